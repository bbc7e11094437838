"""The table of an evaluation: for each length and policy what the model retrieves, and how its attention looks."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from attnscale.errors import reject

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

QUANTITIES = {"w_max": "w_max", "entropy": "entropy", "accumulation_8": "Λ", "criticality": "β/Λ"}
INTERVAL = 2 * 1.96  # standard errors in an interval of 95 %
ABOUT = (
    "accuracy: share of right answers ± standard error. Of the rows that predict: medians over layers and heads of the "
    "largest weight, the entropy (nats), Λ and the criticality β/Λ."
)


class Line(NamedTuple):
    """One row of the table; None where the evaluation has no such number."""

    length: int
    policy: str
    accuracy: float | None
    error: float | None
    bits_per_byte: float | None
    quantities: tuple[float | None, ...]


def show_evaluation(console: Console, folder: Path, *, report: bool) -> int:
    """Print the tables of a finished evaluation, write its page if asked, and say where it is."""
    folder = Path(folder)
    for task, lines in read_lines(folder).items():
        console.print(_table(task, lines))
    console.print(ABOUT, highlight=False)
    written = folder
    if report:
        from attnscale.report import write_report

        with console.status("drawing the page"):
            written = write_report(folder, folder / "report.html")
    console.print(f"wrote {written}", markup=False, highlight=False, soft_wrap=True)
    return 0


def read_lines(folder: Path) -> dict[str, list[Line]]:
    """Lines by task, lengths upwards and policies in the order of the file; perplexity stands beside each task."""
    rows = [row for row in _read(folder / "results.csv") if not row["bin"]]
    pooled = [row for row in rows if row["model"] == "all"] or rows
    values = {(row["task"], row["metric"], int(row["length"]), row["policy"]): row for row in pooled}
    measured = _medians(_read(folder / "statistics.csv"))
    tasks = dict.fromkeys(task for task, metric, _, _ in values if metric == "accuracy") or {"perplexity": None}
    places = list(dict.fromkeys((length, policy) for _, _, length, policy in values))
    tables = {}
    for task in tasks:
        tables[task] = [
            Line(
                length,
                policy,
                _number(row := values.get((task, "accuracy", length, policy)), "value"),
                _standard_error(row),
                _number(values.get(("perplexity", "bits_per_byte", length, policy)), "value"),
                tuple(measured.get((task, length, policy, quantity)) for quantity in QUANTITIES),
            )
            for length, policy in sorted(places, key=lambda place: place[0])
        ]
    return tables


def _medians(rows: list[dict[str, str]]) -> dict[tuple[str, int, str, str], float]:
    """Each quantity over models, layers and heads."""
    found = defaultdict(list)
    for row in rows:
        for quantity in QUANTITIES:
            if (number := _number(row, quantity)) is not None:
                found[row["task"], int(row["length"]), row["policy"], quantity].append(number)
    return {place: statistics.median(numbers) for place, numbers in found.items()}


def _standard_error(row: dict[str, str] | None) -> float | None:
    """From the interval of the bootstrap, which is what the file has."""
    low, high = _number(row, "low"), _number(row, "high")
    return None if low is None or high is None else (high - low) / INTERVAL


def _table(task: str, lines: list[Line]) -> Table:
    """Numbers keep their width, and a long name of a policy goes on in the next line."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    # With the names of the built-in laws this is 77 columns wide.
    table = Table(title=escape(task), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("policy", overflow="fold")
    for header in ("accuracy", "bits/byte", *QUANTITIES.values()):
        table.add_column(header, justify="right", no_wrap=True)
    previous = None
    for line in lines:
        if previous is not None and line.length != previous:
            table.add_section()
        accuracy = _shown(line.accuracy) + ("" if line.error is None else f" ±{line.error:.3f}")
        numbers = (_shown(number) for number in (line.bits_per_byte, *line.quantities))
        table.add_row("" if line.length == previous else str(line.length), escape(line.policy), accuracy, *numbers)
        previous = line.length
    return table


def _shown(number: float | None) -> str:
    return "" if number is None else f"{number:.3f}" if abs(number) < 1000 else f"{number:.1e}"


def _number(row: dict[str, str] | None, column: str) -> float | None:
    return float(row[column]) if row and row[column] else None


def _read(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        reject("folder", str(path.parent), f"the folder of an evaluation, with {path.name}")
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
