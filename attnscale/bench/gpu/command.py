"""The command `attnscale bench gpu`: from its options to a CSV, pictures, a table and one file for an issue."""

from __future__ import annotations

import importlib.metadata
import io
import json
import platform
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attnscale._util.files import write_whole
from attnscale.bench.gpu.machine import Machine, Profile, run_in_interpreter, the_interpreter, this_gpu
from attnscale.bench.gpu.plots import check_matplotlib, draw
from attnscale.bench.gpu.runner import Note, Session
from attnscale.bench.gpu.suites import groups
from attnscale.bench.gpu.tables import ABOUT, header, lines, print_tables
from attnscale.bench.rows import Row, write_rows
from attnscale.errors import reject
from attnscale_kernels import interpreting

if TYPE_CHECKING:
    from rich.console import Console

PACKAGES = ("attnscale", "torch", "triton", "flash-attn", "flash-attn-3", "nvidia-ml-py", "numpy", "matplotlib")


def run(
    console: Console,
    *,
    config: Path | None,
    output: Path | None,
    plots: Path | None,
    bundle: Path | None,
    dry_run: bool,
    diagnose: Callable[[], object],
) -> int:
    """The exit code: 1 where a provider was refused because its numbers are wrong. `diagnose` is for the bundle."""
    options = {"config": config, "output": output, "plots": plots, "bundle": bundle}
    given = {name: str(path) for name, path in options.items() if path is not None}
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


def write_bundle(path: Path, csv: Path, pictures: Sequence[Path], texts: Mapping[str, str]) -> None:
    """A zip of the CSV, the pictures and texts by the names of their files."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(csv, "gpu.csv")
        for picture in pictures:
            archive.write(picture, f"plots/{picture.name}")
        for name, text in texts.items():
            archive.writestr(name, text)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content.getvalue())


def environment(profile: Profile, machine: Machine) -> str:
    """Versions, the card and its state, and what was measured, as JSON; nothing that tells whose machine it is."""
    found = {
        "versions": {package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "device": machine.name,
        "properties": _properties(machine.device),
        "telemetry": machine.clock.telemetry()._asdict(),
        "profile": asdict(profile),
        "notes": machine.notes,
    }
    return json.dumps(found, indent=1) + "\n"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _properties(device: torch.device) -> dict[str, object]:
    """What torch knows of the card that decides about speed."""
    if device.type != "cuda":
        return {}
    found = torch.cuda.get_device_properties(device)
    names = (
        "major", "minor", "gcnArchName", "multi_processor_count", "total_memory", "L2_cache_size", "clock_rate",
        "memory_clock_rate", "memory_bus_width", "warp_size",
    )  # fmt: skip
    return {name: getattr(found, name) for name in names if hasattr(found, name)}
