"""The outcomes of mutants as a CSV with one row each, and as tables by kind and by reason."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from compiled.memory import KINDS
from compiled.mutations import WORDS, Outcome
from compiled.source import origins_of

COLUMNS = (
    "target", "case", "kernel", "kind", "line", "change", "source", "outcome", "shown by", "reason", "evidence",
)  # fmt: skip


def write_outcomes(file: Path, outcomes: Sequence[Outcome]) -> None:
    """Write a row for each mutant."""
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(_row(outcome) for outcome in outcomes)


def _row(outcome: Outcome) -> tuple[str | int, ...]:
    mutant, kernel = outcome.mutant, outcome.kernel
    shown = [KINDS[outcome.found]] if outcome.found else []
    shown += ["numbers"] * outcome.numbers + [outcome.refused] * bool(outcome.refused)
    by = " and ".join(shown) + (f" ({outcome.other})" if outcome.other else "")
    reason = ("", "") if outcome.reason is None else tuple(outcome.reason)
    change = " ".join(mutant.change.split())
    where = (outcome.target, outcome.case, kernel.name, mutant.kind, mutant.line)
    return (*where, change, _source(kernel.text, mutant.line), outcome.word, by, *reason)


def _source(text: str, line: int) -> str:
    """The innermost line outside of Triton's library, where the text tells it."""
    chain = [x for x in origins_of(text)[line] if x[0] != "standard.py" and x[1]]
    return f"{chain[0][0]}:{chain[0][1]}" if chain else ""


def by_kind(target: str, outcomes: Sequence[Outcome]) -> str:
    """How the mutants of a target are caught."""
    counts = {kind: Counter[str]() for kind in sorted({outcome.mutant.kind for outcome in outcomes})}
    for outcome in outcomes:
        counts[outcome.mutant.kind][outcome.word] += 1
    counts[f"all {len(outcomes)}"] = Counter(outcome.word for outcome in outcomes)
    words = [word for word in WORDS if any(found[word] for found in counts.values())]
    lines = [f"| {target} | {' | '.join(words)} |", "|---|" + "---|" * len(words)]
    lines += [f"| {kind} | {' | '.join(str(found[word]) for word in words)} |" for kind, found in counts.items()]
    return "\n".join(lines)


def by_reason(outcomes: Sequence[Outcome]) -> str:
    """Why the others survive, by target."""
    targets = list(dict.fromkeys(outcome.target for outcome in outcomes))
    found = Counter((x.reason.words, x.target) for x in outcomes if x.reason is not None)
    lines = [f"| survivors | {' | '.join(targets)} |", "|---|" + "---|" * len(targets)]
    for words in sorted({words for words, _ in found}):
        lines.append(f"| {words} | {' | '.join(str(found[words, target]) for target in targets)} |")
    return "\n".join(lines)


def tables_of(outcomes: Sequence[Outcome]) -> str:
    """A table by kind for each target, and one by reason."""
    targets = dict.fromkeys(outcome.target for outcome in outcomes)
    tables = [by_kind(target, [x for x in outcomes if x.target == target]) for target in targets]
    return "\n\n".join([*tables, by_reason(outcomes)])
