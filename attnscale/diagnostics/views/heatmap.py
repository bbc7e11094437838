"""One quantity over layers × heads: as places on a colour scale, and as a picture.

The picture needs numpy and pillow only, which tensorboard brings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from attnscale._util.optional import need
from attnscale.diagnostics.records.record import Record, layers_of
from attnscale.diagnostics.views.display import COLOURS, MAIN, Quantity, place_on_scale

RGB = tuple(tuple(bytes.fromhex(colour[1:])) for colour in COLOURS)
BACKGROUND = (255, 255, 255)
INK = (40, 40, 40)
MISSING = (225, 225, 225)  # a head the layer does not have, or NaN

MARGIN = 8
LINE = 16  # height of a line of text
LARGEST = 1024  # cells of a large model shrink to fit


class Grid(NamedTuple):
    """One quantity over layers × heads; NaN where there is none."""

    quantity: Quantity
    layers: list[str]
    values: list[list[float]]

    def scale(self) -> tuple[float, float]:
        """The ends of the colour scale: fixed ones, or the least and largest value that can be shown."""
        shown = [x for row in self.values for x in row if math.isfinite(x) and (x > 0 or not self.quantity.log)]
        low = self.quantity.low if self.quantity.low is not None else min(shown, default=0.0)
        high = self.quantity.high if self.quantity.high is not None else max(shown, default=low)
        return low, max(high, low)

    def shares(self) -> list[list[float]]:
        """The values as places on the scale, 0 to 1; NaN stays NaN."""
        low, high = self.scale()
        return [[place_on_scale(x, low, high, self.quantity.log) for x in row] for row in self.values]


def grid_of(records: Sequence[Record], quantity: Quantity) -> Grid | None:
    """A quantity over layers × heads, rows filled up to the layer with most heads; None if no record has it."""
    layers = layers_of(records)
    known = {(r.layer, r.head): x for r in records if (x := quantity.of(r)) is not None}
    if not known:
        return None
    heads = 1 + max(record.head for record in records)
    values = [[known.get((layer, head), math.nan) for head in range(heads)] for layer in layers]
    return Grid(quantity, layers, values)


def main_grids(records: Sequence[Record]) -> list[Grid]:
    """The grids of the main quantities that are there."""
    return [grid for quantity in MAIN if (grid := grid_of(records, quantity)) is not None]


def colour(share: float) -> tuple[int, int, int]:
    """The colour of a place on the scale, 0 to 1.

    >>> colour(0.0), colour(1.0), colour(float("nan"))
    ((68, 1, 84), (253, 231, 37), (225, 225, 225))
    """
    if math.isnan(share):
        return MISSING
    place = min(max(share, 0.0), 1.0) * (len(RGB) - 1)
    index = min(int(place), len(RGB) - 2)
    part = place - index
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(RGB[index], RGB[index + 1], strict=True))
    return red, green, blue


def cell_size(layers: int, heads: int) -> int:
    """Pixels of a cell, with its gap of one pixel where there is room for one."""
    return max(2, min(24, LARGEST // max(layers, heads, 1)))


def draw(grid: Grid, what: str = "attention heat maps") -> Any:
    """An RGB array [height, width, 3] of uint8: a cell per layer and head, names on the left, the scale above."""
    numpy, image = need("numpy", what, "log"), need("PIL.Image", what, "log")
    canvas, font = need("PIL.ImageDraw", what, "log"), need("PIL.ImageFont", what, "log").load_default()
    size = cell_size(len(grid.layers), len(grid.values[0]))
    gap = 1 if size > 4 else 0
    step = 1 if size >= LINE - 4 else -(-LINE // size)  # names only where they do not overlap
    low, high = grid.scale()
    head = f"{grid.quantity.title}   {low:.3g} .. {high:.3g}{'  (log)' if grid.quantity.log else ''}"
    names = {row: name for row, name in enumerate(grid.layers) if row % step == 0}
    left = MARGIN + max(math.ceil(font.getlength(name)) for name in names.values()) + MARGIN
    top = MARGIN + 2 * LINE + MARGIN
    body = size * len(grid.values[0])
    width = left + max(body, math.ceil(font.getlength(head))) + MARGIN
    bottom = top + size * len(grid.layers)
    picture = image.new("RGB", (width, bottom + LINE + MARGIN), BACKGROUND)
    pen = canvas.Draw(picture)
    bar = width - MARGIN - left
    for x in range(bar):
        pen.line((left + x, MARGIN + LINE, left + x, MARGIN + 2 * LINE - 5), fill=colour(x / max(bar - 1, 1)))
    for row, shares in enumerate(grid.shares()):
        for column, share in enumerate(shares):
            y, x = top + row * size, left + column * size
            pen.rectangle((x, y, x + size - gap - 1, y + size - gap - 1), fill=colour(share))
    pen.text((left, MARGIN), head, fill=INK, font=font)
    for row, name in names.items():
        pen.text((MARGIN, top + row * size + max(0, (size - LINE) // 2)), name, fill=INK, font=font)
    for column in range(0, len(grid.values[0]), step):
        pen.text((left + column * size + gap, bottom), str(column), fill=INK, font=font)
    return numpy.asarray(picture)
