"""Why nothing shows a mutant: the values that it changes, and where the difference ends.

The original and the mutant are executed with traces (trace.py) on the same tensors, with both poisons.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from launch_tensors import outputs_of
from torch import Tensor

from compiled.cases import CASES
from compiled.execution import FINITE, NAN, Settings, executor_of, run_launches
from compiled.launching import Kernel
from compiled.source import is_inside, origins_of
from compiled.trace import Trace
from scripts.static.targets import TARGETS


class Mutant(NamedTuple):
    """A text with one change."""

    kind: str
    line: int
    text: str
    change: str  # before → after


class Reason(NamedTuple):
    """Why a mutant survives: one of a few reasons, and what was seen."""

    words: str
    evidence: str


class Difference(NamedTuple):
    """What a mutant changes in the kernel that holds it and in later ones."""

    idle: bool  # no lane executes the instruction
    zero: bool  # it writes only zeros
    same: bool  # it writes the same
    given: bool  # it reads the same
    loaded: int  # bytes loaded from shared memory that it has written
    cone: frozenset[int]  # other lines that write other values
    ends: frozenset[int]  # lines that read other values and write the same
    later: bool  # later kernels compute other values
    bits: bool  # outputs have the same bits

    @property
    def silent(self) -> bool:
        """Whether no other instruction reads or writes another value."""
        return self.bits and not (self.cone or self.ends or self.later)


BARRIER = "barrier: without it no two warps meet at a byte, or only with the same bits"
IN_TIME = "commit or wait: another one completes the access before it is used"
FENCED = "fence: another one lies between the accesses that it orders, or there are none"
PARITY = "parity of a wait: the barrier object is not waited for a second time"
NOT_ENDED = "barrier object not ended: nothing accesses its memory again"
FALSE_GUARD = "guard: false in every lane"
TRUE_GUARD = "guard: true in every lane"
SAME_STORES = "guard or store: other lanes or instructions store the same bits"
SAME_REGION = "guard of a region: other lanes store the same bits, or bytes that nothing reads"
UNUSED = "guard of a load: nothing uses what the other lanes load"
NOT_READ = "store or copy: nothing reads it"
HELD = "store, copy or load: the same bits are there without it"
ZERO_PRODUCT = "product: it adds 0 everywhere"
EQUAL = "changed instruction: it gives the same values"
FLAG = "flag of `is_broken`: 0 for finite numbers, and NaN also reaches it through other rows and lanes"
PADDING = "padding: other values only in rows that are not stored"
DROPPED = "hidden or padding: a factor of 0, a selection or a comparison drops the other values"
ORDER = "exchange: the same lanes are combined in another order"
UNKNOWN = "unknown"


class Comparison:
    """Traced executions of a case, to compare mutants with."""

    def __init__(self, name: str, target: str, kernels: Sequence[Kernel]) -> None:
        self._call = CASES[name].call(TARGETS[target].resources)
        self._kernels = list(kernels)
        self._execute = executor_of(target)
        self._before = {settings: self._run(self._kernels, settings) for settings in (NAN, FINITE)}

    def _run(self, kernels: Sequence[Kernel], settings: Settings) -> tuple[list[Trace], list[Tensor]]:
        done, _ = run_launches(self._call, kernels, self._execute, settings._replace(traced=True), [])
        outputs = [x for launch in self._call.launches for x in outputs_of(launch)]
        traces = [execution.trace for execution in done if execution.trace is not None]
        if len(traces) < len(done):
            raise ValueError("only the C cores trace")
        return traces, [x.contiguous().view(torch.uint8).clone() for x in outputs]

    def difference(self, place: int, mutant: Mutant) -> Difference:
        """Compare the mutant of a kernel with the original under both poisons."""
        changed = [*self._kernels[:place], self._kernels[place]._replace(text=mutant.text), *self._kernels[place + 1 :]]
        line, own = mutant.line, frozenset([mutant.line])
        cone, ends, later, bits, given = frozenset[int](), frozenset[int](), False, True, True
        for settings, (before, outputs) in self._before.items():
            after, found = self._run(changed, settings)
            cone |= before[place].cone(after[place])
            ends |= before[place].ends(after[place])
            given &= not (before[place].read != after[place].read)[:, line].any()
            later |= any(one.cone(other) for one, other in zip(before[place + 1 :], after[place + 1 :], strict=True))
            bits &= all(torch.equal(one, other) for one, other in zip(outputs, found, strict=True))
        first = self._before[NAN][0][place]
        told = bool(first.idle[line]), bool(first.zero[line]), line not in cone, given, int(first.loaded[line])
        return Difference(*told, cone - own, ends - own - cone, later, bits)

    def reason_of(self, place: int, mutant: Mutant) -> Reason:
        """The reason of a survivor, with what its traces show."""
        text = self._kernels[place].text
        found = self.difference(place, mutant)
        return Reason(_words(text, mutant, found), _evidence(text, found))


def _words(text: str, mutant: Mutant, found: Difference) -> str:
    """One of the reasons, by what was seen."""
    if found.silent:
        words = _silent(mutant, found)
    elif _same_lanes_combined(text, mutant):
        words = ORDER
    elif not found.bits:
        words = UNKNOWN
    elif mutant.kind.startswith("guard") and found.cone and found.cone <= _region(text, mutant.line):
        words = SAME_REGION
    elif mutant.kind.startswith("guard") and not found.ends and all(_stores(text, x) for x in found.cone):
        words = SAME_STORES
    elif any(_stores(text, line) for line in found.ends) and not any(_stores(text, line) for line in found.cone):
        words = PADDING
    else:
        words = DROPPED if found.ends else UNKNOWN
    if words in (EQUAL, HELD, NOT_READ, DROPPED, UNKNOWN) and _in_flag(text, mutant.line, found):
        return FLAG
    return words


# What only orders accesses computes nothing. Had the order been broken without it, the executors would have said so.
_ORDERING = (
    (r"bar\.sync|s_barrier", BARRIER),
    (r"commit_group|wait_group|s_waitcnt", IN_TIME),
    (r"wgmma\.fence|fence\.proxy", FENCED),
)


def _silent(mutant: Mutant, found: Difference) -> str:
    """The reason if no other instruction reads or writes another value."""
    before, _, after = mutant.change.partition(" → ")
    for pattern, words in _ORDERING:
        if re.search(pattern, before):
            return words
    if found.idle:
        return FALSE_GUARD
    if mutant.kind.startswith("guard"):
        return TRUE_GUARD if found.same else SAME_STORES if re.search(r"\bst\.", before) else UNUSED
    if mutant.kind.startswith("parity"):
        return PARITY if found.given else UNKNOWN
    if "mbarrier.inval" in before:
        return NOT_ENDED
    if after != "removed" and found.same and not re.search(r"st\.shared|ds_write", before):
        return EQUAL
    if "mma" in before:
        return ZERO_PRODUCT
    if "mbarrier" in before:
        return UNKNOWN
    if re.search(r"st\.global|(buffer|global)_store", before):
        return SAME_STORES
    stored = re.search(r"st\.shared|ds_write|cp\.async", before)
    return NOT_READ if stored and not found.loaded else HELD


def _same_lanes_combined(text: str, mutant: Mutant) -> bool:
    """Whether the exchanges behind a changed one still reach the same lanes: 7, 2, 1 instead of 4, 2, 1."""
    pattern = r"shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+, (\d+)"
    first = re.search(pattern, mutant.change)
    if first is None or int(first[1]) < 4:
        return False
    following = re.findall(pattern, "\n".join(text.splitlines()[mutant.line :]))
    halves = [int(first[1]) >> step for step in range(1, int(first[1]).bit_length())]
    return [int(mask) for mask in following[: len(halves)]] == halves


def _region(text: str, line: int) -> frozenset[int]:
    """The lines that `s_and_saveexec` guards, up to the end of the region."""
    lines = text.splitlines()
    if "s_and_saveexec" not in lines[line - 1]:
        return frozenset()
    end = next(i for i in range(line, len(lines)) if re.match(r"\s*s_or_b64 exec, exec", lines[i]))
    return frozenset(range(line, end + 2))


def _in_flag(text: str, line: int, found: Difference) -> bool:
    """Whether all lines are in `is_broken`, as far as the text tells their source."""
    told = [x for x in (*found.cone, *found.ends) if any(file != "standard.py" for file, _ in origins_of(text)[x])]
    return is_inside(text, line, "is_broken") and all(is_inside(text, x, "is_broken") for x in told)


def _stores(text: str, line: int) -> bool:
    return bool(re.search(r"st\.global|(buffer|global)_store", text.splitlines()[line - 1]))


def _evidence(text: str, found: Difference) -> str:
    """How many lines compute other values, and up to three lines where the difference ends."""
    lines = text.splitlines()
    told = ["only zeros"] * found.zero + [f"{found.loaded} bytes are read"] * bool(found.loaded)
    told += ["other bits within the bounds"] * (not found.bits)
    told += [f"{len(found.cone)} lines differ"] if found.cone else []
    ends = [f"{line} {_opcode(lines[line - 1])}" for line in sorted(found.ends)]
    told += [f"ends at {', '.join(ends[:3])}" + (f" and {len(ends) - 3} more" if len(ends) > 3 else "")] if ends else []
    return "; ".join(told)


def _opcode(statement: str) -> str:
    return next(word for word in statement.split() if not word.startswith("@"))
