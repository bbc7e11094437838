"""The experiments of `attnscale theory NAME`: predictions compared with measurements, as tables, figures and files.

Each module of this folder is one experiment: `run(quick, progress)` returns an `Experiment`.
"""

from __future__ import annotations

import importlib
import io
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from attnscale._util.files import write_table, write_whole
from attnscale._util.optional import need
from attnscale.errors import reject

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STANDARD_ERRORS = 3  # within which a prediction and a measurement agree
ROUNDING = 1e-6  # relative; two values without randomness are equal within it
NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))

GREY = "#6b7280"
GRID = "#e5e7eb"
# The colours of Okabe and Ito, with grey instead of yellow, which is hard to see on white.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
MARKERS = (
    "o",
    "s",
    "^",
    "D",
    "v",
    "P",
    "X",
    "*",
    "<",
)  # one more than the colours, so the ninth series differs from the first
DASHES: tuple[Any, ...] = ("solid", (0, (6, 2)), (0, (2, 1.5)), (0, (8, 2, 2, 2)), (0, (4, 1)))
POINTS = {"linestyle": "none", "markersize": 5}
REFERENCE: dict[str, Any] = {"color": GREY, "linewidth": 0.9, "linestyle": DASHES[2]}  # line at a known value
DPI = 110

# Kind of a prediction, see `Comparison`.
Kind = Literal["exact", "limit", "bound"]
# Steps done, total steps, and the title of the current step.
Progress = Callable[[int, int, str], None]


class Comparison(NamedTuple):
    """A predicted and a measured value: one row of the printed table.

    `kind` is the kind of the prediction:

    - `exact`: holds at the parameters of the measurement.
    - `limit`: holds for n → ∞, or to leading order; it may differ at finite n.
    - `bound`: `predicted` is the largest value allowed, so the check is one-sided.

    `standard_error` belongs to the measured value; None if nothing is random. `predicted_error` is the standard error
    of a prediction that was itself sampled.
    """

    quantity: str
    parameters: str
    predicted: float
    measured: float
    standard_error: float | None = None
    kind: Kind = "exact"
    predicted_error: float = 0.0

    @property
    def relative_error(self) -> float:
        """(measured − predicted)/|predicted|; the difference itself if 0 is predicted.

        >>> Comparison("E w_max", "n=64", predicted=0.5, measured=0.51).relative_error
        0.02...
        """
        return (self.measured - self.predicted) / (abs(self.predicted) or 1.0)

    @property
    def agreement(self) -> Literal["yes", "no", "equal", "-"]:
        """Whether the two values agree within `STANDARD_ERRORS` standard errors: `yes` or `no`.

        Without randomness, an exact prediction is `equal` up to rounding or it is `no`, and a limit has no standard
        error to compare with: `-`. A bound agrees if it is not exceeded.

        >>> Comparison("E w_max", "n=64", 0.5, 0.51, standard_error=0.004).agreement
        'yes'
        >>> Comparison("E w_max", "n=64", 0.5, 0.51, standard_error=0.003).agreement
        'no'
        >>> Comparison("η/upper bound", "n=64", 1.0, 0.4, kind="bound").agreement
        'yes'
        """
        error = math.hypot(self.standard_error or 0.0, self.predicted_error)
        if self.kind == "bound":
            return "yes" if self.measured - self.predicted <= STANDARD_ERRORS * error else "no"
        if error > 0:
            return "yes" if abs(self.measured - self.predicted) <= STANDARD_ERRORS * error else "no"
        if self.kind == "limit":
            return "-"
        return "equal" if abs(self.relative_error) <= ROUNDING else "no"

    def row(self) -> dict[str, Any]:
        """The row of the CSV file."""
        values = self._asdict()
        added = {name: values.pop(name) for name in ("kind", "predicted_error")}
        return {**values, "relative_error": self.relative_error, **added, "agree": self.agreement}


class Rows(list[dict[str, Any]]):
    """Rows of a table, with the selections and drawing calls that figures need.

    >>> rows = Rows([{"d": 3, "y": 0.5}, {"d": 3, "y": 0.25}, {"d": 5, "y": 1.0}])
    >>> rows.column("y"), [(place, d, part.column("y")) for place, d, part in rows.series("d")]
    ([0.5, 0.25, 1.0], [(0, 3, [0.5, 0.25]), (1, 5, [1.0])])
    """

    def column(self, name: str, factor: float = 1.0) -> list[Any]:
        """The values of a column, times `factor`."""
        return [row[name] if factor == 1.0 else factor * row[name] for row in self]

    def distinct(self, name: str) -> list[Any]:
        """The distinct values of a column, in order of first occurrence."""
        return list(dict.fromkeys(self.column(name)))

    def where(self, **values: object) -> Rows:
        """The rows with the given values."""
        return Rows(row for row in self if all(row[name] == value for name, value in values.items()))

    def only(self, *names: str) -> Rows:
        """The rows with these columns alone."""
        return Rows({name: row[name] for name in names} for row in self)

    def series(self, name: str) -> Iterator[tuple[int, Any, Rows]]:
        """Index, value and rows for each distinct value of a column."""
        for place, value in enumerate(self.distinct(name)):
            yield place, value, self.where(**{name: value})

    def line(self, axes: Axes, x: str, y: str, place: int, **look: Any) -> None:
        """Draw column `y` over column `x` as a line in style number `place`."""
        axes.plot(self.column(x), self.column(y), **(line_style(place) | {"marker": ""} | look))

    def points(self, axes: Axes, x: str, y: str, place: int, **look: Any) -> None:
        """Draw column `y` over column `x` as points in style number `place`."""
        axes.plot(self.column(x), self.column(y), **(line_style(place) | POINTS | look))

    def error_bars(
        self, axes: Axes, x: str, place: int, y: str = "measured", error: str = "standard_error", **look: Any
    ) -> None:
        """Draw a column of measured values as points with error bars of ± 2 standard errors."""
        axes.errorbar(self.column(x), self.column(y), self.column(error, 2), **(line_style(place) | POINTS | look))


class Picture(NamedTuple):
    """A drawing function and the tables that it draws, which become the CSV file of the picture.

    `draw` takes the tables in order; the drawing function of a panel takes the axes first.
    """

    draw: Callable[..., Any]
    tables: Mapping[str, Rows]

    def __call__(self, *axes: Axes) -> Any:
        """Draw the tables, on given axes if the picture is a panel."""
        return self.draw(*axes, *self.tables.values())

    def rows(self) -> Rows:
        """The tables under one another. With more than one, the column `table` names the table of a row.

        >>> Picture(print, {"a": Rows([{"x": 1}]), "b": Rows([{"y": 2}])}).rows()
        [{'table': 'a', 'x': 1}, {'table': 'b', 'y': 2}]
        """
        if len(self.tables) == 1:
            return next(iter(self.tables.values()))
        return Rows({"table": name, **row} for name, rows in self.tables.items() for row in rows)


class Experiment(NamedTuple):
    """The result of an experiment. `write` turns it into CSV, PNG and SVG files, prefixed with the experiment's name.

    `figures` are drawn on call, from their tables alone. `strip` has the panels for the picture of `theory all`.
    """

    name: str
    comparisons: list[Comparison]
    data: dict[str, Rows]
    figures: Mapping[str, Picture]
    strip: tuple[Picture, ...] = ()


def run(name: str, quick: bool, progress: Progress | None = None) -> Experiment:
    """Run an experiment.

    Args:
        name: one of `NAMES`.
        quick: take fewer and smaller samples.
        progress: called with the steps done, the total and the title of the current step.

    Returns:
        The comparisons, data and figures of the experiment.

    Raises:
        ArgumentError: there is no experiment with this name.

    Example:
        >>> run("alchemy", quick=True)
        Traceback (most recent call last):
        ...
        attnscale.errors.ArgumentError: name='alchemy' is not accepted: expected condensation, gaps, phase, ...
    """
    if name not in NAMES:
        reject("name", name, ", ".join(NAMES))
    experiment: Experiment = importlib.import_module(f"{__name__}.{name}").run(quick, progress)
    return experiment


def collect(
    steps: Sequence[tuple[str, str, Callable[[], list[dict[str, Any]]]]], progress: Progress | None
) -> dict[str, Rows]:
    """Run steps (title, table name, function that returns rows) in order and collect the rows by table.

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
    """Colour, marker and dash of a series, as arguments of `Axes.plot`.

    >>> line_style(1)["marker"]
    's'
    """
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
    }


def new_figure(columns: int = 1, size: tuple[float, float] = (4.6, 3.8)) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side, and its axes; `size` is the size of one panel in inches. Needs no display."""
    module = need("matplotlib.figure", "a figure", "report")
    figure: Figure = module.Figure(figsize=(size[0] * columns, size[1]), layout="constrained")
    axes = [figure.add_subplot(1, columns, place + 1) for place in range(columns)]
    for panel in axes:
        panel.grid(color=GRID, linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.title.set_fontsize(10)
    return figure, axes


def draw_strip(panels: Sequence[Picture]) -> Figure:
    """Panels of several experiments side by side in one figure."""
    figure, axes = new_figure(columns=len(panels), size=(4.1, 3.5))
    for panel, place in zip(panels, axes, strict=True):
        panel(place)
    return figure


def write(experiment: Experiment, folder: Path) -> list[Path]:
    """Write comparisons, data and figures of an experiment into a folder, which is created if needed.

    Every picture gets a CSV file of the same name with the data drawn in it. All figures are drawn before the first
    file is written, and each file is written atomically.

    Args:
        experiment: the result of `run`.
        folder: where the files go.

    Returns:
        The paths of the files.

    Raises:
        MissingDependencyError: matplotlib is not installed.

    Example:
        >>> import tempfile
        >>> result = Experiment("toy", [Comparison("one", "", 1.0, 1.0)], {"points": Rows([{"x": 1, "y": 0.5}])}, {})
        >>> [path.name for path in write(result, Path(tempfile.mkdtemp()))]
        ['toy_comparisons.csv', 'toy_points.csv']
    """
    drawn = {stem: render(figure()) for stem, figure in experiment.figures.items()}
    tables = {"comparisons": Rows(line.row() for line in experiment.comparisons), **experiment.data}
    tables |= {stem: figure.rows() for stem, figure in experiment.figures.items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = [write_rows(folder / f"{experiment.name}_{name}.csv", rows) for name, rows in tables.items()]
    for stem, images in drawn.items():
        written += write_picture(folder / f"{experiment.name}_{stem}", images)
    return written


def write_strip(panels: Sequence[Picture], folder: Path) -> list[Path]:
    """Write the strip as PNG and SVG, and the data of its panels as CSV, into an existing folder."""
    images = render(draw_strip(panels))
    tables = ((place, name, rows) for place, panel in enumerate(panels, 1) for name, rows in panel.tables.items())
    data = Rows({"panel": place, "table": name, **row} for place, name, rows in tables for row in rows)
    return [write_rows(folder / "strip.csv", data), *write_picture(folder / "strip", images)]


def write_rows(path: Path, rows: Rows) -> Path:
    """Write a table as CSV; its columns are those of all rows, and None becomes an empty cell."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    write_table(path, columns, [{name: value for name, value in row.items() if value is not None} for row in rows])
    return path


def render(figure: Figure) -> dict[str, bytes]:
    """Render a figure as PNG and SVG, without dates or random ids: the same figure gives the same bytes."""
    matplotlib = need("matplotlib", "a figure", "report")
    image = need("PIL.Image", "a figure", "report")
    targets = {kind: io.BytesIO() for kind in ("full", "png", "svg")}
    with matplotlib.rc_context({"svg.hashsalt": "attnscale"}):
        figure.savefig(targets["full"], format="png", dpi=DPI, metadata={"Software": None})
        figure.savefig(targets["svg"], format="svg", metadata={"Date": None, "Creator": None})
    # The pictures are committed; a palette of 256 colours makes them a third as large.
    with image.open(targets.pop("full")) as picture:
        picture.convert("RGB").quantize(256, dither=image.Dither.NONE).save(targets["png"], "png", optimize=True)
    return {kind: target.getvalue() for kind, target in targets.items()}


def write_picture(stem: Path, picture: dict[str, bytes]) -> list[Path]:
    """Write the images returned by `render`, one file per format; `stem` is the path without suffix."""
    paths = []
    for kind, content in picture.items():
        paths.append(stem.with_name(f"{stem.name}.{kind}"))
        write_whole(paths[-1], content)
    return paths
