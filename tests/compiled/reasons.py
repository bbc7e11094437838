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
    same: bool  # the instruction itself gives the same
    cone: frozenset[int]  # other lines that write other values
    ends: frozenset[int]  # lines that read other values and write the same
    later: bool  # later kernels compute other values
    bits: bool  # outputs have the same bits


RACELESS = "barrier: no race without it"
IN_TIME = "commit or wait: copies and loads are complete where they are used"
FALSE_GUARD = "guard that is false in every lane"
TRUE_GUARD = "guard that is true in every lane"
SAME_STORES = "guard or store: other lanes or instructions store the same bits"
UNREAD = "store or copy: nothing reads what it would change"
SAME_VALUE = "the changed instruction gives the same values"
NO_PRODUCT = "product: it adds 0 everywhere"
FLAG = "the flag of `is_broken` stays 0"
UNSTORED = "other values only in rows that are not stored"
DROPPED = "other values that a later instruction drops"
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
        outputs = [
            x.contiguous().view(torch.uint8).clone() for launch in self._call.launches for x in outputs_of(launch)
        ]
        return [execution.trace for execution in done if execution.trace is not None], outputs

    def difference(self, place: int, mutant: Mutant) -> Difference:
        """Compare the mutant of a kernel with the original under both poisons."""
        changed = [*self._kernels[:place], self._kernels[place]._replace(text=mutant.text), *self._kernels[place + 1 :]]
        cone, ends, idle, same, later, bits = frozenset[int](), frozenset[int](), True, True, False, True
        for settings, (before, outputs) in self._before.items():
            after, found = self._run(changed, settings)
            cone |= before[place].cone(after[place])
            ends |= before[place].ends(after[place])
            idle &= not before[place].written[:, mutant.line].any()
            later |= any(one.cone(other) for one, other in zip(before[place + 1 :], after[place + 1 :], strict=True))
            bits &= all(torch.equal(one, other) for one, other in zip(outputs, found, strict=True))
        same = mutant.line not in cone
        own = frozenset([mutant.line])
        return Difference(idle, same, cone - own, ends - own - cone, later, bits)

    def reason_of(self, place: int, mutant: Mutant) -> Reason:
        """The reason of a survivor, with what its traces show."""
        text = self._kernels[place].text
        found = self.difference(place, mutant)
        return Reason(_words(text, mutant, found), _evidence(text, found))


def _words(text: str, mutant: Mutant, found: Difference) -> str:
    """One of the reasons, by what was seen."""
    before, _, after = mutant.change.partition(" → ")
    silent = not found.cone and not found.ends and not found.later and found.bits
    if silent:
        return _silent(before, after, found)
    if _same_lanes_combined(text, mutant):
        return ORDER
    if not found.bits:
        return UNKNOWN
    if mutant.kind.startswith("guard") and found.cone <= _guarded(text, mutant.line):
        return SAME_STORES
    if _only_in_flag(text, mutant.line, found):
        return FLAG
    stores = [_is_global_store(text, line) for line in found.ends]
    if any(stores) and not any(_is_global_store(text, line) for line in found.cone):
        return UNSTORED
    return DROPPED if found.ends else UNKNOWN


def _silent(before: str, after: str, found: Difference) -> str:
    """The reason if no other instruction reads or writes another value."""
    for pattern, words in ((r"bar\.sync|s_barrier", RACELESS), (r"commit_group|wait_group|s_waitcnt", IN_TIME)):
        if re.search(pattern, before):
            return words
    removed, guarded = after == "removed", before.startswith("@") and not after.startswith("@")
    guarded |= bool(re.match(r"s_and_saveexec|v_cndmask", before))
    if found.idle:
        return FALSE_GUARD
    if guarded:
        return TRUE_GUARD if found.same else SAME_STORES if re.search(r"\bst\.", before) else UNREAD
    if removed and re.search(r"mma", before):
        return NO_PRODUCT
    if removed and re.search(r"st\.global|(buffer|global)_store", before):
        return SAME_STORES
    if removed or re.search(r"st\.shared|ds_write", before):
        return UNREAD
    return SAME_VALUE if found.same else UNREAD


def _same_lanes_combined(text: str, mutant: Mutant) -> bool:
    """Whether the exchanges behind a changed one still reach the same lanes: 7, 2, 1 instead of 4, 2, 1."""
    first = re.search(r"shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+, (\d+)", mutant.change)
    if first is None or int(first[1]) < 4:
        return False
    behind = "\n".join(text.splitlines()[mutant.line :])
    following = re.findall(r"shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+, (\d+)", behind)
    halves = [int(first[1]) >> step for step in range(1, int(first[1]).bit_length())]
    return [int(mask) for mask in following[: len(halves)]] == halves


def _guarded(text: str, line: int) -> frozenset[int]:
    """The lines up to the end of a region that `s_and_saveexec` guards; none in PTX."""
    lines = text.splitlines()
    if "s_and_saveexec" not in lines[line - 1]:
        return frozenset()
    end = next(i for i in range(line, len(lines)) if re.match(r"\s*s_or_b64 exec, exec", lines[i]))
    return frozenset(range(line, end + 2))


def _only_in_flag(text: str, line: int, found: Difference) -> bool:
    """Whether all lines are in `is_broken`, as far as the text tells their source."""
    told = [x for x in (*found.cone, *found.ends) if any(file != "standard.py" for file, _ in origins_of(text)[x])]
    return is_inside(text, line, "is_broken") and all(is_inside(text, x, "is_broken") for x in told)


def _is_global_store(text: str, line: int) -> bool:
    return bool(re.search(r"st\.global|(buffer|global)_store", text.splitlines()[line - 1]))


def _evidence(text: str, found: Difference) -> str:
    """How many lines compute other values, and up to three lines where the difference ends."""
    lines = text.splitlines()
    told = [] if found.bits else ["other bits"]
    told += ["later kernels differ"] if found.later else []
    told += [f"{len(found.cone)} lines differ"] if found.cone else []
    ends = [f"{line} {' '.join(lines[line - 1].split()).split(',')[0]}" for line in sorted(found.ends)]
    told += [f"ends at {'; '.join(ends[:3])}" + (f" and {len(ends) - 3} more" if len(ends) > 3 else "")] if ends else []
    return ", ".join(told)
