"""Figures of an experiment and how they look; its tables and figures as files."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscale._util.csv_files import write_table
from attnscale._util.files import write_whole
from attnscale._util.optional import need
from attnscale.theory.experiment import Experiment

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


GREY = "#6b7280"
GRID = "#e5e7eb"
# The colours of Okabe and Ito, with grey in place of yellow, which is hard to see on white.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")  # one more than colours: the ninth series is not the first
DASHES: tuple[Any, ...] = ("solid", (0, (6, 2)), (0, (2, 1.5)), (0, (8, 2, 2, 2)), (0, (4, 1)))

DPI = 110
COMPARISON_COLUMNS = ("quantity", "parameters", "predicted", "measured", "standard_error", "relative_error")


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


def write(experiment: Experiment, folder: Path) -> list[Path]:
    """Write the data, comparisons and figures of an experiment into a folder, which is made, and return the paths.

    All figures are drawn before the first file is written, and each file is written whole or not at all.

    >>> import tempfile
    >>> from attnscale.theory.experiment import Comparison
    >>> result = Experiment("toy", [Comparison("one", "", 1.0, 1.0)], {"points": [{"x": 1, "y": 0.5}]}, {})
    >>> [path.name for path in write(result, Path(tempfile.mkdtemp()))]
    ['toy_comparisons.csv', 'toy_points.csv']
    """
    pictures = {stem: render(draw()) for stem, draw in experiment.figures.items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{experiment.name}_comparisons.csv"]
    rows = [{**line._asdict(), "relative_error": line.relative_error} for line in experiment.comparisons]
    write_table(written[0], COMPARISON_COLUMNS, [_without_none(row) for row in rows])
    for name, rows in experiment.data.items():
        written.append(folder / f"{experiment.name}_{name}.csv")
        columns = list(dict.fromkeys(column for row in rows for column in row))
        write_table(written[-1], columns, rows)
    for stem, picture in pictures.items():
        written += write_picture(folder / f"{experiment.name}_{stem}", picture)
    return written


def render(figure: Figure) -> dict[str, bytes]:
    """A figure as PNG and SVG; the same figure gives the same bytes, as no date or random name is put in."""
    matplotlib = need("matplotlib", "a figure", "report")
    image = need("PIL.Image", "a figure", "report")
    targets = {kind: io.BytesIO() for kind in ("full", "png", "svg")}
    with matplotlib.rc_context({"svg.hashsalt": "attnscale"}):
        figure.savefig(targets["full"], format="png", dpi=DPI, metadata={"Software": None})
        figure.savefig(targets["svg"], format="svg", metadata={"Date": None, "Creator": None})
    # A palette of 256 colours makes lines and text a third as large: these pictures are committed.
    with image.open(targets.pop("full")) as picture:
        picture.convert("RGB").quantize(256, dither=image.Dither.NONE).save(targets["png"], "png", optimize=True)
    return {kind: target.getvalue() for kind, target in targets.items()}


def write_picture(stem: Path, picture: dict[str, bytes]) -> list[Path]:
    """Write what `render` gave beside each other, under a path without its ending."""
    paths = []
    for kind, content in picture.items():
        paths.append(stem.with_name(f"{stem.name}.{kind}"))
        write_whole(paths[-1], content)
    return paths


def _without_none(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}
