"""A bar for work that counts its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


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
