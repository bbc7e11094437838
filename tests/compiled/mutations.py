"""Mutations of compiled text: what the executors notice when one instruction is missing or wrong.

A mutant is caught by a finding (a race, a hazard, an access out of bounds, ...), by wrong numbers, by bits that differ
in reverse order, or because the text is refused. What one input does not show is tried on the other inputs of the text.
The reasons of survivors are in reasons.py.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from compiled.cases import OTHER_INPUTS
from compiled.execution import Execution, Report, examine, executor_of
from compiled.launching import Kernel, compile_cases
from compiled.reasons import Comparison, Mutant, Reason

# How a mutant is caught, in the order of the tables.
WORDS = ("finding only", "finding and result", "result only", "other input", "refused", "survived")


class Outcome(NamedTuple):
    """What a mutant did."""

    target: str
    case: str
    kernel: Kernel  # without the mutation
    mutant: Mutant
    found: str = ""  # the kind of the first finding
    numbers: bool = False  # the results are wrong or depend on the order or the poison
    refused: str = ""
    other: str = ""  # the case that shows it, if the first one does not
    reason: Reason | None = None  # why nothing shows it

    @property
    def caught(self) -> bool:
        """Whether anything shows it."""
        return bool(self.found or self.numbers or self.refused)

    @property
    def word(self) -> str:
        """The column of the table."""
        if not self.caught:
            return "survived"
        if self.other:
            return "other input"
        if self.refused:
            return "refused"
        return WORDS[(1 if self.found else 2) if self.numbers else 0]


def replaced(text: str, kind: str, line: int, after: str | None) -> Mutant:
    """The text with a line (counted from 1) replaced, or removed."""
    lines = text.splitlines()
    before = lines[line - 1].strip()
    lines[line - 1] = f"\t{after}" if after is not None else ""
    return Mutant(kind, line, "\n".join(lines) + "\n", f"{before} → {after or 'removed'}")


def mutants_of(kernel: Kernel, executed: frozenset[int], each: int, seed: int = 0) -> Iterator[Mutant]:
    """A random choice of mutants at executed lines, `each` of a kind."""
    folder = "ptx" if kernel.target.startswith("sm_") else "amd"
    places = importlib.import_module(f"compiled.{folder}.mutations").places
    by_kind: dict[str, list[tuple[int, str | None]]] = {}
    for kind, line, after in places(kernel.text):
        if line in executed:
            by_kind.setdefault(kind, []).append((line, after))
    chosen = random.Random(seed)
    for kind, found in by_kind.items():
        for line, after in sorted(chosen.sample(found, min(each, len(found)))):
            yield replaced(kernel.text, kind, line, after)


def examine_mutants(name: str, target: str, each: int, kernels: Sequence[Kernel] | None = None) -> Iterator[Outcome]:
    """Run mutants of every kernel of a case."""
    kernels = kernels or compile_cases([name], target)[name]
    others = OTHER_INPUTS.get(name, ())
    for other, compiled in compile_cases(others, target).items() if others else ():
        if [kernel.text for kernel in compiled] != [kernel.text for kernel in kernels]:
            raise ValueError(f"{other} has another text than {name}")
    lines = executed_lines(name, target, kernels)
    comparison = Comparison(name, target, kernels)
    for place, kernel in enumerate(kernels):
        for mutant in mutants_of(kernel, lines[place], each):
            changed = [*kernels[:place], kernel._replace(text=mutant.text), *kernels[place + 1 :]]
            outcome = Outcome(target, name, kernel, mutant)
            for case in (name, *others):
                found = _examined(case, target, changed)
                if isinstance(found, str) or not found.right:
                    outcome = _caught(outcome, found, case)
                    break
            else:
                outcome = outcome._replace(reason=comparison.reason_of(place, mutant))
            yield outcome


def _examined(case: str, target: str, kernels: Sequence[Kernel]) -> Report | str:
    try:
        return examine(case, target, kernels)
    except ValueError as error:
        return str(error)


def _caught(outcome: Outcome, found: Report | str, case: str) -> Outcome:
    other = case if case != outcome.case else ""
    if isinstance(found, str):
        return outcome._replace(refused=found, other=other)
    kind = found.problems[0].finding.kind if found.problems else ""
    return outcome._replace(found=kind, numbers=bool(found.numbers or found.unequal), other=other)


def executed_lines(name: str, target: str, kernels: Sequence[Kernel]) -> list[frozenset[int]]:
    """The lines of each kernel that the case executes, in either order."""
    found = [frozenset[int]() for _ in kernels]
    launch = iter(range(2 * len(kernels)))
    execute = executor_of(target)

    def listening(*given: object) -> Execution:
        done = execute(*given)  # type: ignore[arg-type]
        place = next(launch) % len(kernels)
        found[place] |= done.executed
        return done

    report = examine(name, target, kernels, listening)  # type: ignore[arg-type]
    if not report.right:
        raise ValueError(f"the case fails without a mutation:\n{report}")
    return found
