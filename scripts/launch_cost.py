"""Host time of the kernels' operators relative to torch's attention.

    python scripts/launch_cost.py

No GPU is needed: kernels are compiled for sm_90, and a stub driver discards the launches. Tensors are small and on the
CPU, so torch's attention costs little beyond its host side. The cases are interleaved, and the minimum processor time
of each is reported, as other load only adds time. Only the ratios are meaningful. Calls recorded by autograd are
compared with torch's attention recorded by autograd.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from attnscale_kernels import Visibility, decode_attention, flash_attention
from attnscale_kernels.flash.launch import forward_launches
from attnscale_kernels.launch import SM_80, SM_90, Resources, assuming

ROUNDS, CALLS = 60, 20
BASE = "torch's attention"


class Utils:
    """The driver functions that Triton needs to load a kernel."""

    def load_binary(self, *_: object) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}


class Driver:
    """A stub driver that reports an H100 and discards launches."""

    utils = Utils()

    def launcher_cls(self, *_: object) -> Callable[..., None]:
        return lambda *_: None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def cases() -> dict[str, tuple[Resources, Callable[[], Any]]]:
    """Return the measured calls by name, with the resources assumed for each.

    A `BASE` entry is the baseline of the entries after it.
    """
    q, k = (torch.randn(1, 2, 4, 64, dtype=torch.bfloat16) for _ in range(2))
    row = q[:, :, :1]
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    beta, one = torch.ones(1, 1, 4), torch.ones(1, 1, 1)
    causal, last = Visibility(right=0), Visibility(slot=3, right=0)
    with assuming(SM_80):
        (launch,), _ = forward_launches(q, k, k, beta, causal, scale=0.125)
    long = torch.zeros(1, 2, 4096, 64, dtype=torch.bfloat16)
    # Growing caches, as in generation.
    caches = itertools.cycle([(long[:, :, :n].clone(), Visibility(slot=n - 1, right=0)) for n in range(4000, 4096)])

    def growing() -> Any:
        cache, rule = next(caches)
        return decode_attention(row, cache, cache, one, rule, scale=0.125)

    def forward(query: Tensor, key: Tensor) -> Any:
        return flash_attention(query, key, key, beta, causal, scale=0.125)

    return {
        BASE: (SM_80, lambda: F.scaled_dot_product_attention(q, k, k)),
        "launch alone": (SM_80, lambda: launch.run(q)),
        "forward": (SM_80, lambda: forward(q, k)),
        "forward, descriptors": (SM_90, lambda: forward(q, k)),
        "decoding, one split": (SM_80, lambda: decode_attention(row, k, k, one, last, scale=0.125)),
        "decoding, with a merge": (SM_80, growing),
        f"{BASE}, recorded": (SM_80, lambda: F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[1])),
        "forward, recorded": (SM_80, lambda: forward(*leaves)),
    }


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    driver.set_active(Driver())
    given = cases()
    least = dict.fromkeys(given, float("inf"))
    for resources, call in given.values():
        with assuming(resources):
            call(), call()  # compile, then fill the launch cache
    for name, (resources, call) in [*given.items()] * ROUNDS:
        with assuming(resources):
            start = time.thread_time()
            for _ in range(CALLS):
                call()
            least[name] = min(least[name], (time.thread_time() - start) / CALLS)
    for name, seconds in least.items():
        if name.startswith(BASE):
            base = seconds
        print(f"{name:<28}{seconds * 1e6:8.1f} µs{seconds / base:8.2f} ×")


if __name__ == "__main__":
    main()
