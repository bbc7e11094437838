"""What the commands share: from the words of a command line to the function that runs them, errors, a progress bar."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from attnscale import __version__
from attnscale.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from rich.console import Console

# Name, the file in this folder whose function of that name adds the options, and what it does. Only the file of the
# command that is asked for is imported.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("evaluate", "the model in the wheel under five laws at growing length: table and page"),
    "evaluate": ("evaluate", "retrieval, perplexity and attention of models under policies, by length"),
    "run": ("evaluate", "an evaluation from a YAML file, with key=value overrides"),
    "policies": ("show", "every temperature policy with its parameters"),
    "watch": ("show", "a run of the monitor in the terminal, live"),
    "report": ("show", "a run of the monitor, or an evaluation, as one HTML page"),
    "theory": ("theory", "predictions of the papers against measurements: table, figures and data"),
    "plan": ("parallel_cost", "memory and bytes sent of context parallel attention, by a model"),
    "bench": ("bench", "the kernels on this GPU against what a user would call instead"),
    "doctor": ("show", "versions, devices and a self-check of every backend"),
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and whose help keeps the lines of its examples."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, and leave."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (help: {self.prog} --help)\n")

    def show_examples(self, *lines: str) -> None:
        """End the help with command lines of this command, which stand here without its name."""
        self.epilog = "\n".join(["examples:", *(f"  {self.prog} {line}".rstrip() for line in lines)])

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """The error for words that no option takes, with the option that was probably meant."""
        known = [option for action in self._actions for option in action.option_strings]
        nearest = difflib.get_close_matches(words[0].partition("=")[0], known, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        self.error(f"unrecognized arguments: {' '.join(words)}{hint}")

    @contextmanager
    def bad_arguments(self) -> Iterator[None]:
        """Turn an error about a value into one of the command line."""
        try:
            yield
        except (ArgumentError, ArgumentTypeError) as error:
            self.error(str(error))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a command: `command`, its `parser`, and `run`, which returns the exit code. No words give help."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    asked = next((word for word in words if not word.startswith("-")), None)
    top = Parser(prog="attnscale", description="Attention whose temperature knows its context.")
    top.add_argument("--version", action="version", version=f"attnscale {__version__}")
    top.show_examples("doctor", "evaluate MODEL --lengths 512:8192 --text FILE", "COMMAND --help")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (file, summary) in COMMANDS.items():
        # `help` alone puts a line into the list of commands; the parser of the others is never used.
        parser = commands.add_parser(name, help=summary, prog=f"attnscale {name}", description=_sentence(summary))
        if name == asked:
            getattr(importlib.import_module(f"attnscale.cli.{file}"), name)(parser)
            parser.set_defaults(parser=parser)
    options, unknown = top.parse_known_args(words)
    if unknown:
        options.parser.refuse(unknown)
    return options


def moved(command: str, script: str) -> NoReturn:
    """The error for a command that left the package."""
    raise ArgumentError(f"`{command}` left the package: run `{script}` in a clone of the repository")


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


@contextmanager
def shown_progress(console: Console) -> Iterator[Callable[[int, int, str], None]]:
    """A function of the steps done, their total and what is done now; the bar goes away at the end.

    There is none in a file or a pipe, where rich would leave an empty line.
    """
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, label: bar.update(task, completed=done, total=total, description=escape(label))
