"""The command `attnscale bench gpu`: writes a CSV file, plots and a ZIP bundle, and prints a table.

Providers are verified first; only correct ones are timed.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import platform
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnscale._util.files import write_whole
from attnscale._util.optional import need
from attnscale.bench.gpu.machine import Machine, Profile, interleaved, run_in_interpreter, the_interpreter, this_gpu
from attnscale.bench.gpu.problem import Check, Inputs, Problem, Provider, check_a_few_rows, verify
from attnscale.bench.gpu.providers import SUITES, Group, groups
from attnscale.bench.gpu.results import ABOUT, Result, draw, header, lines, print_tables, rows_of
from attnscale.bench.rows import Row, write_rows
from attnscale.errors import reject
from attnscale_kernels import interpreting

if TYPE_CHECKING:
    from rich.console import Console

PACKAGES = ("attnscale", "torch", "triton", "flash-attn", "flash-attn-3", "nvidia-ml-py", "numpy", "matplotlib")
# Device properties of torch that affect speed.
PROPERTIES = (
    "major", "minor", "gcnArchName", "multi_processor_count", "total_memory", "L2_cache_size", "clock_rate",
    "memory_clock_rate", "memory_bus_width", "warp_size",
)  # fmt: skip
CARD = "card"  # replaces the provider in rows about the device itself

Contender = tuple[Callable[[], Tensor], Result]  # function to time, and its result without times


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
    """Run the benchmark and return the exit code: 1 if a provider has wrong results. `diagnose` is for the bundle."""
    options = {"config": config, "output": output, "plots": plots, "bundle": bundle}
    given = {name: str(path) for name, path in options.items() if path is not None}
    output = output or Path("gpu.csv")
    if output.is_dir():
        reject("output", str(output), "a CSV file, not a directory")
    if plots is not None and plots.exists() and not plots.is_dir():
        reject("plots", str(plots), "a folder")
    if bundle is not None and (bundle.is_dir() or bundle.suffix != ".zip"):
        reject("bundle", str(bundle), "a file name ending in .zip")
    if plots is not None or bundle is not None:
        need("matplotlib", "plots", "bench")  # before anything is measured
    if dry_run and not interpreting():  # the interpreter is selected when triton is imported: use another process
        return run_in_interpreter(["bench", "gpu", "--dry-run", *(f"--{name}={path}" for name, path in given.items())])
    profile, machine = the_interpreter(config) if dry_run else this_gpu(config)
    rows, notes = _measure(console, profile, machine)
    write_rows(output, rows)
    written = [output, *(draw(rows, plots) if plots is not None else [])]
    title = "dry run in triton's interpreter: results are checked, times are meaningless" if dry_run else machine.name
    _print_report(console, title, rows, machine, notes, dry_run)
    if bundle is not None:
        report = io.StringIO()
        _print_report(type(console)(file=report, width=100), title, rows, machine, notes, dry_run)
        texts = {
            "report.txt": report.getvalue(),
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

    rows: list[Row] = []
    notes: list[Note] = []
    for group in track(list(groups(profile)), "measuring", console=console, transient=True):
        found, said = Session(group, profile, machine).measure()
        rows += found
        notes += said
    return rows, notes


def _print_report(
    console: Console, title: str, rows: list[Row], machine: Machine, notes: list[Note], dry_run: bool
) -> None:
    from rich.markup import escape

    print_tables(console, title, header(dry_run=dry_run), lines(rows, dry_run=dry_run), heading=3)
    console.print(ABOUT, highlight=False)
    for text in machine.notes:
        console.print(escape(text), highlight=False)
    where: dict[tuple[bool, str, str], dict[str, None]] = {}  # ordered sets of suites and modes
    for note in sorted(notes, key=lambda note: note.refused):
        where.setdefault((note.refused, note.provider, note.reason), {})[f"{note.suite} {note.mode}"] = None
    for (refused, provider, reason), places in where.items():
        verb = "[red]incorrect[/]" if refused else "[dim]skipped[/]"
        text = f"{provider} ({', '.join(places)}): {reason}"
        console.print(f"{verb}  {escape(text)}", highlight=False, soft_wrap=True)


def write_bundle(path: Path, csv: Path, pictures: Sequence[Path], texts: Mapping[str, str]) -> None:
    """Write a ZIP file with the CSV, the plots, and texts by file name."""
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
    """Return versions, the GPU with its state, and the profile as JSON, without anything that identifies the user."""
    card = torch.cuda.get_device_properties(machine.device) if machine.device.type == "cuda" else None
    found = {
        "versions": {package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "device": machine.name,
        "properties": {name: getattr(card, name) for name in PROPERTIES if hasattr(card, name)},
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


class Note(NamedTuple):
    """The reason why a provider was not measured; `refused` if its results were wrong."""

    refused: bool
    suite: str
    provider: str
    mode: str
    reason: str


class Session:
    """Verifies and times the providers of one group, and records why others were skipped."""

    def __init__(self, group: Group, profile: Profile, machine: Machine) -> None:
        self.group, self.profile, self.machine = group, profile, machine
        self.backward = group.mode != "forward"
        self.notes: list[Note] = []

    def measure(self) -> tuple[list[Row], list[Note]]:
        """Return rows for every provider and length, and notes about skipped providers."""
        rows: list[Row] = []
        problems = self.group.problems(self.profile, self.machine.device)
        small = problems[0].shrunk(self.profile.check_length)
        found = {provider: self._check(provider, small) for provider in SUITES[self.group.suite].providers}
        right = {provider: verdict for provider, verdict in found.items() if verdict is not None}
        for problem in problems:
            inputs = problem.inputs(backward=self.backward)
            entered = [self._enter(provider, verdict, problem, inputs) for provider, verdict in right.items()]
            rows += self._race(problem, [contender for contender in entered if contender is not None])
        return rows, list(dict.fromkeys(self.notes))

    def _check(self, provider: Provider, small: Problem) -> Check | None:
        """Compare a provider with fp64; None if it is skipped."""
        reason = provider.why_not(small, self.backward)
        if reason is not None:
            self._note(provider, reason)
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns about each of its unavailable kernels
                verdict = verify(provider, small, backward=self.backward)
        except Exception as error:  # a failing rival is skipped; a failing attnscale provider is an error
            self._fail(provider, error)
            return None
        return verdict if self._accept(provider, verdict, small) else None

    def _enter(self, provider: Provider, verdict: Check, problem: Problem, inputs: Inputs) -> Contender | None:
        """Run a provider once at the measured size; return its step and untimed result, or None if it is skipped."""
        reason = provider.why_not(problem, self.backward)
        if reason is not None:
            self._note(provider, f"{reason} at {problem.keys} keys")
            return None
        try:
            step = self._step_of(provider, problem, inputs)
            output, peak = self.machine.clock.peak(step)
            seen = check_a_few_rows(provider, problem, inputs, output)
            if self.profile.warm_up:
                self.machine.clock.seconds(step)  # the first warm-up raises for functions that cannot be timed
        except torch.OutOfMemoryError:
            self._note(provider, f"out of memory at {problem.keys} keys")
            return None
        except Exception as error:
            self._fail(provider, error)
            return None
        result = Result(provider.name, [], peak, verdict.share, provider.row_numbers)
        return (step, result) if self._accept(provider, seen, problem) else None

    def _step_of(self, provider: Provider, problem: Problem, inputs: Inputs) -> Callable[[], Tensor]:
        """Return a function that computes attention once, with or without the backward pass."""
        attend = provider.prepare(problem)

        def step() -> Tensor:
            with torch.set_grad_enabled(self.backward):
                output = attend(*inputs.leaves).output
            if self.backward:
                torch.autograd.grad(output, inputs.leaves, inputs.gradient)
            return output.detach()

        return step

    def _race(self, problem: Problem, contenders: list[Contender]) -> list[Row]:
        """Return the interleaved times of all contenders, and the state of the GPU after the last round."""
        profile, machine = self.profile, self.machine
        steps = {result.provider: step for step, result in contenders}
        samples = interleaved(steps, machine.clock, warm_up=profile.warm_up - 1, rounds=profile.rounds)
        results = [result._replace(seconds=samples[result.provider]) for _, result in contenders]
        labels = problem.label, machine.name, machine.version
        suite, mode, baselines = self.group.suite, self.group.mode, SUITES[self.group.suite].baselines
        state = [
            Row(suite, CARD, mode, metric, problem.keys, number, number, number, *labels)
            for metric, number in machine.clock.telemetry().known().items()
        ]
        return rows_of(suite, mode, problem, results, baselines, machine.card, labels) + state

    def _accept(self, provider: Provider, verdict: Check, problem: Problem) -> bool:
        if not verdict.right:
            where = f"{problem.keys} keys, {problem.label}"
            size = f"error {verdict.error:.2e} of {verdict.quantity} exceeds the allowed {verdict.allowed:.2e}"
            self._note(provider, f"{size} ({where})", refused=True)
        return verdict.right

    def _fail(self, provider: Provider, error: Exception) -> None:
        reason = (str(error).strip() or "no message").splitlines()[0]
        self._note(provider, f"{type(error).__name__}: {reason}", refused=provider.ours)

    def _note(self, provider: Provider, reason: str, *, refused: bool = False) -> None:
        self.notes.append(Note(refused, self.group.suite, provider.name, self.group.mode, reason))
