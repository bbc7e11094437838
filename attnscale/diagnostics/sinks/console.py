"""Sink that prints a table in the terminal."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import IO, Any

from attnscale._util.optional import need
from attnscale.diagnostics.records.record import Event, Record, clean, layers_of
from attnscale.diagnostics.views.display import MAIN, Quantity
from attnscale.errors import reject_type

FILE_WIDTH = 120  # for files; rich assumes 80
RANGE_WIDTH = 110  # minimum width for the range over heads
SHOWN_EVENTS = 8


class ConsoleSink:
    """Prints a table with one row per layer: means over heads, and the range over heads for quantities in [0, 1].

    Layers and values with a new event are red. A terminal shows one table that is updated in place. In a file, pipe or
    notebook, each report prints a small table without colours. Needs the extra `cli`.

    Args:
        file: text file to write to. None means stdout.

    Raises:
        ArgumentTypeError: `file` has no `write` method.
        MissingDependencyError: rich is not installed.

    Example:
        >>> import io
        >>> from attnscale.diagnostics import Record
        >>> sink = ConsoleSink(io.StringIO())
        >>> sink.log([Record(0, "layers.0", 0, scalars={"gain": 0.5})], step=0)
        >>> sink.close()
    """

    immediate = True  # keeps the output in order with that of the program

    def __init__(self, file: IO[str] | None = None) -> None:
        if file is not None and not callable(getattr(file, "write", None)):
            reject_type("file", file, "a text file, or None for stdout")
        table, text, self._box, console, live = (
            need(f"rich.{part}", "ConsoleSink", "cli") for part in ("table", "text", "box", "console", "live")
        )
        self._table, self._text, self._group = table.Table, text.Text, console.Group
        self._console = console.Console(file=file)
        self._live: Any = None
        if self._console.is_terminal and not self._console.is_dumb_terminal and not self._console.is_jupyter:
            # auto_refresh=False: rich starts no thread.
            self._live = live.Live(console=self._console, auto_refresh=False)
        else:
            self._console = console.Console(file=file, width=max(FILE_WIDTH, self._console.width), color_system=None)
        self._stop: Any = None
        self._records: Sequence[Record] = ()
        self._closed = False

    def log(self, records: Sequence[Record], step: int) -> None:
        """Print the table of a step. Raises ValueError if the sink is closed."""
        if self._closed:
            raise ValueError("the sink is closed")
        self._records = records
        if self._live is None:
            self._console.print(self._report(records, (), step))
            return
        if self._stop is None:
            self._live.start()
            # Restores the cursor even if the sink is never closed.
            self._stop = weakref.finalize(self, self._live.stop)
        self._live.update(self._report(records, (), step), refresh=True)

    def event(self, events: Sequence[Event], step: int) -> None:
        """Print the events of a step."""
        if self._live is None:
            self._console.print(self._lines(events))
        else:
            report = self._report(self._records, events, step)
            self._live.update(self._group(report, self._lines(events)), refresh=True)

    def close(self) -> None:
        """Stop the live display. Idempotent."""
        self._closed = True
        if self._stop is not None:
            self._stop()

    def _report(self, records: Sequence[Record], events: Sequence[Event], step: int) -> Any:
        quantities = [q for q in MAIN if any(q.of(record) is not None for record in records)]
        red: dict[str, set[str]] = defaultdict(set)  # quantities by layer
        for event in events:
            for layer, _ in event.places:
                red[layer].add(event.quantity)
        box = self._box.SIMPLE_HEAD if self._live is None else self._box.ROUNDED
        table = self._table(title=f"attention, step {step}", title_justify="left", box=box, pad_edge=False)
        table.add_column("layer", overflow="fold")
        for quantity in quantities:
            table.add_column(quantity.title, justify="right", no_wrap=True)
        for layer in layers_of(records):
            heads = [record for record in records if record.layer == layer]
            cells = [self._cell(heads, quantity, quantity.name in red[layer]) for quantity in quantities]
            table.add_row(self._text(clean(layer), style="bold red" if red[layer] else "bold"), *cells)
        return table

    def _cell(self, records: Sequence[Record], quantity: Quantity, red: bool) -> Any:
        values = [x for record in records if (x := quantity.of(record)) is not None]
        if not values:
            return ""
        mean = sum(values) / len(values)
        broken = not math.isfinite(mean)
        style = "cyan"
        if quantity.is_share:
            style = "yellow" if mean > 0.9 or mean < 0.05 else "green"  # yellow near either end
        cell = self._text(_short(mean), style="bold red" if red or broken else style)
        if quantity.is_share and len(values) > 1 and not broken and self._console.width >= RANGE_WIDTH:
            cell.append(f"  {min(values):.2f}–{max(values):.2f}", style="not bold red" if red else "dim white")
        return cell

    def _lines(self, events: Sequence[Event]) -> Any:
        """Format events, one line each."""
        lines = [
            clean(f"! step {event.step}: {event.cause} {event.status}: {event.message}")
            for event in events[:SHOWN_EVENTS]
        ]
        rest = [f"! and {len(events) - SHOWN_EVENTS} more"] if len(events) > SHOWN_EVENTS else []
        return self._text("\n".join(lines + rest), style="red")


def _short(x: float) -> str:
    """Format with three digits for a narrow column.

    >>> [_short(x) for x in (0.1234, 12.34, 1234.5, 0.00001234, 0.0)]
    ['0.123', '12.3', '1.2e+03', '1.2e-05', '0']
    """
    size = abs(x)
    if x == 0 or not math.isfinite(x):
        return f"{x:.0f}"
    return f"{x:.3g}" if 1e-3 <= size < 1000 else f"{x:.1e}"
