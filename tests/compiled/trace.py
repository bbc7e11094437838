"""What each instruction reads and writes, so that two runs of nearly the same text can be compared.

A trace shows where the values of a mutant differ from those of the original, and where the difference ends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from compiled.memory import SharedMemory


class Trace(NamedTuple):
    """An execution by line of the text; the first two hold digests [warps, lines]."""

    read: np.ndarray  # registers in all lanes, whether the instruction is executed in them or not
    written: np.ndarray  # results and stored values in the lanes that execute it
    idle: np.ndarray  # whether nothing is written [lines]
    zero: np.ndarray  # whether only zeros are written [lines]
    loaded: np.ndarray  # bytes loaded from shared memory that the line has written [lines]

    def cone(self, other: Trace) -> frozenset[int]:
        """Lines that write other values."""
        return frozenset(np.flatnonzero((self.written != other.written).any(0)).tolist())

    def ends(self, other: Trace) -> frozenset[int]:
        """Lines that read other values and write the same."""
        read = np.flatnonzero((self.read != other.read).any(0)).tolist()
        return frozenset(read) - self.cone(other)


class TraceStruct(ctypes.Structure):
    """`struct trace` of trace.h."""

    _fields_ = (("read", ctypes.c_void_p), ("written", ctypes.c_void_p), ("places", ctypes.c_int32))


class Recorder:
    """The trace of a running execution, by place of the program."""

    def __init__(self, places: int, warps: int, shared: SharedMemory, on: bool) -> None:
        self._on = on
        self._seen = np.zeros((2, warps, places if on else 0, 2), np.uint64)
        self._loaded = np.zeros(places, np.int64)
        read, written = (x.ctypes.data if on else None for x in self._seen)
        self.c = TraceStruct(read, written, places)
        shared.c.loaded = self._loaded.ctypes.data if on else None

    def by_line(self, lines: Sequence[int], count: int, loaded_lines: Sequence[int] | None = None) -> Trace | None:
        """The trace, given the line of each place and the number of lines; shared memory may count places otherwise."""
        if not self._on:
            return None
        digests = np.zeros((*self._seen.shape[:2], count + 1), np.uint64)
        bits = np.zeros(count + 1, np.uint64)
        loaded = np.zeros(count + 1, np.int64)
        for place, line in enumerate(lines):  # several instructions of a line in their order
            digests[..., line] = digests[..., line] * np.uint64(3) + self._seen[..., place, 0]
            bits[line] |= np.bitwise_or.reduce(self._seen[1, :, place, 1])
        for line, found in zip(lines if loaded_lines is None else loaded_lines, self._loaded.tolist(), strict=False):
            loaded[line] += found
        idle = ~digests[1].any(0)
        return Trace(*digests, idle, (bits == 0) & ~idle, loaded)
