"""Measure CPU costs on this machine, write one CSV, and print all results with targets: `python -m scripts.cost`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from attnscale.bench.rows import write_rows
from attnscale.errors import AttnScaleError, reject
from scripts.cost.plan import Plan, cases, summarise


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 2 for an invalid plan or file."""
    parser = argparse.ArgumentParser(prog="python -m scripts.cost", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("bench.csv"), help="CSV to write (default: %(default)s)")
    parser.add_argument("--config", type=Path, help="YAML file with lengths and rounds (default: built-in plan)")
    options = parser.parse_args(arguments)
    try:
        measure(Console(), options.output, options.config)
    except AttnScaleError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def measure(console: Console, output: Path, config: Path | None) -> None:
    """Measure all cases of a plan, write the rows and print them."""
    if output.is_dir():
        reject("output", str(output), "a CSV file, not a directory")
    work = list(cases(Plan.read(config)))
    rows = [row for case in track(work, "measuring", console=console, transient=True) for row in case.measure()]
    write_rows(output, rows)
    table = Table("metric", "n", "mode", "policy", "ratio", "quartiles", "target", title=escape(str(output)))
    for line in summarise(rows):
        table.add_row(*line)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
