"""The commands `doctor`, `policies`, `watch` and `report`, and the table of a finished evaluation."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from attnscale.cli.parser import Parser

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

QUANTITIES = {"w_max": "w_max", "entropy": "entropy", "accumulation_8": "Λ", "criticality": "β/Λ"}
ABOUT = (
    "accuracy: share of correct answers ± standard error. w_max (largest weight), entropy (nats), Λ (accumulation "
    "scale) and β/Λ (criticality): medians over layers and heads, for the rows that predict an answer."
)


def doctor(parser: Parser) -> None:
    """Options of `attnscale doctor`."""
    parser.set_defaults(run=_doctor)
    parser.show_examples("")


def policies(parser: Parser) -> None:
    """Options of `attnscale policies`."""
    parser.set_defaults(run=_policies)
    parser.show_examples("")


def watch(parser: Parser) -> None:
    """Options of `attnscale watch`."""
    parser.set_defaults(run=_watch)
    parser.show_examples("run/attn.jsonl", "run/attn.jsonl --once")
    parser.add_argument("path", type=Path, help="JSONL file of a JsonlSink")
    parser.add_argument("--once", action="store_true", help="print the current state and exit")


def report(parser: Parser) -> None:
    """Options of `attnscale report`."""
    parser.set_defaults(run=_report)
    parser.show_examples("run/attn.jsonl", "before.jsonl after.jsonl --output compared.html")
    parser.add_argument(
        "path",
        type=Path,
        nargs="+",
        help="JSONL file of a JsonlSink, several of them to compare, or output folder of an evaluation",
    )
    parser.add_argument(
        "--output", type=Path, help="HTML file (default: next to the file, or report.html in the folder)"
    )


def _doctor(_: Namespace) -> int:
    from attnscale.doctor import doctor

    print(doctor())
    return 0


def _policies(_: Namespace) -> int:
    """Print two lines per policy: name and formula, then the parameters."""
    from attnscale.policies import POLICIES

    width = max(map(len, POLICIES))
    for name, kind in POLICIES.items():
        fields = [field for field in dataclasses.fields(kind) if field.init]
        parameters = ", ".join(f.name if f.default is dataclasses.MISSING else f"{f.name}={f.default}" for f in fields)
        print(f"{name:<{width}}  {(kind.__doc__ or '').strip().splitlines()[0]}")
        print(f"{'':<{width}}  {parameters or 'no parameters'}")
    return 0


def _watch(console: Console, options: Namespace) -> int:
    from attnscale.diagnostics.views.watch import show

    show(options.path, console, once=options.once)
    return 0


def _report(options: Namespace) -> int:
    from attnscale.report import write_report

    first, *others = options.path
    print(f"wrote {write_report(options.path if others else first, options.output)}")
    return 0


class Line(NamedTuple):
    """One row of the table; None for numbers that were not measured."""

    length: int
    policy: str
    accuracy: float | None
    error: float | None
    bits_per_byte: float | None
    quantities: tuple[float | None, ...]


def show_evaluation(console: Console, folder: Path, *, report: bool) -> int:
    """Print the tables and the verdict of a finished evaluation and, with `report`, write its page."""
    from attnscale.report.evaluation_data import read_evaluation
    from attnscale.report.verdict import verdict

    folder = Path(folder)
    for task, lines in read_lines(folder).items():
        console.print(_table(task, lines))
    console.print(ABOUT, highlight=False)
    found = verdict(read_evaluation(folder))
    console.print()
    for sentence in found.sentences:
        console.print(sentence, highlight=False, markup=False)
    if found.line is not None:
        console.print(found.line, highlight=False, markup=False, soft_wrap=True)
    console.print()
    written = folder
    if report:
        from attnscale.report import write_report

        with console.status("writing the page"):
            written = write_report(folder, folder / "report.html")
    console.print(f"wrote {written}", markup=False, highlight=False, soft_wrap=True)
    return 0


def show_calibration(console: Console, folder: Path) -> int:
    """Print the findings of a calibration, write its page, and return 0 if the plan helped, else 1."""
    from attnscale.report import write_report
    from attnscale.report.calibration_page import read_calibration, summary_sentences

    data = read_calibration(folder)
    for sentence in summary_sentences(data):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    console.print(f"wrote {write_report(folder)}", markup=False, highlight=False, soft_wrap=True)
    return 0 if data.about["helped"] else 1


def read_lines(folder: Path) -> dict[str, list[Line]]:
    """Return the table rows by task, ordered by length with `constant` first; every task includes bits per byte.

    Quantities are medians over models, layers and heads. Standard errors come from the bootstrap.
    """
    from attnscale.report.evaluation_data import PROSE, read_evaluation

    data = read_evaluation(folder)
    prose = data.whole(PROSE)
    tables: dict[str, list[Line]] = {}
    for task in data.retrieval_tasks or [PROSE]:
        answers = data.whole(task) if task != PROSE else {}
        tables[task] = lines = []
        for length, policy in itertools.product(data.lengths, data.policies):
            answered, written = answers.get((policy, length)), prose.get((policy, length))
            heads = data.heads_at.get((task, policy, length), [])
            known = [[getattr(head, name) for head in heads if getattr(head, name) is not None] for name in QUANTITIES]
            if answered is not None or written is not None:
                line = Line(
                    length,
                    policy,
                    None if answered is None else answered.value,
                    None if answered is None else answered.standard_error,
                    None if written is None else written.value,
                    tuple(statistics.median(numbers) if numbers else None for numbers in known),
                )
                lines.append(line)
    return tables


def _table(task: str, lines: list[Line]) -> Table:
    """Return a table in which numbers never wrap and long policy names do."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from attnscale.report.evaluation_data import PROSE

    borrowed = task != PROSE and any(line.bits_per_byte is not None for line in lines)
    title = f"{task} (bits/byte: {PROSE})" if borrowed else task
    # 77 columns wide with the names of the built-in laws.
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
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
