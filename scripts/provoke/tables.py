"""Tables of `attnscale/diagnostics/README.md`, from the CSV files of `python -m scripts.provoke`."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path


def provoked(path: Path) -> str:
    """Markdown: what was provoked, and the event that was raised, for each run over its seeds."""
    runs: dict[str, list[dict[str, str]]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            runs[row["run"]].append(row)
    lines = ["| run | provoked at | event | first step | where | what to try | as expected |", "|---" * 7 + "|"]
    for name, rows in runs.items():
        seeds = {row["seed"] for row in rows}
        right = len({row["seed"] for row in rows if row["as expected"] == "yes"})
        events = ", ".join(dict.fromkeys("none" if row["event"] == "none" else f"`{row['event']}`" for row in rows))
        steps = ", ".join(dict.fromkeys(row["first step"] for row in rows)) or "–"
        place = rows[0]["message"].rpartition(", since step")[0].rpartition(" in ")[2] or "–"
        at, advice = rows[0]["provoked at"] or "–", rows[0]["advice"] or "–"
        lines.append(f"| {name} | {at} | {events} | {steps} | {place} | {advice} | {right} of {len(seeds)} |")
    return "\n".join(lines)


def healthy(path: Path) -> str:
    """Markdown: 5th to 95th percentile of each quantity in each healthy run."""
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            cells[f"`{row['quantity']}`, {row['statistic']}"][row["run"]] = f"{row['p5']} – {row['p95']}"
    runs = list(dict.fromkeys(run for of_quantity in cells.values() for run in of_quantity))
    lines = ["| quantity | " + " | ".join(runs) + " |", "|---" * (1 + len(runs)) + "|"]
    lines += [f"| {name} | " + " | ".join(found.get(run, "–") for run in runs) + " |" for name, found in cells.items()]
    return "\n".join(lines)
