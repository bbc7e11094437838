"""The commands `evaluate`, `demo` and `run`: options, or a YAML file with overrides, fill a dataclass.

The fields of the dataclass define names, types and defaults of the options and of the keys in the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import inspect
import re
import types
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from attnscale._util.files import PACKAGED, read_yaml
from attnscale._util.optional import need
from attnscale.cli.parser import Parser, moved, shown_progress
from attnscale.cli.show import show_calibration, show_evaluation
from attnscale.errors import ArgumentError, reject

if TYPE_CHECKING:
    from rich.console import Console


# Key `experiment` of a file → module, dataclass with the other keys as fields, and function(dataclass, progress) that
# returns the output path.
Experiments = Mapping[str, tuple[str, str, str]]
EXPERIMENTS = {
    "evaluation": ("attnscale.lab.evaluation", "Evaluation", "evaluate"),
    "calibration": ("attnscale.lab.calibration", "Calibration", "calibrate"),
}
MOVED = ("attention_loss", "max_retrieval", "training")  # experiments of scripts/training

NAMES = "comma-separated names (a,b) or a list"
NUMBERS = "comma-separated ints (128,2048), a doubling range (512:32768; quoted in a YAML file), or a list"


def evaluate(parser: Parser) -> None:
    """Options of `attnscale evaluate`: the fields of `Evaluation`."""
    kind, _ = load(EXPERIMENTS["evaluation"])
    parser.set_defaults(run=_evaluate)
    parser.show_examples(
        "MODEL --policies constant,sqrt_log,log,log_squared,gap_adaptive --lengths 512:32768 --text FILE",
        "MODEL --rope yarn:4 --policies constant,log,constant@own,plan.yaml --tasks perplexity,needle --text FILE",
    )
    documents = add_fields(parser, kind, {"models": "", "output": "evaluation/MODEL"})
    parser.add_argument("models", nargs="+", metavar="MODEL", help=documents["models"])
    parser.add_argument("--report", action=argparse.BooleanOptionalAction, default=True, help="also write the page")


def add_fields(parser: Parser, kind: type[Any], shown: Mapping[str, str]) -> dict[str, str]:
    """Add an option for every field of a dataclass but the model, and return the description of each field.

    `shown` holds the default in the help of fields without one, or "" for a required field.
    """
    hints, documents = get_type_hints(kind), field_documents(kind)
    for field in dataclasses.fields(kind):
        if field.name in ("model", "models"):
            continue
        default = shown[field.name] if field.name in shown else _default(field)
        text = documents[field.name] + (f" (default: {default})" if default else "")
        settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}  # `build` parses the given text
        if hints[field.name] is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings["metavar"] = _metavar(field.name, hints[field.name])
        parser.add_argument(f"--{field.name.replace('_', '-')}", **settings)
    return documents


def demo(parser: Parser) -> None:
    """Options of `attnscale demo`."""
    parser.set_defaults(run=_demo)
    parser.show_examples("", "--quick --output /tmp/demo")
    parser.add_argument("--output", type=Path, default=Path("demo"), help="output folder (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer lengths and samples")


def run(parser: Parser) -> None:
    """Options of `attnscale run`."""
    parser.set_defaults(run=_run)
    parser.show_examples("experiment/smollm2", "configs/experiment/swapped_in.yaml output=again samples=16")
    names = (file.stem for file in sorted((PACKAGED / "experiment").glob("*.yaml")) if file.stem not in MOVED)
    packaged = ", ".join(f"experiment/{name}" for name in names)
    about = f"YAML file with the key `experiment` ({', '.join(EXPERIMENTS)}), or a packaged file: {packaged}"
    parser.add_argument("file", type=Path, metavar="FILE", help=about)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides keys of the file; lists: [0,1]")


def _evaluate(console: Console, options: argparse.Namespace) -> int:
    kind, function = load(EXPERIMENTS["evaluation"])
    values = {key: value for key, value in vars(options).items() if key not in ("command", "parser", "run", "report")}
    values.setdefault("output", f"evaluation/{Path(options.models[0]).name}")
    with options.parser.bad_arguments():
        evaluation = build(kind, values)
    return _run_and_show(console, evaluation, function, options.report)


def _demo(console: Console, options: argparse.Namespace) -> int:
    from attnscale.lab.evaluation import demo_evaluation, evaluate

    return _run_and_show(console, demo_evaluation(options.output, options.quick), evaluate)


def _run(console: Console, options: Namespace) -> int:
    with options.parser.bad_arguments():
        evaluation, function = read_experiment(options.file, options.overrides, EXPERIMENTS)
    return _run_and_show(console, evaluation, function)


def _run_and_show(console: Console, evaluation: Any, function: Callable[..., Path], report: bool = True) -> int:
    with shown_progress(console) as progress:
        folder = function(evaluation, progress=progress)
    if (folder / "calibration.json").is_file():
        return show_calibration(console, folder)
    return show_evaluation(console, folder, report=report)


def load(place: tuple[str, str, str]) -> tuple[type[Any], Callable[..., Path]]:
    """Import the dataclass and the function of an experiment."""
    module, kind, function = place
    loaded = importlib.import_module(module)
    return getattr(loaded, kind), getattr(loaded, function)


def read_experiment(file: Path, overrides: list[str], experiments: Experiments) -> tuple[Any, Callable[..., Path]]:
    """Read an experiment file; return the filled dataclass and the function that runs it."""
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


def read_list(argument: str, value: Any, numbers: bool) -> tuple[Any, ...]:
    """Return the items of a list (types are checked by the caller) or of a text; `a:b` doubles from a to b.

    >>> read_list("policies", "constant, log", numbers=False)
    ('constant', 'log')
    >>> read_list("lengths", "128,1024:4096", numbers=True)
    (128, 1024, 2048, 4096)
    >>> read_list("lengths", "512:3000", numbers=True)
    Traceback (most recent call last):
    ...
    attnscale.errors.ArgumentError: lengths='512:3000' is not accepted: expected 2048 or 4096 as the end of 512:3000
    """
    if isinstance(value, (list, tuple)):
        return tuple(value)
    # A single number is not accepted as a list: YAML parses an unquoted 16:32 as 992 (minutes and seconds).
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else []
    if not parts or not all(parts):
        reject(argument, value, NUMBERS if numbers else NAMES)
    if not numbers:
        return tuple(parts)
    return tuple(number for part in parts for number in _numbers(part, value, argument))


def _numbers(part: str, value: str, argument: str) -> Iterator[int]:
    """Yield one number, or the numbers of a range."""
    ends = part.split(":")
    if len(ends) > 2 or not all(end.isdecimal() for end in ends):
        reject(argument, value, NUMBERS)
    number, last = int(ends[0]), int(ends[-1])
    if len(ends) == 2 and not 1 <= number <= last:
        reject(argument, value, f"a range a:b with 1 <= a <= b instead of {part}")
    yield number
    while number < last:
        if 2 * number > last:
            reject(argument, value, f"{number} or {2 * number} as the end of {part}")
        number *= 2
        yield number


def field_documents(kind: type[Any]) -> dict[str, str]:
    """Return the description of each field from `Args:` in the docstring of a dataclass, escaped for argparse."""
    _, _, entries = (inspect.getdoc(kind) or "").partition("\nArgs:\n")
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", entries, re.MULTILINE)
    return {name: " ".join(text.split()).replace("%", "%%") for name, text in found}


def build(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Build a dataclass from texts or YAML values; unknown keys and wrong types raise a one-line `ArgumentError`."""
    fields, hints = {field.name: field for field in dataclasses.fields(kind)}, get_type_hints(kind)
    for key, value in values.items():
        if key not in fields:
            nearest = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise ArgumentError(f"key {key!r} (value {value!r}) is not accepted: {hint}expected {', '.join(fields)}")
        if value is None and type(None) not in get_args(hints[key]):  # jsonargparse accepts null for any type
            reject(key, value, _accepted(hints[key]))
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise ArgumentError(f"key {name!r} is missing: expected {_accepted(hints[name])}")
    given = dict(values)
    for key, value in values.items():
        if get_origin(hints[key]) is tuple and not (isinstance(value, str) and value.startswith("[")):  # that is YAML
            given[key] = read_list(key, value, get_args(hints[key])[0] is int)
    library = need("jsonargparse", "this command", "cli")
    parser = library.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    try:
        read = parser.parse_object(given)
    except argparse.ArgumentError as error:
        place = re.search(r'key "(\w+)', str(error))
        if place is None or place[1] not in values:
            raise ArgumentError(" ".join(str(error).split())) from error
        reject(place[1], values[place[1]], _accepted(hints[place[1]]))
    return kind(**{key: value for key, value in read.as_dict().items() if key in values})


def _accepted(hint: Any) -> str:
    """Describe the accepted values of a type, for errors."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_accepted(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return NUMBERS if get_args(hint)[0] is int else NAMES
    words = {int: "an int", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def _metavar(name: str, hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    if get_origin(hint) is tuple:
        return "N,N|N:N" if get_args(hint)[0] is int else "A,B"
    numbers = {int: "N", float: "X"}
    return next((numbers[part] for part in (hint, *get_args(hint)) if part in numbers), name.rsplit("_")[-1].upper())


def _default(field: dataclasses.Field[Any]) -> str:
    """Format a default as on the command line; empty if there is none."""
    if field.default is dataclasses.MISSING or field.default is None:
        return ""
    return ",".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)
