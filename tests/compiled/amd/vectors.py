"""Execution of decoded instructions with numpy, where there is no C compiler: the functions of core.c."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from compiled.access import Site, global_load, global_store, shared_claim, shared_load, shared_store
from compiled.execution import Settings
from compiled.memory import Findings, GlobalMemory, SharedMemory

from . import arithmetic
from .arithmetic import f32, f64, half_of, result16, result32, result64, u32
from .decode import ELEMENTS, EXEC, VCC, Condition, Flag, Handler, Kind, Program, Row
from .rules import RULES, Rule

LANES = np.arange(64)
ALL = (1 << 64) - 1
_NAMES = {name: getattr(arithmetic, name) for name in dir(arithmetic) if not name.startswith("_")}
_READ: dict[str, Callable[[Any], Any]] = {
    "u32": lambda x: x, "i32": lambda x: x.view(np.int32), "f32": lambda x: x.view(np.float32), "u64": lambda x: x,
    "i64": lambda x: x.view(np.int64), "f64": lambda x: x.view(np.float64), "u16": lambda x: x & np.uint32(0xFFFF),
    "i16": lambda x: x.astype(np.uint16).view(np.int16).astype(np.int32), "f16": half_of, "old": lambda x: x,
}  # fmt: skip
_WRITTEN: dict[str, Callable[[Any], Any]] = {
    "u32": u32, "i32": u32, "f32": lambda x: result32(f32(x)), "u64": arithmetic.u64, "i64": arithmetic.u64,
    "f64": lambda x: result64(f64(x)), "u16": lambda x: u32(x) & np.uint32(0xFFFF),
    "i16": lambda x: u32(x) & np.uint32(0xFFFF), "f16": lambda x: result16(f32(x)), "mask": lambda x: x,
    "none": lambda x: x,
}  # fmt: skip
_VALUES = [compile(rule.value, rule.name, "eval") for rule in RULES]
_FLAGS = [compile(rule.flag, rule.name, "eval") if rule.flag else None for rule in RULES]
# Part of a register: shift and mask.
_PARTS = {0: (0, 32), 1: (0, 16), 2: (16, 16), 3: (0, 8), 4: (8, 8), 5: (16, 8), 6: (24, 8)}


class Operand(NamedTuple):
    """A decoded operand."""

    kind: int
    index: int
    words: int
    flags: int
    value: int


class Instruction(NamedTuple):
    """A decoded instruction."""

    handler: int
    rule: int
    sources: int
    m: tuple[int, ...]
    result: Operand
    second: Operand
    source: tuple[Operand, ...]


@dataclass
class Access:
    """An access to memory that the wave has not waited for."""

    kind: int  # 0 vector memory, 1 LDS, 2 scalar memory
    scalar: bool = False
    registers: range = range(0)
    local: list[tuple[int, int]] = field(default_factory=list)  # lane and address
    write: bool = False
    size: int = 0


class Wave:
    """Registers of a wave and what is under way to them."""

    def __init__(self, poison: int, pc: int, private: int = 0) -> None:
        self.private = np.full((private // 4, 64), poison, np.uint32)  # spilled registers
        self.v = np.full((512, 64), poison, np.uint32)
        self.s = [poison] * 128
        self.scc, self.pc = 0, pc
        self.queues: tuple[deque[Access], deque[Access]] = (deque(), deque())
        self.under_way: dict[tuple[bool, int], int] = {}

    def pair(self, index: int) -> int:
        return self.s[index] | self.s[index + 1] << 32

    def set_pair(self, index: int, value: int) -> None:
        self.s[index], self.s[index + 1] = value & 0xFFFF_FFFF, value >> 32 & 0xFFFF_FFFF

    def active(self) -> Any:
        return lanes_of(self.pair(EXEC))

    def finish(self, access: Access) -> None:
        for register in access.registers:
            self.under_way.pop((access.scalar, register), None)
        access.registers, access.local = range(0), []

    def wait(self, queue: int, allowed: int) -> None:
        """LDS accesses finish in order, scalar loads in any order: these are only certain to have arrived at 0."""
        accesses = self.queues[queue]
        if queue == 0 or allowed == 0:
            while len(accesses) > allowed:
                self.finish(accesses.popleft())
            return
        for access in [a for a in accesses if a.kind == 1][::-1][allowed:]:
            self.finish(access)

    def issue(self, kind: int, target: Operand | None) -> Access:
        queue = self.queues[min(kind, 1)]
        if len(queue) == 64:
            self.finish(queue.popleft())
        access = Access(kind)
        if target is not None:
            access.scalar = target.kind == Kind.SCALAR
            access.registers = range(target.index, target.index + target.words)
            self.under_way |= {(access.scalar, register): kind + 1 for register in access.registers}
        queue.append(access)
        return access


def lanes_of(mask: int) -> Any:
    """A mask as 64 booleans."""
    return np.unpackbits(np.frombuffer(mask.to_bytes(8, "little"), np.uint8), bitorder="little").astype(bool)


def mask_of(lanes: Any) -> int:
    """Inverse of `lanes_of`."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


def run(
    program: Program, memory: GlobalMemory, shared: SharedMemory, findings: Findings, start: dict[str, int],
    block: np.ndarray, warps: int, settings: Settings,
) -> np.ndarray:  # fmt: skip
    """Execute all programs of a grid, and return how often each instruction was executed."""
    machine = Machine(program, memory, shared, Site(findings), start, block, warps, settings)
    order = range(start["grid"])
    with np.errstate(all="ignore"):
        for number in reversed(order) if settings.reverse else order:
            machine.run_block(number)
    return machine.counts


class Machine:
    """One block after the other."""

    def __init__(
        self, program: Program, memory: GlobalMemory, shared: SharedMemory, site: Site, start: dict[str, int],
        block: np.ndarray, warps: int, settings: Settings,
    ) -> None:  # fmt: skip
        self.code = [_instruction(record) for record in program.code.tolist()]
        self.memory, self.shared, self.site, self.start = memory, shared, site, start
        self.block, self.warps, self.settings = block, warps, settings
        self.counts = np.zeros(len(self.code), np.uint64)
        self.wave = Wave(0, 0)

    def run_block(self, number: int) -> None:
        """Waves run one at a time until each has reached the barrier."""
        self.site.program = number
        self.shared.start_block(self.settings.poison)
        waves = [self._start(number, index) for index in range(self.warps)]
        budget = [self.start["limit"]]
        order = range(self.warps)
        while True:
            barriers = set()
            ended = 0
            for index in reversed(order) if self.settings.reverse else order:
                self.wave, self.site.warp = waves[index], index
                state = self._run_wave(budget)
                if state is None:
                    return
                ended += state == Handler.END
                barriers |= {self.wave.pc} if state == Handler.BARRIER else set()
            if len(barriers) > 1 or (ended and barriers):
                self.site.report("BARRIER", -1, 0)
            if ended:
                return
            self.shared.c.epoch += 1
            for index in order:
                self.wave, self.site.warp, self.site.place = waves[index], index, waves[index].pc - 1
                self._carry_over()

    def _start(self, number: int, index: int) -> Wave:
        wave, start = Wave(self.settings.poison, self.start["entry"], self.start["private_bytes"]), self.start
        wave.v[0] = index * 64 + LANES
        wave.set_pair(0, self.block.ctypes.data)
        preloaded = self.block[: 4 * start["preloaded"]].view(np.uint32).tolist()
        wave.s[2 : 2 + len(preloaded)] = preloaded
        wave.s[start["program_register"]] = number
        wave.set_pair(EXEC, ALL)
        return wave

    def _run_wave(self, budget: list[int]) -> int | None:
        """Run to a barrier or the end; None if there is no end."""
        wave = self.wave
        while wave.pc < len(self.code) and budget[0]:
            budget[0] -= 1
            i = self.code[wave.pc]
            self.site.place = wave.pc
            self.counts[wave.pc] += 1
            if wave.under_way:
                self._check_idle(i)
            if i.handler in (Handler.BARRIER, Handler.END):
                wave.pc += 1
                return i.handler
            if i.handler == Handler.BRANCH and self._taken(i.m[0]):
                wave.pc = i.m[1]
                continue
            method = _METHODS.get(i.handler)
            if method is not None:
                method(self, i)
            wave.pc += 1
        self.site.report("UNFINISHED", -1, 0)
        return None

    def _check_idle(self, i: Instruction) -> None:
        in_order = {Handler.LOAD: 1, Handler.LOCAL_READ: 2, Handler.PERMUTE: 2, Handler.SWIZZLE: 2}.get(i.handler, 0)
        for operand in (*i.source, i.result, i.second):
            if operand.kind in (Kind.VECTOR, Kind.SCALAR):
                allowed = in_order if operand is i.result else 0
                for register in range(operand.index, operand.index + operand.words):
                    state = self.wave.under_way.get((operand.kind == Kind.SCALAR, register), 0)
                    if state not in (0, allowed):
                        self.site.report("HAZARD", -1, register)
                        break

    def _carry_over(self) -> None:
        """An LDS access that is not waited for may happen after the barrier."""
        for access in self.wave.queues[1]:
            for lane, address in access.local:
                self.shared.syncs[self.site.warp] += 1
                if address + access.size > len(self.shared.bytes) or address % access.size:
                    continue
                if access.write:
                    shared_claim(self.shared, self.site, lane, address, access.size)
                else:
                    shared_load(self.shared, self.site, lane, address, access.size)

    def _taken(self, condition: int) -> bool:
        wave = self.wave
        return {
            Condition.ALWAYS: True, Condition.SCC0: not wave.scc, Condition.SCC1: bool(wave.scc),
            Condition.VCCZ: wave.pair(VCC) == 0, Condition.VCCNZ: wave.pair(VCC) != 0,
            Condition.EXECZ: wave.pair(EXEC) == 0, Condition.EXECNZ: wave.pair(EXEC) != 0,
        }[Condition(condition)]  # fmt: skip

    # Operands

    def _scalar_value(self, o: Operand) -> int:
        if o.kind == Kind.SCALAR:
            return self.wave.pair(o.index) if o.words == 2 else self.wave.s[o.index]
        return self.wave.scc if o.kind == Kind.CONDITION else o.value

    def _fetch(self, o: Operand) -> Any:
        wide = o.words == 2
        if o.kind == Kind.VECTOR and wide:
            x = self.wave.v[o.index].astype(np.uint64) | self.wave.v[o.index + 1].astype(np.uint64) << np.uint64(32)
        elif o.kind == Kind.VECTOR:
            x = self.wave.v[o.index].copy()
        else:
            value = self._scalar_value(o)
            x = np.full(64, value, np.uint64) if wide else np.full(64, value & 0xFFFF_FFFF, np.uint32)
        kind, (shift, width) = x.dtype.type, _PARTS[o.flags // Flag.SELECT % 8]
        if width < 32:
            x = x >> kind(shift) & kind((1 << width) - 1)
            if o.flags & Flag.EXTEND:
                x = ((x << kind(32 - width)).view(np.int32) >> (32 - width)).view(np.uint32)
        if o.flags & Flag.HALF:
            x = half_of(x).view(np.uint32)
        sign = kind(1 << (63 if wide else o.flags // Flag.SIGN % 64))
        if o.flags & Flag.ABSOLUTE:
            x &= ~sign
        if o.flags & Flag.NEGATE:
            x ^= sign
        return x

    def _write(self, o: Operand, values: Any, active: Any) -> None:
        self.wave.v[o.index][active] = values.astype(np.uint32)[active]
        if o.words == 2:
            self.wave.v[o.index + 1][active] = (values >> np.uint64(32)).astype(np.uint32)[active]

    # Arithmetic

    def _vector(self, i: Instruction) -> None:
        rule, active = RULES[i.rule], self.wave.active()
        sources = [self._fetch(o) for o in i.source[: i.sources]]
        exists = active.copy()
        if i.m[0]:
            other = np.array([_source_lane(i.m[1], i.m[2], lane) for lane in LANES.tolist()])
            valid = (other >= 0) & active[other]
            sources[0] = np.where(valid, sources[0][other], np.uint32(0))
            exists &= valid | bool(i.m[5])
            exists &= (i.m[3] >> LANES // 16 & 1).astype(bool) & (i.m[4] >> (LANES // 4 % 4) & 1).astype(bool)
        mask = lanes_of(self.wave.pair(i.source[3].index)) if i.source[3].kind else np.zeros(64, bool)
        value, flag = _evaluate(i.rule, rule, sources, mask)
        if i.handler == Handler.COMPARE:
            self.wave.set_pair(i.result.index, mask_of(np.broadcast_to(value, 64) & exists))
            return
        value = np.broadcast_to(value, 64)
        if i.m[8]:
            x = value.view(np.float32)
            value = np.where(x > 0, np.where(x > 1, np.uint32(0x3F80_0000), value), np.uint32(0))
        if i.m[6]:
            shift, width = _PARTS[i.m[6]]
            part = np.uint32((1 << width) - 1 << shift)
            kept = self.wave.v[i.result.index] & ~part if i.m[7] else np.uint32(0)
            value = (value << np.uint32(shift) & part) | kept
        self._write(i.result, value, exists)
        if i.second.kind:
            self.wave.set_pair(i.second.index, mask_of(np.broadcast_to(flag, 64) & exists))

    def _packed(self, i: Instruction) -> None:
        rule, wide, moves = RULES[i.rule], i.m[0] == 32, i.m[1]
        halves = []
        for half in range(2):
            sources = []
            for k, o in enumerate(i.source[: i.sources]):
                high = o.flags & (Flag.HIGH if moves or not half else Flag.HIGH_FOR_HIGH)
                index = o.index + (1 if wide and high else 0)
                x = self.wave.v[index] if o.kind == Kind.VECTOR else None
                if x is None:
                    x = np.full(64, self.wave.s[index] if o.kind == Kind.SCALAR else o.value, np.uint32)
                x = x >> np.uint32(0 if wide or not high else 16)
                if o.flags & (Flag.NEGATE_HIGH if half else Flag.NEGATE_LOW):
                    x = x ^ np.uint32(0x8000_0000 if wide else 0x8000)
                if not moves or k == half:
                    sources.append(x)
            halves.append(np.broadcast_to(_evaluate(i.rule, rule, sources, None)[0], 64))
        active = self.wave.active()
        if wide:
            for half in range(2):
                self.wave.v[i.result.index + half][active] = halves[half][active]
        else:
            both = (halves[0] & np.uint32(0xFFFF)) | halves[1] << np.uint32(16)
            self.wave.v[i.result.index][active] = both[active]

    def _scalar(self, i: Instruction) -> None:
        rule, wave = RULES[i.rule], self.wave
        values = [self._scalar_value(o) for o in i.source[: i.sources]]
        sources = [
            np.array([value & (ALL if type_ in ("u64", "i64") else 0xFFFF_FFFF)], np.uint64).astype(
                np.uint64 if type_ in ("u64", "i64") else np.uint32
            )
            for value, type_ in zip(values, rule.sources, strict=True)
        ]
        found, flag = _evaluate(i.rule, rule, sources, np.array([bool(wave.scc)]))
        if rule.flag:
            wave.scc = int(bool(np.asarray(flag).reshape(-1)[0]))
        if rule.result == "none":
            return
        result = int(np.asarray(found).reshape(-1)[0])
        if i.handler == Handler.SAVE_EXEC:
            wave.set_pair(i.result.index, values[1])
            wave.set_pair(EXEC, result)
        elif i.result.words == 2:
            wave.set_pair(i.result.index, result)
        else:
            wave.s[i.result.index] = result

    def _read_lane(self, i: Instruction) -> None:
        exec_ = self.wave.pair(EXEC)
        first = (exec_ & -exec_).bit_length() - 1 if exec_ else 0
        lane = first if i.m[0] else self._scalar_value(i.source[1]) & 63
        self.wave.s[i.result.index] = int(self.wave.v[i.source[0].index][lane])

    def _write_lane(self, i: Instruction) -> None:
        self.wave.v[i.result.index][self._scalar_value(i.source[1]) & 63] = self._scalar_value(i.source[0])

    def _wait(self, i: Instruction) -> None:
        self.wave.wait(0, i.m[0])
        self.wave.wait(1, i.m[1])

    # Memory

    def _scalar_load(self, i: Instruction) -> None:
        address = self.wave.pair(i.source[0].index) + self._scalar_value(i.source[1]) & ~3
        for k in range(i.m[0]):
            place = address + 4 * k - self.block.ctypes.data
            if 0 <= place <= len(self.block) - 4:
                found: bytes | None = self.block[place : place + 4].tobytes()
            else:
                found = global_load(self.memory, self.site, 0, address + 4 * k, 4)
            if found is not None:
                self.wave.s[i.result.index + k] = int.from_bytes(found, "little")
        self.wave.issue(2, i.result)

    def _vector_memory(self, i: Instruction) -> None:
        wave, stores = self.wave, i.handler == Handler.STORE
        if i.m[3] == 3:
            return self._private(i)
        base, records, extra, size = 0, 1 << 64, 0, i.m[0]
        address, resource, unit = i.source[0], i.source[1], min(size, 4)
        if i.m[3]:
            words = wave.s[resource.index : resource.index + 4]
            base, records = words[0] | (words[1] & 0xFFFF) << 32, words[2]
            extra = self._scalar_value(i.source[2]) & 0xFFFF_FFFF
            if words[1] >> 16 or words[3] & 0x0088_0000:
                self.site.report("OUTSIDE", -1, base)
        elif resource.kind:
            base = wave.pair(resource.index)
        for lane in LANES[wave.active()].tolist():
            offset = int(wave.v[address.index][lane]) if address.kind else 0
            if address.words == 2:
                offset |= int(wave.v[address.index + 1][lane]) << 32
            offset += i.m[2]
            for k in range(0, size, unit):
                outside = i.m[3] and offset % (1 << 64) + k + unit > records
                at = (base + extra + offset + k) % (1 << 64)
                if stores:
                    value = int(wave.v[i.source[3].index + k // 4][lane]) >> (16 if i.m[4] else 0)
                    if not outside:
                        global_store(self.memory, self.site, lane, at, value.to_bytes(4, "little")[:unit])
                    continue
                found = None if outside else global_load(self.memory, self.site, lane, at, unit)
                value = int.from_bytes(found or b"", "little", signed=bool(i.m[1]))
                wave.v[i.result.index + k // 4][lane] = value & 0xFFFF_FFFF
        wave.issue(0, None if stores else i.result)
        return None

    def _private(self, i: Instruction) -> None:
        wave, stores, active = self.wave, i.handler == Handler.STORE, self.wave.active()
        base = i.m[2] + (wave.s[i.source[1].index] if i.source[1].kind else 0)
        for k in range(i.m[0] // 4):
            place = base // 4 + k
            if base % 4 or not 0 <= place < len(wave.private):
                self.site.report("OUTSIDE", -1, 4 * place)
            elif stores:
                wave.private[place][active] = wave.v[i.source[3].index + k][active]
            else:
                wave.v[i.result.index + k][active] = wave.private[place][active]
        wave.issue(0, None if stores else i.result)

    def _local(self, i: Instruction) -> None:
        wave, writes, size = self.wave, i.handler == Handler.LOCAL_WRITE, i.m[0]
        words = max(1, size // 4)
        self.shared.syncs[self.site.warp] += 1
        active, local = LANES[wave.active()].tolist(), []
        addresses = wave.v[i.source[0].index].tolist()
        for part in range(i.m[1]):
            for lane in active:
                address = (addresses[lane] + i.m[2 + part]) & 0xFFFF_FFFF
                local.append((lane, address))
                if writes:
                    source = i.source[1 + part].index
                    value = wave.v[source : source + words, lane].tobytes()
                    shared_store(self.shared, self.site, lane, address, value[2:][:size] if i.m[5] else value[:size])
                    continue
                found = shared_load(self.shared, self.site, lane, address, size) or bytes(size)
                if size < 4:
                    found = struct.pack("<I", int.from_bytes(found, "little", signed=bool(i.m[4])) & 0xFFFF_FFFF)
                first = i.result.index + part * words
                wave.v[first : first + words, lane] = np.frombuffer(found, np.uint32)
        access = wave.issue(1, None if writes else i.result)
        access.local, access.write, access.size = local, writes, size

    def _lanes(self, i: Instruction) -> None:
        wave, permutes = self.wave, i.handler == Handler.PERMUTE
        active = wave.active()
        other = (wave.v[i.source[0].index] + np.uint32(i.m[0])) // 4 % 64 if permutes else LANES ^ i.m[0]
        found = np.where(active[other], wave.v[i.source[permutes].index][other], np.uint32(0))
        self._write(i.result, found, active)
        wave.issue(1, i.result)

    def _matrix(self, i: Instruction) -> None:
        """The sum is exact to fp64 and rounded once, as in core.c."""
        n, depth, v = i.m[0], i.m[2], self.wave.v
        per_lane = depth * n // 64
        factors = np.zeros((2, depth, n))
        for side in range(2):
            for j in range(per_lane):
                factors[side, LANES // n * per_lane + j, LANES % n] = _elements(v, i.source[side].index, j, i.m[3])
        r = np.arange(n * n // 64)[:, None]
        rows = 8 * (r // 4) + 4 * (LANES // 32) + r % 4 if n == 32 else 4 * (LANES // 16) + r
        columns = np.broadcast_to(LANES % n, rows.shape)
        added = i.source[2]
        total = np.zeros((n, n))
        if added.kind == Kind.VECTOR:
            total[rows, columns] = v[added.index : added.index + len(r)].view(np.float32)
        else:
            total[:] = np.uint32(added.value).view(np.float32)
        for k in range(depth):
            total = total + factors[0, k][:, None] * factors[1, k]
        v[i.result.index : i.result.index + len(r)] = result32(f32(total[rows, columns]))


def _instruction(record: tuple[Any, ...]) -> Instruction:
    handler, rule, sources, _, m, result, second, source = record
    return Instruction(
        handler, rule, sources, tuple(int(x) for x in m), Operand(*result), Operand(*second),
        tuple(Operand(*(o.tolist() if hasattr(o, "tolist") else o)) for o in source),
    )  # fmt: skip


def _evaluate(number: int, rule: Rule, sources: list[Any], mask: Any) -> tuple[Any, Any]:
    """The bits of the result, and the flag."""
    read = {name: _READ[type_](x) for name, type_, x in zip("abc", rule.sources, sources, strict=False)}
    names = {**_NAMES, **read, "m": mask}
    value = eval(_VALUES[number], names)
    flag = None
    if _FLAGS[number] is not None:
        flag = eval(_FLAGS[number], {**names, "d": value})
        flag = np.asarray(flag) != 0
    return _WRITTEN[rule.result](value), flag


def _source_lane(kind: int, argument: int, lane: int) -> int:
    row, place = lane & ~15, lane & 15
    if kind == Row.QUAD:
        return lane & ~3 | argument >> 2 * (lane & 3) & 3
    if kind == Row.SHIFT_LEFT:
        return lane + argument if place + argument < 16 else -1
    if kind == Row.SHIFT_RIGHT:
        return lane - argument if place >= argument else -1
    if kind == Row.ROTATE:
        return row | place - argument & 15
    if kind == Row.BROADCAST:
        return row - 1 if argument == 15 else 31 if lane >= 32 else -1
    return row | 15 - place if kind == Row.MIRROR else lane & ~7 | 7 - (lane & 7)


def _elements(v: Any, index: int, place: int, kind: int) -> Any:
    name = ELEMENTS[kind]
    if name in ("f32", "xf32"):
        x = v[index + place]
        if name == "xf32":  # rounded to 11 bits
            rounded = (x + np.uint32(0xFFF) + (x >> np.uint32(13) & np.uint32(1))) & np.uint32(0xFFFF_E000)
            x = np.where((x & np.uint32(0x7F80_0000)) == 0x7F80_0000, x, rounded)
        return x.view(np.float32)
    x = v[index + place // 2] >> np.uint32(16 * (place & 1)) & np.uint32(0xFFFF)
    return half_of(x) if name == "f16" else (x << np.uint32(16)).view(np.float32)


_METHODS: dict[int, Callable[[Machine, Instruction], None]] = {
    Handler.VECTOR: Machine._vector, Handler.COMPARE: Machine._vector, Handler.PACKED: Machine._packed,
    Handler.SCALAR: Machine._scalar, Handler.SAVE_EXEC: Machine._scalar, Handler.READ_LANE: Machine._read_lane,
    Handler.WRITE_LANE: Machine._write_lane, Handler.WAIT: Machine._wait, Handler.SCALAR_LOAD: Machine._scalar_load,
    Handler.LOAD: Machine._vector_memory, Handler.STORE: Machine._vector_memory, Handler.LOCAL_READ: Machine._local,
    Handler.LOCAL_WRITE: Machine._local, Handler.PERMUTE: Machine._lanes, Handler.SWIZZLE: Machine._lanes,
    Handler.MATRIX: Machine._matrix,
}  # fmt: skip
