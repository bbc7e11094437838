"""The command line: `attnscale doctor | policies | demo | bench | watch | report`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnscale.errors import AttnScaleError, reject

if TYPE_CHECKING:
    from rich.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Exit codes: 0, 2 for a mistake of the user's, 1 for a kernel that gives a wrong result."""
    try:
        from rich.console import Console
        from rich.markup import escape
    except ImportError:
        print("attnscale: the command line needs rich: pip install 'attnscale[cli]'", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="attnscale", description="Attention whose temperature knows its context.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="versions, devices and a self-check of every backend")
    commands.add_parser("policies", help="every temperature policy with its parameters")
    commands.add_parser("demo", help="five laws in one attention stack, at growing length")
    bench = commands.add_parser("bench", help="cost against torch's attention, as ratios in one run")
    bench.add_argument(
        "on", nargs="?", choices=("cpu", "gpu"), default="cpu", help="what to measure (default: %(default)s)"
    )
    bench.add_argument("--output", type=Path, help="CSV to write (default: bench.csv, or gpu.csv)")
    bench.add_argument(
        "--config", type=Path, help="YAML with lengths and rounds (default: built in, or the card's in configs/bench)"
    )
    bench.add_argument("--plots", type=Path, metavar="DIR", help="gpu: also draw pictures there")
    without = bench.add_mutually_exclusive_group()
    without.add_argument("--dry-run", action="store_true", help="gpu: without one, tiny sizes in triton's interpreter")
    without.add_argument("--static", action="store_true", help="gpu: without one, what compilation tells")
    watch = commands.add_parser("watch", help="a run of the monitor in the terminal, live")
    watch.add_argument("path", type=Path, help="JSONL file that a JsonlSink writes")
    watch.add_argument("--once", action="store_true", help="print the present state and end")
    report = commands.add_parser("report", help="a run of the monitor as one HTML page")
    report.add_argument("path", type=Path, help="JSONL file that a JsonlSink has written")
    report.add_argument("--output", type=Path, default=Path("report.html"), help="page (default: %(default)s)")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        if options.command == "doctor":
            _doctor(console)
        elif options.command == "policies":
            _policies(console)
        elif options.command == "demo":
            _demo(console)
        elif options.command == "watch":
            _watch(console, options.path, options.once)
        elif options.command == "report":
            _report(console, options.path, options.output)
        elif options.on == "gpu":
            return _bench_gpu(console, options)
        else:
            for name in ("plots", "dry_run", "static"):
                if getattr(options, name):
                    reject(name, getattr(options, name), "it with `attnscale bench gpu` only")
            _bench(console, options.output or Path("bench.csv"), options.config)
    except AttnScaleError as error:
        Console(stderr=True).print(
            f"[red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False, soft_wrap=True
        )
        return 2
    return 0


def _doctor(console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    from attnscale.doctor import doctor

    table = Table("", "", "", title="attnscale doctor", show_header=False, title_justify="left")
    previous = ""
    for topic, subject, value in doctor().findings:
        if previous and topic != previous:
            table.add_section()
        table.add_row("" if topic == previous else f"[bold]{topic}[/]", subject, escape(value))
        previous = topic
    console.print(table)


def _policies(console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    from attnscale.policies import POLICIES

    table = Table("policy", "parameters", "β", title="Temperature policies", title_justify="left")
    for name, kind in POLICIES.items():
        fields = [field for field in dataclasses.fields(kind) if field.init]
        parameters = ", ".join(f.name if f.default is dataclasses.MISSING else f"{f.name}={f.default}" for f in fields)
        table.add_row(name, parameters, escape((kind.__doc__ or "").strip().splitlines()[0]))
    console.print(table)


def _demo(console: Console) -> None:
    from rich.table import Table

    from attnscale.demo import LENGTHS, measure

    results = {(cell.policy, cell.length): cell for cell in measure()}
    table = Table(title="One attention stack, five temperature laws", title_justify="left")
    table.add_column("β(n)")
    table.add_column("")
    for length in LENGTHS:
        table.add_column(f"n = {length}", justify="right")
    for name in dict.fromkeys(policy for policy, _ in results):
        cells = [results[name, length] for length in LENGTHS]
        table.add_row(f"[bold]{name}[/]", "β", *(f"{cell.beta:.2f}" for cell in cells))
        table.add_row("", "w_max", *(f"[cyan]{cell.w_max:.3f}[/]" for cell in cells))
        table.add_row("", "entropy", *(f"{cell.entropy:.2f}" for cell in cells), end_section=True)
    console.print(table)
    console.print(
        "Means over heads and the last 64 rows of the second layer; entropy in nats, ln n for uniform attention.\n"
        "With constant β the largest weight fades as the context grows; a law that grows too fast leaves one key.",
        highlight=False,
    )


def _watch(console: Console, path: Path, once: bool) -> None:
    from attnscale.diagnostics.views.watch import show

    show(path, console, once=once)


def _report(console: Console, path: Path, output: Path) -> None:
    from attnscale.report import write_report

    with console.status("reading records"):
        written = write_report(path, output)
    console.print(f"wrote {written}", markup=False, highlight=False, soft_wrap=True)


def _bench_gpu(console: Console, options: argparse.Namespace) -> int:
    from attnscale.bench.gpu.command import run

    return run(
        console,
        config=options.config,
        output=options.output,
        plots=options.plots,
        dry_run=options.dry_run,
        static=options.static,
    )


def _bench(console: Console, output: Path, config: Path | None) -> None:
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


if __name__ == "__main__":
    sys.exit(main())
