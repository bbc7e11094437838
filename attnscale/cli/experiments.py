"""The command `run`: an experiment from a YAML file, with overrides."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscale._util.yaml_files import PACKAGED, read_yaml
from attnscale.cli.fields import build
from attnscale.cli.parser import Parser
from attnscale.errors import ArgumentError, reject

if TYPE_CHECKING:
    from rich.console import Console

# The key `experiment` of a file: the module, the dataclass that has the other keys as fields, and the function that
# takes it and `progress`, and returns what it wrote.
EXPERIMENTS: dict[str, tuple[str, str, str]] = {
    "evaluation": ("attnscale.lab.evaluation", "Evaluation", "evaluate"),
    "max_retrieval": ("attnscale.lab.max_retrieval", "MaxRetrieval", "run"),
    "training": ("attnscale.lab.training", "Training", "run"),
}


def run(parser: Parser) -> None:
    """Options of `attnscale run`."""
    parser.set_defaults(run=_run)
    parser.show_examples("experiment/training", "configs/experiment/training.yaml output=again 'seeds=[0,1]'")
    packaged = ", ".join(f"experiment/{file.stem}" for file in sorted((PACKAGED / "experiment").glob("*.yaml")))
    about = f"YAML file with the key `experiment` ({', '.join(EXPERIMENTS)}), or one of the package: {packaged}"
    parser.add_argument("file", type=Path, metavar="FILE", help=about)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="instead of what the file says; lists: [0,1]")


def load(name: str) -> tuple[type[Any], Callable[..., Path]]:
    """The dataclass and the function of an experiment."""
    module, kind, function = EXPERIMENTS[name]
    loaded = importlib.import_module(module)
    return getattr(loaded, kind), getattr(loaded, function)


def read_experiment(file: Path, overrides: list[str]) -> tuple[str, Any]:
    """The name of an experiment and its filled dataclass."""
    values = read_yaml(file)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            reject("override", override, "key=value")
        values[key] = value
    if "experiment" not in values:
        raise ArgumentError(f"key 'experiment' is missing in {file}: expected {', '.join(EXPERIMENTS)}")
    name = values.pop("experiment")
    if not isinstance(name, str) or name not in EXPERIMENTS:
        reject("experiment", name, ", ".join(EXPERIMENTS))
    return name, build(load(name)[0], values)


def _run(console: Console, options: Namespace) -> int:
    with options.parser.bad_arguments():
        name, experiment = read_experiment(options.file, options.overrides)
    from attnscale.cli.progress import shown_progress

    with shown_progress(console) as progress:
        written = load(name)[1](experiment, progress=progress)
    if name == "evaluation":
        from attnscale.cli.evaluation_table import show_evaluation

        return show_evaluation(console, written, report=True)
    console.print(f"wrote {written}", markup=False, highlight=False, soft_wrap=True)
    return 0
