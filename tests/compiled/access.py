"""Accesses to global and shared memory where there is no C compiler: the functions of memory.h, lane by lane."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from compiled.asynchronous import GENERIC
from compiled.memory import READABLE, WRITABLE, WRITTEN, Findings, GlobalMemory, SharedMemory


@dataclass
class Site:
    """The instruction that accesses memory."""

    findings: Findings
    place: int = 0
    program: int = 0
    warp: int = 0
    proxy: int = GENERIC

    def report(self, kind: str, lane: int, address: int) -> None:
        """Add a finding at this instruction."""
        self.findings.add(kind, self.place, self.program, self.warp, lane, address)


def global_load(memory: GlobalMemory, at: Site, lane: int, address: int, size: int) -> bytes | None:
    """Return the bytes, or None where the access is not allowed."""
    if address % size:
        at.report("MISALIGNED", lane, address)
        return None
    index = memory.range_of(address, size)
    if index < 0:
        at.report("OUTSIDE", lane, address)
        return None
    first = address - int(memory.start[index])
    flags, writers = (array[index][first : first + size] for array in (memory.flags, memory.writers))
    for i in range(size):
        if not flags[i] & READABLE:
            at.report("OUTSIDE", lane, address + i)
            return None
        if flags[i] & WRITTEN and writers[i] != at.program:
            at.report("READ_OF_OTHER_PROGRAM", lane, address + i)
            return None
    return ctypes.string_at(address, size)


def global_store(memory: GlobalMemory, at: Site, lane: int, address: int, value: bytes) -> None:
    """Store the bytes where it is allowed."""
    size = len(value)
    if address % size:
        return at.report("MISALIGNED", lane, address)
    index = memory.range_of(address, size)
    if index < 0:
        return at.report("OUTSIDE", lane, address)
    first = address - int(memory.start[index])
    flags, writers = (array[index][first : first + size] for array in (memory.flags, memory.writers))
    for i in range(size):
        if not flags[i] & WRITABLE:
            return at.report("INPUT_WRITTEN" if flags[i] & READABLE else "OUTSIDE", lane, address + i)
        if flags[i] & WRITTEN and writers[i] != at.program:
            return at.report("WRITTEN_TWICE", lane, address + i)
        if flags[i] & WRITTEN and ctypes.string_at(address + i, 1)[0] != value[i]:
            at.report("UNEQUAL_BITS", lane, address + i)
        flags[i] |= WRITTEN
        writers[i] = at.program
        ctypes.memmove(address + i, value[i : i + 1], 1)
    return None


def shared_load(memory: SharedMemory, at: Site, lane: int, address: int, size: int) -> bytes | None:
    """Return the bytes, or None outside of the shared memory."""
    if not shared_inside(memory, at, lane, address, size):
        return None
    epoch, sync, thread, warp = memory.c.epoch, int(memory.syncs[at.warp]), 64 * at.warp + lane, 1 << at.warp
    reported = False
    for i in range(size):
        b = memory.bytes[address + i]
        reported = reported or _conflict_with_write(b, at, lane, address + i, epoch, sync, thread)
        if memory.further is not None:
            reported = memory.further.read(at, lane, address + i, epoch, reported)
        if b["read_epoch"] != epoch:
            b["readers"] = 0
        alone = b["readers"] == 0 or (b["readers"] == warp and b["reader"] == thread)
        b["reader"] = thread if alone else -1
        b["read_epoch"], b["read_sync"] = epoch, sync
        b["readers"] |= np.uint32(warp)
    return memory.bytes["value"][address : address + size].tobytes()


def shared_claim(
    memory: SharedMemory, at: Site, lane: int, address: int, size: int, value: bytes | None = None
) -> None:
    """Mark a write. Bytes that keep their bits may be written by several warps."""
    epoch, sync, thread = memory.c.epoch, int(memory.syncs[at.warp]), 64 * at.warp + lane
    reported = False
    for i in range(size):
        b = memory.bytes[address + i]
        same = value is not None and b["value"] == value[i]
        if not reported and (b["pending"] or not same):
            reported = _conflict_with_write(b, at, lane, address + i, epoch, sync, thread, writes=True)
        if not reported and b["read_epoch"] == epoch and not same:
            reported = True
            if int(b["readers"]) & ~(1 << at.warp):
                at.report("RACE", lane, address + i)
            elif b["readers"] and b["reader"] != thread and b["read_sync"] == sync:
                at.report("RACE_IN_WARP", lane, address + i)
            else:
                reported = False
        if memory.further is not None:
            reported = memory.further.write(at, lane, address + i, epoch, reported)
        b["write_epoch"], b["writer"], b["write_sync"], b["write_place"] = epoch, thread, sync, at.place


def shared_store(memory: SharedMemory, at: Site, lane: int, address: int, value: bytes) -> None:
    """Store the bytes inside of the shared memory."""
    if shared_inside(memory, at, lane, address, len(value)):
        shared_claim(memory, at, lane, address, len(value), value)
        memory.bytes["value"][address : address + len(value)] = np.frombuffer(value, np.uint8)


def shared_inside(memory: SharedMemory, at: Site, lane: int, address: int, size: int) -> bool:
    """Whether an access lies in the shared memory."""
    if address % size:
        at.report("MISALIGNED", lane, address)
        return False
    if address + size > len(memory.bytes):
        at.report("SHARED_OUTSIDE", lane, address)
        return False
    return True


def _conflict_with_write(
    b: np.void, at: Site, lane: int, address: int, epoch: int, sync: int, thread: int, *, writes: bool = False
) -> bool:
    """Report an access to what a copy or another thread writes in this interval."""
    if b["pending"]:
        at.report("COPY_UNDER_WAY", lane, address)
        return True
    if b["write_epoch"] != epoch or b["writer"] == thread:
        return False
    if b["writer"] // 64 != at.warp:
        at.report("RACE", lane, address)
        return True
    if b["write_sync"] == sync:
        at.report("UNEQUAL_BITS" if writes and b["write_place"] == at.place else "RACE_IN_WARP", lane, address)
        return True
    return False
