"""Execution of a compiled gfx942 kernel on the tensors of a launch."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from compiled.execution import Execution, Settings
from compiled.launching import Argument, Kernel
from compiled.memory import Findings, GlobalMemory, SharedMemory
from compiled.trace import Recorder, Trace

from . import core, vectors
from .decode import Program, decode
from .text import KernelText, ProgramError, read_kernel

LIMIT = 5_000_000  # instructions of a program's waves
REGISTERS = 512 * 64 * 4  # bytes of a wave
_FORMATS = {"fp32": "f", "fp64": "d", "i32": "i", "u32": "I", "i64": "q", "u64": "Q"}


class LaunchStruct(ctypes.Structure):
    """`struct launch` of core.c."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in (
                "count", "entry", "grid", "warps", "reverse", "preloaded", "program_register", "registers",
            )
        ),
        ("poison", ctypes.c_uint32),
        ("arguments", ctypes.c_uint64),
        ("argument_bytes", ctypes.c_int32),
        ("private_bytes", ctypes.c_int32),
        ("limit", ctypes.c_uint64),
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def program_of(text: str) -> Program:
    """Decode the text of a kernel."""
    return decode(read_kernel(text))


def execute(
    kernel: Kernel, arguments: Sequence[Argument], memory: GlobalMemory, findings: Findings, grid: int,
    settings: Settings,
) -> Execution:  # fmt: skip
    """Execute all programs of a grid: from the preloaded entry in order, from the loading prologue in reverse order."""
    program = program_of(kernel.text)
    block = argument_block(program.text, arguments, grid, 64 * kernel.warps)
    launch = _launch(program.text, kernel, block, grid, settings)
    launch.count = len(program.code)
    shared = SharedMemory(kernel.shared, kernel.warps)
    counts, conflicts = (np.zeros(len(program.code), np.uint64) for _ in range(2))
    library = core.library()
    if library is None:
        start = {name: int(getattr(launch, name)) for name, _ in LaunchStruct._fields_}
        counts = vectors.run(program, memory, shared, findings, start, block, kernel.warps, settings)
        return _execution(program, counts, 0, None)
    waves = ctypes.create_string_buffer(library.wave_size() * kernel.warps)
    registers, private = (np.empty(kernel.warps * size, np.uint8) for size in (REGISTERS, 64 * launch.private_bytes))
    recorder = Recorder(len(program.code), kernel.warps, shared, settings.traced)
    library.run(
        ctypes.c_void_p(program.code.ctypes.data), ctypes.byref(launch), ctypes.byref(memory.c), ctypes.byref(shared.c),
        ctypes.byref(findings.c), waves,
        *(ctypes.c_void_p(array.ctypes.data) for array in (registers, private, counts, conflicts)),
        ctypes.byref(recorder.c),
    )  # fmt: skip
    trace = recorder.by_line(program.code["line"].tolist(), kernel.text.count("\n"))
    return _execution(program, counts, int(conflicts.sum()), trace)


def argument_block(text: KernelText, arguments: Sequence[Argument], grid: int, threads: int) -> np.ndarray:
    """The kernel arguments as the metadata lays them out; Triton's two scratch pointers follow them and are null.

    Hidden arguments give the size of the grid, which has one axis.
    """
    listed = [argument for argument in text.arguments if not argument[2].startswith("hidden_")]
    if len(listed) != len(arguments) + 2:
        raise ProgramError(f"the metadata lists {len(listed)} arguments, the launch has {len(arguments)}")
    block = np.zeros(text.declared["kernarg_size"], np.uint8)
    for (offset, size, kind), argument in zip(listed, arguments, strict=False):
        pointer = argument.type.startswith("*")
        code = "Q" if pointer else _FORMATS[argument.type]
        if struct.calcsize(code) != size or (kind == "global_buffer") != pointer:
            raise ProgramError(f"argument {argument.name} of type {argument.type} is a {kind} of {size} bytes")
        block[offset : offset + size] = np.frombuffer(struct.pack(f"<{code}", argument.value), np.uint8)
    hidden = dict.fromkeys(("block_count_y", "block_count_z", "group_size_y", "group_size_z", "grid_dims"), 1)
    hidden |= {"block_count_x": grid, "group_size_x": threads}
    for offset, size, kind in text.arguments:
        if kind.startswith("hidden_"):
            value = hidden.get(kind.removeprefix("hidden_"), 0)
            block[offset : offset + size] = np.frombuffer(value.to_bytes(size, "little"), np.uint8)
    return block


def _launch(text: KernelText, kernel: Kernel, block: np.ndarray, grid: int, settings: Settings) -> LaunchStruct:
    """Registers at the start of a wave: arguments' address, preloaded arguments, program id; v0 is the thread."""
    declared: dict[str, Any] = text.declared
    expected = {
        "user_sgpr_kernarg_segment_ptr": 1, "user_sgpr_dispatch_ptr": 0, "user_sgpr_queue_ptr": 0,
        "user_sgpr_dispatch_id": 0, "user_sgpr_private_segment_size": 0, "user_sgpr_kernarg_preload_offset": 0,
        "system_sgpr_workgroup_id_x": 1, "system_vgpr_workitem_id": 0,
        "float_round_mode_32": 0, "float_round_mode_16_64": 0, "float_denorm_mode_32": 3,
        "float_denorm_mode_16_64": 3, "dx10_clamp": 1, "ieee_mode": 1, "group_segment_fixed_size": 0,
    }  # fmt: skip
    for name, value in expected.items():
        if declared.get(name) != value:
            raise ProgramError(f".amdhsa_{name} is {declared.get(name)}, known is {value}")
    preloads = declared.get("user_sgpr_kernarg_preload_length", 0)
    if declared["user_sgpr_count"] != 2 + preloads:
        raise ProgramError("user registers beside the arguments")
    loading = settings.reverse or not preloads
    return LaunchStruct(
        entry=0 if loading else text.preloaded_entry, grid=grid, warps=kernel.warps, reverse=settings.reverse,
        preloaded=0 if loading else preloads, program_register=declared["user_sgpr_count"],
        registers=256, poison=settings.poison, arguments=block.ctypes.data, argument_bytes=len(block), limit=LIMIT,
        private_bytes=-(-declared["private_segment_fixed_size"] // 4) * 4,
    )  # fmt: skip


def _execution(program: Program, counts: np.ndarray, conflicts: int, trace: Trace | None) -> Execution:
    by_opcode: Counter[str] = Counter()
    for statement, count in zip(program.text.statements, counts.tolist(), strict=True):
        by_opcode[statement.opcode] += count
    lines = frozenset(program.code["line"][counts > 0].tolist())
    return Execution(by_opcode, functools.partial(instruction_at, program), lines, conflicts, trace)


def instruction_at(program: Program, place: int) -> str:
    """An instruction as written, with its line."""
    statement = program.text.statements[place]
    return f"line {statement.line}: " + " ".join(
        (statement.opcode, ", ".join(statement.operands), *statement.modifiers)
    )
