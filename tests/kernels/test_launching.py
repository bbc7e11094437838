"""Kernel launches: the variants Triton would compile, and that the launched variant is the one Triton would choose.

Nothing is compiled and no GPU is needed: Triton gets a stub driver, and a stub for each compiled kernel. The tests run
in a separate process, because this process interprets kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from triton.tools.tensor_descriptor import TensorDescriptor

from attnscale_kernels import Visibility, decode_attention, flash_attention, launch_cache, state
from attnscale_kernels.launch_cache import class_of
from attnscale_kernels.operators import is_eager

STUBS = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from attnscale_kernels import Visibility
from attnscale_kernels.decode.kernel import decode_merge_kernel, decode_split_kernel
from attnscale_kernels.decode.launch import decode_launches
from attnscale_kernels.launch import SM_80, SM_90, assuming


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
            with assuming(SM_90):
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
import functools
import itertools
import random

from attnscale_kernels import state
from attnscale_kernels.flash import mask
from attnscale_kernels.flash.launch import backward_launches, forward_launches
from attnscale_kernels.softmax.launch import forward_launches as softmax_launches

mask.LEAST_SCORES = 0  # so that tiles of a mask are looked for in calls as small as these
memory = functools.cache(lambda dtype: torch.zeros(2**17, dtype=dtype))
# In elements, and axes that lie in memory the other way round; or elements apart from each other.
PLACES = [(0, None), (1, None), (0, (1, 2)), (0, (2, 3)), (0, "apart")]
SHAPES = {
    "dtype": [torch.bfloat16, torch.float32], "dim": [16, 24, 40], "value_dim": [16, 32, 24], "batch": [2, 1],
    "heads": [4, 2], "kv_heads": [1, 2], "rows": [5, 1, 16], "keys": [6, 1, 32],
    "beta_dtype": [torch.float32, torch.bfloat16], "beta_heads": [True, False], "beta_rows": [False, True],
    "beta_sliced": [True, False], "beta_axes": [3, 2],
    "q": PLACES, "k": PLACES, "v": PLACES, "out": PLACES, "gradient": PLACES, "lse": PLACES[:2],
    "gradient_dtype": [None, torch.float32], "beta": PLACES[:2], "padding_at": PLACES[:2], "mask_at": PLACES,
    "bounds": [False, True], "one_bound": [False, True], "padding": [False, True],
    "mask": [None, torch.bool, torch.float32, torch.bfloat16], "mask_heads": [False, True],
    "slot": [0, 1, 3, 16], "left": [None, 0, 1, 16], "right": [0, None, 1, 3], "dropout": [None, 0, 1],
    "device": [SM_80, SM_90], "splits": [1, 3], "sinks": [False, True], "scale": [0.1, 1, -0.3],
    "softcap": [None, 30, 16, 1.5], "precision": ["ieee", "tf32"], "entropy": [False, True],
    "winner": [False, True],
}


def tensor(shape, dtype, place=(0, None)):
    offset, axes = place
    shape = list(shape)
    if axes == "apart":
        return memory(dtype)[: 16 * torch.Size(shape).numel()].view(*shape, 16)[..., 0]
    if axes is not None:
        shape[axes[0]], shape[axes[1]] = shape[axes[1]], shape[axes[0]]
    x = memory(dtype)[offset : offset + torch.Size(shape).numel()].view(shape)
    return x if axes is None else x.transpose(*axes)


def launches_of(c):
    heads = c["heads"]
    torch.backends.cuda.matmul.fp32_precision = c["precision"]
    q = tensor((c["batch"], heads, c["rows"], c["dim"]), c["dtype"], c["q"])
    k = tensor((c["batch"], c["kv_heads"], c["keys"], c["dim"]), c["dtype"], c["k"])
    v = tensor((c["batch"], c["kv_heads"], c["keys"], c["value_dim"]), c["dtype"], c["v"])
    of_beta = heads if c["beta_heads"] else 1, c["rows"] if c["beta_rows"] else 1
    extents = (heads, c["rows"]) if c["beta_sliced"] else of_beta  # a slice has the strides of the whole
    beta = tensor((1, *extents), c["beta_dtype"], c["beta"])[:, : of_beta[0], : of_beta[1]]
    beta = beta if c["beta_axes"] == 3 else beta[0]
    rule = [c["slot"], c["left"], c["right"], None, None, None, None]
    if c["bounds"]:
        bounds = tensor((1 if c["one_bound"] else c["batch"], c["rows"]), torch.int32)
        rule = [0, None, None, bounds, bounds, None, None]
    if c["padding"]:
        rule[5] = tensor((c["batch"], c["keys"]), torch.bool, c["padding_at"])
    if c["mask"]:
        rule[6] = tensor((1, heads if c["mask_heads"] else 1, c["rows"], c["keys"]), c["mask"], c["mask_at"])
    given = q, k, v, beta, Visibility(*rule)
    options = {name: c[name] for name in ("scale", "softcap", "entropy", "winner")}
    options["sinks"] = tensor((heads,), torch.float32) if c["sinks"] else None
    dropout = {} if c["dropout"] is None else {"dropout_p": 0.5, "seed": tensor((2,), torch.int64)[c["dropout"]]}
    of_out = c["batch"], heads, c["rows"], c["value_dim"]
    out, lse = tensor(of_out, c["dtype"], c["out"]), tensor(of_out[:3], torch.float32, c["lse"])
    gradient = tensor(of_out, c["gradient_dtype"] or c["dtype"], c["gradient"])
    numbers = {"scale": c["scale"], "softcap": c["softcap"], "dbeta": c["entropy"]}
    with assuming(c["device"]):
        decoding, _ = decode_launches(*given, **options, splits=c["splits"])
        forward, _ = forward_launches(*given, **options, **dropout)
        backward, _ = backward_launches(gradient, *given, out, lse, **numbers, **dropout)
        softmax, _ = softmax_launches(q, one, mask=None, bias=None, thresholds=None)
    return [(q, launch) for launch in (*decoding, *forward, *backward, *softmax)]


def numbers(values):
    for value in values:
        if isinstance(value, tuple):
            yield from numbers(value)
        elif type(value) in (int, float, type(None)):
            yield value


def choices(launch):
    return launch.grid, launch.constants, launch.warps, launch.stages, list(numbers(launch.arguments.values()))


# Calls that differ in one thing: what the signature of a plan forgot would be launched as the other is.
draw, calls = random.Random(0), []
for number in range(8):
    base = {name: draw.choice(values) if number else values[0] for name, values in SHAPES.items()}
    calls += [base, *({**base, name: value} for name, values in SHAPES.items() for value in values)]
cases = [launches_of(call) for call in calls]
for call, made in zip(calls, cases, strict=True):
    state.LAUNCHES.clear()
    assert [choices(launch) for _, launch in launches_of(call)] == [choices(launch) for _, launch in made], call
for _ in range(2):  # the first time triton compiles, the second it is known here
    for like, launch in itertools.chain(*cases):
        launch.run(like)
        ours = launched[-1]
        launch.kernel[(launch.grid,)](
            **launch.arguments, **launch.constants, num_warps=launch.warps, num_stages=launch.stages
        )
        assert launched[-1] is ours, launch
assert len(set(launched)) > 300
"""


def test_one_variant_serves_all_lengths_of_decoding_and_the_right_ones_are_launched(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    finished = subprocess.run(
        [sys.executable, "-c", STUBS + DECODING + CHOICES],
        capture_output=True, text=True, check=False, timeout=300, env=environment,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr


def test_a_tensor_that_has_escaped_from_a_transform_is_recorded_as_any_other() -> None:
    query, escaped = torch.randn(1, 1, 4, 16), []
    torch.func.grad(lambda x: (escaped.append(x), x.sum())[1])(query)
    key = torch.randn(1, 1, 4, 16, requires_grad=True)

    found = flash_attention(escaped[0], key, key, torch.ones(1, 1, 1), Visibility(), scale=0.25)
    expected = flash_attention(query, key, key, torch.ones(1, 1, 1), Visibility(), scale=0.25)

    assert torch.equal(found.out, expected.out)
    (gradient,), (wanted,) = (torch.autograd.grad(x.out.sum(), key) for x in (found, expected))
    assert torch.equal(gradient, wanted)


def test_the_launch_cache_is_bounded_and_calls_are_right_after_it_was_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "LAUNCHES", {})
    monkeypatch.setattr(launch_cache, "MOST_ENTRIES", 3)
    x = torch.randn(1, 1, 8, 16)

    for rows in (1, 2, 3, 4, 5, 1):
        found = flash_attention(x[:, :, :rows], x, x, torch.ones(1, 1, 1), Visibility(), scale=0.25)
        assert torch.allclose(found.out, torch.softmax(0.25 * x[:, :, :rows] @ x.mT, -1) @ x, atol=1e-6)
        assert 0 < len(state.LAUNCHES) <= 3


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

    assert is_eager(q, torch.nn.Parameter(q))
    assert not is_eager(q, None)
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
