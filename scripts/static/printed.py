"""The printed table of compilation results for every kernel and target."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from attnscale.bench.gpu.results import print_tables
from scripts.static.calls import LENGTHS
from scripts.static.counts import Counts
from scripts.static.per_score import (
    edge,
    over_all_hot,
    over_plain,
    over_reference,
    per_score,
    per_visible_score,
    with_the_rest,
)
from scripts.static.table import KernelRow
from scripts.static.targets import TARGETS

HEADER = (
    "kernel", "variant", "dtype", "D", "target", "tile", "warps", "regs", "spills", "shared", "blocks", "KB", "MFLOP",
    "hot", "edge", *(f"n={length // 1024}k" for length in LENGTHS), "≤ n=1k", "over hot", "over plain", "+ statistics",
)  # fmt: skip
ABOUT = (
    "Nothing was timed. blocks: resident blocks per multiprocessor or compute unit; KB, MFLOP: bytes read and FLOPs "
    "per block and tile; hot, edge: instructions per score in a fully and a partially visible tile, over all sweeps; "
    "n=1k…: loop instructions of a call per visible score; ≤ n=1k: upper bound including code outside the loops; "
    "over hot: relative to a call with all tiles in the hot loop, at n=1k; over plain: hot loop relative to a plain "
    "kernel without temperature and statistics, at its best tile; + statistics: hot loop relative to the same kernel "
    "without statistics."
)


def print_table(rows: list[KernelRow]) -> None:
    """Print all rows and an explanation of the columns."""
    console = Console()
    print_tables(console, "compiled ahead of time, not run", HEADER, static_lines(rows), heading=4)
    console.print(ABOUT, highlight=False)


def static_lines(rows: list[KernelRow]) -> Iterator[tuple[str, ...]]:
    """Yield the table cells of each kernel and target."""
    for row in rows:
        dim, target = f"D={row.dim}" if row.dim else "", f"{row.target} {TARGETS[row.target].card}"
        yield row.family, row.name, row.dtype, dim, target, *_resources(row), *_instructions(row, rows)


def _resources(row: KernelRow) -> tuple[str, ...]:
    sizes = (row.warps, row.registers, row.spills, row.shared_memory, row.blocks)
    work = (f"{row.tile_bytes / 1024:.0f}", f"{row.matrix_flops / 1e6:.1f}") if row.matrix_flops else ("", "")
    return "×".join(map(str, row.tile)), *map(str, sizes), *work


def _instructions(row: KernelRow, rows: list[KernelRow]) -> Iterator[str]:
    """Yield instructions per score, by phase and for calls; empty for kernels without a score tile."""
    yield from (_of_tile(row, counts) for counts in (row.phases.hot, edge(row)))
    yield from (_number(per_visible_score(row, length), 1) for length in LENGTHS)
    yield _number(with_the_rest(row, LENGTHS[0]), 1)
    yield _number(over_all_hot(row, rows, LENGTHS[0]), 2)
    yield _number(over_reference(row, rows), 2)
    added = over_plain(row, rows)
    yield "" if added is None else f"{added - 1:+.0%}"


def _of_tile(row: KernelRow, counts: Counts) -> str:
    return f"{per_score(row, counts):.1f}" if counts.total and row.tile != (1, 1) else ""


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
