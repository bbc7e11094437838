"""The command `calibrate`: options fill `Calibration`; the exit code and calibration.json carry the verdict."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscale.cli.evaluate import EXPERIMENTS, add_fields, build, load
from attnscale.cli.parser import Parser, shown_progress
from attnscale.cli.show import show_calibration

if TYPE_CHECKING:
    from rich.console import Console


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
