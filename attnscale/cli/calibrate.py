"""The command `calibrate`: options fill `Calibration`; the exit code and calibration.json carry the verdict."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscale.cli.evaluate import EXPERIMENTS, add_fields, build, load
from attnscale.cli.parser import Parser, shown_progress

if TYPE_CHECKING:
    from rich.console import Console

NOT_HELPED = 1


def calibrate(parser: Parser) -> None:
    """Options of `attnscale calibrate`: the fields of `Calibration`."""
    kind, _ = load(EXPERIMENTS["calibration"])
    parser.set_defaults(run=_calibrate)
    parser.show_examples(
        "MODEL --text FILE --to 16384 --rope yarn:2 --fit",
        "embedded --to 4096 --samples 16 --output runs/mine",
    )
    documents = add_fields(parser, kind, {"model": "", "output": "calibration/MODEL", "to": ""})
    parser.add_argument("model", metavar="MODEL", help=documents["model"])


def _calibrate(console: Console, options: Namespace) -> int:
    kind, function = load(EXPERIMENTS["calibration"])
    values = {key: value for key, value in vars(options).items() if key not in ("command", "parser", "run")}
    values.setdefault("output", f"calibration/{Path(options.model).name}")
    with options.parser.bad_arguments():
        calibration: Any = build(kind, values)
    with shown_progress(console) as progress:
        folder = function(calibration, progress=progress)
    return show_calibration(console, folder)


def show_calibration(console: Console, folder: Path) -> int:
    """Print the findings of a calibration, write its page, and return 0 if the plan helped, else 1."""
    from attnscale.report import write_report
    from attnscale.report.calibration_page import read_calibration, summary_sentences

    data = read_calibration(folder)
    for sentence in summary_sentences(data):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    console.print(f"wrote {write_report(folder)}", markup=False, highlight=False, soft_wrap=True)
    return 0 if data.about["helped"] else NOT_HELPED
