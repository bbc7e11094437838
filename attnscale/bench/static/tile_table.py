"""The table of tiles that were compared: a CSV in the package, and how to make it."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from attnscale.bench.static.building import compile_variant, row_of
from attnscale.bench.static.cards import CARDS
from attnscale.bench.static.compiling import Compiled
from attnscale.bench.static.goals import CALL_OVER_HOT, HOT_OVER_REFERENCE
from attnscale.bench.static.occupancy import blocks_per_unit
from attnscale.bench.static.per_score import over_all_hot, per_score
from attnscale.bench.static.targets import TARGETS
from attnscale.bench.static.tile_candidates import Case, candidates, cases
from attnscale.bench.static.tile_model import cycles_per_score
from attnscale_kernels.launch import Tile

FILE = Path(str(resources.files("attnscale.bench.static") / "tiles.csv"))


class TileRow(NamedTuple):
    """One kernel at one tile, compiled for one target, and what the model says of it."""

    kernel: str
    dim: int
    target: str
    m: int
    n: int
    warps: int
    stages: int
    most_registers: int  # that the compiler was told; 0: none
    registers: int
    spills: int
    shared_memory: int
    tensor_columns: int
    blocks: int  # of a multiprocessor or compute unit at once; 0: it does not fit
    instructions: float  # of the threads of a block together, for each score
    over_hot: float  # instructions of a causal call of 1024, over those if all of its tiles ran in the hot loop
    cycles: float  # of a unit, for each score, by tile_model.py; 0 where it does not fit

    @property
    def case(self) -> Case:
        """What it is compared with others for."""
        return Case(self.kernel, self.dim, self.target)

    @property
    def tile(self) -> Tile:
        """As launches take it."""
        return Tile(self.m, self.n, self.warps, self.stages, self.most_registers)


def tile_table(path: Path = FILE) -> list[TileRow]:
    """The rows that are checked in. Needs neither triton nor a GPU.

    >>> tile_table()[0].target
    'sm_80'
    """
    with path.open(newline="") as file:
        return [_read(row) for row in csv.DictReader(file)]


def write_tiles(path: Path = FILE) -> None:
    """Compile all candidates, in this process, and write what they take."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(TileRow._fields)
        for case in cases():
            writer.writerows(_built(case))


def tile_row(case: Case, tile: Tile, compiled: Compiled) -> TileRow:
    """What compiling a case at a tile has given, and what follows from it."""
    row = row_of(case.variant(tile), case.target, compiled)
    columns = compiled.tensor_columns
    fits = compiled.shared_memory <= TARGETS[case.target].resources.shared_memory
    blocks = fits * blocks_per_unit(
        CARDS[case.target].limits,
        registers=compiled.registers,
        warps=tile.warps,
        shared_memory=compiled.shared_memory,
        tensor_columns=columns,
    )
    cycles = cycles_per_score(row, blocks, tensor_columns=columns) if blocks else 0.0
    return TileRow(
        *case, *tile, compiled.registers, compiled.spills, compiled.shared_memory, columns, blocks,
        round(per_score(row, row.loop), 2), round(over_all_hot(row, [row], 1024) or 0.0, 3), round(cycles, 5),
    )  # fmt: skip


def worth_comparing(rows: list[TileRow]) -> list[TileRow]:
    """Of the rows of one case, those that the model may choose from.

    They fit, meet the goal for a causal call, spill least, and take at most 5 % more instructions than another of them:
    instructions are counted, and cycles only modelled.
    """
    fitting = [row for row in rows if row.blocks and row.over_hot <= CALL_OVER_HOT]
    fewest = min(row.spills for row in fitting)
    lean = [row for row in fitting if row.spills == fewest]
    most = HOT_OVER_REFERENCE * min(row.instructions for row in lean)
    return [row for row in lean if row.instructions <= most]


def best_tile(rows: list[TileRow]) -> TileRow:
    """Of the rows of one case that are worth comparing, the one that the model gives the fewest cycles."""
    return min(worth_comparing(rows), key=lambda row: row.cycles)


def _built(case: Case) -> Iterator[TileRow]:
    for tile in candidates(case):
        yield tile_row(case, tile, compile_variant(case.variant(tile), case.target))


def _read(row: dict[str, str]) -> TileRow:
    counts = [int(row[name]) for name in TileRow._fields[3:-3]]
    modelled = [float(row[name]) for name in TileRow._fields[-3:]]
    return TileRow(row["kernel"], int(row["dim"]), row["target"], *counts, *modelled)
