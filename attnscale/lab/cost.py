"""Time and memory of the cells of an evaluation: peak memory of one cell, and an estimate of the time of the rest."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class Clock:
    """Estimates the time of the cells to come from that of finished cells, by length.

    >>> clock = Clock()
    >>> clock.add(512, 2.0)
    >>> clock.rest([512, 1024])
    'at least 6 s left'
    >>> clock.add(1024, 6.0)
    >>> clock.rest([1024, 2048])
    'about 24 s left'
    """

    def __init__(self) -> None:
        self._seconds: dict[int, list[float]] = {}

    def add(self, length: int, seconds: float) -> None:
        """Add a finished cell."""
        self._seconds.setdefault(length, []).append(seconds)

    def rest(self, lengths: Iterable[int]) -> str:
        """Describe the time for cells of these lengths; empty before the first finished cell.

        Beyond the longest finished length, time is extrapolated by the growth between the two longest finished ones,
        between linear and quadratic. With one finished length, linear growth gives a lower bound.
        """
        if not self._seconds:
            return ""
        known = {length: sum(some) / len(some) for length, some in sorted(self._seconds.items())}
        longest, power = max(known), 1.0
        if len(known) > 1:
            before = sorted(known)[-2]
            growth = math.log(max(known[longest], 1e-9) / max(known[before], 1e-9)) / math.log(longest / before)
            power = min(max(growth, 1.0), 2.0)
        wanted = list(lengths)
        seconds = sum(known.get(n, known[longest] * (n / longest) ** power) for n in wanted)
        certain = len(known) > 1 or all(length in known for length in wanted)
        return f"{'about' if certain else 'at least'} {spoken(seconds)} left"


def spoken(seconds: float) -> str:
    """Format a duration in its largest unit.

    >>> spoken(12.2), spoken(240), spoken(9000)
    ('12 s', '4 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@contextmanager
def peak_memory() -> Iterator[Callable[[], float | None]]:
    """Yield a function that returns the peak memory in MB: of the CUDA allocator, of the process on Linux, or None.

    >>> with peak_memory() as peak:
    ...     kept = torch.ones(2**20)
    >>> peak() is None or peak() > 4
    True
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        yield lambda: torch.cuda.max_memory_allocated() / 2**20
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current resident memory
    except OSError:
        yield lambda: None
        return
    yield _resident_peak


def _resident_peak() -> float | None:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else None
