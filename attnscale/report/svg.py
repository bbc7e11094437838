"""Charts and small heat maps as SVG text. Colours are classes of evaluation.css, so one text serves both themes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from attnscale.diagnostics.views.display import COLOURS
from attnscale.report.axes import Axis, Style

WIDTH, HEIGHT = 460, 330
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 38, 46  # above the frame: a line for the unit, and one for the names of marks
LETTER, LINE = 7.0, 14.0  # width and height of a letter of the labels
FAR = 40  # from the margin: a line to a name there would cross the chart
LONGEST = 14  # letters of a label at the end of a line; the legend has the whole name


class Point(NamedTuple):
    """Intervals along y (low, high) and along x (left, right), where there are some."""

    x: float
    y: float
    tip: str = ""
    low: float | None = None
    high: float | None = None
    left: float | None = None
    right: float | None = None


class Series(NamedTuple):
    """Points of one policy; with `joined` a line connects them, with `bands` their intervals are shaded."""

    label: str
    style: Style
    points: Sequence[Point]
    joined: bool = True
    bands: bool = True


class Mark(NamedTuple):
    """A dashed line across the chart, at x or at y."""

    label: str
    x: float | None = None
    y: float | None = None


def chart(label: str, series: Sequence[Series], x: Axis, y: Axis, marks: Sequence[Mark] = (), ends: bool = True) -> str:
    """A chart; with `ends` the names of lines stand to the right of their last points."""
    names = [one for one in series if one.joined and one.points] if ends and len(series) <= 10 else []
    room = LETTER * max((len(_cut(one.label)) for one in names), default=0) + (18 if names else 0)
    frame = _Frame(x, y, WIDTH - RIGHT - room)
    places = [frame.at(point.x, point.y) for one in series for point in one.points]
    parts = [*frame.axes(), *(frame.mark(mark, places) for mark in marks)]
    parts += [frame.band(one) for one in series if one.bands]
    for one in series:
        parts += frame.whiskers(one) if not one.bands else []
    parts += [frame.line(one) for one in series if one.joined]
    parts += [frame.marker(one, point) for one in series for point in one.points]
    parts += frame.names(names)
    return _figure(label, WIDTH, HEIGHT, parts)


def swatch(style: Style) -> str:
    """A piece of line with its marker, for a legend."""
    inner = f'<path class="line" d="M1 7H35"{_dash(style)}/>{_marker(style, 18, 7)}'
    return f'<svg class="swatch p{style.colour}" viewBox="0 0 36 14" aria-hidden="true">{inner}</svg>'


def grid(label: str, rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[float | None]]) -> str:
    """A heat map of shares with their percentages in the cells; a missing one is left empty."""
    left, size, height = 12 + LETTER * max(map(len, rows)), 46.0, 24.0
    width = left + size * len(columns) + 6
    parts = []
    for r, (row, values) in enumerate(zip(rows, cells, strict=True)):
        middle = height * (r + 0.5) + 4
        parts.append(f'<text x="{left - 6:.1f}" y="{middle:.1f}" text-anchor="end">{escape(row)}</text>')
        for c, value in enumerate(values):
            if value is None:
                continue
            share = min(1.0, max(0.0, value))
            box = f'x="{left + c * size:.1f}" y="{r * height:.1f}" width="{size - 1}" height="{height - 1}"'
            ink = "#fff" if share < 0.55 else "#000"
            parts.append(f'<rect {box} fill="{_viridis(share)}"/>')
            place = f'x="{left + (c + 0.5) * size:.1f}" y="{middle:.1f}"'
            parts.append(f'<text {place} text-anchor="middle" style="fill:{ink}">{100 * share:.0f}</text>')
    for c, column in enumerate(columns):
        x, y = left + (c + 0.5) * size, height * len(rows) + 15
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(column)}</text>')
    return _figure(label, width, height * len(rows) + 22, parts)


class _Frame:
    """The rectangle of a chart: from numbers to places in it."""

    def __init__(self, x: Axis, y: Axis, right: float) -> None:
        self.x, self.y, self.right, self.bottom = x, y, right, float(HEIGHT - BOTTOM)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """In the picture; what lies outside the axes is moved to their ends."""
        across, up = (min(1.0, max(0.0, axis.share(value))) for axis, value in ((self.x, x), (self.y, y)))
        return LEFT + across * (self.right - LEFT), self.bottom - up * (self.bottom - TOP)

    def axes(self) -> Iterable[str]:
        for tick in self.y.ticks:
            _, y = self.at(self.x.low, tick.value)
            yield f'<path class="grid" d="M{LEFT} {y:.1f}H{self.right:.1f}"/>'
            yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick.text}</text>'
        for tick in self.x.ticks:
            x, _ = self.at(tick.value, self.y.low)
            yield f'<path class="axis" d="M{x:.1f} {self.bottom}v4"/>'
            yield f'<text x="{x:.1f}" y="{self.bottom + 17}" text-anchor="middle">{tick.text}</text>'
        yield f'<path class="axis" d="M{LEFT} {self.bottom}H{self.right:.1f}"/>'
        middle = (LEFT + self.right) / 2
        yield f'<text class="name" x="{middle:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(self.x.label)}</text>'
        yield f'<text class="name" x="4" y="13">{escape(self.y.label)}</text>'

    def mark(self, mark: Mark, points: Sequence[tuple[float, float]]) -> str:
        """The line, and its name where the fewest points are near."""
        if mark.x is not None:
            if not self.x.low <= mark.x <= self.x.high:
                return ""
            x, _ = self.at(mark.x, self.y.low)
            late = x > (LEFT + self.right) / 2
            place = f'x="{x:.1f}" y="{TOP - 6}" text-anchor="{"end" if late else "start"}"'
            path = f"M{x:.1f} {TOP - 3}V{self.bottom}"
        elif mark.y is not None and self.y.low <= mark.y <= self.y.high:
            _, y = self.at(self.x.low, mark.y)
            half = (LEFT + self.right) / 2
            left, right = (
                min((abs(place[1] - y) for place in points if (place[0] < half) == early), default=HEIGHT)
                for early in (True, False)
            )
            end, anchor = (LEFT + 3, "start") if left > right else (self.right - 3, "end")
            place = f'x="{end:.1f}" y="{y - 4:.1f}" text-anchor="{anchor}"'
            path = f"M{LEFT} {y:.1f}H{self.right:.1f}"
        else:
            return ""
        return f'<path class="mark" d="{path}"/><text class="mark" {place}>{escape(mark.label)}</text>'

    def band(self, one: Series) -> str:
        known = [(point.x, point.low, point.high) for point in one.points]
        upper = [self.at(x, high) for x, low, high in known if low is not None and high is not None]
        lower = [self.at(x, low) for x, low, high in known if low is not None and high is not None]
        if len(upper) < 2:
            return ""
        return f'<polygon class="band p{one.style.colour}" points="{_places([*upper, *reversed(lower)])}"/>'

    def whiskers(self, one: Series) -> Iterable[str]:
        for point in one.points:
            ends = []
            if point.low is not None and point.high is not None:
                ends.append((self.at(point.x, point.low), self.at(point.x, point.high)))
            if point.left is not None and point.right is not None:
                ends.append((self.at(point.left, point.y), self.at(point.right, point.y)))
            for pair in ends:
                yield f'<polyline class="whisker p{one.style.colour}" points="{_places(pair)}"/>'

    def line(self, one: Series) -> str:
        places = _places([self.at(point.x, point.y) for point in one.points])
        return f'<polyline class="line p{one.style.colour}" points="{places}"{_dash(one.style)}/>'

    def marker(self, one: Series, point: Point) -> str:
        x, y = self.at(point.x, point.y)
        tip = escape(point.tip)
        return f'<g class="marker p{one.style.colour}" data-tip="{tip}">{_marker(one.style, x, y)}</g>'

    def names(self, named: Sequence[Series]) -> Iterable[str]:
        """In the right margin, apart from each other, with a thin line to their point; beside it if that is far."""
        every = [(self.at(one.points[-1].x, one.points[-1].y), one) for one in named]
        for (x, y), one in every:
            if x < self.right - FAR:
                text = escape(_cut(one.label))
                yield f'<text class="end p{one.style.colour}" x="{x + 8:.1f}" y="{y - 5:.1f}">{text}</text>'
        ends = sorted((end for end in every if end[0][0] >= self.right - FAR), key=lambda end: end[0][1])
        places = _apart([y for (_, y), _ in ends], TOP + 4, self.bottom)
        for ((x, y), one), place in zip(ends, places, strict=True):
            text, edge = escape(_cut(one.label)), self.right + 14
            yield f'<path class="lead p{one.style.colour}" d="M{x + 5:.1f} {y:.1f}L{edge - 2:.1f} {place:.1f}"/>'
            yield f'<text class="end p{one.style.colour}" x="{edge:.1f}" y="{place + 4:.1f}">{text}</text>'


def _apart(wanted: Sequence[float], low: float, high: float) -> list[float]:
    """Rising places at least a line apart, as near to the wanted ones as one pass down and one pass up bring them."""
    found = list(wanted)
    for index in range(1, len(found)):
        found[index] = max(found[index], found[index - 1] + LINE)
    limit = high
    for index in reversed(range(len(found))):
        found[index] = max(low, min(found[index], limit))
        limit = found[index] - LINE
    return found


def _marker(style: Style, x: float, y: float) -> str:
    shapes = {
        "square": "M-4-4H4V4H-4Z",
        "triangle": "M0-5L5 4H-5Z",
        "diamond": "M0-5.5L5.5 0L0 5.5L-5.5 0Z",
        "down": "M0 5L5-4H-5Z",
        "plus": "M-1.7-5H1.7V-1.7H5V1.7H1.7V5H-1.7V1.7H-5V-1.7H-1.7Z",
        "cross": "M-5-3L-3-5L0-2L3-5L5-3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0Z",
        "bar": "M-1.5-6H1.5V6H-1.5Z",
    }
    if style.marker == "circle":
        return f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    return f'<path class="dot" transform="translate({x:.1f} {y:.1f})" d="{shapes[style.marker]}"/>'


def _dash(style: Style) -> str:
    return f' stroke-dasharray="{" ".join(map(str, style.dash))}"' if style.dash else ""


def _places(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _cut(label: str) -> str:
    return label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"


def _viridis(share: float) -> str:
    place = share * (len(COLOURS) - 1)
    left = min(int(place), len(COLOURS) - 2)
    ends = [[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in COLOURS[left : left + 2]]
    mixed = (round(one + (place - left) * (other - one)) for one, other in zip(*ends, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _figure(label: str, width: float, height: float, parts: Iterable[str]) -> str:
    # Never larger than drawn, so that letters have about the same size in all figures.
    box = f'viewBox="0 0 {width:g} {height:g}" style="max-width: {width:g}px" role="img" aria-label="{escape(label)}"'
    return f'<svg class="figure" {box}>{"".join(parts)}</svg>'
