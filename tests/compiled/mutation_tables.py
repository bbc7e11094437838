"""The outcomes of mutants as a CSV with one row each, and its tables by kind and by reason."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from compiled.memory import KINDS
from compiled.mutations import WORDS, Outcome
from compiled.source import origins_of

Row = dict[str, str]


def row_of(outcome: Outcome) -> Row:
    """The row of a mutant."""
    mutant, kernel = outcome.mutant, outcome.kernel
    shown = [KINDS[outcome.found]] if outcome.found else []
    shown += ["numbers"] * outcome.numbers + [outcome.refused] * bool(outcome.refused)
    reason, evidence = ("", "") if outcome.reason is None else outcome.reason
    return {
        "target": outcome.target,
        "case": outcome.case,
        "kernel": kernel.name,
        "kind": mutant.kind,
        "line": str(mutant.line),
        "change": " ".join(mutant.change.split()),
        "source": _source(kernel.text, mutant.line),
        "outcome": outcome.word,
        "shown by": " and ".join(shown) + (f" ({outcome.other})" if outcome.other else ""),
        "reason": reason,
        "evidence": evidence,
    }


def _source(text: str, line: int) -> str:
    """The innermost line outside of Triton's library, where the text tells it."""
    chain = [x for x in origins_of(text)[line] if x[0] != "standard.py" and x[1]]
    return f"{chain[0][0]}:{chain[0][1]}" if chain else ""


def replace_rows(file: Path, rows: Sequence[Row], targets: Sequence[str]) -> list[Row]:
    """Replace the rows of the targets that have new ones in a CSV; return all of its rows, in order of `targets`."""
    with file.open(newline="") as stream:
        kept = [row for row in csv.DictReader(stream) if row["target"] not in {new["target"] for new in rows}]
    everything = sorted([*kept, *rows], key=lambda row: targets.index(row["target"]))
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(everything[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(everything)
    return everything


def tables_of(rows: Sequence[Row]) -> str:
    """A table by kind for each target, and one by reason."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    tables = []
    for target in targets:
        own = [row for row in rows if row["target"] == target]
        kinds = [(row["kind"], row["outcome"]) for row in own]
        words = [word for word in WORDS if word in {row["outcome"] for row in own}]
        tables.append(_table(target, kinds, words, f"all {len(own)}"))
    reasons = [(row["reason"], row["target"]) for row in rows if row["reason"]]
    return "\n\n".join([*tables, _table("survivors", reasons, targets, f"all {len(reasons)}")])


def _table(title: str, cells: Iterable[tuple[str, str]], columns: Sequence[str], last: str) -> str:
    """How often each pair of line and column occurs, with the sums of all lines."""
    counts = Counter(cells)
    lines = [f"| {title} | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for name in sorted({name for name, _ in counts}):
        lines.append(f"| {name} | {' | '.join(str(counts[name, column]) for column in columns)} |")
    sums = [sum(count for (_, other), count in counts.items() if other == column) for column in columns]
    return "\n".join([*lines, f"| {last} | {' | '.join(map(str, sums))} |"])
