"""Execution of the launches of a case, and everything that is checked beside the numbers.

Each case runs twice: with NaN as poison and warps and programs in order, and with a finite poison and both in reverse
order. Registers, shared memory and outputs start as poison. Both runs must give the same bits.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from launch_tensors import name_of, outputs_of, tensors_of
from torch import Tensor

from attnscale_kernels.launch import Launch
from compiled.calls import Call
from compiled.cases import CASES
from compiled.known import are_known
from compiled.launching import Argument, Kernel, arguments_of
from compiled.memory import KINDS, Finding, Findings, GlobalMemory, poison_tensor
from compiled.source import repair_lines
from compiled.trace import Trace
from scripts.static.targets import TARGETS


class Settings(NamedTuple):
    """How a case is executed."""

    poison: int = 0xFFFF_FFFF  # a NaN in every format
    reverse: bool = False  # warps and programs in reverse order
    traced: bool = False  # digests of what each instruction reads and writes, see trace.py; in C only


NAN = Settings()
FINITE = Settings(0x3F81_3F81, True)  # about 1.01 in fp32 and bf16, 1.88 in fp16


class Execution(NamedTuple):
    """The execution of one launch."""

    counts: Counter[str]  # executed instructions of a warp, by opcode
    lines: Callable[[int], str]  # the instruction at a place of the program, with its line number
    executed: frozenset[int] = frozenset()  # lines of the text
    conflicts: int = 0  # additional cycles of shared memory, where they are counted
    trace: Trace | None = None


# Executes a kernel on arguments for a number of programs; violations are added to the findings.
Executor = Callable[[Kernel, Sequence[Argument], GlobalMemory, Findings, int, Settings], Execution]


class Problem(NamedTuple):
    """A finding, with the text of its instruction."""

    kernel: str
    finding: Finding
    instruction: str

    def __str__(self) -> str:
        kind, _, program, warp, lane, address = self.finding
        where = f"program {program}, warp {warp}, lane {lane}, address {address:#x}"
        return f"{self.kernel}: {KINDS[kind]} at {self.instruction} ({where})"


class Report(NamedTuple):
    """The result of a case."""

    case: str
    problems: list[Problem]
    found: int  # all findings, of which `problems` keeps the first
    numbers: str  # why the numbers are wrong, or ""
    unequal: list[str]  # outputs whose bits differ between both runs
    counts: dict[str, Counter[str]]  # executed instructions by kernel and opcode, of the first run
    scores: int
    launches: int
    known: int = 0  # findings for which the compiler is at fault

    @property
    def right(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.found or self.numbers or self.unequal)

    def __str__(self) -> str:
        told = [str(problem) for problem in self.problems[:5]]
        told += [f"numbers: {self.numbers}"] if self.numbers else []
        told += [f"different bits in reverse order with finite poison: {', '.join(self.unequal)}"] * bool(self.unequal)
        return "\n".join([f"{self.case}: {self.found} findings", *told])


def executor_of(target: str) -> Executor:
    """The executor of a target."""
    folder = "amd" if TARGETS[target].backend == "hip" else "ptx"
    executor: Executor = importlib.import_module(f"compiled.{folder}.execute").execute
    return executor


def examine(name: str, target: str, kernels: Sequence[Kernel], execute: Executor | None = None) -> Report:
    """Execute the launches of a case twice and check everything."""
    call = CASES[name].call(TARGETS[target].resources)
    execute = execute or executor_of(target)
    problems: list[Problem] = []
    found = 0
    counts: dict[str, Counter[str]] = {}
    numbers = ""
    bits: list[list[Tensor]] = []
    for settings in (NAN, FINITE):
        done, count = run_launches(call, kernels, execute, settings, problems)
        found += count
        if settings is NAN:
            for kernel, execution in zip(kernels, done, strict=True):
                counts.setdefault(kernel.name, Counter()).update(execution.counts)
        try:
            call.check()
        except AssertionError as error:
            numbers = numbers or str(error) or "an assertion failed"
        bits.append([_bits(x) for launch in call.launches if not leaves_gaps(launch) for x in outputs_of(launch)])
    outputs = [name_of(launch) for launch in call.launches if not leaves_gaps(launch) for _ in outputs_of(launch)]
    known = are_known(target, name, problems, found)
    if known is False:
        numbers = numbers or "not exactly the known findings"
    unequal = [f"{output} {i}" for i, output in enumerate(outputs) if not torch.equal(bits[0][i], bits[1][i])]
    told, excused = ([], found) if known else (problems, 0)
    return Report(
        name, told, found - excused, numbers, sorted(set(unequal)), counts, call.scores, len(kernels), excused
    )


def run_launches(
    call: Call, kernels: Sequence[Kernel], execute: Executor, settings: Settings, problems: list[Problem]
) -> tuple[list[Execution], int]:
    """Execute all launches, and return the executions and the number of findings."""
    for launch in call.launches:
        for x in outputs_of(launch):
            poison_tensor(x, settings.poison)
    done = []
    count = 0
    for launch, kernel in zip(call.launches, kernels, strict=True):
        memory = GlobalMemory(tensors_of(launch.arguments.values()), outputs_of(launch))
        findings = Findings()
        execution = execute(kernel, arguments_of(launch, kernel), memory, findings, launch.grid, settings)
        for address in [] if leaves_gaps(launch) else memory.unwritten():
            findings.add("UNWRITTEN", -1, -1, address=address)
        if call.finite and repair_lines(kernel.text) & execution.executed:
            findings.add("REPAIRED", -1, -1)
        for finding in findings.kept():
            text = execution.lines(finding.place) if finding.place >= 0 else "the end"
            problems.append(Problem(kernel.name, finding, text))
        count += findings.count
        done.append(execution)
    return done, count


def leaves_gaps(launch: Launch) -> bool:
    """Whether a launch leaves elements of its output unwritten: decode scratch has room for an entropy."""
    return name_of(launch) == "decode_split_kernel" and launch.arguments["entropy_ptr"] is None


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).clone()
