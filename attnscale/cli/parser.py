"""Shared by all commands: argument parsing, error messages and a progress bar."""

from __future__ import annotations

import argparse
import difflib
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from attnscale import __version__
from attnscale.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from rich.console import Console

INTERVAL = 60.0  # seconds between two lines of progress without a terminal

# Command → file in this folder, which has a function of the same name that adds the options; and a summary. Only the
# file of the requested command is imported.
COMMANDS: dict[str, tuple[str, str]] = {
    "recommend": ("recommend", "recommend how a model can read longer texts, from its config, in seconds"),
    "demo": ("evaluate", "evaluate the embedded model with five policies at increasing lengths"),
    "evaluate": ("evaluate", "measure retrieval, perplexity and attention of models by policy and length"),
    "calibrate": ("calibrate", "measure a model, predict where it fails, fit the temperature it needs, and test it"),
    "run": ("evaluate", "run an evaluation or a calibration from a YAML file, with key=value overrides"),
    "policies": ("show", "list all policies with their parameters"),
    "watch": ("show", "show a monitored run live in the terminal"),
    "report": ("show", "write a monitored run, a comparison of runs, or an evaluation as one HTML page"),
    "theory": ("theory", "compare predictions of the papers with measurements: table, figures and data"),
    "plan": ("parallel_cost", "estimate memory and communication of context-parallel attention"),
    "bench": ("bench", "benchmark the kernels on this GPU against other attention implementations"),
    "export": (
        "export",
        "export a model with its policy to vLLM, Ministral 3, llama.cpp or ONNX, and check the result",
    ),
    "doctor": ("show", "show versions and devices, and check every backend"),
}


class Parser(argparse.ArgumentParser):
    """Argument parser with one-line errors, and with examples in its help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Print a one-line error and exit with code 2."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (help: {self.prog} --help)\n")

    def show_examples(self, *lines: str) -> None:
        """Add examples to the help; lines are given without the name of the command."""
        self.epilog = "\n".join(["examples:", *(f"  {self.prog} {line}".rstrip() for line in lines)])

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Exit with an error for unknown arguments, suggesting the closest option."""
        known = [option for action in self._actions for option in action.option_strings]
        nearest = difflib.get_close_matches(words[0].partition("=")[0], known, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        self.error(f"unrecognized arguments: {' '.join(words)}{hint}")

    @contextmanager
    def bad_arguments(self) -> Iterator[None]:
        """Turn argument errors into command-line errors."""
        try:
            yield
        except (ArgumentError, ArgumentTypeError) as error:
            self.error(str(error))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a command, with `command`, its `parser`, and `run`, which returns the exit code.

    Without arguments the help is shown.
    """
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    asked = next((word for word in words if not word.startswith("-")), None)
    top = Parser(prog="attnscale", description="Attention with a length-dependent temperature.")
    top.add_argument("--version", action="version", version=f"attnscale {__version__}")
    top.show_examples("doctor", "evaluate MODEL --lengths 512:8192 --text FILE", "COMMAND --help")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (file, summary) in COMMANDS.items():
        # The parsers of other commands only add a line to the list of commands.
        parser = commands.add_parser(name, help=summary, prog=f"attnscale {name}", description=_sentence(summary))
        if name == asked:
            getattr(importlib.import_module(f"attnscale.cli.{file}"), name)(parser)
            parser.set_defaults(parser=parser)
    options, unknown = top.parse_known_args(words)
    if unknown:
        options.parser.refuse(unknown)
    return options


class ProgressLines:
    """Prints progress as lines on stderr, for files and pipes. The first lines come in quick succession."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._due, self._wait = now, -math.inf, INTERVAL / 16

    def __call__(self, done: int, total: int, label: str) -> None:
        """Print a line if it is due."""
        if self._now() < self._due:
            return
        print(f"{done}/{total}: {label}", file=sys.stderr, flush=True)
        self._wait = min(2 * self._wait, INTERVAL)
        self._due = self._now() + self._wait


def moved(command: str, script: str) -> NoReturn:
    """Raise the error for a command that is no longer part of the package."""
    raise ArgumentError(f"`{command}` is no longer part of the package: run `{script}` in a clone of the repository")


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


@contextmanager
def shown_progress(console: Console) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function (done, total, label) that updates a transient progress bar.

    Without a terminal, lines on stderr replace the bar: at the start, and then at most one per `INTERVAL`.
    """
    if not console.is_terminal:
        yield ProgressLines(time.monotonic)
        return
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, label: bar.update(task, completed=done, total=total, description=escape(label))
