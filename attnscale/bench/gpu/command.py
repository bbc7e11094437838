"""The command `attnscale bench gpu`: from its options to a CSV, pictures and a table."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from attnscale.bench.gpu.bundle import environment, write_bundle
from attnscale.bench.gpu.machine import Machine, run_in_interpreter, the_interpreter, this_gpu
from attnscale.bench.gpu.plots import check_matplotlib, draw
from attnscale.bench.gpu.profile import Profile
from attnscale.bench.gpu.report import ABOUT, header, lines
from attnscale.bench.gpu.runner import Note, Session
from attnscale.bench.gpu.suites import groups
from attnscale.bench.gpu.whole_table import print_tables
from attnscale.bench.rows import Row, write_rows
from attnscale.errors import reject
from attnscale_kernels import interpreting

if TYPE_CHECKING:
    from rich.console import Console


def run(
    console: Console,
    *,
    config: Path | None,
    output: Path | None,
    plots: Path | None,
    bundle: Path | None,
    dry_run: bool,
    static: bool,
    diagnose: Callable[[], object],
) -> int:
    """The exit code: 1 where a provider was refused because its numbers are wrong. `diagnose` is for the bundle."""
    options = {"config": config, "output": output, "plots": plots, "bundle": bundle}
    given = {name: str(path) for name, path in options.items() if path is not None}
    if static:
        for name, path in given.items():
            reject(name, path, "nothing beside --static, which measures and writes nothing")
        _print_static(console)
        return 0
    output = output or Path("gpu.csv")
    if output.is_dir():
        reject("output", str(output), "a CSV file, not a directory")
    if plots is not None and plots.exists() and not plots.is_dir():
        reject("plots", str(plots), "a folder")
    if bundle is not None and (bundle.is_dir() or bundle.suffix != ".zip"):
        reject("bundle", str(bundle), "a file that ends with .zip")
    if plots is not None or bundle is not None:
        check_matplotlib()
    if dry_run and not interpreting():  # which is decided before triton is first imported: so in another process
        return run_in_interpreter(["bench", "gpu", "--dry-run", *(f"--{name}={path}" for name, path in given.items())])
    profile, machine = the_interpreter(config) if dry_run else this_gpu(config)
    rows, notes = _measure(console, profile, machine)
    write_rows(output, rows)
    written = [output, *(draw(rows, plots) if plots is not None else [])]
    title = "dry run in triton's interpreter: numbers are checked, times mean nothing" if dry_run else machine.name
    _print_report(console, title, rows, machine, notes, dry_run)
    if bundle is not None:
        texts = {
            "report.txt": _as_text(lambda paper: _print_report(paper, title, rows, machine, notes, dry_run)),
            "environment.json": environment(profile, machine),
            "doctor.txt": f"{diagnose()}\n",
        }
        with tempfile.TemporaryDirectory() as folder:
            write_bundle(bundle, output, draw(rows, Path(folder)), texts)
        written.append(bundle)
    console.print("wrote " + ", ".join(map(str, written)), markup=False, highlight=False, soft_wrap=True)
    return 1 if any(note.refused for note in notes) else 0


def _measure(console: Console, profile: Profile, machine: Machine) -> tuple[list[Row], list[Note]]:
    from rich.progress import track

    work = track(list(groups(profile)), "measuring", console=console, transient=True)
    outcomes = [Session(group, profile, machine).measure() for group in work]
    rows = [row for outcome in outcomes for row in outcome.rows]
    return rows, [note for outcome in outcomes for note in outcome.notes]


def _as_text(write: Callable[[Console], None]) -> str:
    from rich.console import Console

    paper = io.StringIO()
    write(Console(file=paper, width=100))
    return paper.getvalue()


def _print_report(
    console: Console, title: str, rows: list[Row], machine: Machine, notes: list[Note], dry_run: bool
) -> None:
    print_tables(console, title, header(dry_run=dry_run), lines(rows, dry_run=dry_run), heading=3)
    console.print(ABOUT, highlight=False)
    _print_notes(console, machine, notes)


def _print_static(console: Console) -> None:
    from attnscale.bench.gpu.compiled import ABOUT, HEADER, static_lines

    print_tables(console, "compiled ahead of time, not run", HEADER, static_lines(), heading=4)
    console.print(ABOUT, highlight=False)


def _print_notes(console: Console, machine: Machine, notes: list[Note]) -> None:
    from rich.markup import escape

    for text in machine.notes:
        console.print(escape(text), highlight=False)
    where: dict[tuple[bool, str, str], list[str]] = {}
    for note in sorted(notes, key=lambda note: note.refused):
        places = where.setdefault((note.refused, note.provider, note.reason), [])
        places += [place for place in (f"{note.suite} {note.mode}",) if place not in places]
    for (refused, provider, reason), places in where.items():
        verb = "[red]refused[/]" if refused else "[dim]left out[/]"
        text = f"{provider} ({', '.join(places)}): {reason}"
        console.print(f"{verb}  {escape(text)}", highlight=False, soft_wrap=True)
