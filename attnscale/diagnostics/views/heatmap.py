"""A picture of one quantity over layers × heads, with numpy and pillow only, which tensorboard brings."""

from __future__ import annotations

import math
from typing import Any

from attnscale._util.optional import need
from attnscale.diagnostics.views.display import Grid

# Viridis at nine places: dark is little, light is much, and it survives printing in grey.
COLOURS = (
    (68, 1, 84),
    (71, 44, 122),
    (59, 81, 139),
    (44, 113, 142),
    (33, 144, 141),
    (39, 173, 129),
    (92, 200, 99),
    (170, 220, 50),
    (253, 231, 37),
)
BACKGROUND = (255, 255, 255)
INK = (40, 40, 40)
NOTHING = (225, 225, 225)  # a head the layer does not have, or NaN

MARGIN = 8
LINE = 16  # height of a line of text
LARGEST = 1024  # cells of a large model shrink to fit


def colour(share: float) -> tuple[int, int, int]:
    """The colour of a place on the scale, 0 to 1.

    >>> colour(0.0), colour(1.0), colour(float("nan"))
    ((68, 1, 84), (253, 231, 37), (225, 225, 225))
    """
    if math.isnan(share):
        return NOTHING
    place = min(max(share, 0.0), 1.0) * (len(COLOURS) - 1)
    index = min(int(place), len(COLOURS) - 2)
    part = place - index
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(COLOURS[index], COLOURS[index + 1], strict=True))
    return red, green, blue


def cell_size(layers: int, heads: int) -> int:
    """Pixels of a cell, its gap of one included where there is room for one."""
    return max(2, min(24, LARGEST // max(layers, heads, 1)))


def draw(grid: Grid, what: str = "attention heat maps", extra: str = "log") -> Any:
    """An RGB array [height, width, 3] of uint8: a cell per layer and head, names on the left, the scale above."""
    numpy, image = need("numpy", what, extra), need("PIL.Image", what, extra)
    canvas, font = need("PIL.ImageDraw", what, extra), need("PIL.ImageFont", what, extra).load_default()
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
    picture = numpy.full((top + size * len(grid.layers) + LINE + MARGIN, width, 3), BACKGROUND, dtype=numpy.uint8)
    bar = width - MARGIN - left
    for x in range(bar):
        picture[MARGIN + LINE : MARGIN + 2 * LINE - 4, left + x] = colour(x / max(bar - 1, 1))
    for row, shares in enumerate(grid.shares()):
        for column, share in enumerate(shares):
            y, x = top + row * size, left + column * size
            picture[y : y + size - gap, x : x + size - gap] = colour(share)
    finished = image.fromarray(picture)
    pen = canvas.Draw(finished)
    pen.text((left, MARGIN), head, fill=INK, font=font)
    for row, name in names.items():
        pen.text((MARGIN, top + row * size + max(0, (size - LINE) // 2)), name, fill=INK, font=font)
    bottom = top + size * len(grid.layers)
    for column in range(0, len(grid.values[0]), step):
        pen.text((left + column * size + gap, bottom), str(column), fill=INK, font=font)
    return numpy.asarray(finished)
