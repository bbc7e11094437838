"""Times and memory of several functions that take turns, so that what disturbs one disturbs all."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from attnscale.bench.ratio import Spread

# Larger than the last-level cache of any card. Overwriting it a few times takes long enough (half a millisecond at
# 8 TB/s) for the host to queue what is timed behind it, so that the events see the device's time and not the host's.
FLUSH_BYTES, FLUSHES = 512 * 2**20, 8


class Clock(Protocol):
    """Measures one call of a function: its time, or its result and the bytes it holds at most (None: not known)."""

    def seconds(self, function: Callable[[], object]) -> float: ...

    def peak(self, function: Callable[[], Tensor]) -> tuple[Tensor, int | None]: ...


class DeviceClock:
    """Time on a GPU between two events, with a cold cache; memory from torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.room = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def seconds(self, function: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(FLUSHES):
            self.room.zero_()
        start.record()
        function()
        end.record()
        torch.cuda.synchronize(self.device)
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1000

    def peak(self, function: Callable[[], Tensor]) -> tuple[Tensor, int | None]:
        """The second call counts, beyond what was there before: the first one may compile and tune."""
        function()
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = function()
        torch.cuda.synchronize(self.device)
        return result, torch.cuda.max_memory_allocated(self.device) - before


class HostClock:
    """For dry runs: the time of this process; its memory is not what a GPU would take."""

    def seconds(self, function: Callable[[], object]) -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    def peak(self, function: Callable[[], Tensor]) -> tuple[Tensor, int | None]:
        return function(), None


def interleaved(
    functions: Mapping[str, Callable[[], object]], clock: Clock, *, warm_up: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of every function in every round; each round runs all of them, in random order."""
    shuffle = random.Random(0)
    for _ in range(warm_up):
        for function in functions.values():
            clock.seconds(function)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            samples[name].append(clock.seconds(functions[name]))
    return samples


def spread(values: list[float]) -> Spread:
    """Median and quartiles within the measured range: an extrapolated quartile of times may be negative.

    >>> spread([4.0, 1.0, 3.0, 2.0, 5.0])
    Spread(median=3.0, low=2.0, high=4.0)
    """
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)
