"""The commands `evaluate` and `demo`."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from attnscale.cli.experiments import load
from attnscale.cli.fields import add_options, build, field_documents
from attnscale.cli.parser import Parser

if TYPE_CHECKING:
    from rich.console import Console


def evaluate(parser: Parser) -> None:
    """Options of `attnscale evaluate`: the fields of `Evaluation`."""
    kind, _ = load("evaluation")
    parser.set_defaults(run=_evaluate)
    parser.show_examples(
        "MODEL --policies constant,sqrt_log,log,log_squared,gap_adaptive --lengths 512:32768 --text FILE",
        "MODEL --rope yarn:4 --policies constant,log,constant@own,plan.yaml --tasks perplexity,needle --text FILE",
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help=field_documents(kind).get("models"))
    parser.add_argument("--report", action=argparse.BooleanOptionalAction, default=True, help="write the page, too")
    add_options(parser, kind, skip=("models",), defaults={"output": "evaluation/MODEL"})


def demo(parser: Parser) -> None:
    """Options of `attnscale demo`."""
    parser.set_defaults(run=_demo)
    parser.show_examples("", "--quick --output /tmp/demo")
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer lengths and samples")


def _evaluate(console: Console, options: argparse.Namespace) -> int:
    from attnscale.cli.evaluation_table import show_evaluation
    from attnscale.cli.progress import shown_progress

    kind, function = load("evaluation")
    values = {key: value for key, value in vars(options).items() if key not in ("command", "parser", "run", "report")}
    values.setdefault("output", f"evaluation/{Path(options.models[0]).name}")
    with options.parser.bad_arguments():
        evaluation = build(kind, values)
    with shown_progress(console) as progress:
        folder = function(evaluation, progress=progress)
    return show_evaluation(console, folder, report=options.report)


def _demo(console: Console, options: argparse.Namespace) -> int:
    from attnscale.cli.evaluation_table import show_evaluation
    from attnscale.cli.progress import shown_progress

    with shown_progress(console) as progress:
        folder = importlib.import_module("attnscale.lab.demo").run(options.output, progress, options.quick)
    return show_evaluation(console, folder, report=True)
