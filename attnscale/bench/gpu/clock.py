"""Times and memory of several functions that take turns, and the card's clock, power and temperature."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

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


class Telemetry(NamedTuple):
    """Of one moment; None where it cannot be read."""

    mhz: float | None = None
    watts: float | None = None
    celsius: float | None = None

    def known(self) -> dict[str, float]:
        """What could be read, by name.

        >>> Telemetry(mhz=1980.0).known()
        {'mhz': 1980.0}
        """
        return {name: value for name, value in self._asdict().items() if value is not None}


def read_telemetry(device: torch.device) -> Telemetry:
    """Over the last second or less. torch asks NVIDIA's or AMD's library, by a package that may not be installed."""
    power = _read(torch.cuda.power_draw, device)
    unit = 1 if torch.version.hip else 1000  # torch passes on what the libraries give: AMD's watts, NVIDIA's milliwatts
    return Telemetry(
        _read(torch.cuda.clock_rate, device),
        None if power is None else power / unit,
        _read(torch.cuda.temperature, device),
    )


def _read(quantity: Callable[[torch.device], int], device: torch.device) -> float | None:
    # Missing packages and drivers, or cards that do not tell, raise whatever the vendor's library raises; on ROCm torch
    # gives 0 for what is not known.
    with contextlib.suppress(Exception):
        return float(quantity(device)) or None
    return None
