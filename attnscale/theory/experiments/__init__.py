"""What `attnscale theory NAME` runs: comparisons of a prediction with a measurement, their data, figures and files.

Each module of this folder is an experiment of that name: `run(quick, progress)` returns an `Experiment`.
"""

from __future__ import annotations

import importlib
import io
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attnscale._util.files import write_table, write_whole
from attnscale._util.optional import need
from attnscale.errors import reject

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))

GREY = "#6b7280"
GRID = "#e5e7eb"
# The colours of Okabe and Ito, with grey in place of yellow, which is hard to see on white.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")  # one more than colours: the ninth series is not the first
DASHES: tuple[Any, ...] = ("solid", (0, (6, 2)), (0, (2, 1.5)), (0, (8, 2, 2, 2)), (0, (4, 1)))
POINTS = {"linestyle": "none", "markersize": 5}
REFERENCE: dict[str, Any] = {"color": GREY, "linewidth": 0.9, "linestyle": DASHES[2]}  # a line at a known value
DPI = 110

# Steps done, their total, and what is done now.
Progress = Callable[[int, int, str], None]


class Comparison(NamedTuple):
    """One line of the printed table. `standard_error` is that of the measured value; None where nothing is random."""

    quantity: str
    parameters: str
    predicted: float
    measured: float
    standard_error: float | None = None

    @property
    def relative_error(self) -> float:
        """(measured − predicted)/|predicted|; the difference itself where zero is predicted.

        >>> Comparison("E w_max", "n=64", predicted=0.5, measured=0.51).relative_error
        0.02...
        """
        return (self.measured - self.predicted) / (abs(self.predicted) or 1.0)


class Rows(list[dict[str, Any]]):
    """Rows of a table, with what figures take of them.

    >>> rows = Rows([{"d": 3, "y": 0.5}, {"d": 3, "y": 0.25}, {"d": 5, "y": 1.0}])
    >>> rows.column("y"), [(place, d, part.column("y")) for place, d, part in rows.series("d")]
    ([0.5, 0.25, 1.0], [(0, 3, [0.5, 0.25]), (1, 5, [1.0])])
    """

    def column(self, name: str, factor: float = 1.0) -> list[Any]:
        """The values of a column, multiplied by a factor other than 1."""
        return [row[name] if factor == 1.0 else factor * row[name] for row in self]

    def distinct(self, name: str) -> list[Any]:
        """The values of a column in the order in which they first occur."""
        return list(dict.fromkeys(self.column(name)))

    def where(self, **values: object) -> Rows:
        """The rows that have these values."""
        return Rows(row for row in self if all(row[name] == value for name, value in values.items()))

    def series(self, name: str) -> Iterator[tuple[int, Any, Rows]]:
        """Place, value and rows of each distinct value of a column."""
        for place, value in enumerate(self.distinct(name)):
            yield place, value, self.where(**{name: value})

    def line(self, axes: Axes, x: str, y: str, place: int, **look: Any) -> None:
        """Draw a column over another as a line in the style of a place."""
        axes.plot(self.column(x), self.column(y), **(line_style(place) | {"marker": ""} | look))

    def points(self, axes: Axes, x: str, y: str, place: int, **look: Any) -> None:
        """Draw a column over another as points in the style of a place."""
        axes.plot(self.column(x), self.column(y), **(line_style(place) | POINTS | look))

    def error_bars(
        self, axes: Axes, x: str, place: int, y: str = "measured", error: str = "standard_error", **look: Any
    ) -> None:
        """Draw a column of measured values ± 2 standard errors as points."""
        axes.errorbar(self.column(x), self.column(y), self.column(error, 2), **(line_style(place) | POINTS | look))


class Experiment(NamedTuple):
    """What an experiment found; `write` makes CSV, PNG and SVG of it, each name preceded by that of the experiment.

    `figures` draw from `data` alone, when they are called. `strip` has those panels of figures that stand in the strip
    of the root README: each draws on axes of its own.
    """

    name: str
    comparisons: list[Comparison]
    data: dict[str, Rows]
    figures: Mapping[str, Callable[[], Figure]]
    strip: tuple[Callable[[Axes], None], ...] = ()


def run(name: str, quick: bool, progress: Progress | None = None) -> Experiment:
    """Run the experiment of that name; `quick` takes fewer and smaller samples.

    >>> run("alchemy", quick=True)
    Traceback (most recent call last):
    ...
    attnscale.errors.ArgumentError: name='alchemy' is not accepted: expected condensation, gaps, phase, simplex, sphere
    """
    if name not in NAMES:
        reject("name", name, ", ".join(NAMES))
    experiment: Experiment = importlib.import_module(f"{__name__}.{name}").run(quick, progress)
    return experiment


def collect(
    steps: Sequence[tuple[str, str, Callable[[], list[dict[str, Any]]]]], progress: Progress | None
) -> dict[str, Rows]:
    """Tables by name from steps (title, table, function that returns rows of it), run in order.

    >>> collect([("first", "points", lambda: [{"x": 1}]), ("second", "points", lambda: [{"x": 2}])], progress=None)
    {'points': [{'x': 1}, {'x': 2}]}
    """
    data: dict[str, Rows] = {}
    report = progress or (lambda done, total, title: None)
    for done, (title, table, step) in enumerate(steps):
        report(done, len(steps), title)
        data.setdefault(table, Rows()).extend(step())
    report(len(steps), len(steps), "done")
    return data


def line_style(index: int) -> dict[str, Any]:
    """Colour, marker and dash of the series at a place: arguments of `Axes.plot`; any one of them tells it apart.

    >>> line_style(1)["marker"]
    's'
    """
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
    }


def new_figure(columns: int = 1, size: tuple[float, float] = (4.6, 3.8)) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side that needs no display, and its axes; `size` is that of a panel, in inches."""
    module = need("matplotlib.figure", "a figure", "report")
    figure: Figure = module.Figure(figsize=(size[0] * columns, size[1]), layout="constrained")
    axes = [figure.add_subplot(1, columns, place + 1) for place in range(columns)]
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
    >>> result = Experiment("toy", [Comparison("one", "", 1.0, 1.0)], {"points": Rows([{"x": 1, "y": 0.5}])}, {})
    >>> [path.name for path in write(result, Path(tempfile.mkdtemp()))]
    ['toy_comparisons.csv', 'toy_points.csv']
    """
    pictures = {stem: render(draw()) for stem, draw in experiment.figures.items()}
    lines = Rows({**line._asdict(), "relative_error": line.relative_error} for line in experiment.comparisons)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for table, rows in {"comparisons": lines, **experiment.data}.items():
        written.append(folder / f"{experiment.name}_{table}.csv")
        columns = list(dict.fromkeys(column for row in rows for column in row))
        present = [{name: value for name, value in row.items() if value is not None} for row in rows]
        write_table(written[-1], columns, present)
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
