"""Measurement of time ratios on a noisy machine, a causal step, and peak memory."""

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

from attnscale._util import state
from attnscale.bench.rows import Quartiles


def interleaved_ratio(
    candidate: Callable[[], object],
    baseline: Callable[[], object],
    rounds: int,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    pairs: int = 1,
) -> Quartiles:
    """Return the time of `candidate` relative to `baseline`. Both run in each round, in random order, after a warm-up.

    Disturbances longer than a round affect both, and the median removes those that affect one. Each run of the
    candidate is wrapped in `around`, which is not timed. In each round both run `pairs` times alternately, and the sums
    are compared.
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
    """Return the geometric mean of the ratio of two models and the ratio with exchanged roles.

    The placement of a model in memory changes its time by several per cent. Exchanging the roles cancels this effect.
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
    """Return a function that runs attention once on fixed random inputs, with a backward pass or without gradients.

    `beta` [Tq], if given, multiplies the queries in advance.
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
    """Return configuration, device and version of a row."""
    version: Any = torch.__version__
    config = f"H={heads} D={head_dim} {dtype} causal threads={torch.get_num_threads()}"
    return config, f"cpu {platform.machine()}", f"torch {version}"


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the peak of CPU allocations alive at once, from the profiler's allocation records.

    >>> import torch
    >>> peak_bytes(lambda: torch.empty(1024, dtype=torch.float32))
    4096
    """
    function()
    state.SCRATCH.clear()  # buffers kept between inference calls count as its memory
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    if record.profiler is None or record.profiler.kineto_results is None:
        raise RuntimeError("the profiler recorded no allocations")
    held = peak = 0
    events = record.profiler.kineto_results.events()
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        if event.device_type().name == "CPU":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
