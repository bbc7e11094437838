"""The interpreter of core.c on numpy arrays, for machines without a C compiler; hundreds of times slower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from compiled.access import Site, global_load, global_store, shared_claim, shared_inside, shared_load, shared_store
from compiled.asynchronous import Further
from compiled.launching import Map
from compiled.memory import Findings, GlobalMemory, SharedMemory
from compiled.ptx.bulk import Boxes
from compiled.ptx.encode import ADDRESS, LANES, NUMBERS, Encoded
from compiled.ptx.numbers import FUNCTIONS, bf16, canonical_f32, f16
from compiled.ptx.products import Products, Warpgroups
from compiled.ptx.rules import RULES

Array = np.ndarray
ALL = np.ones(LANES, bool)

_DTYPES = {
    "pred": np.uint32, "u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "u64": np.uint64, "s64": np.int64, "f64": np.float64,
}  # fmt: skip


class Copy(NamedTuple):
    """An asynchronous copy under way."""

    group: int
    lane: int
    address: int
    bytes: bytes


@dataclass
class Warp:
    """Registers, paths that have diverged as place → lanes, and asynchronous copies."""

    file: Array  # uint32 [units, LANES]
    paths: dict[int, Array]
    group: int = 0
    copies: list[Copy] = field(default_factory=list)
    waiting: int = -1
    blocked: int = -1
    products: Products | None = None


def _compile(expression: str) -> Any:
    return eval(f"lambda a, b=None, c=None: {expression}", dict(FUNCTIONS))


_EXPRESSIONS = [_compile(rule.expression) for rule in RULES.values()]
_TYPES = [(rule.result, rule.operands) for rule in RULES.values()]
_NAMES = {number: name.removeprefix("OP_").lower() for name, number in NUMBERS.items()}


def read(file: Array, row: int, kind: str) -> Array:
    """A register as an array of its type."""
    dtype = np.dtype(_DTYPES[kind])
    if dtype.itemsize == 8:
        return file[row : row + 2].reshape(-1).view(dtype)
    return file[row].astype(dtype) if dtype.itemsize == 2 else file[row].view(dtype)


def write(file: Array, row: int, value: Array, lanes: Array) -> None:
    """Write lanes of a register. Narrow results are held in 32 bits without sign."""
    if value.dtype.itemsize == 8:
        file[row : row + 2].reshape(-1).view(np.uint64)[lanes] = value.view(np.uint64)[lanes]
        return
    if value.dtype.itemsize < 4:
        value = value.view(np.uint16).astype(np.uint32) if value.dtype.itemsize == 2 else value.astype(np.uint32)
    file[row][lanes] = value.view(np.uint32)[lanes]


class Block:
    """A block that is executed: its memory, and a method for each special instruction."""

    def __init__(
        self,
        encoded: Encoded,
        memory: GlobalMemory,
        shared: SharedMemory,
        findings: Findings,
        counts: Array,
        budget: int,
        warps: int,
        maps: Sequence[Map],
    ) -> None:
        self.code, self.memory, self.shared = encoded.code, memory, shared
        self.counts, self.budget = counts, budget
        self.at = Site(findings)
        self.further = shared.further = Further(len(shared.bytes), warps) if encoded.asynchronous else None
        owners: list[object] = [self]
        if self.further is not None:
            self.groups = Warpgroups(shared, self.further, self.at, encoded.lists, warps)
            self.boxes = Boxes(memory, shared, self.further, self.at, maps)
            owners += [self.groups, self.boxes]
        # Methods by the number of the instruction; False means that the warp has to try again.
        self.special: dict[int, Callable[..., bool | None]] = {
            number: getattr(owner, name)
            for number, name in _NAMES.items()
            for owner in owners
            if name not in ("branch", "return", "barrier") and hasattr(owner, name)
        }

    def run_warp(self, warp: Warp, number: int) -> None:
        """Run until a barrier, a wait or the end; the path at the earliest place goes first."""
        while warp.paths:
            place = min(warp.paths)
            path = warp.paths.pop(place)
            entry = self.code[place]
            self.at.place, self.at.warp = int(entry["place"]), number
            self.budget -= 1
            if self.budget < 0:
                self.at.report("UNFINISHED", -1, 0)
                warp.paths = {}
                return
            self.counts[place] += 1
            lanes = path
            if entry["predicate"] >= 0:
                lanes = path & ((warp.file[entry["predicate"]] & 1) != entry["negated"])
            op = int(entry["op"])
            if warp.products is not None and lanes.any():
                warp.products.use(self.at, entry)
            if op == NUMBERS["OP_BRANCH"]:
                self.go(warp, int(entry["numbers"][0]), lanes)
                self.go(warp, place + 1, path & ~lanes)
                continue
            if op == NUMBERS["OP_RETURN"]:
                self.go(warp, place + 1, path & ~lanes)
                continue
            if op in self.special and self.special[op](warp, entry, lanes, path) is False:
                self.budget += 1
                self.counts[place] -= 1
                warp.paths[place], warp.blocked = path, self.at.place
                return
            self.go(warp, place + 1, path)
            if op in self.special:
                continue
            if op == NUMBERS["OP_BARRIER"]:
                if not lanes.all():
                    self.at.report("BARRIER", -1, _bits(lanes))
                warp.waiting = self.at.place
                return
            result, operands = _TYPES[op]
            rows = entry["rows"]
            values = [read(warp.file, int(rows[1 + i]), kind) for i, kind in enumerate(operands)]
            found = np.asarray(_EXPRESSIONS[op](*values)).astype(_DTYPES[result])
            write(warp.file, int(rows[0]), found, lanes)

    @staticmethod
    def go(warp: Warp, place: int, lanes: Array) -> None:
        if lanes.any():
            warp.paths[place] = warp.paths.get(place, ~ALL) | lanes

    def expect_all(self, lanes: Array, members: int = 0xFFFF_FFFF) -> None:
        if _bits(lanes) != members:
            self.at.report("CONVERGENCE", -1, _bits(lanes))

    def warp_barrier(self, warp: Warp, entry: Any, lanes: Array, path: Array) -> None:
        self.expect_all(lanes, int(warp.file[entry["rows"][0]][0]))
        self.shared.syncs[self.at.warp] += 1

    def addresses(self, warp: Warp, entry: Any, row: int, kind: str) -> list[int]:
        found = read(warp.file, row, kind).astype(np.int64) + int(entry["offset"])
        return [int(x) & (0xFFFF_FFFF if kind == "u32" else (1 << 64) - 1) for x in found]

    def load_global(self, warp: Warp, entry: Any, lanes: Array, path: Array) -> None:
        self.load(warp, entry, lanes, "u64", lambda *args: global_load(self.memory, self.at, *args))

    def load_shared(self, warp: Warp, entry: Any, lanes: Array, path: Array) -> None:
        self.load(warp, entry, lanes, "u32", lambda *args: shared_load(self.shared, self.at, *args))

    def load(self, warp: Warp, entry: Any, lanes: Array, kind: str, get: Callable[..., bytes | None]) -> None:
        count, width, signed, wide = (int(x) for x in entry["numbers"])
        at = self.addresses(warp, entry, int(entry["rows"][ADDRESS]), kind)
        for lane in np.flatnonzero(lanes):
            found = get(int(lane), at[lane], count * width)
            if found is None:
                continue
            for i in range(count):
                value = int.from_bytes(found[i * width : (i + 1) * width], "little", signed=bool(signed))
                row = int(entry["rows"][i])
                if wide:
                    warp.file[row : row + 2].reshape(-1).view(np.uint64)[lane] = value & ((1 << 64) - 1)
                else:
                    warp.file[row][lane] = value & 0xFFFF_FFFF

    def store_global(self, warp: Warp, entry: Any, lanes: Array, path: Array) -> None:
        self.store(warp, entry, lanes, "u64", lambda *args: global_store(self.memory, self.at, *args))

    def store_shared(self, warp: Warp, entry: Any, lanes: Array, path: Array) -> None:
        self.store(warp, entry, lanes, "u32", lambda *args: shared_store(self.shared, self.at, *args))

    def store(self, warp: Warp, entry: Any, lanes: Array, kind: str, put: Callable[..., None]) -> None:
        count, width, _, wide = (int(x) for x in entry["numbers"])
        at = self.addresses(warp, entry, int(entry["rows"][ADDRESS]), kind)
        values = [read(warp.file, int(row), "u64" if wide else "u32") for row in entry["rows"][:count]]
        for lane in np.flatnonzero(lanes):
            put(int(lane), at[lane], b"".join(value[lane].tobytes()[:width] for value in values))

    def load_matrices(self, warp: Warp, entry: Any, lanes: Array, path: Array) -> None:
        self.expect_all(lanes)
        count, transposed = int(entry["numbers"][0]), bool(entry["numbers"][1])
        at = self.addresses(warp, entry, int(entry["rows"][ADDRESS]), "u32")
        for i in range(count):
            matrix = np.full((8, 8), 0xFFFF, np.uint16)
            for row in range(8):
                found = shared_load(self.shared, self.at, 8 * i + row, at[8 * i + row], 16)
                if found is not None:
                    matrix[row] = np.frombuffer(found, np.uint16)
            pairs = np.ascontiguousarray(matrix.T if transposed else matrix).view(np.uint32)  # [8, 4]
            warp.file[entry["rows"][i]] = pairs.reshape(-1)

    def store_matrices(self, warp: Warp, entry: Any, lanes: Array, path: Array) -> None:
        self.expect_all(lanes)
        at = self.addresses(warp, entry, int(entry["rows"][ADDRESS]), "u32")
        for i in range(entry["numbers"][0]):
            matrix = warp.file[entry["rows"][i]].reshape(8, 4).view(np.uint16)
            for row, part in enumerate(matrix.T if entry["numbers"][1] else matrix):
                shared_store(self.shared, self.at, 8 * i + row, at[8 * i + row], part.tobytes())

    def multiply(self, warp: Warp, entry: Any, lanes: Array, path: Array) -> None:
        self.expect_all(lanes)
        kind = int(entry["numbers"][0])
        rows = [int(row) for row in entry["rows"][:14]]
        group, thread = np.arange(LANES) // 4, np.arange(LANES) % 4
        depth = 8 if kind == 2 else 16
        a, b = np.zeros((16, depth)), np.zeros((depth, 8))
        for i in range(4):
            value = warp.file[rows[4 + i]]
            down = group + 8 * (i % 2)
            if kind == 2:
                a[down, thread + 4 * (i // 2)] = (value & np.uint32(0xFFFF_E000)).view(np.float32)
            else:
                for half in range(2):
                    a[down, 2 * thread + half + 8 * (i // 2)] = _half(value, half, kind)
        for i in range(2):
            value = warp.file[rows[8 + i]]
            if kind == 2:
                b[thread + 4 * i, group] = (value & np.uint32(0xFFFF_E000)).view(np.float32)
            else:
                for half in range(2):
                    b[2 * thread + half + 8 * i, group] = _half(value, half, kind)
        sums = np.zeros((16, 8))
        for k in range(depth):
            sums += a[:, k : k + 1] * b[k]
        results = []
        for i in range(4):
            own = sums[group + 8 * (i // 2), 2 * thread + i % 2]
            results.append(canonical_f32((own + read(warp.file, rows[10 + i], "f32")).astype(np.float32)))
        for row, value in zip(rows[:4], results, strict=True):
            write(warp.file, row, value, ALL)

    def elect(self, warp: Warp, entry: Any, lanes: Array, path: Array) -> None:
        """The first lane, as GPUs do; the manual leaves it open."""
        if not lanes.any():
            return
        first = int(lanes.argmax())
        self.expect_all(lanes, int(warp.file[entry["rows"][2]][first]))
        write(warp.file, int(entry["rows"][0]), np.full(LANES, first, np.uint32), lanes)
        write(warp.file, int(entry["rows"][1]), (np.arange(LANES) == first).astype(np.uint32), lanes)

    def shuffle(self, warp: Warp, entry: Any, lanes: Array, path: Array) -> None:
        a, by, limit, members = (warp.file[row].copy() for row in entry["rows"][1:5])
        mode, found = int(entry["numbers"][0]), a.copy()
        for lane in map(int, np.flatnonzero(lanes)):
            step, segment = int(by[lane]) & 31, int(limit[lane]) >> 8 & 31
            last = (lane & segment) | (int(limit[lane]) & 31 & ~segment)
            source = (lane - step, lane + step, lane ^ step, (lane & segment) | (step & ~segment))[mode]
            if not (source >= last if mode == 0 else source <= last):
                source = lane
            if not lanes[source] or _bits(lanes) != members[lane]:
                self.at.report("CONVERGENCE", lane, source)
            found[lane] = a[source]
        write(warp.file, int(entry["rows"][0]), found, lanes)

    def reduce(self, warp: Warp, entry: Any, lanes: Array, path: Array) -> None:
        self.expect_all(lanes, int(warp.file[entry["rows"][2]][0]))
        values = read(warp.file, int(entry["rows"][1]), "s32")[lanes]
        found = (values.astype(np.int64).sum(), values.max(), values.min())[int(entry["numbers"][0])]
        write(warp.file, int(entry["rows"][0]), np.full(LANES, int(found) & 0xFFFF_FFFF, np.uint32), lanes)

    def copy(self, warp: Warp, entry: Any, lanes: Array, path: Array) -> None:
        size, sized, further = (int(x) for x in entry["numbers"][:3])
        to = self.addresses(warp, entry, int(entry["rows"][0]), "u32")
        source = [int(x) + further for x in read(warp.file, int(entry["rows"][1]), "u64")]
        for lane in map(int, np.flatnonzero(lanes)):
            given = int(read(warp.file, int(entry["rows"][2]), "s32")[lane]) if sized else size
            if not shared_inside(self.shared, self.at, lane, to[lane], size):
                continue
            if not 0 <= given <= size:
                self.at.report("OUTSIDE", lane, source[lane])
                continue
            if given == size:
                found = global_load(self.memory, self.at, lane, source[lane], size)
                if found is None:
                    continue
            else:
                parts = [global_load(self.memory, self.at, lane, source[lane] + i, 1) or b"\0" for i in range(given)]
                found = b"".join(parts).ljust(size, b"\0")
            if source[lane] % size and given < size:
                self.at.report("MISALIGNED", lane, source[lane])
            shared_claim(self.shared, self.at, lane, to[lane], size)
            self.shared.bytes["pending"][to[lane] : to[lane] + size] = 1 + self.at.warp
            warp.copies.append(Copy(warp.group, lane, to[lane], found))

    def commit(self, warp: Warp, entry: Any, lanes: Array, path: Array) -> None:
        self.expect_all(lanes, _bits(path))
        warp.group += 1

    def wait(self, warp: Warp, entry: Any, lanes: Array, path: Array) -> None:
        self.expect_all(lanes, _bits(path))
        first_kept = warp.group - int(entry["numbers"][0])
        for copy in warp.copies:
            if copy.group < first_kept:
                b = self.shared.bytes[copy.address : copy.address + len(copy.bytes)]
                b["value"], b["pending"] = np.frombuffer(copy.bytes, np.uint8), 0
                b["write_epoch"], b["writer"] = self.shared.c.epoch, 64 * self.at.warp + copy.lane
                b["write_sync"] = self.shared.syncs[self.at.warp]
                for i in range(len(copy.bytes)) if self.further is not None else ():
                    self.further.write(self.at, copy.lane, copy.address + i, self.shared.c.epoch, True)
        warp.copies = [copy for copy in warp.copies if copy.group >= first_kept]


def _half(value: Array, half: int, kind: int) -> Array:
    bits = ((value >> (16 * half)) & 0xFFFF).astype(np.uint16)
    return f16(bits) if kind == 1 else bf16(bits)


def _bits(lanes: Array) -> int:
    return int(np.packbits(lanes, bitorder="little").view(np.uint32)[0])
