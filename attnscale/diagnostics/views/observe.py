"""`observe`: attention statistics of a model inside a `with` block, for notebooks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

from torch import nn

from attnscale._util.optional import need
from attnscale.diagnostics.monitor import Monitor
from attnscale.diagnostics.records.record import Record
from attnscale.diagnostics.views.display import COLOURS, MISSING, colour, main_grids
from attnscale.diagnostics.views.flatten import numbers_of
from attnscale.errors import ArgumentError


class Observation:
    """Result of `observe`: the statistics of all attention calls inside the block.

    `records` has one `Record` per layer and head, and is empty until the block ends. Prints as a table, and as an HTML
    table in notebooks.

    Example:
        >>> Observation()
        <Observation of 0 heads>
    """

    def __init__(self) -> None:
        self.records: Sequence[Record] = ()

    def to_pandas(self) -> Any:
        """Convert to a pandas DataFrame.

        Returns:
            A DataFrame with one row per (layer, head) and columns such as `forward/w_max/mean` and `gain`.
            `frame["forward/w_max/mean"].unstack()` has the shape layer × head.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        pandas = need("pandas", "to_pandas", "report")
        rows = []
        for record in self.records:
            numbers, visible = dict(numbers_of(record)), record.forward.get("visible")
            rows.append({"layer": record.layer, "head": record.head, **numbers, "rows": visible.rows if visible else 0})
        columns = None if rows else ["layer", "head"]
        return pandas.DataFrame(rows, columns=columns).set_index(["layer", "head"])

    def plot(self) -> Any:
        """Draw a heat map of layer × head for each main quantity.

        Returns:
            A matplotlib Figure.

        Raises:
            ArgumentError: there are no records.
            MissingDependencyError: matplotlib is not installed.
        """
        # Unused here, but notebooks display figures only after pyplot has been imported.
        need("matplotlib.pyplot", "plot", "report")
        figures, colours = need("matplotlib.figure", "plot", "report"), need("matplotlib.colors", "plot", "report")
        grids = main_grids(self.records)
        if not grids:
            raise ArgumentError("records=() is not accepted: expected a model that was called inside the block")
        palette = colours.LinearSegmentedColormap.from_list("attn", COLOURS)
        palette = palette.with_extremes(bad=[x / 255 for x in MISSING])
        columns = min(len(grids), 4)
        lines = -(-len(grids) // columns)
        layers, heads = len(grids[0].layers), len(grids[0].values[0])
        size = (columns * (1.9 + min(0.25 * heads, 4)), lines * (1.1 + min(0.25 * layers, 8)))
        figure = figures.Figure(figsize=size, layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False, sharey=True)
        for index, axis in enumerate(axes.flat):
            if index >= len(grids):
                axis.remove()
                continue
            grid = grids[index]
            low, high = grid.scale()
            logarithmic = grid.quantity.log and 0 < low < high
            norm = (colours.LogNorm if logarithmic else colours.Normalize)(low, high)
            image = axis.imshow(grid.values, norm=norm, cmap=palette, aspect="auto", interpolation="nearest")
            axis.set_title(grid.quantity.title, fontsize=10)
            axis.set_yticks(range(layers), grid.layers, fontsize=8)
            axis.set_xlabel("head", fontsize=8)
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.tick_params(labelsize=8)
            figure.colorbar(image, ax=axis).ax.tick_params(labelsize=8)
        return figure

    def __str__(self) -> str:
        lines = [["layer", "head", *(grid.quantity.title for grid in main_grids(self.records))]]
        lines += [[layer, str(head), *map(_short, numbers)] for layer, head, numbers, _ in self._lines()]
        if len(lines) == 1:
            return "no records: the model was not called, or the block has not ended"
        first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = ([layer.ljust(first), *map(str.rjust, cells, others)] for layer, *cells in lines)
        return "\n".join(map("  ".join, aligned))

    def __repr__(self) -> str:
        return f"<Observation of {len(self.records)} heads>"

    def _repr_html_(self) -> str:
        if not self.records:
            return f"<p>{escape(str(self))}</p>"
        titles = ["layer", "head", *(grid.quantity.title for grid in main_grids(self.records))]
        lines = ["<tr>" + "".join(f"<th>{escape(title)}</th>" for title in titles) + "</tr>"]
        for layer, head, numbers, shares in self._lines():
            cells = "".join(_cell(number, share) for number, share in zip(numbers, shares, strict=True))
            lines.append(f"<tr><td>{escape(layer)}</td><td>{head}</td>{cells}</tr>")
        return f"<table>{''.join(lines)}</table>"

    def _lines(self) -> Iterator[tuple[str, int, list[float], list[float]]]:
        """Iterate over layer, head, and the values of the main quantities with their positions on the colour scale."""
        grids = [(grid, grid.shares()) for grid in main_grids(self.records)]
        for record in self.records:
            row = grids[0][0].layers.index(record.layer)
            numbers = [grid.values[row][record.head] for grid, _ in grids]
            yield record.layer, record.head, numbers, [shares[row][record.head] for _, shares in grids]


@contextmanager
def observe(model: nn.Module, rows: int | None = None) -> Iterator[Observation]:
    """Measure the attention of a model inside a `with` block, forward and backward.

    The model is restored at the end of the block.

    Args:
        model: a model that `Monitor` accepts.
        rows: number of sampled rows per attention call. None measures all rows.

    Returns:
        A context manager that yields an `Observation`.

    Raises:
        ArgumentError: the model has no attention that can be measured, or `rows` is less than 1.
        ArgumentTypeError: `model` is not a torch.nn.Module.

    Example:
        >>> import torch, attnscale
        >>> model = attnscale.MultiheadAttention(16, 2, batch_first=True)
        >>> x = torch.randn(1, 8, 16)
        >>> with attnscale.observe(model) as observed:
        ...     output, _ = model(x, x, x, need_weights=False)
        >>> [(record.layer, record.head, record.forward["visible"].max) for record in observed.records]
        [('MultiheadAttention', 0, 8.0), ('MultiheadAttention', 1, 8.0)]
    """
    observation = Observation()
    with Monitor(model, every=1, rows=rows, alerts=None) as monitor:
        yield observation
        observation.records = tuple(monitor.step(0))


def _short(x: float) -> str:
    return "" if math.isnan(x) else f"{x:.4g}"


def _cell(number: float, share: float) -> str:
    if math.isnan(number):
        return "<td></td>"
    red, green, blue = colour(share)
    ink = "#000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#fff"
    style = f"background:#{red:02x}{green:02x}{blue:02x};color:{ink};text-align:right"
    return f'<td style="{style}">{_short(number)}</td>'
