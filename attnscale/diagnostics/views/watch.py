"""The terminal view of a run: a line per layer with sparklines over steps, and the alerts below."""

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
PLAIN = ".:-=+*#@"  # for a terminal without Unicode
BROKEN = "×"
NUMBER = 8  # characters of a number and the gap before it
NARROW = 6  # the shortest useful sparkline
SHOWN_ALERTS = 8
RECORDS = "a file of records, lines of JSON that a JsonlSink writes"


class History:
    """Takes records and alerts as they come. Memory is bounded: of many steps every second, fourth, … is kept.

    `series(layer, quantity)` are the values at `steps`, the last of which is the latest report, for each quantity of
    `WATCHED`.
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
        """In the order they first appeared."""
        return list(self.heads)

    @property
    def steps(self) -> list[int]:
        """Those that are kept, and the latest."""
        kept = [step for step, _ in self._kept]
        return kept if self._latest is None else [*kept, self._latest[0]]

    def add(self, items: Iterable[Record | Alert]) -> None:
        """Take what has come."""
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
        """One value per step of `steps`; NaN where the layer has none."""
        values = [layers.get(layer, {}).get(quantity, math.nan) for _, layers in self._kept]
        return values if self._latest is None else [*values, self.latest(layer).get(quantity, math.nan)]

    def latest(self, layer: str) -> dict[str, float]:
        """The layer's numbers in the latest report; empty where it is not in it."""
        records = [] if self._latest is None else self._latest[1].get(layer, [])
        return {name: _join(records, name) for name in WATCHED} if records else {}

    def _begin(self, step: int) -> tuple[int, dict[str, list[Record]]]:
        """Start a report, after keeping the latest one if it is one to keep."""
        if self._latest is not None:
            before, layers = self._latest
            if (self.reports - 1) % self._stride == 0 and before < step:
                self._kept.append((before, {layer: self.latest(layer) for layer in layers}))
            if before > step:  # resumed from a checkpoint: later steps are repeated
                self._kept = [kept for kept in self._kept if kept[0] < step]
        self.alerting.clear()
        self.reports += 1
        if len(self._kept) >= self.most_steps:
            del self._kept[1::2]
            self._stride *= 2
        return step, {}


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

    @property
    def is_foreign(self) -> bool:
        """Whether the file has content, none of which is a record."""
        return not self.history.layers and self.tail.foreign

    def view(self, width: int, height: int | None = None, *, bars: str = BARS) -> RenderableType:
        """A table of this width, of all layers or as many as fit into the height."""
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
            parts.append(Text(f"{missing} more layers without an alert now; --once shows all", style="dim"))
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
        """As many quantities as fit with a sparkline each; where none does, only the number of one."""
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
        """The scale of a sparkline, the same for all layers: its ends, and whether it is logarithmic."""
        shown = QUANTITIES[quantity]
        if shown.low is not None and shown.high is not None:
            return shown.low, shown.high, False
        values = [x for layer in self.history.layers for x in self.history.series(layer, quantity) if math.isfinite(x)]
        low, high = min(values, default=0.0), max(values, default=0.0)
        return low, high, shown.log and low > 0


def _join(records: Iterable[Record], name: str) -> float:
    """One number of a layer from those of its heads; NaN does not count."""
    statistic = {"mean": "mean", "least": "min", "largest": "max"}[WATCHED[name]]
    values = [x for r in records if (x := QUANTITIES[name].of(r, statistic)) is not None and not math.isnan(x)]
    if not values:
        return math.nan
    return {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}[statistic]


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
    share = place_on_scale(min(max(sum(known) / len(known), low), high), low, high, log)
    return bars[min(len(bars) - 1, int(share * len(bars)))]


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
