"""The table of what every kernel takes on every target: a file in the package, and how to make and compare it."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from attnscale.bench.static.counts import Counts

FILE = Path(str(resources.files("attnscale.bench.static") / "resources.json"))
REGISTER_SLACK, LOOP_SLACK = 8, 0.03


class Row(NamedTuple):
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
    matrix_flops: int  # of a block in one pass of the loop, multiply and add being two, dimensions as padded
    tile_bytes: int  # that a block reads in one pass
    loop: Counts

    @property
    def key(self) -> tuple[str, str, str, int, str]:
        """What tells rows apart."""
        return self.family, self.name, self.dtype, self.dim, self.target


class Table(NamedTuple):
    """Rows, and the versions of the compilers that they hold for."""

    versions: dict[str, str]
    rows: list[Row]


def static_table(path: Path = FILE) -> list[Row]:
    """The rows that are checked in. Needs neither triton nor a GPU."""
    return read_table(path).rows


def read_table(path: Path = FILE) -> Table:
    """A table as `write_table` leaves it."""
    held = json.loads(path.read_text())
    rows = [
        Row(**{**row, "tile": tuple(row["tile"]), "loop": Counts(**row["loop"])})
        for row in (dict(zip(Row._fields, values, strict=True)) for values in held["rows"])
    ]
    return Table(held["versions"], rows)


def write_table(table: Table, path: Path = FILE) -> None:
    """One row on a line, so that a change of one kernel is a change of its lines."""
    lines = []
    for row in table.rows:
        loop = {kind: number for kind, number in row.loop._asdict().items() if number}
        lines.append("  " + json.dumps([loop if field == "loop" else getattr(row, field) for field in Row._fields]))
    body = ",\n".join(lines)
    path.write_text(f'{{"versions": {json.dumps(table.versions)}, "rows": [\n{body}\n]}}\n')


def baseline(row: Row, rows: list[Row]) -> Row | None:
    """The same kernel without statistics, if `row` has some: same flags, dtype, dimension, target and tile."""
    if row.family != "forward" or not row.name.endswith(", entropy"):
        return None
    wanted = row._replace(name=row.name.removesuffix("entropy") + "plain").key
    return next((other for other in rows if other.key == wanted), None)


def differences(known: Row, found: Row) -> list[str]:
    """Where a kernel got worse than the table says, in words: empty if it did not.

    Compilers make small moves: registers may grow by 8 and the loop by 3 %. What is decided by the kernel's text may
    not change at all: shared memory, matrix products, powers of two. Spills may only go down.
    """
    exact = {
        "tile": (known.tile, found.tile),
        "warps": (known.warps, found.warps),
        "stages": (known.stages, found.stages),
        "shared memory": (known.shared_memory, found.shared_memory),
        "matrix products": (known.loop.mma, found.loop.mma),
        "powers of two": (known.loop.ex2, found.loop.ex2),
    }
    most = {
        "spills": (known.spills, found.spills),
        "registers": (known.registers + REGISTER_SLACK, found.registers),
        "instructions of the loop": (int(known.loop.total * (1 + LOOP_SLACK)), found.loop.total),
    }
    said = [f"{what}: {before} → {now}" for what, (before, now) in exact.items() if before != now]
    return said + [f"{what}: {now}, expected at most {limit}" for what, (limit, now) in most.items() if now > limit]
