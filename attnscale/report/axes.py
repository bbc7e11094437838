"""Axes of a chart, and the colour, dashes and marker of each policy: the same for SVG and for pictures.

No picture depends on colours alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from attnscale.report.words import short

# The palette of Okabe and Ito, without yellow, which does not show on white. In the page the first is the colour of
# text, and the dark theme has lighter ones (evaluation.css).
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ((), (7, 3), (2, 3), (9, 3, 2, 3), (4, 2))
MARKERS = ("circle", "square", "triangle", "diamond", "down", "plus", "cross", "bar")
MATPLOTLIB = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D", "down": "v", "plus": "P", "cross": "X"}


class Tick(NamedTuple):
    """A place on an axis and what is written there."""

    value: float
    text: str


class Axis(NamedTuple):
    """`label` has the unit; ticks rise."""

    label: str
    low: float
    high: float
    log: bool
    ticks: tuple[Tick, ...]

    def share(self, value: float) -> float:
        """Where a value is, from 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear(label: str, values: Iterable[float], *, least: float | None = None, most: float | None = None) -> Axis:
    """Around the values, with a margin that does not go beyond the possible ones.

    >>> [tick.text for tick in linear("accuracy", [0.1, 0.9], least=0, most=1).ticks]
    ['0', '0.2', '0.4', '0.6', '0.8', '1']
    """
    known = list(values) or [0.0, 1.0]
    low, high = min(known), max(known)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    low = max(low - margin, -math.inf if least is None else least)
    high = min(high + margin, math.inf if most is None else most)
    if least == 0 and most == 1:
        low, high = 0.0, 1.0  # shares are always shown whole, so that pictures can be compared
    if high <= low:
        high = low + 1.0
    return Axis(label, low, high, False, tuple(Tick(value, short(value, 4)) for value in _round_steps(low, high)))


def logarithmic(label: str, values: Iterable[float], also: float | None = None) -> Axis:
    """Around values above zero, and around `also`; ticks are powers of ten, and more where these are few."""
    known = [value for value in (*values, *(() if also is None else (also,))) if value > 0] or [1.0]
    low, high = min(known) / 1.25, max(known) * 1.25
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if high / low < 12 else (1.0, 2.0, 5.0) if high / low < 200 else (1.0,)
    ticks = [float(f"{step}e{power}") for power in powers for step in steps]
    inside = [tick for tick in ticks if low <= tick <= high]
    every = -(-len(inside) // 7) if len(steps) == 1 else 1
    return Axis(label, low, high, True, tuple(Tick(tick, short(tick)) for tick in inside[::every]))


def lengths_axis(label: str, lengths: Sequence[float], most: int = 7) -> Axis:
    """Logarithmic, with ticks at the lengths that were measured; the last always has one."""
    known = sorted(set(lengths))
    every = -(-len(known) // most)
    ticks = [Tick(value, short(value, 7)) for value in known[::-1][::every]][::-1]
    low, high = (known[0], known[-1]) if known[-1] > known[0] else (known[0] / 2, known[0] * 2)
    return Axis(label, low, high, True, tuple(ticks))


def _round_steps(low: float, high: float, wanted: int = 5) -> list[float]:
    rough = (high - low) / wanted
    size = 10.0 ** math.floor(math.log10(rough))
    step = size * next(factor for factor in (1, 2, 5, 10) if factor * size >= 0.999 * rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{place * step:.12g}") for place in range(first, last + 1)]


class Style(NamedTuple):
    """The numbers of cycles differ, so 280 policies would be needed for two to look the same."""

    colour: int
    marker: str
    dash: tuple[int, ...]

    @property
    def symbol(self) -> str:
        """The marker as matplotlib calls it."""
        return MATPLOTLIB.get(self.marker, "|")


def style(index: int) -> Style:
    """The style of the policy at a place in the list; `constant` is at 0, solid and black.

    >>> style(0), style(1).symbol
    (Style(colour=0, marker='circle', dash=()), 's')
    """
    return Style(index % len(COLOURS), MARKERS[index % len(MARKERS)], DASHES[index % len(DASHES)])
