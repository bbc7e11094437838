"""State of shared memory where matrix products and bulk copies access it beside threads: asynchronous.h in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

Array = np.ndarray

# Who accesses shared memory: a thread with its loads and stores, the asynchronous proxy, or mbarrier instructions.
GENERIC, ASYNCHRONOUS, OBJECT = 0, 1, 2


class Where(Protocol):
    """The instruction that accesses memory: `Site` of access.py."""

    warp: int
    proxy: int

    def report(self, kind: str, lane: int, address: int) -> None:
        """Add a finding."""


BYTE = np.dtype(
    [
        ("write_epoch", np.int32), ("write_fence", np.int32), ("read_epoch", np.int32), ("read_fence", np.int32),
        ("readers", np.uint32), ("writer", np.int16), ("products", np.int16), ("delivery", np.int32),
        ("object", np.int8),
    ],
)  # fmt: skip


@dataclass
class Delivery:
    """The delivery of bulk copies: the address of their barrier object, and the warps that have waited, as bits."""

    object: int
    waited: int = 0


class Further:
    """The state of a block."""

    def __init__(self, size: int, warps: int) -> None:
        self.bytes = np.zeros(size, BYTE)
        self.bytes["write_epoch"] = self.bytes["read_epoch"] = -1
        self.fences, self.settled, self.fence_epoch = [0] * warps, [0] * warps, [-1] * warps
        self.settled_epoch = -1
        self.deliveries: list[Delivery] = []

    def settle(self, epoch: int) -> None:
        """All warps have met at a barrier, which ends the epoch."""
        self.settled = list(self.fences)
        if epoch in self.fence_epoch:
            self.settled_epoch = epoch
        for delivery in self.deliveries:
            delivery.waited = 0xFFFF_FFFF

    def fence(self, warp: int, epoch: int) -> None:
        """A proxy fence."""
        self.fences[warp] += 1
        self.fence_epoch[warp] = epoch

    def read(self, at: Where, lane: int, address: int, epoch: int, reported: bool) -> bool:
        """Note a read of a byte; return whether something has been reported."""
        b = self.bytes[address]
        reported = self._access(at, lane, address, epoch, reported)
        if at.proxy != GENERIC:
            return reported
        fence = self.fences[at.warp]
        if b["read_epoch"] != epoch:
            b["readers"], b["read_fence"] = 0, fence
        b["read_epoch"], b["read_fence"] = epoch, max(fence, int(b["read_fence"]))
        b["readers"] |= np.uint32(1 << at.warp)
        return reported

    def write(self, at: Where, lane: int, address: int, epoch: int, reported: bool) -> bool:
        """Note a write of a byte; return whether something has been reported."""
        b = self.bytes[address]
        reported = self._access(at, lane, address, epoch, reported)
        if not reported and b["products"]:
            at.report("FACTOR_UNDER_WAY", lane, address)
            reported = True
        read, fence = int(b["read_epoch"]), int(b["read_fence"])
        fenced = read < 0 or self._fenced(at.warp, epoch, read, int(b["readers"]), fence)
        if not reported and at.proxy == ASYNCHRONOUS and not fenced:
            at.report("PROXY", lane, address)
            reported = True
        b["delivery"] = 0
        if at.proxy == ASYNCHRONOUS:
            b["write_epoch"] = b["read_epoch"] = -1
        if at.proxy == GENERIC:
            b["write_epoch"], b["writer"], b["write_fence"] = epoch, at.warp, self.fences[at.warp]
        return reported

    def _access(self, at: Where, lane: int, address: int, epoch: int, reported: bool) -> bool:
        """Checks of any access."""
        b = self.bytes[address]
        if reported:
            return True
        kind = ""
        if b["object"] and at.proxy != OBJECT:
            kind = "BARRIER_OBJECT"
        elif b["delivery"] and not self.deliveries[b["delivery"] - 1].waited >> at.warp & 1:
            kind = "NOT_WAITED"
        elif at.proxy == ASYNCHRONOUS and b["write_epoch"] >= 0:
            writer, fence = 1 << int(b["writer"]), int(b["write_fence"])
            kind = "" if self._fenced(at.warp, epoch, int(b["write_epoch"]), writer, fence) else "PROXY"
        if kind:
            at.report(kind, lane, address)
        return bool(kind)

    def _fenced(self, warp: int, now: int, epoch: int, warps: int, fence: int) -> bool:
        """Whether a proxy fence lies between ordinary accesses by some warps and an access of this warp now."""
        if epoch < now and (self.settled_epoch > epoch or self.fence_epoch[warp] == now):
            return True
        done = (self.fences[i] if i == warp else self.settled[i] for i in range(len(self.fences)) if warps >> i & 1)
        return all(fences > fence for fences in done)
