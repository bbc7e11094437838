"""The table of what every kernel takes on every target: how it is read, written and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from scripts.static.calls import RULES
from scripts.static.counts import Counts, Phases
from scripts.static.targets import TARGETS, blocks_per_unit

FILE = Path(__file__).parent / "resources.json"
REFERENCE = "reference"  # the family of the plain kernel that the forward is held against
REGISTER_SLACK, LOOP_SLACK = 8, 0.03


class KernelRow(NamedTuple):
    """One kernel, compiled for one target."""

    family: str
    name: str
    dtype: str
    dim: int  # the head dimension; 0 where there is none
    target: str
    tile: tuple[int, int]
    warps: int
    stages: int
    registers: int
    spills: int
    shared_memory: int
    tensor_columns: int  # of tensor memory, which sm_100 has
    matrix_flops: int  # of a block for one tile, multiply and add being two, dimensions as padded
    tile_bytes: int  # that a block reads for one tile
    phases: Phases

    @property
    def key(self) -> tuple[str, str, str, int, str]:
        """What tells rows apart."""
        return self.family, self.name, self.dtype, self.dim, self.target

    @property
    def rule(self) -> str:
        """What rows see, which the name begins with; empty where there is no such rule."""
        first = self.name.split(", ")[0]
        return first if first in RULES else ""

    @property
    def lanes(self) -> int:
        """Of a warp."""
        return TARGETS[self.target].resources.warp_size

    @property
    def blocks(self) -> int:
        """On a multiprocessor or compute unit at once; 0 where one does not fit."""
        return blocks_per_unit(
            TARGETS[self.target].limits,
            registers=self.registers,
            warps=self.warps,
            shared_memory=self.shared_memory,
            tensor_columns=self.tensor_columns,
        )

    @property
    def loop(self) -> Counts:
        """What most tiles run: the hot loop, or the edge's where there is none."""
        return self.phases.hot if self.phases.hot.total else self.phases.after


class Table(NamedTuple):
    """Rows, and the versions of the compilers that they hold for."""

    versions: dict[str, str]
    rows: list[KernelRow]


def static_table(path: Path = FILE) -> list[KernelRow]:
    """The rows that are checked in. Needs neither triton nor a GPU."""
    return read_table(path).rows


def read_table(path: Path = FILE) -> Table:
    """A table as `write_table` leaves it."""
    held = json.loads(path.read_text())
    rows = [
        KernelRow(**{**row, "tile": tuple(row["tile"]), "phases": _phases(row["phases"])})
        for row in (dict(zip(KernelRow._fields, values, strict=True)) for values in held["rows"])
    ]
    return Table(held["versions"], rows)


def write_table(table: Table, path: Path = FILE) -> None:
    """One row on a line, so that a change of one kernel is a change of its lines."""
    lines = []
    for row in table.rows:
        lines.append("  " + json.dumps([*row[:-1], _without_zeros(row.phases)]))
    body = ",\n".join(lines)
    path.write_text(f'{{"versions": {json.dumps(table.versions)}, "rows": [\n{body}\n]}}\n')


def _without_zeros(phases: Phases) -> dict[str, object]:
    loops = {name: _held(counts) for name, counts in phases._asdict().items() if isinstance(counts, Counts)}
    return {**{name: held for name, held in loops.items() if held}, "once": phases.once}


def _held(counts: Counts) -> dict[str, int]:
    return {kind: number for kind, number in counts._asdict().items() if number}


def _phases(held: dict[str, Any]) -> Phases:
    once = held.pop("once")
    return Phases(**{name: Counts(**kinds) for name, kinds in held.items()}, once=once)


def baseline(row: KernelRow, rows: list[KernelRow]) -> KernelRow | None:
    """The same kernel without statistics, if `row` has some: same flags, dtype, dimension and target."""
    if row.family != "forward" or not row.name.endswith(", entropy"):
        return None
    wanted = row._replace(name=row.name.removesuffix("entropy") + "plain").key
    return next((other for other in rows if other.key == wanted), None)


def differences(known: KernelRow, found: KernelRow) -> list[str]:
    """Where a kernel got worse than the table says, in words: empty if it did not.

    Compilers make small moves: registers may grow by 8 and each loop by 3 %. What is decided by the kernel's text may
    not change at all: which loops there are, shared memory, matrix products, powers of two. Spills may only go down.
    """
    exact = {
        "tile": (known.tile, found.tile),
        "warps": (known.warps, found.warps),
        "stages": (known.stages, found.stages),
        "shared memory": (known.shared_memory, found.shared_memory),
        "loops": (_loops(known), _loops(found)),
        "matrix products": (known.loop.mma, found.loop.mma),
        "powers of two": (known.loop.ex2, found.loop.ex2),
    }
    most = {
        "spills": (known.spills, found.spills),
        "registers": (known.registers + REGISTER_SLACK, found.registers),
        "instructions outside of loops": (int(known.phases.once * (1 + LOOP_SLACK)), found.phases.once),
        **{
            f"instructions of the loop {name!r}": (int(held.total * (1 + LOOP_SLACK)), now.total)
            for name, held, now in zip(Phases._fields, known.phases, found.phases, strict=True)
            if isinstance(held, Counts) and isinstance(now, Counts)
        },
    }
    said = [f"{what}: {before} → {now}" for what, (before, now) in exact.items() if before != now]
    return said + [f"{what}: {now}, expected at most {limit}" for what, (limit, now) in most.items() if now > limit]


def _loops(row: KernelRow) -> list[str]:
    return [name for name, held in row.phases._asdict().items() if isinstance(held, Counts) and held.total]
