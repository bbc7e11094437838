"""Terminal view of a run: one line per layer with sparklines over steps, and the latest alerts."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from attnscale.diagnostics.records.record import Alert, Record, Tail
from attnscale.diagnostics.views.display import QUANTITIES, WATCHED, place_on_scale, short_names
from attnscale.errors import reject

BARS = "▁▂▃▄▅▆▇█"
PLAIN = ".:-=+*#@"  # for terminals without Unicode
BROKEN = "×"
NUMBER = 8  # width of a number, including the gap before it
NARROW = 6  # minimum width of a sparkline
SHOWN_ALERTS = 8
RECORDS = "a file of records written by JsonlSink"


class History:
    """History of records and alerts in bounded memory: with many steps, only every second, fourth, … step is kept.

    `series(layer, quantity)` returns the values at `steps` for a quantity of `WATCHED`. The last step is the latest
    report.
    """

    def __init__(self, most_steps: int = 512, most_alerts: int = 256) -> None:
        self.most_steps = most_steps
        self.alerts: deque[Alert] = deque(maxlen=most_alerts)
        self.by_layer: Counter[str] = Counter()
        self.by_kind: Counter[str] = Counter()
        self.heads: dict[str, int] = {}
        self.alerting: set[str] = set()  # layers with an alert in the latest report
        self.reports = 0  # steps seen, the latest included
        self._stride = 1
        self._kept: list[tuple[int, dict[str, dict[str, float]]]] = []
        self._latest: tuple[int, dict[str, list[Record]]] | None = None

    @property
    def layers(self) -> list[str]:
        """Layers in order of first appearance."""
        return list(self.heads)

    @property
    def steps(self) -> list[int]:
        """The kept steps and the latest step."""
        kept = [step for step, _ in self._kept]
        return kept if self._latest is None else [*kept, self._latest[0]]

    def add(self, items: Iterable[Record | Alert]) -> None:
        """Add new records and alerts."""
        for item in items:
            if isinstance(item, Alert):
                self.alerts.append(item)
                self.by_layer[item.layer] += 1
                self.by_kind[item.kind] += 1
                if self._latest is not None and item.step == self._latest[0]:
                    self.alerting.add(item.layer)
            else:
                if self._latest is None or item.step != self._latest[0]:
                    self._latest = self._begin(item.step)
                self._latest[1].setdefault(item.layer, []).append(item)
                self.heads[item.layer] = max(self.heads.get(item.layer, 0), item.head + 1)

    def series(self, layer: str, quantity: str) -> list[float]:
        """Return one value per step of `steps`; NaN if missing."""
        values = [layers.get(layer, {}).get(quantity, math.nan) for _, layers in self._kept]
        return values if self._latest is None else [*values, self.latest(layer).get(quantity, math.nan)]

    def latest(self, layer: str) -> dict[str, float]:
        """Return the values of a layer in the latest report; empty if the layer is missing."""
        records = [] if self._latest is None else self._latest[1].get(layer, [])
        return {name: _join(records, name) for name in WATCHED} if records else {}

    def _begin(self, step: int) -> tuple[int, dict[str, list[Record]]]:
        """Start a report. The previous report is kept if its index is a multiple of the stride."""
        if self._latest is not None:
            before, layers = self._latest
            if (self.reports - 1) % self._stride == 0 and before < step:
                self._kept.append((before, {layer: self.latest(layer) for layer in layers}))
            if before > step:  # resumed from a checkpoint: later steps run again
                self._kept = [kept for kept in self._kept if kept[0] < step]
        self.alerting.clear()
        self.reports += 1
        if len(self._kept) >= self.most_steps:
            del self._kept[1::2]
            self._stride *= 2
        return step, {}


class Watch:
    """Current state of a run: `update` reads new records, `view` renders them."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            reject("path", str(path), "a file of records, not a folder")
        self.tail = Tail(self.path)
        self.history = History()

    def update(self) -> None:
        """Read new lines of the file. A new file replaces the history."""
        restarts = self.tail.restarts
        for item in self.tail.new():
            if self.tail.restarts != restarts:
                restarts, self.history = self.tail.restarts, History()
            self.history.add((item,))
        if self.tail.restarts != restarts:  # the new file has no records yet
            self.history = History()

    @property
    def is_foreign(self) -> bool:
        """Whether the file has content but no records."""
        return not self.history.layers and self.tail.foreign

    def view(self, width: int, height: int | None = None, *, bars: str = BARS) -> RenderableType:
        """Render a table of this width, with all layers or as many as fit into the height."""
        if self.is_foreign:
            return Text(f"{self.path}: not {RECORDS}", style="yellow")
        if not self.history.layers:
            waiting = "no records yet" if self.path.exists() else "the file does not exist yet"
            return Text(f"{self.path}: {waiting}", style="dim")
        alerts = _grouped(self.history.alerts)
        room = None if height is None else max(1, height - 6 - len(alerts) - 2 * bool(alerts))
        shown = self._choose(room)
        parts: list[RenderableType] = [self._title(), self._table(shown, width, bars)]
        missing = len(self.history.layers) - len(shown)
        if missing:
            parts.append(Text(f"{missing} more layers without a current alert; --once shows all", style="dim"))
        if alerts:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.history.by_kind.most_common())
            text = f"\n{self.history.by_kind.total()} alerts: {kinds}; the latest:"
            parts.append(Text(text, style="bold red", overflow="ellipsis", no_wrap=True))
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
        title.append(f" · {self.path}", style="not bold dim")  # last, because the end is truncated first
        return title

    def _choose(self, room: int | None) -> list[str]:
        """Select layers: those with a current alert, then evenly spaced others; in model order."""
        layers = self.history.layers
        if room is None or len(layers) <= room:
            return layers
        wanted = [layer for layer in layers if layer in self.history.alerting][:room]
        others = [layer for layer in layers if layer not in self.history.alerting]
        left = min(room - len(wanted), len(others))
        wanted += [others[index * len(others) // left] for index in range(left)]
        return [layer for layer in layers if layer in set(wanted)]

    def _table(self, layers: list[str], width: int, bars: str) -> Table:
        """Build a table with as many sparklines as fit; if none fits, a single column of numbers."""
        names = short_names(layers)
        widest = max(5, min(max(map(len, names)), 28, width // 4))
        room = width - widest - 2 - 8 * bool(self.history.by_layer)
        fitting = next((number for number in range(len(WATCHED), 0, -1) if room // number >= NARROW + NUMBER + 2), 0)
        spark = min(room // fitting - NUMBER - 2, 48) if fitting else 0
        with_alerts = bool(fitting and self.history.by_layer)
        ranges = {quantity: self._range(quantity) for quantity in [*WATCHED][: fitting or 1]}
        used = widest + 2 + 8 * with_alerts + len(ranges) * (spark + NUMBER + 2)
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, width=min(width, used))
        table.add_column("layer", width=widest, no_wrap=True, overflow="ellipsis")
        if with_alerts:
            table.add_column("alerts", justify="right", width=6)
        for quantity in ranges:
            title, over_heads = QUANTITIES[quantity].title, WATCHED[quantity]
            long = title if over_heads == "largest" else f"{title} ({over_heads})"
            heading = long if len(long) <= spark + NUMBER else title
            table.add_column(heading, width=spark + NUMBER, no_wrap=True, overflow="crop")
        for layer, name in zip(layers, names, strict=True):
            cells = [Text(name, style="red" if layer in self.history.alerting else "")]
            if with_alerts:
                cells.append(Text(str(self.history.by_layer.get(layer, "")), style="red"))
            for quantity, scale in ranges.items():
                values = self.history.series(layer, quantity)
                drawn = sparkline(self.history.steps, values, spark, *scale, bars)
                cells.append(Text.assemble((drawn, "cyan"), (f"{_number(values[-1]):>{NUMBER}}", "")))
            table.add_row(*cells)
        return table

    def _range(self, quantity: str) -> tuple[float, float, bool]:
        """Return the ends of a sparkline scale and whether it is logarithmic; the same for all layers."""
        shown = QUANTITIES[quantity]
        if shown.low is not None and shown.high is not None:
            return shown.low, shown.high, False
        values = [x for layer in self.history.layers for x in self.history.series(layer, quantity) if math.isfinite(x)]
        low, high = min(values, default=0.0), max(values, default=0.0)
        return low, high, shown.log and low > 0


def _join(records: Iterable[Record], name: str) -> float:
    """Reduce a quantity over the heads of a layer. NaN is ignored."""
    statistic = {"mean": "mean", "least": "min", "largest": "max"}[WATCHED[name]]
    values = [x for r in records if (x := QUANTITIES[name].of(r, statistic)) is not None and not math.isnan(x)]
    if not values:
        return math.nan
    return {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}[statistic]


def sparkline(
    steps: Sequence[int], values: Sequence[float], width: int, low: float, high: float, log: bool, bars: str = BARS
) -> str:
    """Draw one character per range of steps, for the mean of its values; blank if there are none.

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
        # With fewer reports than characters, each value is repeated until the next one.
        previous = _bar(cell, low, high, log, bars) if cell else previous
        line += previous
    return line.ljust(width)


def _bar(cell: list[float], low: float, high: float, log: bool, bars: str) -> str:
    if any(math.isinf(x) for x in cell):
        return BROKEN
    known = [x for x in cell if not math.isnan(x)]
    if not known:
        return " "
    share = place_on_scale(min(max(sum(known) / len(known), low), high), low, high, log)
    return bars[min(len(bars) - 1, int(share * len(bars)))]


def _number(value: float) -> str:
    """Format with three significant digits in at most seven characters; a dash for NaN."""
    if math.isnan(value):
        return "–"
    return f"{value:.3f}" if 1e-2 <= abs(value) < 10 or value == 0 else f"{value:.3g}"


def _grouped(alerts: Iterable[Alert]) -> list[list[Alert]]:
    """Group the latest alerts by step, layer and kind, newest first."""
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
    """Show a run until Ctrl-C. With `once`, or if the console is not a terminal, print the current state and return."""
    once = once or not console.is_terminal
    watch = Watch(path)
    if once and not watch.path.exists():
        reject("path", str(path), "an existing file of records")
    bars = BARS if console.encoding.lower().startswith("utf") else PLAIN
    watch.update()
    if watch.is_foreign:
        reject("path", str(path), RECORDS)
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
