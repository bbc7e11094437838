"""The commands `evaluate`, `demo` and `run`: options, or a YAML file with overrides, become a dataclass that is run."""

from __future__ import annotations

import argparse
import importlib
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscale._util.yaml_files import PACKAGED, read_yaml
from attnscale.cli.fields import add_options, build, field_documents
from attnscale.cli.parser import Parser, moved
from attnscale.errors import ArgumentError, reject

if TYPE_CHECKING:
    from rich.console import Console


# The key `experiment` of a file: the module, the dataclass that has the other keys as fields, and the function that
# takes it and `progress`, and returns what it wrote.
Experiments = Mapping[str, tuple[str, str, str]]
EXPERIMENTS = {"evaluation": ("attnscale.lab.evaluation", "Evaluation", "evaluate")}
MOVED = ("max_retrieval", "training")  # to scripts/training


def evaluate(parser: Parser) -> None:
    """Options of `attnscale evaluate`: the fields of `Evaluation`."""
    kind, _ = load(EXPERIMENTS["evaluation"])
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

    kind, function = load(EXPERIMENTS["evaluation"])
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
    from attnscale.lab.evaluation import demo_evaluation, evaluate

    with shown_progress(console) as progress:
        folder = evaluate(demo_evaluation(options.output, options.quick), progress)
    return show_evaluation(console, folder, report=True)


def run(parser: Parser) -> None:
    """Options of `attnscale run`."""
    parser.set_defaults(run=_run)
    parser.show_examples("experiment/smollm2", "configs/experiment/swapped_in.yaml output=again samples=16")
    names = (file.stem for file in sorted((PACKAGED / "experiment").glob("*.yaml")) if file.stem not in MOVED)
    packaged = ", ".join(f"experiment/{name}" for name in names)
    about = f"YAML file with the key `experiment` ({', '.join(EXPERIMENTS)}), or one of the package: {packaged}"
    parser.add_argument("file", type=Path, metavar="FILE", help=about)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="instead of what the file says; lists: [0,1]")


def load(place: tuple[str, str, str]) -> tuple[type[Any], Callable[..., Path]]:
    """The dataclass and the function of an experiment."""
    module, kind, function = place
    loaded = importlib.import_module(module)
    return getattr(loaded, kind), getattr(loaded, function)


def read_experiment(file: Path, overrides: list[str], experiments: Experiments) -> tuple[Any, Callable[..., Path]]:
    """The filled dataclass of an experiment, and the function that runs it."""
    values = read_yaml(file)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            reject("override", override, "key=value")
        values[key] = value
    if "experiment" not in values:
        raise ArgumentError(f"key 'experiment' is missing in {file}: expected {', '.join(experiments)}")
    name = values.pop("experiment")
    if name in MOVED and name not in experiments:
        moved(f"attnscale run {file}", f"python -m scripts.training {file}")
    if not isinstance(name, str) or name not in experiments:
        reject("experiment", name, ", ".join(experiments))
    kind, function = load(experiments[name])
    return build(kind, values), function


def _run(console: Console, options: Namespace) -> int:
    with options.parser.bad_arguments():
        evaluation, evaluate = read_experiment(options.file, options.overrides, EXPERIMENTS)
    from attnscale.cli.evaluation_table import show_evaluation
    from attnscale.cli.progress import shown_progress

    with shown_progress(console) as progress:
        folder = evaluate(evaluation, progress=progress)
    return show_evaluation(console, folder, report=True)
