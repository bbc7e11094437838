"""Matrix products of a warpgroup in numpy, with the checks of their registers and operands; see products.c."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from compiled.access import Site, shared_load
from compiled.asynchronous import ASYNCHRONOUS, Further
from compiled.memory import Findings, SharedMemory
from compiled.ptx.asynchronous import FACTOR_IN_REGISTERS, NEGATIVE_A, NEGATIVE_B, TRANSPOSED_A, TRANSPOSED_B
from compiled.ptx.encode import ADDRESS, LANES, NUMBERS
from compiled.ptx.numbers import bf16, canonical_f32, f16

Array = np.ndarray
NOTHING, USED, FACTOR, ACCUMULATOR = 0, 1, 2, 3
_UNKNOWN = 0x3FFF_C000_C000_C000  # bits of a descriptor that must be 0
_LANES = np.arange(LANES)


class Product(NamedTuple):
    """A product under way, with the addresses of the 16-byte parts of its factors in shared memory."""

    group: int
    place: int
    chunks: Array


class Products:
    """The products of a warp that are under way, and what it did last with each register."""

    def __init__(self, units: int) -> None:
        self.group = 0
        self.under_way = np.zeros(units, np.int32)
        self.last = np.full(units, USED, np.uint8)
        self.product: list[Product] = []

    def use(self, at: Site, entry: Any) -> None:
        """An ordinary instruction accesses its registers; a move gives a value another name."""
        rows = [*entry["rows"][: entry["used"]], entry["rows"][ADDRESS]]
        moves = entry["op"] < NUMBERS["OP_BRANCH"] and entry["numbers"][0]
        for row in rows:
            if self.under_way[row]:
                at.report("PRODUCT_UNDER_WAY", -1, int(row))
                break
        if moves:
            self.last[rows[0]] = self.last[rows[1]]
        else:
            self.last[rows] = USED


@dataclass
class Trace:
    """The instructions of a warpgroup since the last barrier, and how many of them each warp has executed."""

    steps: list[tuple[int, int, int]] = field(default_factory=list)
    done: list[int] = field(default_factory=lambda: [0] * 4)

    def step(self, at: Site, a: int = 0, b: int = 0) -> None:
        """One more instruction of a warp."""
        done = self.done[at.warp % 4]
        if done == len(self.steps):
            self.steps.append((at.place, a, b))
        if self.steps[done] != (at.place, a, b):
            at.report("WARPGROUP", -1, self.steps[done][0])
        self.done[at.warp % 4] += 1


class Warpgroups:
    """The instructions of a block for whole warps and warpgroups."""

    def __init__(self, shared: SharedMemory, further: Further, at: Site, lists: Array, warps: int) -> None:
        self.shared, self.further, self.at, self.lists = shared, further, at, lists
        self.traces = [Trace() for _ in range(warps // 4)]

    def end_traces(self) -> None:
        """All warps have met or ended: they must have executed equally many instructions of their warpgroup."""
        for number, trace in enumerate(self.traces):
            for i, done in enumerate(trace.done):
                if done < len(trace.steps):
                    self.at.place, self.at.warp = trace.steps[done][0], 4 * number + i
                    self.at.report("WARPGROUP", -1, 0)
        self.traces = [Trace() for _ in self.traces]

    def _step(self, a: int = 0, b: int = 0) -> None:
        self.traces[self.at.warp // 4].step(self.at, a, b)

    def _expect_all(self, lanes: Array) -> None:
        if not lanes.all():
            self.at.report("CONVERGENCE", -1, int(np.packbits(lanes, bitorder="little").view(np.uint32)[0]))

    def product_fence(self, warp: Any, entry: Any, lanes: Array, path: Array) -> None:
        self._expect_all(lanes)
        self._step()
        warp.products.last[warp.products.under_way == 0] = NOTHING

    def product_commit(self, warp: Any, entry: Any, lanes: Array, path: Array) -> None:
        self._expect_all(lanes)
        self._step()
        warp.products.group += 1

    def product_wait(self, warp: Any, entry: Any, lanes: Array, path: Array) -> None:
        self._expect_all(lanes)
        self._step()
        products, epoch = warp.products, self.shared.c.epoch
        first_kept = products.group - int(entry["numbers"][0])
        for product in products.product:
            for address in self._bytes(product.chunks) if product.group < first_kept else ():
                b = self.shared.bytes[address]
                self.further.bytes["products"][address] -= 1
                if b["read_epoch"] != epoch:
                    b["readers"], b["reader"] = 0, -1
                b["read_epoch"], b["read_sync"] = epoch, -1
                b["readers"] |= np.uint32(1 << self.at.warp)
        products.product = [product for product in products.product if product.group >= first_kept]
        products.under_way[products.under_way <= first_kept] = 0

    def _bytes(self, chunks: Array) -> Iterator[int]:
        return (int(x) + i for x in chunks for i in range(16) if x + i < len(self.shared.bytes))

    def proxy_fence(self, warp: Any, entry: Any, lanes: Array, path: Array) -> None:
        self._expect_all(lanes)
        self.further.fence(self.at.warp, self.shared.c.epoch)

    def product(self, warp: Any, entry: Any, lanes: Array, path: Array) -> None:
        self._expect_all(lanes)
        kind, columns, flags, first = (int(x) for x in entry["numbers"])
        scaled, a_row, b_row = (int(x) for x in entry["rows"][:3])
        in_registers = bool(flags & FACTOR_IN_REGISTERS)
        b_at = warp.file[b_row : b_row + 2].reshape(-1).view(np.uint64)
        a_at = np.zeros_like(b_at) if in_registers else warp.file[a_row : a_row + 2].reshape(-1).view(np.uint64)
        added = warp.file[scaled] & 1
        other = (b_at != b_at[0]) | (a_at != a_at[0]) | (added != added[0])
        if other.any():
            self.at.report("CONVERGENCE", int(other.argmax()), int(b_at[0]))
        self._step(int(a_at[0]), int(b_at[0]))
        results = self.lists[first : first + columns // 2]
        factor = self.lists[first + columns // 2 : first + columns // 2 + 4] if in_registers else self.lists[:0]
        self._claim(warp.products, results, factor, ACCUMULATOR + columns // 8 + (64 if kind == 2 else 0))
        quarter = 16 * (self.at.warp % 4)
        chunks = []
        if in_registers:
            a = _fragments(warp.file[factor], kind)
        else:
            found = self._chunks(int(a_at[0]), 64, bool(flags & TRANSPOSED_A))
            a = self._factor(found, 64, bool(flags & TRANSPOSED_A), kind)[quarter : quarter + 16]
            chunks.append(found)
        found = self._chunks(int(b_at[0]), columns, bool(flags & TRANSPOSED_B))
        b = self._factor(found, columns, bool(flags & TRANSPOSED_B), kind)
        product = Product(warp.products.group, self.at.place, np.concatenate([*chunks, found]))
        warp.products.product.append(product)
        for address in self._bytes(product.chunks):
            self.further.bytes["products"][address] += 1
        sign = (-1.0 if flags & NEGATIVE_A else 1.0) * (-1.0 if flags & NEGATIVE_B else 1.0)
        sums = np.zeros((16, columns))
        for k in range(a.shape[1]):
            sums += sign * a[:, k : k + 1] * b[:, k]
        for i, row in enumerate(results):
            own = sums[_LANES // 4 + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * (_LANES % 4) + (i & 1)]
            total = own + warp.file[row].view(np.float32) if added[0] else own
            warp.file[row] = canonical_f32(total.astype(np.float32)).view(np.uint32)

    def _claim(self, products: Products, results: Array, factor: Array, shape: int) -> None:
        """Check the registers of a product against what was done with them, and mark them."""
        under = behind = False
        for rows, own in ((results, shape), (factor, FACTOR)):
            other = products.last[rows] != own
            busy = products.under_way[rows] != 0
            under |= bool((busy & other).any())
            behind |= bool((~busy & other & (products.last[rows] != NOTHING)).any())
            products.under_way[rows], products.last[rows] = 1 + products.group, own
        if under or behind:
            self.at.report("PRODUCT_UNDER_WAY" if under else "REGISTER_FENCE", -1, 0)

    def _chunks(self, descriptor: int, rows: int, transposed: bool) -> Array:
        """The addresses of the 16-byte parts of a factor; none behind a finding."""
        if descriptor & _UNKNOWN:
            self.at.report("DESCRIPTOR", -1, descriptor)
            return np.zeros(0, np.int32)
        start, leading, stride = ((descriptor >> place & 0x3FFF) << 4 for place in (0, 16, 32))
        mode = descriptor >> 62
        width = 256 >> mode if mode else 16
        i = np.arange(16 if transposed else rows)[:, None]
        j = np.arange(rows // 8 if transposed else 2)[None]
        offset: Array = i % 8 * width
        if not mode:
            offset = offset + (j * stride + i // 8 * leading if transposed else j * leading + i // 8 * stride)
        elif not transposed:
            offset = offset + 16 * j + i // 8 * stride
        else:
            offset = offset + j % (width // 16) * 16 + j // (width // 16) * leading + i // 8 * stride
        address = start + offset
        return (address ^ (address >> 7 & (width // 16 - 1)) << 4).reshape(-1)

    def _factor(self, chunks: Array, rows: int, transposed: bool, kind: int) -> Array:
        """A factor [rows, depth] from shared memory. Only the first finding is reported."""
        if not len(chunks):
            return np.zeros((rows, 8 if kind == 2 else 16))
        before = self.at.findings.count
        at = Site(self.at.findings, self.at.place, self.at.program, self.at.warp, ASYNCHRONOUS)
        parts = []
        for address in chunks:
            at.findings = at.findings if self.at.findings.count == before else Findings()
            parts.append(shared_load(self.shared, at, -1, int(address), 16) or b"\xff" * 16)
        numbers = _NUMBERS[kind](np.frombuffer(b"".join(parts), np.uint8))
        return numbers.reshape(16, rows).T if transposed else numbers.reshape(rows, -1)


def _tf32(raw: Array) -> Array:
    return (raw.view(np.uint32) & np.uint32(0xFFFF_E000)).view(np.float32).astype(np.float64)


_NUMBERS: tuple[Callable[[Array], Array], ...] = (
    lambda raw: bf16(raw.view(np.uint16)).astype(np.float64),
    lambda raw: f16(raw.view(np.uint16)).astype(np.float64),
    _tf32,
)


def _fragments(registers: Array, kind: int) -> Array:
    """The rows of a warp of a factor in four registers."""
    found = np.zeros((16, 8 if kind == 2 else 16))
    for i, register in enumerate(registers):
        down = _LANES // 4 + 8 * (i & 1)
        values = _NUMBERS[kind](np.ascontiguousarray(register).view(np.uint8)).reshape(LANES, -1)
        for half in range(values.shape[1]):
            across = _LANES % 4 + 4 * (i >> 1) if kind == 2 else 2 * (_LANES % 4) + half + 8 * (i >> 1)
            found[down, across] = values[:, half]
    return found
