"""How a figure is measured: ratios on a noisy machine, one causal step, and the peak of allocations."""

from __future__ import annotations

import math
import platform
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from attnscale._util.scratch import forget
from attnscale.bench.rows import Quartiles


def interleaved_ratio(
    candidate: Callable[[], object],
    baseline: Callable[[], object],
    rounds: int,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    pairs: int = 1,
) -> Quartiles:
    """Time of `candidate` over time of `baseline`: both run in each round, in random order, after a warm-up.

    What disturbs the machine for longer than a round disturbs both; the median drops what disturbs one. Each time the
    candidate runs `around` something that is not part of its time. In a round both run `pairs` times, in turn, and
    their sums are compared.
    """
    shuffle = random.Random(0)

    def seconds_of_candidate() -> float:
        with around():
            return _seconds(candidate)

    for _ in range(2):
        baseline()
        seconds_of_candidate()
    ratios = []
    for _ in range(rounds):
        candidates, baselines = [], []
        for _ in range(pairs):
            if shuffle.random() < 0.5:
                candidates.append(seconds_of_candidate())
                baselines.append(_seconds(baseline))
            else:
                baselines.append(_seconds(baseline))
                candidates.append(seconds_of_candidate())
        ratios.append(sum(candidates) / sum(baselines))
    low, median, high = statistics.quantiles(ratios, n=4)
    return Quartiles(median, low, high)


def in_both_roles(ratio: Callable[[Any, Any], Quartiles], one: Any, other: Any) -> Quartiles:
    """The mean of a ratio of two models and of the same with roles exchanged.

    Where a model lies in memory is worth several per cent, round after round: as much for one role as for the other.
    """
    first, second = ratio(one, other), ratio(other, one)
    return Quartiles(*(math.sqrt(a * b) for a, b in zip(first, second, strict=True)))


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def causal_step(
    attention: Callable[..., Tensor],
    *,
    heads: int,
    length: int,
    head_dim: int,
    backward: bool,
    beta: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Callable[[], object]:
    """A function that runs attention once on fixed random inputs, with backward or without gradients at all.

    β [Tq], where given, multiplies the queries beforehand.
    """
    shape = (1, heads, length, head_dim)
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(shape, generator=generator, device=generator.device) for _ in range(3))
    q = q if beta is None else q * beta[:, None]
    q, k, v = (x.to(dtype).requires_grad_(backward) for x in (q, k, v))
    gradient = torch.randn(shape, generator=generator, device=generator.device).to(dtype)

    def step() -> None:
        with torch.set_grad_enabled(backward):
            out = attention(q, k, v, is_causal=True)
        if backward:
            torch.autograd.grad(out, (q, k, v), gradient)

    return step


def label(heads: int, head_dim: int, dtype: str = "fp32") -> tuple[str, str, str]:
    """Configuration, device and version of a row."""
    version: Any = torch.__version__
    config = f"H={heads} D={head_dim} {dtype} causal threads={torch.get_num_threads()}"
    return config, f"cpu {platform.machine()}", f"torch {version}"


def peak_bytes(function: Callable[[], object]) -> int:
    """The largest sum of CPU allocations alive at once, from the profiler's record of every one.

    >>> import torch
    >>> peak_bytes(lambda: torch.empty(1024, dtype=torch.float32))
    4096
    """
    function()
    forget()  # buffers that inference keeps from call to call belong to its memory
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    if record.profiler is None or record.profiler.kineto_results is None:
        raise RuntimeError("the profiler kept no record")
    held = peak = 0
    events = record.profiler.kineto_results.events()
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        if event.device_type().name == "CPU":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
