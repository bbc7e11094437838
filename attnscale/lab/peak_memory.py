"""The most memory that a piece of work held at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@contextmanager
def peak_memory() -> Iterator[Callable[[], float | None]]:
    """Yields a function for the peak in MB since then: of the GPU's allocator, or of this process on Linux, else None.

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
        _CLEAR.write_text("5")  # sets the peak to what is held now
    except OSError:
        yield lambda: None
        return
    yield _resident_peak


def _resident_peak() -> float | None:
    found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    return int(found[1]) / 1024 if found else None
