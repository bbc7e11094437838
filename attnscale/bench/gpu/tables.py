"""The table a user reads: a line for each provider at each length, and as wide as its content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from attnscale.bench.rows import Row

if TYPE_CHECKING:
    from rich.console import Console


SPEEDS = ("suite", "mode", "config", "n", "provider", "µs", "TFLOP/s", "GB/s", "roof", "MB", "over", "error")
# The interpreter's times are those of numpy in a Python loop.
CHECKS = ("suite", "mode", "config", "n", "provider", "error", "host ms, meaningless")
ABOUT = (
    "over: time over that of the fastest rival, whose own is 1.00, round by round; error: the largest, as a share of "
    "what is allowed (twice that of torch's attention, and one rounding), above 1 there is no speed."
)

# More than any table needs.
UNLIMITED = 10_000


def header(*, dry_run: bool) -> tuple[str, ...]:
    """The names of the columns."""
    return CHECKS if dry_run else SPEEDS


def lines(rows: Sequence[Row], *, dry_run: bool) -> Iterator[tuple[str, ...]]:
    """Cells for each column, in the order of the rows."""
    found: dict[tuple[str, str, str, int, str], dict[str, float]] = {}
    for row in rows:
        found.setdefault((row.kernel, row.mode, row.config, row.x, row.provider), {})[row.metric] = row.y
    for (suite, mode, config, n, provider), numbers in found.items():
        if "us" not in numbers:  # about the card
            continue
        where = suite, mode, short(config), str(n), provider
        error = f"{numbers['error_share']:.2f}"
        if dry_run:
            yield *where, error, f"{numbers['us'] / 1000:.0f}"
        else:
            yield *where, *_speeds(numbers), error


def _speeds(numbers: dict[str, float]) -> tuple[str, ...]:
    share, peak = numbers.get("roofline_share"), numbers.get("peak_mb")
    over = next((value for metric, value in numbers.items() if metric.startswith("time_over_")), None)
    return (
        f"{numbers['us']:.1f}",
        f"{numbers['tflops']:.1f}",
        f"{numbers['gb_per_s']:.0f}",
        "" if share is None else f"{share:.0%}",
        "" if peak is None else f"{peak:.0f}",
        "" if over is None else f"{over:.2f}",
    )


def short(config: str) -> str:
    """Head dimension and dtype: what a table has room for."""
    return " ".join(part for part in config.split() if part.startswith("D=") or "float" in part)


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
