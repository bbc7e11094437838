"""Execution of a launch from its PTX, in C or, where there is no compiler, in numpy."""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Sequence
from ctypes import Array
from pathlib import Path

import numpy as np

from compiled import memory as memories
from compiled import native
from compiled.execution import Execution, Settings
from compiled.launching import Argument, Kernel, Map
from compiled.memory import Findings, GlobalMemory, SharedMemory
from compiled.ptx.encode import NUMBERS, RULE_NUMBERS, Encoded, encode
from compiled.ptx.grid import interpret
from compiled.ptx.numbers import POWERS
from compiled.ptx.parameters import MAP_SIZE, MAPS
from compiled.ptx.parse import Program, parse
from compiled.ptx.registers import REGISTERS, registers_of
from compiled.ptx.rules import RULES
from compiled.trace import Recorder

BUDGET = 20_000_000  # instructions of a warp, over the warps of a block

_C_TYPES = {
    "pred": "uint32_t", "u16": "uint16_t", "s16": "int16_t", "u32": "uint32_t", "s32": "int32_t", "f32": "float",
    "u64": "uint64_t", "s64": "int64_t", "f64": "double",
}  # fmt: skip


def execute(
    kernel: Kernel,
    arguments: Sequence[Argument],
    memory: GlobalMemory,
    findings: Findings,
    grid: int,
    settings: Settings,
    *,
    in_c: bool = True,
) -> Execution:
    """Execute a launch; see `Executor` in execution.py."""
    program = _parsed(kernel.text)
    if program.threads != 32 * kernel.warps:
        raise ValueError(f"{program.threads} threads per block instead of {32 * kernel.warps}")
    encoded = encode(program, arguments, grid, settings.poison)
    if encoded.asynchronous and kernel.warps % 4:
        raise ValueError(f"{kernel.warps} warps are no warpgroups")
    shared = SharedMemory(kernel.shared, kernel.warps)
    shared.start_block(settings.poison)
    counts = np.zeros(len(encoded.code), np.int64)
    core = library() if in_c else None
    recorder = Recorder(len(encoded.code), kernel.warps, shared, settings.traced and core is not None)
    maps = [x.map for x in arguments if x.map is not None]
    if core is None:
        interpret(encoded, memory, shared, findings, counts, BUDGET, kernel.warps, grid, settings, maps)
    else:
        _run_in_c(core, encoded, memory, shared, findings, counts, kernel.warps, grid, settings, recorder, maps)
    by_opcode: Counter[str] = Counter()
    for instruction, count in zip(program.instructions, counts[encoded.counted].tolist(), strict=True):
        by_opcode[instruction.opcode] += count
    done = counts[encoded.counted] > 0
    lines = frozenset(x.line for x, was in zip(program.instructions, done, strict=True) if was)

    def line(place: int) -> str:
        found = program.instructions[place]
        return f"line {found.line}: {found.text}"

    own = [instruction.line for instruction in program.instructions]
    trace = recorder.by_line([own[place] for place in encoded.code["place"]], kernel.text.count("\n"), own)
    return Execution(by_opcode, line, lines, trace=trace)


class MapRow(ctypes.Structure):
    """`struct map` of bulk.c."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("strides", ctypes.c_uint64 * 5),
        ("shape", ctypes.c_int64 * 5),
        ("box", ctypes.c_int32 * 5),
        ("rank", ctypes.c_int32),
        ("element", ctypes.c_int32),
        ("swizzle", ctypes.c_int32),
    )


def _maps_in_c(given: Sequence[Map]) -> Array[MapRow]:
    rows = [
        MapRow(
            m.address, (ctypes.c_uint64 * 5)(*m.strides), (ctypes.c_int64 * 5)(*m.shape), (ctypes.c_int32 * 5)(*m.box),
            len(m.shape), m.element, m.swizzle,
        )
        for m in given
    ]  # fmt: skip
    return (MapRow * len(rows))(*rows)


def _run_in_c(
    core: ctypes.CDLL,
    encoded: Encoded,
    memory: GlobalMemory,
    shared: SharedMemory,
    findings: Findings,
    counts: np.ndarray,
    warps: int,
    grid: int,
    settings: Settings,
    recorder: Recorder,
    maps: Sequence[Map],
) -> None:
    empty = shared.bytes.copy()
    registers = registers_of(encoded.code, encoded.lists) if settings.traced else np.zeros(0, REGISTERS)
    core.run_grid(
        ctypes.c_void_p(encoded.code.ctypes.data), ctypes.byref(memory.c), ctypes.byref(shared.c),
        ctypes.byref(findings.c), ctypes.c_void_p(counts.ctypes.data), ctypes.c_int64(BUDGET),
        ctypes.c_void_p(encoded.start.ctypes.data), len(encoded.start), encoded.thread, encoded.program, warps, grid,
        int(settings.reverse), *(ctypes.c_void_p(x.ctypes.data) for x in (empty, registers)), ctypes.byref(recorder.c),
        int(encoded.asynchronous), ctypes.c_void_p(encoded.lists.ctypes.data), _maps_in_c(maps), len(maps),
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> Program:
    return parse(text)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The C core, or None without a compiler."""
    powers = "static const double POWERS[] = {" + ", ".join(float(power).hex() for power in POWERS) + "};"
    folder = Path(__file__).parent
    definitions = [*memories.NUMBERS.items(), *NUMBERS.items(), ("MAPS", MAPS), ("MAP_SIZE", MAP_SIZE)]
    headers = (folder.parent / name for name in ("memory.h", "asynchronous.h", "trace.h"))
    cores = (folder / name for name in ("core.c", "products.c", "bulk.c", "grid.c"))
    return native.build(definitions, "\n".join(map(_case, RULES)), powers, *headers, *cores)


def _case(opcode: str) -> str:
    """The C code of a rule."""
    rule = RULES[opcode]
    stored = "uint32_t" if rule.result in ("pred", "u16", "s16") else _C_TYPES[rule.result]
    narrow = {"s16": "uint16_t", "u16": "uint16_t"}.get(rule.result, stored)
    loads = "".join(
        f"{_C_TYPES[kind]} {name} = READ_{kind}(r{name}, l); " for name, kind in zip("abc", rule.operands, strict=False)
    )
    return (
        f"case {RULE_NUMBERS[opcode]}: {{ {_C_TYPES[rule.result]} t[LANES]; "
        f"for (int l = 0; l < LANES; l++) {{ {loads}t[l] = {rule.expression}; }} WRITE({stored}, {narrow}) }} break;"
    )
