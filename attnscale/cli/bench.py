"""The command `bench`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from attnscale.cli.parser import Parser
from attnscale.errors import reject

if TYPE_CHECKING:
    from rich.console import Console


def bench(parser: Parser) -> None:
    """Options of `attnscale bench`."""
    parser.set_defaults(run=_bench)
    parser.show_examples("--config configs/bench/quick.yaml", "gpu --bundle gpu.zip")
    parser.add_argument(
        "on", nargs="?", choices=("cpu", "gpu"), default="cpu", help="what to measure (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="CSV to write (default: bench.csv, or gpu.csv)")
    parser.add_argument(
        "--config", type=Path, help="YAML with lengths and rounds (default: built in, for the card found)"
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="gpu: also draw pictures there")
    parser.add_argument("--bundle", type=Path, metavar="ZIP", help="gpu: also put all of it into a file to pass on")
    without = parser.add_mutually_exclusive_group()
    without.add_argument("--dry-run", action="store_true", help="gpu: without one, tiny sizes in triton's interpreter")
    without.add_argument("--static", action="store_true", help="gpu: without one, what compilation tells")


def _bench(console: Console, options: Namespace) -> int:
    if options.on == "gpu":
        from attnscale.bench.gpu.command import run
        from attnscale.doctor import doctor

        return run(
            console,
            config=options.config,
            output=options.output,
            plots=options.plots,
            bundle=options.bundle,
            dry_run=options.dry_run,
            static=options.static,
            diagnose=doctor,
        )
    for name in ("plots", "bundle", "dry_run", "static"):
        if getattr(options, name):
            reject(name, getattr(options, name), "it with `attnscale bench gpu` only")
    _bench_cpu(console, options.output or Path("bench.csv"), options.config)
    return 0


def _bench_cpu(console: Console, output: Path, config: Path | None) -> None:
    from rich.markup import escape
    from rich.progress import track
    from rich.table import Table

    from attnscale.bench.cost import Plan, cases, summarise
    from attnscale.bench.rows import write_rows

    if output.is_dir():
        reject("output", str(output), "a CSV file, not a directory")
    plan = Plan.read(config)
    work = list(cases(plan))
    rows = [row for case in track(work, "measuring", console=console, transient=True) for row in case.measure()]
    write_rows(output, rows)
    table = Table("metric", "n", "mode", "policy", "ratio", "half of runs", "target", title=escape(str(output)))
    for line in summarise(rows):
        table.add_row(*line)
    console.print(table)
