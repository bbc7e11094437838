"""Terminal view of a run: its state, its lasting events, and a line per layer with sparklines over steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from attnscale.diagnostics.records.file import ACCEPTED, End, Region, Tail
from attnscale.diagnostics.records.record import Event, RunInfo, clean
from attnscale.diagnostics.records.report import Report
from attnscale.diagnostics.views.display import QUANTITIES, WATCHED, place_on_scale, short_names
from attnscale.diagnostics.views.flatten import Extreme, overview
from attnscale.errors import reject

BARS = "▁▂▃▄▅▆▇█"
PLAIN = ".:-=+*#@"  # for terminals without Unicode
BROKEN = "×"
NUMBER = 8  # width of a number, including the gap before it
NARROW = 6  # minimum width of a sparkline
SHOWN_EVENTS = 8
MOST_EVENTS = 256  # kept in memory
WORST = "max_logit"  # decides which head of a layer is shown
LATE = 3.0  # usual intervals without a report after which a run is called silent
LEAST_LATE = 30.0  # seconds


class Kept(NamedTuple):
    """What is kept of a report: its number in the file, and the values of each layer."""

    step: int
    number: int
    time: float | None
    layers: dict[str, dict[str, float]]


class History:
    """History of a run in bounded memory: with many steps, only every second, fourth, … step is kept.

    `series(layer, quantity)` returns the values at `steps` for a quantity of `WATCHED`. The last step is the latest
    report. Reports that are not kept are never decoded.

    Args:
        read: decodes these quantities of a report; None if it cannot be read.
        most_steps: number of steps to keep.
    """

    def __init__(self, read: Callable[[Region, Collection[str]], Report | None], most_steps: int = 256) -> None:
        self.most_steps = most_steps
        self.run: RunInfo | None = None
        self.end: End | None = None
        self.report: Report | None = None  # the latest
        self.open: dict[int, Event] = {}
        self.over = 0  # events
        self.heads: dict[str, int] = {}
        self.reports = 0  # steps seen, the latest included
        self._first = 0  # index of the first report of this start of the run
        self._read = read
        self._stride = 1
        self._kept: list[Kept] = []
        self._waiting: Region | None = None  # the latest report, not yet decoded
        self._latest: Kept | None = None

    @property
    def layers(self) -> list[str]:
        """Layers in order of first appearance."""
        return list(self.heads)

    @property
    def steps(self) -> list[int]:
        """The kept steps and the latest step."""
        return [kept.step for kept in self._all]

    @property
    def events(self) -> list[Event]:
        """Events that are not over, critical ones first."""
        return sorted(self.open.values(), key=lambda event: (event.severity != "critical", event.start))

    @property
    def alerting(self) -> set[str]:
        """Layers with an event that is not over."""
        return {layer for event in self.open.values() for layer, _ in event.places}

    @property
    def interval(self) -> float | None:
        """Seconds between the last reports; None if unknown."""
        if len(self._all) < 2 or self._all[-2].number < self._first:
            return None
        before, last = self._all[-2:]
        if before.time is None or last.time is None or last.time <= before.time:
            return None
        return (last.time - before.time) / (last.number - before.number)

    def add(self, items: Iterable[RunInfo | Region | Event | End]) -> None:
        """Add new items of a file."""
        for item in items:
            if isinstance(item, Event):
                self._add_event(item)
            elif isinstance(item, RunInfo):  # a resumed process finds its events anew
                self.run, self.end, self._first = item, None, self.reports
                self.open.clear()
            elif isinstance(item, End):
                self.end = item
            elif self._waiting is not None and (item.step, item.start) == (self._waiting.step, self._waiting.stop):
                self._waiting = self._waiting._replace(stop=item.stop)  # more lines of the same report of an old file
            else:
                self._begin(item)
        if self._waiting is not None:
            self._decode()

    def series(self, layer: str, quantity: str) -> list[float]:
        """Return one value per step of `steps`; NaN if missing."""
        return [kept.layers.get(layer, {}).get(quantity, math.nan) for kept in self._all]

    def latest(self, layer: str) -> dict[str, float]:
        """Return the values of a layer in the latest report; empty if the layer is missing."""
        return {} if self._latest is None else self._latest.layers.get(layer, {})

    @property
    def _all(self) -> list[Kept]:
        return self._kept if self._latest is None else [*self._kept, self._latest]

    def _begin(self, region: Region) -> None:
        """Start a report. The previous report is decoded and kept if its index is a multiple of the stride."""
        if self._waiting is not None and (self.reports - 1) % self._stride == 0:
            self._decode()
        if self._latest is not None:
            if self._latest.number % self._stride == 0 and self._latest.step < region.step:
                self._kept.append(self._latest)
            self._latest = None
        # After a resume from a checkpoint, later steps run again.
        self._kept = [kept for kept in self._kept if kept.step < region.step]
        if len(self._kept) >= self.most_steps:
            del self._kept[1::2]
            self._stride *= 2
        self._waiting, self.end = region, None
        self.reports += 1

    def _decode(self) -> None:
        region, self._waiting = self._waiting, None
        try:
            report = None if region is None else self._read(region, WATCHED)
        except OSError:  # the file was removed
            report = None
        if report is None:
            return
        self.report = report
        layers: dict[str, dict[str, float]] = {}
        for name, reduction in WATCHED.items():
            quantity = QUANTITIES[name]
            statistic = {"mean": "mean", "least": "min", "largest": "max"}[reduction]
            plane = report.plane(quantity.phase, name, statistic)
            values = [math.nan] * len(report.places) if plane is None else plane.tolist()
            column = 0
            for layer, heads, _ in report.layers:
                found = [x for x in values[column : column + len(heads)] if not math.isnan(x)]
                column += len(heads)
                layers.setdefault(layer, {})[name] = _reduce(found, statistic)
                self.heads[layer] = max(self.heads.get(layer, 0), *(head + 1 for head in heads))
        self._latest = Kept(report.step, self.reports - 1, report.time, layers)

    def _add_event(self, event: Event) -> None:
        before = self.open.pop(event.number, None)
        if event.status == "over":
            self.over += 1
            return
        if before is not None and event.status == "begun":  # an old file has a message for each head
            places = dict(before.places)
            for layer, heads in event.places:
                places[layer] = tuple(sorted({*places.get(layer, ()), *heads}))
            event = replace(event, start=before.start, places=tuple(places.items()))
        self.open[event.number] = event
        if len(self.open) > MOST_EVENTS:
            del self.open[next(iter(self.open))]


class Watch:
    """Current state of a run: `update` reads new lines, `view` renders the state."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            reject("path", str(path), "a file of reports, not a folder")
        self.tail = Tail(self.path)
        self.history = History(self.tail.read)

    def update(self) -> None:
        """Read new lines of the file. A new file replaces the history."""
        restarts = self.tail.restarts
        found = list(self.tail.new())
        if self.tail.restarts != restarts:
            self.history = History(self.tail.read)
        self.history.add(found)

    @property
    def is_foreign(self) -> bool:
        """Whether the file has content but no reports."""
        return not self.history.layers and self.tail.foreign

    def view(self, width: int, height: int | None = None, *, bars: str = BARS) -> RenderableType:
        """Render a table of this width, with all layers or as many as fit into the height."""
        name = clean(str(self.path))
        if self.is_foreign:
            return Text(f"{name}: not {ACCEPTED}", style="yellow")
        if self.history.report is None:
            waiting = "no reports yet" if self.path.exists() else "the file does not exist yet"
            return Text(f"{name}: {waiting}", style="dim")
        events = self._events()
        room = None if height is None else max(1, height - 7 - len(events) - bool(events))
        shown = self._choose(room)
        parts: list[RenderableType] = [self._title(), self._state(), self._summary(self.history.report), *events]
        parts += [Text(), self._table(shown, width, bars)]
        missing = len(self.history.layers) - len(shown)
        if missing:
            parts.append(Text(f"{missing} more layers; --once shows all", style="dim"))
        return Group(*parts)

    def _title(self) -> Text:
        history = self.history
        heads = sorted(set(history.heads.values()))
        each = f"{heads[0]}" if len(heads) == 1 else f"{heads[0]}–{heads[-1]}"
        title = _line(f"step {history.steps[-1]}", style="bold")
        if history.report is not None and history.report.loss is not None:
            title.append(f" · loss {_number(history.report.loss)}")
        title.append(f" · {history.reports} reports · {len(history.layers)} layers × {each} heads", style="not bold")
        title.append(f" · {clean(str(self.path))}", style="not bold dim")  # last, because the end is truncated first
        return title

    def _state(self) -> Text:
        """Whether the run is alive, and what is missing from the file."""
        history, age = self.history, _age(self.path)
        usual = "" if history.interval is None else f"; usually one every {_duration(history.interval)}"
        if history.end is not None:
            text = _line(f"closed {_duration(age)} ago", style="dim")
        elif history.interval is not None and age > max(LATE * history.interval, LEAST_LATE):
            text = _line(f"silent for {_duration(age)}{usual}", style="bold yellow")
        else:
            state = "last report" if history.interval is None else "running: last report"
            text = _line(f"{state} {_duration(age)} ago{usual}", style="green")
        dropped = history.end.dropped if history.end is not None else history.report.dropped if history.report else 0
        for number, what in ((dropped, "reports dropped"), (self.tail.skipped, "unreadable lines")):
            if number:
                text.append(f" · {number} {what}", style="not bold yellow")
        if self.tail.unknown:
            text.append(" · written by a newer attnscale", style="not bold yellow")
        return text

    def _summary(self, report: Report) -> Text:
        """The largest logit and the smallest gain of the model with their heads, and the mean entropy."""
        short = self._short_names()

        def at(extreme: Extreme) -> str:
            return f"{_number(extreme.value)} at {short[extreme.layer]} h{extreme.head}"

        found = overview(report)
        parts = [] if found.max_logit is None else [f"max logit {at(found.max_logit)}"]
        parts += [] if found.entropy_share is None else [f"H / ln n {_number(found.entropy_share)}"]
        parts += [] if found.min_gain is None else [f"min gain {at(found.min_gain)}"]
        return _line(" · ".join(parts))

    def _events(self) -> list[RenderableType]:
        """A heading and a line per event that is not over: cause, first step, places, message, advice."""
        events, over, short = self.history.events, self.history.over, self._short_names()
        past = f", {over} over" if over else ""
        if not events:
            return [_line(f"no open events{past}", style="dim")] if over else []
        lines: list[RenderableType] = [
            _line(f"{len(events)} open event{'s' if len(events) > 1 else ''}{past}:", style="bold red")
        ]
        for event in events[:SHOWN_EVENTS]:
            style = "bold red" if event.severity == "critical" else "red"
            where = replace(
                event, places=tuple((short.get(layer, layer), heads) for layer, heads in event.places)
            ).where
            parts = (f"! {event.cause}", f"since step {event.start}", where, event.message, event.advice)
            lines.append(_line("  ".join(filter(None, parts)), style=style))
        if len(events) > SHOWN_EVENTS:
            lines.append(_line(f"! {len(events) - SHOWN_EVENTS} more", style="red"))
        return lines

    def _short_names(self) -> dict[str, str]:
        return dict(zip(self.history.layers, short_names(self.history.layers), strict=True))

    def _choose(self, room: int | None) -> list[str]:
        """Select layers: those with an open event, then evenly spaced others; in model order."""
        layers = self.history.layers
        if room is None or len(layers) <= room:
            return layers
        alerting = self.history.alerting
        wanted = [layer for layer in layers if layer in alerting][:room]
        others = [layer for layer in layers if layer not in alerting]
        left = min(room - len(wanted), len(others))
        wanted += [others[index * len(others) // left] for index in range(left)]
        return [layer for layer in layers if layer in set(wanted)]

    def _table(self, layers: list[str], width: int, bars: str) -> Table:
        """Build a table with as many sparklines as fit; if none fits, with as many numbers."""
        names, alerting = short_names(layers), self.history.alerting
        widest = max(5, min(max(map(len, names)) + 2 * bool(alerting), 28, width // 3))
        worst = self._worst_heads()
        room = width - widest - 2 - 6 * bool(worst)
        fitting = next((number for number in range(len(WATCHED), 0, -1) if room // number >= NARROW + NUMBER + 2), 0)
        spark = min(room // fitting - NUMBER - 2, 48) if fitting else 0
        shown = [*WATCHED][: fitting or max(1, room // (NUMBER + 4))]
        cell = spark + NUMBER if fitting else NUMBER + 2
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("layer", width=widest, no_wrap=True, overflow="ellipsis")
        for quantity in shown:
            title, over_heads = QUANTITIES[quantity].title, WATCHED[quantity]
            long = title if over_heads == "largest" else f"{title} ({over_heads})"
            justify: Literal["left", "right"] = "left" if fitting else "right"
            heading = long if len(long) <= cell else title
            table.add_column(heading, width=cell, no_wrap=True, overflow="crop", justify=justify)
            if quantity == WORST and worst:
                table.add_column("head", width=4, justify="right")
        scales = {quantity: self._range(quantity) for quantity in shown}
        for layer, name in zip(layers, names, strict=True):
            red = layer in alerting
            cells = [Text(f"{name} !" if red else name, style="red" if red else "")]
            for quantity, scale in scales.items():
                values = self.history.series(layer, quantity)
                drawn = sparkline(self.history.steps, values, spark, *scale, bars)
                cells.append(Text.assemble((drawn, "cyan"), (f"{_number(values[-1]):>{NUMBER}}", "")))
                if quantity == WORST and worst:
                    cells.append(Text(str(worst.get(layer, ""))))
            table.add_row(*cells)
        return table

    def _worst_heads(self) -> dict[str, int]:
        """Return the head with the largest logit of each layer in the latest report."""
        report = self.history.report
        plane = None if report is None else report.plane("forward", WORST, "max")
        if report is None or plane is None:
            return {}
        found: dict[str, tuple[float, int]] = {}
        for (layer, head), value in zip(report.places, plane.tolist(), strict=True):
            if not math.isnan(value) and value > found.get(layer, (-math.inf, 0))[0]:
                found[layer] = value, head
        return {layer: head for layer, (_, head) in found.items()}

    def _range(self, quantity: str) -> tuple[float, float, bool]:
        """Return the ends of a sparkline scale and whether it is logarithmic; the same for all layers."""
        shown = QUANTITIES[quantity]
        if shown.low is not None and shown.high is not None:
            return shown.low, shown.high, False
        values = [x for layer in self.history.layers for x in self.history.series(layer, quantity) if math.isfinite(x)]
        low, high = min(values, default=0.0), max(values, default=0.0)
        return low, high, shown.log and low > 0


def _reduce(values: list[float], statistic: str) -> float:
    """Reduce the values of the heads of a layer; NaN if there are none."""
    if not values:
        return math.nan
    return sum(values) / len(values) if statistic == "mean" else min(values) if statistic == "min" else max(values)


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


def _line(text: str, style: str = "") -> Text:
    """Return one line of text that is truncated to the width of the terminal."""
    return Text(clean(text), style=style, no_wrap=True, overflow="ellipsis")


def _age(path: Path) -> float:
    """Return the seconds since the last write to a file."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return 0.0


def _duration(seconds: float) -> str:
    """Format a duration with one unit.

    >>> [_duration(seconds) for seconds in (0.4, 59, 90, 7200, 200_000)]
    ['0.4 s', '59 s', '2 min', '2 h', '2 d']
    """
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"


def show(path: str | Path, console: Console, *, once: bool = False, interval: float = 1.0) -> None:
    """Show a run until Ctrl-C. With `once`, or if the console is not a terminal, print the current state and return."""
    once = once or not console.is_terminal
    watch = Watch(path)
    if once and not watch.path.exists():
        reject("path", str(path), "an existing file of reports")
    bars = BARS if console.encoding.lower().startswith("utf") else PLAIN
    watch.update()
    if watch.is_foreign:
        reject("path", str(path), ACCEPTED)
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
