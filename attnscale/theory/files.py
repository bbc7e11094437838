"""The files of an experiment: CSV for its data and comparisons, PNG and SVG for its figures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscale._util.csv_files import write_table
from attnscale._util.files import write_whole
from attnscale._util.optional import need
from attnscale.theory.experiment import Experiment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 110
COMPARISON_COLUMNS = ("quantity", "parameters", "predicted", "measured", "standard_error", "relative_error")


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
