"""Times and memory of several functions that take turns, so that what disturbs one disturbs all."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attnscale.bench.gpu.telemetry import Telemetry, read_telemetry
from attnscale.bench.ratio import Spread
from attnscale.errors import BackendError

# Larger than the last-level cache of any card.
FLUSH_BYTES = 512 * 2**20

# Cycles that the device is held for while the host queues what is timed: a millisecond at first, an eighth of a second
# at most.
FIRST_HOLD, LONGEST_HOLD = 2_000_000, 256_000_000


class Clock(Protocol):
    """Measures one call of a function: its time, or its result and the bytes it holds at most (None: not known)."""

    def seconds(self, function: Callable[[], object]) -> float: ...

    def peak(self, function: Callable[[], Tensor]) -> tuple[Tensor, int | None]: ...

    def telemetry(self) -> Telemetry: ...


class DeviceClock:
    """Time on a GPU between two events, with a cold cache and never the host's; memory from torch's allocator.

    A kernel that only waits holds the device until everything that is timed is queued behind it. Whether it held long
    enough is not assumed: if the device passes the first event while the host still launches, the measurement is thrown
    away and made again with twice the wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.room = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self.hold = FIRST_HOLD

    def seconds(self, function: Callable[[], object]) -> float:
        """The device's time of one call; `BackendError` for a function that waits for the device itself."""
        while True:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self.room.zero_()
            torch.cuda._sleep(self.hold)  # type: ignore[no-untyped-call]
            start.record()
            function()
            end.record()
            overtaken = start.query()  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(self.device)
            if not overtaken:
                milliseconds: float = start.elapsed_time(end)
                return milliseconds / 1000
            if self.hold >= LONGEST_HOLD:
                self.hold = FIRST_HOLD  # the next function need not suffer from this one
                raise BackendError("the host waits for the device within a call, so that events would time the host")
            self.hold *= 2

    def telemetry(self) -> Telemetry:
        """Of the card now, so right after what was measured."""
        return read_telemetry(self.device)

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
    """For dry runs, whose times mean nothing: a function runs once, for its result, and each of its times is that one.

    The memory of this process is not what a GPU would take.
    """

    def __init__(self) -> None:
        self.known: WeakKeyDictionary[Callable[[], object], float] = WeakKeyDictionary()

    def seconds(self, function: Callable[[], object]) -> float:
        if function not in self.known:
            start = time.perf_counter()
            function()
            self.known[function] = time.perf_counter() - start
        return self.known[function]

    def peak(self, function: Callable[[], Tensor]) -> tuple[Tensor, int | None]:
        start = time.perf_counter()
        result = function()
        self.known[function] = time.perf_counter() - start
        return result, None

    def telemetry(self) -> Telemetry:
        return Telemetry()


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
