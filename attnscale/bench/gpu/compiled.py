"""The table of `--static`: what compilation tells of every kernel on every target, and what a model makes of it."""

from __future__ import annotations

from collections.abc import Iterator

from attnscale.bench.static.cards import CARDS
from attnscale.bench.static.roofline import overhead, roofline
from attnscale.bench.static.table import Row, static_table
from attnscale.errors import BackendError

HEADER = (
    "kernel", "variant", "dtype", "D", "target", "tile", "warps", "regs", "spills", "shared", "loop", "mma", "ex2",
    "bound by", "of peak", "+ statistics",
)  # fmt: skip
ABOUT = (
    "Nothing here was timed. loop: instructions of a warp in one pass of the inner loop; of peak: a model on published "
    "rates, from the matrix units waiting for the other pipes to all of them at once; + statistics: what is added to "
    "the same kernel without them, in instructions of the loop (and in time, at both ends of the model)."
)


def static_lines() -> Iterator[tuple[str, ...]]:
    """Cells of the table for each kernel and target."""
    try:
        rows = static_table()
    except FileNotFoundError as error:
        raise BackendError(
            f"{error.filename} is missing: `python -m attnscale.bench.static --write` makes it"
        ) from error
    for row in rows:
        yield row.family, row.name, row.dtype, str(row.dim or ""), _target(row), *_resources(row), *_model(row, rows)


def _target(row: Row) -> str:
    return f"{row.target} {CARDS[row.target].name}"


def _resources(row: Row) -> tuple[str, ...]:
    tile = "×".join(map(str, row.tile))
    sizes = (row.warps, row.registers, row.spills, row.shared_memory, row.loop.total, row.loop.mma, row.loop.ex2)
    return tile, *map(str, sizes)


def _model(row: Row, rows: list[Row]) -> tuple[str, str, str]:
    """What bounds a kernel that has matrix products, its share of their peak, and what its statistics cost, if any."""
    if not row.matrix_flops:
        return "", "", ""
    model, added = roofline(row), overhead(row, rows)
    least, most = model.fraction_of_peak
    cost = ""
    if added is not None:
        times = sorted((added.fastest, added.slowest))
        cost = f"{added.instructions:+.0%} ({times[0]:+.0%} … {times[1]:+.0%})"
    return model.bound, f"{least:.0%} … {most:.0%}", cost
