"""How figures of experiments look: series told apart by colour, marker and dash, and the strip of four panels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attnscale._util.optional import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#6b7280"
GRID = "#e5e7eb"
# The colours of Okabe and Ito, with grey in place of yellow, which is hard to see on white.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")  # one more than colours: the ninth series is not the first
DASHES: tuple[Any, ...] = ("solid", (0, (6, 2)), (0, (2, 1.5)), (0, (8, 2, 2, 2)), (0, (4, 1)))


def line_style(index: int) -> dict[str, Any]:
    """Colour, marker and dash of the series at a place: arguments of `Axes.plot`; any one of them tells it apart.

    >>> line_style(1)["marker"]
    's'
    """
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
        "markersize": 5,
        "linewidth": 1.5,
    }


def new_figure(columns: int = 1, rows: int = 1, size: tuple[float, float] = (4.6, 3.8)) -> tuple[Figure, list[Axes]]:
    """A figure that needs no display, and its axes in reading order; `size` is that of one panel, in inches."""
    module = need("matplotlib.figure", "a figure", "report")
    figure: Figure = module.Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, place + 1) for place in range(rows * columns)]
    for panel in axes:
        panel.grid(color=GRID, linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.title.set_fontsize(10)
    return figure, axes


def draw_strip(panels: Sequence[Callable[[Axes], None]]) -> Figure:
    """Panels of several experiments side by side in one figure, each drawn by its own function."""
    figure, axes = new_figure(columns=len(panels), size=(4.1, 3.5))
    for draw, place in zip(panels, axes, strict=True):
        draw(place)
    return figure
