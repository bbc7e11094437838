"""The table of `--static`: what compilation tells of every kernel on every target, and what a model makes of it."""

from __future__ import annotations

from collections.abc import Iterator

from attnscale.bench.static.calls import LENGTHS
from attnscale.bench.static.cards import CARDS
from attnscale.bench.static.counts import Counts
from attnscale.bench.static.per_score import (
    edge,
    over_all_hot,
    over_reference,
    per_score,
    per_visible_score,
    with_the_rest,
)
from attnscale.bench.static.roofline import overhead, roofline
from attnscale.bench.static.table import Row, static_table
from attnscale.errors import BackendError

HEADER = (
    "kernel", "variant", "dtype", "D", "target", "tile", "warps", "regs", "spills", "shared", "hot", "edge",
    *(f"n={length // 1024}k" for length in LENGTHS), "≤ n=1k", "over hot", "over plain",
    "bound by", "of peak", "+ statistics",
)  # fmt: skip
ABOUT = (
    "Nothing here was timed. hot, edge: instructions for each score of a tile that every row sees whole, and of one "
    "that some see in part, over all passes of the kernel; n=1k…: of all loops of a call, for each score that counts; "
    "≤ n=1k: with what stands outside of the loops, at most; over hot: of the loops at n=1k, over a call whose tiles "
    "all run in the hot loop; over plain: hot over that of a plain kernel without temperature and statistics, at its "
    "own best tile; of peak: a model on published rates, from the matrix units waiting for the other pipes to all of "
    "them at once; + statistics: what is added to the same kernel without them, in instructions of the hot loop (and "
    "in time, at both ends of the model)."
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
        yield row.family, row.name, row.dtype, _dim(row), _target(row), *_resources(row), *_model(row, rows)


def _dim(row: Row) -> str:
    return f"D={row.dim}" if row.dim else ""


def _target(row: Row) -> str:
    return f"{row.target} {CARDS[row.target].name}"


def _resources(row: Row) -> tuple[str, ...]:
    sizes = (row.warps, row.registers, row.spills, row.shared_memory)
    return "×".join(map(str, row.tile)), *map(str, sizes)


def _instructions(row: Row, rows: list[Row]) -> Iterator[str]:
    """For each score, by phase and for calls; where a tile has none, as the merge of parts, nothing."""
    yield from (_of_tile(row, counts) for counts in (row.phases.hot, edge(row)))
    yield from (_number(per_visible_score(row, length), 1) for length in LENGTHS)
    yield _number(with_the_rest(row, LENGTHS[0]), 1)
    yield _number(over_all_hot(row, rows, LENGTHS[0]), 2)
    yield _number(over_reference(row, rows), 2)


def _of_tile(row: Row, counts: Counts) -> str:
    return f"{per_score(row, counts):.1f}" if counts.total and row.tile != (1, 1) else ""


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _model(row: Row, rows: list[Row]) -> tuple[str, ...]:
    """Instructions for a score; where there are products what bounds them and their share of the peak; statistics."""
    counted = tuple(_instructions(row, rows))
    if not row.matrix_flops:
        return *counted, "", "", ""
    model, added = roofline(row), overhead(row, rows)
    least, most = model.fraction_of_peak
    cost = ""
    if added is not None:
        times = sorted((added.fastest, added.slowest))
        cost = f"{added.instructions:+.0%} ({times[0]:+.0%} … {times[1]:+.0%})"
    return *counted, model.bound, f"{least:.0%} … {most:.0%}", cost
