"""Renders charts as SVG for pages and as PNG for READMEs.

SVG colours are classes of evaluation.css, so that one SVG serves both themes.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from attnscale._util.optional import need
from attnscale.diagnostics.views.display import COLOURS
from attnscale.report.chart import PALETTE, Chart, Place, Point, Series, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 460, 330
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 38, 46.0  # TOP has room for the unit and for the labels of marks
LETTER, LINE = 7.0, 14.0  # width and height of a letter in labels
FAR = 40  # distance to the margin beyond which a leader line to a label would cross the chart
LONGEST = 14  # maximum letters of a label at the end of a line; the legend has the full name
SHAPES = {  # SVG paths of the markers
    "o": "M-4 0A4 4 0 1 1 4 0A4 4 0 1 1-4 0Z",
    "s": "M-4-4H4V4H-4Z",
    "^": "M0-5L5 4H-5Z",
    "D": "M0-5.5L5.5 0L0 5.5L-5.5 0Z",
    "v": "M0 5L5-4H-5Z",
    "P": "M-1.7-5H1.7V-1.7H5V1.7H1.7V5H-1.7V1.7H-5V-1.7H-1.7Z",
    "X": "M-5-3L-3-5L0-2L3-5L5-3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0Z",
    "d": "M-1.5-6H1.5V6H-1.5Z",
}

PIXELS = 200  # per inch: 9 inches are 1800 pixels, twice the width on GitHub
QUIET = "#46505e"
LOOK = {
    "font.size": 11.0,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a94a3",
    "axes.titlesize": 12.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 18.0,  # room for the labels of vertical marks
    "axes.grid": True,
    "grid.color": "#e4e8ee",
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "legend.frameon": False,
}


def svg(chart: Chart) -> str:
    """Render a chart as SVG, with line labels to the right of the last points."""
    named = [one for one in chart.series if one.joined and one.points] if len(chart.series) <= 10 else []
    room = LETTER * max((len(_cut(one.label)) for one in named), default=0) + (18 if named else 0)
    frame = _Frame(chart, WIDTH - RIGHT - room)
    parts = [*frame.axes(), *frame.marks()]
    for one in chart.series:
        parts += frame.intervals(one)
    parts += [frame.line(one) for one in chart.series if one.joined]
    parts += [frame.marker(one, point) for one in chart.series for point in one.points]
    parts += frame.names(named)
    return _figure(chart.title, WIDTH, HEIGHT, parts)


def swatch(style: Style) -> str:
    """Render a line sample with its marker, for a legend."""
    inner = f'<path class="line" d="M1 7H35"{_dash(style)}/>{_marker(style, 18, 7)}'
    return f'<svg class="swatch p{style.colour}" viewBox="0 0 36 14" aria-hidden="true">{inner}</svg>'


def grid(label: str, rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[float | None]]) -> str:
    """Render a heat map of shares as SVG, with percentages in the cells; missing cells are empty."""
    left, size, height = 12 + LETTER * max(map(len, rows)), 46.0, 24.0
    parts = []
    for r, (row, values) in enumerate(zip(rows, cells, strict=True)):
        middle = height * (r + 0.5) + 4
        parts.append(_text(row, left - 6, middle, "end"))
        for c, value in enumerate(values):
            if value is None:
                continue
            share = min(1.0, max(0.0, value))
            box = f'x="{left + c * size:.1f}" y="{r * height:.1f}" width="{size - 1}" height="{height - 1}"'
            parts.append(f'<rect {box} fill="{_viridis(share)}"/>')
            ink = f' style="fill:{"#fff" if share < 0.55 else "#000"}"'
            parts.append(_text(f"{100 * share:.0f}", left + (c + 0.5) * size, middle, "middle", ink))
    bottom = height * len(rows) + 15
    parts += [_text(column, left + (c + 0.5) * size, bottom, "middle") for c, column in enumerate(columns)]
    return _figure(label, left + size * len(columns) + 6, bottom + 7, parts)


class _Frame:
    """The plot area of a chart: maps values to SVG coordinates."""

    def __init__(self, chart: Chart, right: float) -> None:
        self.chart, self.x, self.y, self.right, self.bottom = chart, chart.x, chart.y, right, HEIGHT - BOTTOM

    def at(self, x: float, y: float) -> Place:
        across, up = self.x.share(x), self.y.share(y)
        return LEFT + across * (self.right - LEFT), self.bottom - up * (self.bottom - TOP)

    def axes(self) -> Iterator[str]:
        for tick, text in zip(self.y.ticks, self.y.tick_labels(), strict=True):
            _, y = self.at(self.x.low, tick)
            yield f'<path class="grid" d="M{LEFT} {y:.1f}H{self.right:.1f}"/>' + _text(text, LEFT - 6, y + 4, "end")
        for tick, text in zip(self.x.ticks, self.x.tick_labels(), strict=True):
            x, _ = self.at(tick, self.y.low)
            yield f'<path class="axis" d="M{x:.1f} {self.bottom}v4"/>' + _text(text, x, self.bottom + 17, "middle")
        yield f'<path class="axis" d="M{LEFT} {self.bottom}H{self.right:.1f}"/>'
        yield _text(self.x.label, (LEFT + self.right) / 2, HEIGHT - 8, "middle", ' class="name"')
        yield _text(self.y.label, 4, 13, "start", ' class="name"')

    def marks(self) -> Iterator[str]:
        for label, at in self.chart.vertical_marks():
            x, _ = self.at(at, self.y.low)
            yield f'<path class="mark" d="M{x:.1f} {TOP - 3}V{self.bottom}"/>'
            yield _text(label, x, TOP - 6, "end" if self.x.share(at) > 0.5 else "start", ' class="mark"')
        for label, at, right in self.chart.horizontal_marks():
            _, y = self.at(self.x.low, at)
            yield f'<path class="mark" d="M{LEFT} {y:.1f}H{self.right:.1f}"/>'
            end, anchor = (self.right - 3, "end") if right else (LEFT + 3, "start")
            yield _text(label, end, y - 4, anchor, ' class="mark"')

    def intervals(self, one: Series) -> Iterator[str]:
        if band := one.band():
            upper, lower = [self.at(x, high) for x, _, high in band], [self.at(x, low) for x, low, _ in band]
            yield f'<polygon class="band p{one.style.colour}" points="{_places([*upper, *reversed(lower)])}"/>'
        for ends in one.whiskers():
            places = _places(self.at(*end) for end in ends)
            yield f'<polyline class="whisker p{one.style.colour}" points="{places}"/>'

    def line(self, one: Series) -> str:
        places = _places(self.at(point.x, point.y) for point in one.points)
        return f'<polyline class="line p{one.style.colour}" points="{places}"{_dash(one.style)}/>'

    def marker(self, one: Series, point: Point) -> str:
        inner = _marker(one.style, *self.at(point.x, point.y))
        return f'<g class="marker p{one.style.colour}" data-tip="{escape(point.tip)}">{inner}</g>'

    def names(self, named: Sequence[Series]) -> Iterator[str]:
        """Yield line labels: in the right margin with leader lines, or next to a point far from the margin."""
        ends = []
        for one in named:
            x, y = self.at(one.points[-1].x, one.points[-1].y)
            if x < self.right - FAR:
                yield _text(_cut(one.label), x + 8, y - 5, "start", f' class="end p{one.style.colour}"')
            else:
                ends.append((y, x, one))
        ends.sort(key=lambda end: end[:2])
        edge = self.right + 14
        for (y, x, one), place in zip(ends, _apart([y for y, _, _ in ends], TOP + 4, self.bottom), strict=True):
            yield f'<path class="lead p{one.style.colour}" d="M{x + 5:.1f} {y:.1f}L{edge - 2:.1f} {place:.1f}"/>'
            yield _text(_cut(one.label), edge, place + 4, "start", f' class="end p{one.style.colour}"')


def _apart(wanted: Sequence[float], low: float, high: float) -> list[float]:
    """Return ascending positions at least one line apart, close to the wanted ones (one pass down, one pass up)."""
    found = list(wanted)
    for index in range(1, len(found)):
        found[index] = max(found[index], found[index - 1] + LINE)
    limit = high
    for index in reversed(range(len(found))):
        found[index] = max(low, min(found[index], limit))
        limit = found[index] - LINE
    return found


def _text(text: str, x: float, y: float, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _marker(style: Style, x: float, y: float) -> str:
    return f'<path class="dot" transform="translate({x:.1f} {y:.1f})" d="{SHAPES[style.marker]}"/>'


def _dash(style: Style) -> str:
    return f' stroke-dasharray="{" ".join(map(str, style.dash))}"' if style.dash else ""


def _places(points: Iterable[Place]) -> str:
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
    # Limits the scale, so that letters have about the same size in all figures.
    box = f'viewBox="0 0 {width:g} {height:g}" style="max-width: {width:g}px" role="img" aria-label="{escape(label)}"'
    return f'<svg class="figure" {box}>{"".join(parts)}</svg>'


def png(*charts: Chart) -> bytes:
    """Render charts side by side as PNG, 9 inches wide, with one legend."""
    matplotlib, figures = (need(name, "pictures", "report") for name in ("matplotlib", "matplotlib.figure"))
    file = io.BytesIO()
    with matplotlib.rc_context(LOOK):
        figure = figures.Figure(figsize=(9, 4.6 if len(charts) == 1 else 4), layout="constrained")
        for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
            _plot(axes, chart)
        lines = {line.get_label(): line for axes in figure.axes for line in axes.get_legend_handles_labels()[0]}
        rows = -(-len(lines) // 5)
        figure.legend(handles=list(lines.values()), loc="outside lower center", ncols=-(-len(lines) // rows))
        figure.savefig(file, format="png", dpi=PIXELS, facecolor="white", bbox_inches="tight", pad_inches=0.1)
    return file.getvalue()


def _plot(axes: Axes, chart: Chart) -> None:
    for one in chart.series:
        colour, dash = PALETTE[one.style.colour], (0, tuple(part / 2 for part in one.style.dash))
        if band := one.band():
            places, low, high = zip(*band, strict=True)
            axes.fill_between(places, low, high, color=colour, alpha=0.13, linewidth=0)
        for ends in one.whiskers():
            axes.plot(*zip(*ends, strict=True), color=colour, alpha=0.4, linewidth=0.8)
        axes.plot(
            [point.x for point in one.points],
            [point.y for point in one.points],
            label=one.label,
            color=colour,
            linestyle=(dash if one.style.dash else "-") if one.joined else "none",
            linewidth=1.8,
            marker=one.style.marker,
            markersize=5.5,
            markeredgecolor="white",
            markeredgewidth=0.6,
            alpha=1.0 if one.joined else 0.8,
            clip_on=False,
        )
    axes.set(title=chart.title, xlabel=chart.x.label, ylabel=chart.y.label)
    for own, axis, scaled, limited in (
        (axes.xaxis, chart.x, axes.set_xscale, axes.set_xlim),
        (axes.yaxis, chart.y, axes.set_yscale, axes.set_ylim),
    ):
        scaled("log" if axis.log else "linear")
        limited(axis.low, axis.high)
        own.set_ticks(axis.ticks, labels=axis.tick_labels())
        own.set_ticks([], minor=True)
    line: dict[str, Any] = {"color": QUIET, "linewidth": 1.0, "linestyle": "--"}
    note: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9.5, "color": QUIET}
    note["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    for label, x in chart.vertical_marks():
        axes.axvline(x, **line)
        side = "right" if chart.x.share(x) > 0.5 else "left"
        axes.annotate(label, (x, 1), xytext=(0, 4), xycoords=("data", "axes fraction"), ha=side, **note)
    for label, y, right in chart.horizontal_marks():
        axes.axhline(y, **line)
        side = "right" if right else "left"
        axes.annotate(label, (right, y), xytext=(0, 4), xycoords=("axes fraction", "data"), ha=side, **note)
