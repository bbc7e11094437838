"""Tables as wide as their content: a name is never cut to fit a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# More than any table needs.
UNLIMITED = 10_000


def print_tables(
    console: Console, title: str, columns: tuple[str, ...], cells: Iterable[tuple[str, ...]], *, heading: int
) -> None:
    """A table for each change in the first `heading` columns, which stand above it; the next one says repeats once."""
    from rich import box
    from rich.markup import escape
    from rich.measure import Measurement
    from rich.table import Table

    console.print(escape(title), highlight=False, soft_wrap=True)
    options = console.options.update(width=UNLIMITED)
    for shared, lines in groupby(cells, key=lambda line: line[:heading]):
        name = escape(" · ".join(part for part in shared if part))
        table = Table(title=name, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
        held = [line[heading:] for line in lines]
        for index, column in enumerate(columns[heading:]):
            numbers = all(line[index][:1].isdigit() or not line[index] for line in held)
            table.add_column(column, justify="right" if numbers else "left", no_wrap=True)
        said = ""
        for first, *rest in held:
            table.add_row("" if first == said else escape(first), *map(escape, rest))
            said = first
        table.width = Measurement.get(console, options, table).maximum
        console.print(table, crop=False, soft_wrap=True)
