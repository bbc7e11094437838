"""The terminal view of a run: a line per layer with sparklines over steps, and the alerts below."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from attnscale.diagnostics.records.jsonl import Tail
from attnscale.diagnostics.records.record import Alert
from attnscale.diagnostics.views.display import QUANTITIES, short_names
from attnscale.diagnostics.views.history import COLUMNS, History
from attnscale.errors import reject

BARS = "▁▂▃▄▅▆▇█"
PLAIN = ".:-=+*#@"  # for a terminal without Unicode
BROKEN = "×"
NUMBER = 8  # characters of a number and the gap before it
NARROW = 6  # the shortest useful sparkline
SHOWN_ALERTS = 8


class Watch:
    """The present state of a run: `update` reads what is new, `view` shows it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            reject("path", str(path), "a file of records, not a directory")
        self.tail = Tail(self.path)
        self.history = History()

    def update(self) -> None:
        """Read what has been added to the file; a new file replaces the history."""
        restarts = self.tail.restarts
        for item in self.tail.new():
            if self.tail.restarts != restarts:
                restarts, self.history = self.tail.restarts, History()
            self.history.add((item,))
        if self.tail.restarts != restarts:  # by a file that has no records yet
            self.history = History()

    def view(self, width: int, height: int | None = None, *, bars: str = BARS) -> RenderableType:
        """A table of this width, of all layers or as many as fit into the height."""
        if not self.history.layers:
            waiting = "no records yet" if self.path.exists() else "the file does not exist yet"
            return Text(f"{self.path}: {waiting}", style="dim")
        alerts = _grouped(self.history.alerts)
        room = None if height is None else max(1, height - 6 - len(alerts) - 2 * bool(alerts))
        shown = self._choose(room)
        parts: list[RenderableType] = [self._title(), self._table(shown, width, bars)]
        missing = len(self.history.layers) - len(shown)
        if missing:
            parts.append(Text(f"{missing} more layers without an alert now; --once shows all", style="dim"))
        if alerts:
            parts.append(self._kinds())
            parts += [_alert_line(group) for group in alerts]
        return Group(*parts)

    def _title(self) -> Text:
        history = self.history
        heads = sorted(set(history.heads.values()))
        each = f"{heads[0]}" if len(heads) == 1 else f"{heads[0]}–{heads[-1]}"
        title = Text(f"step {history.steps[-1]}", style="bold", no_wrap=True, overflow="ellipsis")
        title.append(f" · {history.reports} reports · {len(history.layers)} layers × {each} heads", style="not bold")
        if self.tail.skipped:
            title.append(f" · {self.tail.skipped} unreadable lines", style="not bold yellow")
        title.append(f" · {self.path}", style="not bold dim")  # last, since the end is cut off first
        return title

    def _choose(self, room: int | None) -> list[str]:
        """The layers to show: those with an alert now first, then evenly spaced ones; in the order of the model."""
        layers = self.history.layers
        if room is None or len(layers) <= room:
            return layers
        wanted = [layer for layer in layers if layer in self.history.alerting][:room]
        others = [layer for layer in layers if layer not in self.history.alerting]
        left = min(room - len(wanted), len(others))
        wanted += [others[index * len(others) // left] for index in range(left)]
        return [layer for layer in layers if layer in set(wanted)]

    def _table(self, layers: list[str], width: int, bars: str) -> Table:
        plan = _plan(layers, width, any(self.history.by_layer.values()))
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, width=min(width, plan.width))
        table.add_column("layer", width=plan.name, no_wrap=True, overflow="ellipsis")
        if plan.alerts:
            table.add_column("alerts", justify="right", width=6)
        for quantity in plan.quantities:
            table.add_column(_heading(quantity, plan.cell), width=plan.cell, no_wrap=True, overflow="crop")
        ranges = {quantity: self._range(quantity) for quantity in plan.quantities}
        for layer, name in zip(layers, short_names(layers), strict=True):
            count = self.history.by_layer[layer]
            style = "red" if layer in self.history.alerting else ""
            cells = [Text(name, style=style)]
            if plan.alerts:
                cells.append(Text(str(count) if count else "", style="red"))
            for quantity in plan.quantities:
                values = self.history.series(layer, quantity)
                drawn = sparkline(self.history.steps, values, plan.spark, *ranges[quantity], bars)
                cells.append(Text.assemble((drawn, "cyan"), (f"{_number(values[-1]):>{NUMBER}}", "")))
            table.add_row(*cells)
        return table

    def _range(self, quantity: str) -> tuple[float, float, bool]:
        """The scale of a sparkline, the same for all layers: its ends, and whether it is logarithmic."""
        shown = QUANTITIES[quantity]
        if shown.low is not None and shown.high is not None:
            return shown.low, shown.high, False
        values = [x for layer in self.history.layers for x in self.history.series(layer, quantity) if math.isfinite(x)]
        low, high = min(values, default=0.0), max(values, default=0.0)
        return low, high, shown.log and low > 0

    def _kinds(self) -> Text:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.history.by_kind.most_common())
        text = f"\n{self.history.alert_count} alerts: {kinds}; the latest:"
        return Text(text, style="bold red", overflow="ellipsis", no_wrap=True)


class _Plan(NamedTuple):
    """The widths of the columns, and which there are."""

    name: int
    alerts: bool
    quantities: tuple[str, ...]
    spark: int  # characters of a sparkline

    @property
    def cell(self) -> int:
        return self.spark + NUMBER

    @property
    def width(self) -> int:
        return self.name + 2 + 8 * self.alerts + len(self.quantities) * (self.cell + 2)


def _plan(layers: list[str], width: int, alerts: bool) -> _Plan:
    """As many quantities as fit with a sparkline each; where none does, the number of one."""
    name = max(5, min(max(map(len, short_names(layers))), 28, width // 4))
    quantities = tuple(COLUMNS)
    while quantities:
        spark = (width - name - 2 - 8 * alerts) // len(quantities) - NUMBER - 2
        if spark >= NARROW:
            return _Plan(name, alerts, quantities, min(spark, 48))
        quantities = quantities[:-1]
    return _Plan(name, False, tuple(COLUMNS)[:1], 0)


def _heading(quantity: str, width: int) -> str:
    title, over_heads = QUANTITIES[quantity].title, COLUMNS[quantity].over_heads
    long = title if over_heads == "largest" else f"{title} ({over_heads})"
    return long if len(long) <= width else title


def sparkline(
    steps: Sequence[int], values: Sequence[float], width: int, low: float, high: float, log: bool, bars: str = BARS
) -> str:
    """A character per range of steps, for the mean of the values in it; a blank where there is none.

    >>> sparkline([0, 1, 2, 3], [0.0, 0.3, 0.6, 1.0], 4, 0.0, 1.0, False)
    '▁▃▅█'
    """
    first, last = steps[0], steps[-1]
    cells: list[list[float]] = [[] for _ in range(width)]
    for step, value in zip(steps, values, strict=True):
        if width:
            cells[(step - first) * (width - 1) // (last - first) if last > first else 0].append(value)
    used = cells if last > first else cells[:1]
    line, previous = "", " "
    for cell in used:
        # With fewer reports than characters, a value is repeated until the next.
        previous = _bar(cell, low, high, log, bars) if cell else previous
        line += previous
    return line.ljust(width)


def _bar(cell: list[float], low: float, high: float, log: bool, bars: str) -> str:
    if any(math.isinf(x) for x in cell):
        return BROKEN
    known = [x for x in cell if not math.isnan(x)]
    if not known:
        return " "
    value = sum(known) / len(known)
    if log:
        value, low, high = (math.log(max(x, 1e-300)) for x in (value, low, high))
    share = (value - low) / (high - low) if high > low else 0.5
    return bars[min(len(bars) - 1, max(0, int(share * len(bars))))]


def _number(value: float) -> str:
    """Three significant digits in at most seven characters; a dash for NaN."""
    if math.isnan(value):
        return "–"
    return f"{value:.3f}" if 1e-2 <= abs(value) < 10 or value == 0 else f"{value:.3g}"


def _grouped(alerts: Iterable[Alert]) -> list[list[Alert]]:
    """The latest alerts, newest first; those of one kind, layer and step together."""
    groups: dict[tuple[int, str, str], list[Alert]] = {}
    for alert in reversed(list(alerts)):
        key = (alert.step, alert.layer, alert.kind)
        if key in groups or len(groups) < SHOWN_ALERTS:
            groups.setdefault(key, []).insert(0, alert)
    return list(groups.values())


def _alert_line(group: list[Alert]) -> Text:
    alert = group[0]
    heads = ", ".join(str(alert.head) for alert in group[:8]) + (", …" if len(group) > 8 else "")
    where = f"step {alert.step}  {alert.layer}  head{'s' if len(group) > 1 else ''} {heads}  "
    parts = (where, (alert.kind, "bold"), f"  {alert.message}")
    return Text.assemble(*parts, style="red", overflow="ellipsis", no_wrap=True)


def show(path: str | Path, console: Console, *, once: bool = False, interval: float = 1.0) -> None:
    """Show a run until Ctrl-C; only its present state with `once`, or if the console is no terminal."""
    once = once or not console.is_terminal
    watch = Watch(path)
    if once and not watch.path.exists():
        reject("path", str(path), "an existing file of records")
    bars = BARS if console.encoding.lower().startswith("utf") else PLAIN
    watch.update()
    if once:
        console.print(watch.view(console.width, bars=bars))
        return
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(watch.view(console.width, console.height, bars=bars), refresh=True)
                time.sleep(interval)
                watch.update()
    except KeyboardInterrupt:
        console.print(watch.view(console.width, console.height, bars=bars))
