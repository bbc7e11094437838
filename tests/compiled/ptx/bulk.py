"""Bulk copies of boxes (TMA) and the barrier objects that tell their end (mbarrier) in numpy; see bulk.c."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from compiled.access import Site, global_load, shared_claim, shared_inside, shared_load
from compiled.asynchronous import ASYNCHRONOUS, OBJECT, Delivery, Further
from compiled.launching import Map
from compiled.memory import Findings, GlobalMemory, SharedMemory
from compiled.ptx.encode import ADDRESS
from compiled.ptx.parameters import MAP_SIZE, MAPS

Array = np.ndarray


@dataclass
class Object:
    """A barrier object."""

    expected: int  # arrivals of a phase
    pending: int  # of this phase
    phase: int = 0
    bytes: int = 0  # announced and not delivered

    def turn(self) -> None:
        """Begin the next phase if this one is complete."""
        if not self.pending and not self.bytes:
            self.phase ^= 1
            self.pending = self.expected


class Bulk(NamedTuple):
    """A copy under way: the address of its object, and 16 bytes for each address in shared memory."""

    place: int
    warp: int
    object: int
    parts: list[tuple[int, bytes]]


class Boxes:
    """The barrier objects and bulk copies of a block. A copy is delivered when a warp waits for its object."""

    def __init__(
        self, memory: GlobalMemory, shared: SharedMemory, further: Further, at: Site, maps: Sequence[Map]
    ) -> None:
        self.memory, self.shared, self.further, self.at, self.maps = memory, shared, further, at, maps
        self.objects: dict[int, Object] = {}
        self.copies: list[Bulk] = []

    def _site(self, proxy: int) -> Site:
        return Site(self.at.findings, self.at.place, self.at.program, self.at.warp, proxy)

    @staticmethod
    def _addresses(warp: Any, entry: Any, lanes: Array) -> Iterator[tuple[int, int]]:
        at = warp.file[entry["rows"][ADDRESS]].astype(np.int64) + int(entry["offset"])
        return ((int(lane), int(at[lane]) & 0xFFFF_FFFF) for lane in np.flatnonzero(lanes))

    def object_start(self, warp: Any, entry: Any, lanes: Array, path: Array) -> None:
        site = self._site(OBJECT)
        for lane, address in self._addresses(warp, entry, lanes):
            count = int(warp.file[entry["rows"][0]][lane])
            if not shared_inside(self.shared, site, lane, address, 8):
                continue
            if address in self.objects or not count:
                site.report("BARRIER_OBJECT", lane, address)
                continue
            self._claim(site, lane, address, True)
            self.objects[address] = Object(count, count)

    def object_end(self, warp: Any, entry: Any, lanes: Array, path: Array) -> None:
        site = self._site(OBJECT)
        for lane, address in self._addresses(warp, entry, lanes):
            found = self.objects.pop(address, None)
            copied = any(copy.object == address for copy in self.copies)
            if found is None or found.bytes or found.pending != found.expected or copied:
                site.report("BARRIER_OBJECT", lane, address)
            if found is not None:
                self._claim(site, lane, address, False)

    def _claim(self, site: Site, lane: int, address: int, starts: bool) -> None:
        shared_claim(self.shared, site, lane, address, 8)
        self.further.bytes["object"][address : address + 8] = starts

    def _used(self, site: Site, lane: int, address: int) -> Object | None:
        """The object that a lane uses. It must have been started, and other warps may use it behind a barrier."""
        found = self.objects.get(address)
        if found is None:
            site.report("BARRIER_OBJECT", lane, address)
        else:
            shared_load(self.shared, site, lane, address, 8)
        return found

    def object_expect(self, warp: Any, entry: Any, lanes: Array, path: Array) -> None:
        site = self._site(OBJECT)
        for lane, address in self._addresses(warp, entry, lanes):
            found = self._used(site, lane, address)
            if found is None:
                continue
            if not found.pending:
                site.report("BARRIER_OBJECT", lane, address)
                continue
            found.pending -= 1
            found.bytes += int(warp.file[entry["rows"][0]][lane])
            found.turn()

    def object_wait(self, warp: Any, entry: Any, lanes: Array, path: Array) -> bool:
        """Return whether the warp goes on."""
        if not lanes.any():
            return True
        site = self._site(OBJECT)
        given = list(self._addresses(warp, entry, lanes))
        parities = warp.file[entry["rows"][1]]
        (lane, address), parity = given[0], int(parities[given[0][0]])
        for other, at in given:
            if at != address or parities[other] != parity:
                site.report("CONVERGENCE", other, address)
                break
        found = self.objects.get(address)
        if found is not None and found.phase == parity:
            self._deliver(found, address)
            if found.phase == parity:
                return False
        if self._used(site, lane, address) is not None:
            for delivery in self.further.deliveries:
                if delivery.object == address:
                    delivery.waited |= 1 << site.warp
        warp.file[entry["rows"][0]][lanes] = 1
        return True

    def _deliver(self, found: Object, address: int) -> None:
        """Deliver all copies that signal an object."""
        arriving = [copy for copy in self.copies if copy.object == address]
        if not arriving:
            return
        self.copies = [copy for copy in self.copies if copy.object != address]
        self.further.deliveries.append(Delivery(address))
        for copy in arriving:
            for to, value in copy.parts:
                b = self.shared.bytes[to : to + 16]
                b["value"], b["pending"], b["write_epoch"] = np.frombuffer(value, np.uint8), 0, -1
                self.further.bytes["delivery"][to : to + 16] = len(self.further.deliveries)
            found.bytes -= 16 * len(copy.parts)
        found.turn()

    def copy_box(self, warp: Any, entry: Any, lanes: Array, path: Array) -> None:
        rows, rank = entry["rows"], int(entry["numbers"][0])
        given = warp.file[rows[0] : rows[0] + 2].reshape(-1).view(np.uint64)
        for lane, to in self._addresses(warp, entry, lanes):
            number, rest = divmod(int(given[lane]) - MAPS, MAP_SIZE)
            if rest or not 0 <= number < len(self.maps) or len(self.maps[number].shape) != rank:
                self.at.report("DESCRIPTOR", lane, int(given[lane]))
                continue
            signal = int(warp.file[rows[1]][lane])
            if self._used(self._site(OBJECT), lane, signal) is None:
                continue
            self._start(self.maps[number], lane, to, signal, [int(warp.file[row][lane]) for row in rows[2 : 2 + rank]])

    def _start(self, given: Map, lane: int, to: int, signal: int, coordinates: Sequence[int]) -> None:
        size = given.element * int(np.prod(given.box))
        if to % 128:
            return self.at.report("MISALIGNED", lane, to)
        if to + size > len(self.shared.bytes):
            return self.at.report("SHARED_OUTSIDE", lane, to)
        start = [x - (1 << 32) if x >> 31 else x for x in coordinates]
        before, site = self.at.findings.count, self._site(ASYNCHRONOUS)
        parts = []
        for i in range(size // 16):
            plain = to + 16 * i
            address = plain ^ (plain >> 7 & (given.swizzle // 16 - 1)) << 4 if given.swizzle else plain
            if self.at.findings.count != before:  # one finding is enough
                site.findings = Findings()
            parts.append((address, self._read(site, given, lane, start, 16 * i)))
            shared_claim(self.shared, site, lane, address, 16)
            self.shared.bytes["pending"][address : address + 16] = 1 + self.at.warp
        self.copies.append(Bulk(self.at.place, self.at.warp, signal, parts))
        return None

    def _read(self, site: Site, given: Map, lane: int, start: Sequence[int], place: int) -> bytes:
        """16 bytes of a box as read from global memory. What lies outside of the tensor is 0."""
        address, rest = given.address, place // given.element
        places = []
        for first, box, stride in zip(start, given.box, given.strides, strict=True):
            places.append(first + rest % box)
            rest //= box
            address += places[-1] * stride
        if any(not 0 <= x < size for x, size in zip(places[1:], given.shape[1:], strict=True)):
            return bytes(16)
        count, first = 16 // given.element, places[0]
        if first >= 0 and first + count <= given.shape[0] and address % 16 == 0:
            return global_load(self.memory, site, lane, address, 16) or bytes(16)
        found = b""
        for e in range(count):
            inside = 0 <= first + e < given.shape[0]
            at = address + e * given.element
            value = global_load(self.memory, site, lane, at, given.element) if inside else None
            found += value or bytes(given.element)
        return found

    def report_left(self, warps: Sequence[Any]) -> None:
        """The end of a block: nothing may be under way."""
        for copy in self.copies:
            self.at.place, self.at.warp = copy.place, copy.warp
            self.at.report("LEFT_UNDER_WAY", -1, copy.object)
        for number, warp in enumerate(warps):
            for product in warp.products.product:
                self.at.place, self.at.warp = product.place, number
                self.at.report("LEFT_UNDER_WAY", -1, 0)
