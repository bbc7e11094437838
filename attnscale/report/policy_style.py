"""How policies are told apart: a colour, a marker and a dash each, so that no picture depends on colours alone."""

from __future__ import annotations

from typing import NamedTuple

# The palette of Okabe and Ito, without yellow, which does not show on white. In the page the first is the colour of
# text, and the dark theme has lighter ones (evaluation.css).
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ((), (7, 3), (2, 3), (9, 3, 2, 3), (4, 2))
MARKERS = ("circle", "square", "triangle", "diamond", "down", "plus", "cross", "bar")
MATPLOTLIB = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D", "down": "v", "plus": "P", "cross": "X"}


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
