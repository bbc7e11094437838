"""Memory of both executors: the tensors of a launch, and the shared memory of a block, with shadow state per byte.

The C cores use memory.h on the same arrays; the numpy path uses the classes here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from compiled.asynchronous import Further

Array = np.ndarray

READABLE, WRITABLE, WRITTEN = 1, 2, 4

# What can be wrong with an execution; the names are constants of memory.h.
KINDS = {
    "OUTSIDE": "access outside of the arguments",
    "MISALIGNED": "address that is not a multiple of the access",
    "INPUT_WRITTEN": "write to an input",
    "READ_OF_OTHER_PROGRAM": "read of what another program writes",
    "WRITTEN_TWICE": "write to what another program writes",
    "UNEQUAL_BITS": "different bits written to one address",
    "SHARED_OUTSIDE": "access outside of the shared memory",
    "RACE": "race between warps in shared memory",
    "RACE_IN_WARP": "race inside of a warp in shared memory",
    "COPY_UNDER_WAY": "access to shared memory that a copy is under way to",
    "BARRIER": "warps or lanes that do not meet at the same barrier",
    "CONVERGENCE": "instruction for a whole warp that not all lanes execute",
    "UNFINISHED": "program that does not end",
    "HAZARD": "register that is used while its load is under way",
    "PRODUCT_UNDER_WAY": "register of a matrix product that is not waited for",
    "REGISTER_FENCE": "matrix product of registers that no wgmma.fence separates from their last access",
    "FACTOR_UNDER_WAY": "write to shared memory that a matrix product under way reads",
    "WARPGROUP": "instruction that the warps of a warpgroup do not execute alike",
    "DESCRIPTOR": "descriptor or map with an unknown field",
    "PROXY": "asynchronous access that no fence.proxy.async separates from an ordinary one",
    "NOT_WAITED": "access to what a bulk copy has written, by a warp that has not waited for it",
    "BARRIER_OBJECT": "wrong use of a barrier object in shared memory",
    "NEVER_DONE": "wait for a phase that never completes",
    "LEFT_UNDER_WAY": "matrix product or bulk copy that nothing waits for",
    "UNWRITTEN": "output element that no program writes",
    "REPAIRED": "repair phase although all inputs are finite",
}
NUMBERS = {name: number for number, name in enumerate(KINDS)}


class Finding(NamedTuple):
    """One violation, at an instruction given by its index in the program."""

    kind: str  # a key of KINDS
    place: int
    program: int
    warp: int
    lane: int
    address: int


class FindingRow(ctypes.Structure):
    """`struct finding` of memory.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "place", "program", "warp", "lane")),
        ("address", ctypes.c_uint64),
    )


class FindingRows(ctypes.Structure):
    """`struct findings` of memory.h."""

    _fields_ = (("count", ctypes.c_int32), ("room", ctypes.c_int32), ("rows", ctypes.POINTER(FindingRow)))


class Findings:
    """The violations of an execution. All are counted, the first ones are kept."""

    ROOM = 64

    def __init__(self) -> None:
        self._rows = (FindingRow * self.ROOM)()
        self.c = FindingRows(0, self.ROOM, self._rows)

    def add(self, kind: str, place: int, program: int, warp: int = -1, lane: int = -1, address: int = 0) -> None:
        if self.c.count < self.ROOM:
            self._rows[self.c.count] = FindingRow(NUMBERS[kind], place, program, warp, lane, address)
        self.c.count += 1

    @property
    def count(self) -> int:
        return int(self.c.count)

    def kept(self) -> list[Finding]:
        names = list(KINDS)
        rows = self._rows[: min(self.count, self.ROOM)]
        return [Finding(names[row.kind], row.place, row.program, row.warp, row.lane, row.address) for row in rows]


class GlobalStruct(ctypes.Structure):
    """`struct global` of memory.h."""

    _fields_ = (
        ("ranges", ctypes.c_int32),
        ("start", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("flags", ctypes.c_void_p),
        ("writers", ctypes.c_void_p),
    )


class GlobalMemory:
    """The elements of tensors, at their addresses in this process."""

    def __init__(self, tensors: Iterable[Tensor], outputs: Sequence[Tensor]) -> None:
        given = [x for x in tensors if x.numel()]
        spans = _merged([_span(x) for x in given])
        self.start = np.array([start for start, _ in spans], np.uint64)
        self.end = np.array([end for _, end in spans], np.uint64)
        self.flags = [np.zeros(end - start, np.uint8) for start, end in spans]
        self.writers = [np.full(end - start, -1, np.int32) for start, end in spans]
        for x in given:
            self._mark(x, READABLE)
        for x in outputs:
            if x.numel():
                self._mark(x, WRITABLE)
        self._pointers = [np.array([a.ctypes.data for a in arrays], np.uint64) for arrays in (self.flags, self.writers)]
        arrays = (self.start, self.end, *self._pointers)
        self.c = GlobalStruct(len(spans), *(array.ctypes.data for array in arrays))

    def unwritten(self) -> list[int]:
        """Addresses of output bytes that nothing was written to."""
        return [
            int(start) + int(place)
            for start, flags in zip(self.start, self.flags, strict=True)
            for place in np.flatnonzero((flags & (WRITABLE | WRITTEN)) == WRITABLE)
        ]

    def range_of(self, address: int, size: int) -> int:
        """The range that holds these bytes, or −1."""
        inside = (self.start <= address) & (address + size <= self.end)
        return int(np.argmax(inside)) if inside.any() else -1

    def _mark(self, x: Tensor, flag: int) -> None:
        first = _span(x)[0]
        index = self.range_of(first, 1)
        size = x.element_size()
        flags = self.flags[index][first - int(self.start[index]) :]
        shape, strides = (*x.shape, size), (*(stride * size for stride in x.stride()), 1)
        np.lib.stride_tricks.as_strided(flags, shape, strides)[...] |= np.uint8(flag)


def _span(x: Tensor) -> tuple[int, int]:
    """The first address of a tensor and the end of its last element."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Overlapping spans as one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


SHADOW = np.dtype(
    [
        ("write_epoch", np.int32), ("read_epoch", np.int32), ("readers", np.uint32), ("writer", np.int16),
        ("reader", np.int16), ("write_sync", np.int32), ("read_sync", np.int32), ("write_place", np.int32),
        ("pending", np.int16), ("value", np.uint8),
    ],
    align=True,
)  # fmt: skip


class SharedStruct(ctypes.Structure):
    """`struct shared` of memory.h."""

    _fields_ = (
        ("size", ctypes.c_int32),
        ("epoch", ctypes.c_int32),
        ("bytes", ctypes.c_void_p),
        ("syncs", ctypes.c_void_p),
        ("loaded", ctypes.c_void_p),
        ("further", ctypes.c_void_p),
    )


class SharedMemory:
    """Shared memory of a block, as poison."""

    def __init__(self, size: int, warps: int) -> None:
        self.bytes = np.zeros(size, SHADOW)
        self.syncs = np.zeros(warps, np.int32)
        self.c = SharedStruct(size, 0, self.bytes.ctypes.data, self.syncs.ctypes.data, None, None)
        self.further: Further | None = None  # of the numpy path; C makes its own

    def start_block(self, poison: int) -> None:
        """Forget everything and fill the memory with a 32-bit pattern."""
        self.bytes[:] = np.zeros((), SHADOW)
        self.bytes["write_epoch"] = self.bytes["read_epoch"] = self.bytes["write_place"] = -1
        pattern = np.frombuffer(np.uint32(poison).tobytes(), np.uint8)
        self.bytes["value"] = np.resize(pattern, len(self.bytes))
        self.syncs[:] = 0
        self.c.epoch = 0


def poison_tensor(x: Tensor, pattern: int) -> None:
    """Fill a tensor with a 32-bit pattern, element by element."""
    size = x.element_size()
    element: Any = np.resize(np.frombuffer(np.uint32(pattern).tobytes(), np.uint8), size)
    place = np.ctypeslib.as_array((ctypes.c_uint8 * (_span(x)[1] - x.data_ptr())).from_address(x.data_ptr()))
    shape, strides = (*x.shape, size), (*(stride * size for stride in x.stride()), 1)
    np.lib.stride_tricks.as_strided(place, shape, strides)[...] = element
