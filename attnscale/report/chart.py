"""Charts as data: axes, series, marks and number formats. `drawing` renders them as SVG or PNG.

A policy has a colour, a dash pattern and a marker, so that no chart depends on colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

MINUS = "\N{MINUS SIGN}"

# Okabe-Ito palette without yellow, which is hard to see on white. On the page the first colour is that of the text, and
# the dark theme has lighter colours (evaluation.css).
PALETTE = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ((), (7, 3), (2, 3), (9, 3, 2, 3), (4, 2))
MARKERS = "os^DvPXd"  # matplotlib names


def short(value: float, digits: int = 3) -> str:
    """Format a number with significant digits, avoiding exponents where possible.

    >>> short(0.123456), short(-2.5), short(16384.0), short(0.0), short(1e-7)
    ('0.123', '−2.5', '16384', '0', '1e−07')
    """
    whole = 10**digits <= abs(value) < 1e7
    return (f"{value:.0f}" if whole else f"{value:.{digits}g}").replace("-", MINUS).replace("e+", "e")


def points(share: float) -> str:
    """Format a difference of shares in percentage points, with a decimal only below one point.

    >>> points(0.482), points(-0.02), points(0.004)
    ('48', '−2', '0.4')
    """
    scaled = 100 * share
    text = f"{scaled:.0f}" if abs(scaled) >= 0.95 else f"{scaled:.1f}"
    return (text.removesuffix(".0").replace("-0", "0") if float(text) == 0 else text).replace("-", MINUS)


def percent(share: float) -> str:
    """Format a share in per cent.

    >>> percent(0.7), percent(0.004), percent(0.0)
    ('70 %', '0.4 %', '0 %')
    """
    return f"{points(share)} %"


def bits(value: float) -> str:
    """Format bits per byte with two decimals, or three for small values.

    >>> bits(1.2), bits(-0.0001), bits(-0.0254)
    ('1.20', '0.00', '−0.025')
    """
    text = f"{value:.3f}" if 0.0005 <= abs(value) < 0.0995 else f"{value:.2f}"
    return (text.lstrip("-") if float(text) == 0 else text).replace("-", MINUS)


class Axis(NamedTuple):
    """An axis; the label contains the unit, and ticks are ascending."""

    label: str
    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Return the relative position of a value, clamped to 0 to 1."""
        if self.log:
            place = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            place = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, place))

    def tick_labels(self) -> list[str]:
        return [short(tick, 7) for tick in self.ticks]


def linear(label: str, values: Iterable[float], *, least: float | None = None, most: float | None = None) -> Axis:
    """Return a linear axis around the values, with a margin limited to `least` and `most`.

    >>> linear("accuracy", [0.1, 0.9], least=0, most=1).tick_labels()
    ['0', '0.2', '0.4', '0.6', '0.8', '1']
    """
    known = list(values) or [0.0, 1.0]
    low, high = min(known), max(known)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    low = max(low - margin, -math.inf if least is None else least)
    high = min(high + margin, math.inf if most is None else most)
    if least == 0 and most == 1:
        low, high = 0.0, 1.0  # shares always use the full range, so that charts are comparable
    if high <= low:
        high = low + 1.0
    rough = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = size * next(factor for factor in (1, 2, 5, 10) if factor * size >= 0.999 * rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis(label, low, high, False, tuple(float(f"{place * step:.12g}") for place in range(first, last + 1)))


def logarithmic(label: str, values: Iterable[float]) -> Axis:
    """Return a logarithmic axis around the positive values, with ticks at powers of ten, and more on short axes."""
    known = [value for value in values if value > 0] or [1.0]
    low, high = min(known) / 1.25, max(known) * 1.25
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if high / low < 12 else (1.0, 2.0, 5.0) if high / low < 200 else (1.0,)
    ticks = [float(f"{step}e{power}") for power in powers for step in steps]
    inside = [tick for tick in ticks if low <= tick <= high]
    every = -(-len(inside) // 7) if len(steps) == 1 else 1
    return Axis(label, low, high, True, tuple(inside[::every]))


def lengths_axis(label: str, lengths: Iterable[float]) -> Axis:
    """Return a logarithmic axis with at most seven ticks at measured lengths, including the last."""
    known = sorted(set(lengths))
    every = -(-len(known) // 7)
    margin = (known[-1] / known[0]) ** 0.02 if known[-1] > known[0] else 2.0
    return Axis(label, known[0] / margin, known[-1] * margin, True, tuple(known[::-1][::every][::-1]))


class Style(NamedTuple):
    """Style of a policy. Colours, markers and dashes cycle with periods 7, 8 and 5: 280 combinations."""

    colour: int
    marker: str
    dash: tuple[int, ...]


def style(index: int) -> Style:
    """Return the style of the policy at an index; `constant` has index 0, solid and black.

    >>> style(0)
    Style(colour=0, marker='o', dash=())
    """
    return Style(index % len(PALETTE), MARKERS[index % len(MARKERS)], DASHES[index % len(DASHES)])


Place = tuple[float, float]


class Point(NamedTuple):
    """A point with optional intervals along y (low, high) and x (left, right); `tip` is its tooltip."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    left: float | None = None
    right: float | None = None
    tip: str = ""


class Series(NamedTuple):
    """Points of one policy; `joined` draws a line, `shaded` draws the intervals as a band."""

    label: str
    style: Style
    points: Sequence[Point]
    joined: bool = True
    shaded: bool = True

    def band(self) -> list[tuple[float, float, float]]:
        """Return (x, low, high) of points with an interval; empty for fewer than two."""
        known = [(p.x, p.low, p.high) for p in self.points if p.low is not None and p.high is not None]
        return known if self.shaded and len(known) > 1 else []

    def whiskers(self) -> Iterator[tuple[Place, Place]]:
        """Yield the ends of each interval of a series without a band."""
        for point in () if self.shaded else self.points:
            if point.low is not None and point.high is not None:
                yield (point.x, point.low), (point.x, point.high)
            if point.left is not None and point.right is not None:
                yield (point.left, point.y), (point.right, point.y)


class Mark(NamedTuple):
    """A dashed line across the chart at x or y."""

    label: str
    x: float | None = None
    y: float | None = None


class Chart(NamedTuple):
    """A chart. Marks outside the axes are not drawn."""

    title: str
    series: Sequence[Series]
    x: Axis
    y: Axis
    marks: Sequence[Mark] = ()

    def vertical_marks(self) -> list[tuple[str, float]]:
        return [(one.label, one.x) for one in self.marks if one.x is not None and self.x.low <= one.x <= self.x.high]

    def horizontal_marks(self) -> list[tuple[str, float, bool]]:
        """Return label, y, and whether to place the label at the right end, where points are farther away."""
        shown = [(one.label, one.y) for one in self.marks if one.y is not None and self.y.low <= one.y <= self.y.high]
        return [(label, y, self._room(y, right=False) <= self._room(y, right=True)) for label, y in shown]

    def _room(self, y: float, right: bool) -> float:
        half = [p for one in self.series for p in one.points if (self.x.share(p.x) >= 0.5) == right]
        return min((abs(self.y.share(p.y) - self.y.share(y)) for p in half), default=1.0)
