"""Digests of what each instruction reads and writes, so that two runs of nearly the same text can be compared.

They show where the values of a mutant differ from those of the original, and where the difference ends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Trace(NamedTuple):
    """Digests [warps, lines] of an execution; 0 where nothing was read or written."""

    read: np.ndarray  # registers in all lanes, whether the instruction is executed in them or not
    written: np.ndarray  # results and stored values in the lanes that execute it

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
    """The digests of a running execution, by place of the program."""

    def __init__(self, places: int, warps: int, on: bool) -> None:
        self._digests = np.zeros((2, warps, places), np.uint64) if on else None
        read, written = (None, None) if self._digests is None else (x.ctypes.data for x in self._digests)
        self.c = TraceStruct(read, written, places)

    def by_line(self, lines: Sequence[int], count: int) -> Trace | None:
        """The trace, given the line of each place and the number of lines."""
        if self._digests is None:
            return None
        found = np.zeros((*self._digests.shape[:2], count + 1), np.uint64)
        for place, line in enumerate(lines):  # several instructions of a line in their order
            found[..., line] = found[..., line] * np.uint64(3) + self._digests[..., place]
        return Trace(*found)
