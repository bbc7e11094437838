"""How kernels are launched: which variants triton would compile, and that those are launched that it would choose.

There is no GPU, and nothing is compiled: triton gets a driver that does nothing, and a stub for each kernel that it
would compile. In a process of its own, since in that of the tests kernels are interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from triton.tools.tensor_descriptor import TensorDescriptor

from attnscale_kernels import Visibility, decode_attention, flash_attention
from attnscale_kernels.compiled import class_of
from attnscale_kernels.operators import is_eager

STUBS = """
import itertools

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from attnscale_kernels import Visibility
from attnscale_kernels.decode.kernel import decode_merge_kernel, decode_split_kernel
from attnscale_kernels.decode.launch import decode_launches


class Driver:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


launched = []


class Stub:
    packed_metadata = function = None

    def __init__(self, kernel):
        self.kernel = kernel

    def launch_metadata(self, *_):
        return None

    def run(self, *_):
        launched.append(self)

    def __getitem__(self, grid):
        def runner(*arguments):
            assert len(grid) == 3 and len(arguments) == len(self.kernel.arg_names)
            launched.append(self)

        return runner


def compile_nothing(self, key, signature, device, *_):
    stub = self.device_caches[device][0][key] = Stub(self)
    return stub


def variants(kernel):
    return len(kernel.device_caches[0][0])


driver.set_active(Driver())
JITFunction._do_compile = compile_nothing
one = torch.ones(1, 1, 1)
"""

DECODING = """
for dim in (64, 128):
    before = variants(decode_split_kernel), variants(decode_merge_kernel)
    splits, launches = set(), set()
    query = torch.zeros(1, 4, 1, dim, dtype=torch.bfloat16)
    static = torch.zeros(1, 2, 20000, dim, dtype=torch.bfloat16)
    for keys in (*range(1, 70), 100, 1000, 1024, 5000, 16384, 20000):
        cache = static[:, :, :keys].clone()  # one that grows with each token, then one of fixed length
        for held in (cache, static):
            rule = Visibility(slot=keys - 1, right=0)
            made = decode_launches(query, held, held, one, rule, scale=0.1)[0]
            splits.add(made[0].arguments["splits"])
            launches.add(len(made))
            assert len(made) == (1 if made[0].arguments["splits"] == 1 else 2)
            for launch in made:
                launch.run(query)
    assert len(splits) > 3 and launches == {1, 2}
    assert (variants(decode_split_kernel), variants(decode_merge_kernel)) == (before[0] + 1, before[1] + 1)
"""

CHOICES = """
from attnscale_kernels.flash import mask
from attnscale_kernels.flash.launch import forward_launches
from attnscale_kernels.softmax.launch import forward_launches as softmax_launches

mask.LEAST_SCORES = 0  # so that tiles of a mask are looked for in calls as small as these
memory = torch.zeros(2**16)
cases = []
for dtype, offset, dim, rows, right in itertools.product(
    (torch.float32, torch.bfloat16), (0, 1), (16, 24, 40), (1, 5, 16), (None, 0, 1, 16)
):
    q = memory.to(dtype)[offset : offset + 2 * rows * dim].view(1, 2, rows, dim)
    for x in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
        padding = torch.zeros(1, rows, dtype=torch.bool) if right == 0 else None
        rule = Visibility(right=right, padding=padding)
        if right == 1:
            rule = rule._replace(mask=torch.ones(1, 1, rows, rows, dtype=torch.bool))
        for launch in forward_launches(x, q, q, one, rule, scale=0.1, entropy=rows == 5)[0]:
            cases.append((x, launch))
        cases.append((x, decode_launches(x, q, q, one, rule, scale=0.1)[0][0]))
        cases.append((x, softmax_launches(x, one, mask=None, bias=None, thresholds=None)[0][0]))
for _ in range(2):  # the first time triton compiles, the second it is known here
    for like, launch in cases:
        launch.run(like)
        ours = launched[-1]
        launch.kernel[(launch.grid,)](
            **launch.arguments, **launch.constants, num_warps=launch.warps, num_stages=launch.stages
        )
        assert launched[-1] is ours, launch
assert len(set(launched)) > 30
"""


def test_one_variant_serves_all_lengths_of_decoding_and_the_right_ones_are_launched(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    finished = subprocess.run(
        [sys.executable, "-c", STUBS + DECODING + CHOICES],
        capture_output=True, text=True, check=False, timeout=300, env=environment,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr


def test_a_descriptor_is_compiled_for_by_its_block_and_not_by_its_extent() -> None:
    def class_with(rows: int, block: int = 16, dtype: torch.dtype = torch.float16) -> object:
        x = torch.zeros(rows, 32, dtype=dtype)
        return class_of(TensorDescriptor(x, list(x.shape), list(x.stride()), [block, 32]))

    assert class_with(40) == class_with(64)
    assert len({class_with(40), class_with(40, block=32), class_with(40, dtype=torch.bfloat16)}) == 3


def test_operators_are_called_where_somebody_listens_to_them() -> None:
    q = torch.randn(1, 1, 4, 16)

    class Elsewhere(torch.Tensor):
        pass

    assert is_eager(q, None, torch.nn.Parameter(q))
    assert not is_eager(q.as_subclass(Elsewhere))
    with FlopCounterMode(display=False):
        assert not is_eager(q)
    names = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Names():
        flash_attention(q, q, q, torch.ones(1, 1, 1), Visibility(), scale=0.25)
        decode_attention(q, q, q, torch.ones(1, 1, 1), Visibility(), scale=0.25)
    assert "attnscale_kernels::flash_forward" in names
    assert "attnscale_kernels::decode" in names
