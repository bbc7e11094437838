"""Mutations of compiled text: what the executors notice when one instruction is missing or wrong.

A mutant is caught by a finding (a race, a hazard, an access out of bounds, ...), by wrong numbers, by bits that differ
in reverse order, or because the text is refused. Each survivor has to be explained.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from compiled.execution import Execution, examine, executor_of
from compiled.launching import Kernel, compile_cases


class Mutant(NamedTuple):
    """A text with one change."""

    kind: str
    line: int
    text: str
    change: str  # before → after


class Outcome(NamedTuple):
    """What a mutant did."""

    case: str
    kernel: str
    mutant: Mutant
    found: str  # the kind of the first finding, or ""
    numbers: bool  # the results are wrong or depend on the order or the poison
    refused: str = ""

    @property
    def caught(self) -> bool:
        """Whether anything shows it."""
        return bool(self.found or self.numbers or self.refused)


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
    lines = executed_lines(name, target, kernels)
    for place, kernel in enumerate(kernels):
        for mutant in mutants_of(kernel, lines[place], each):
            changed = [*kernels[:place], kernel._replace(text=mutant.text), *kernels[place + 1 :]]
            try:
                report = examine(name, target, changed)
            except ValueError as error:
                yield Outcome(name, kernel.name, mutant, "", False, str(error))
                continue
            found = report.problems[0].finding.kind if report.problems else ""
            yield Outcome(name, kernel.name, mutant, found, bool(report.numbers or report.unequal))


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
