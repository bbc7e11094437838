"""The resource table of every kernel and target: reading, writing and comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from scripts.static.calls import RULES
from scripts.static.counts import Counts, Phases
from scripts.static.targets import TARGETS, blocks_per_unit

FILE = Path(__file__).parent / "resources.json"
REFERENCE = "reference"  # family of the plain baseline kernel
REGISTER_SLACK, LOOP_SLACK = 8, 0.03


class KernelRow(NamedTuple):
    """One kernel compiled for one target."""

    family: str
    name: str
    dtype: str
    dim: int  # head dimension; 0 if there is none
    target: str
    tile: tuple[int, int]
    warps: int
    stages: int
    registers: int
    spills: int
    shared_memory: int
    tensor_columns: int  # tensor memory of sm_100
    matrix_flops: int  # FLOPs per block and tile, with padded dimensions
    tile_bytes: int  # bytes read per block and tile
    phases: Phases

    @property
    def key(self) -> tuple[str, str, str, int, str]:
        """Identity of a row."""
        return self.family, self.name, self.dtype, self.dim, self.target

    @property
    def rule(self) -> str:
        """The visibility rule at the start of the name; empty if there is none."""
        first = self.name.split(", ")[0]
        return first if first in RULES else ""

    @property
    def lanes(self) -> int:
        """Threads per warp."""
        return TARGETS[self.target].resources.warp_size

    @property
    def blocks(self) -> int:
        """Resident blocks per multiprocessor or compute unit; 0 if none fits."""
        return blocks_per_unit(
            TARGETS[self.target].limits,
            registers=self.registers,
            warps=self.warps,
            shared_memory=self.shared_memory,
            tensor_columns=self.tensor_columns,
        )

    @property
    def loop(self) -> Counts:
        """The loop of most tiles: the hot loop, or the edge loop if there is no hot loop."""
        return self.phases.hot if self.phases.hot.total else self.phases.after


class Table(NamedTuple):
    """Rows, and the compiler versions they were produced with."""

    versions: dict[str, str]
    rows: list[KernelRow]


def static_table(path: Path = FILE) -> list[KernelRow]:
    """Return the committed rows. Requires neither triton nor a GPU."""
    return read_table(path).rows


def read_table(path: Path = FILE) -> Table:
    """Read a table written by `write_table`."""
    held = json.loads(path.read_text())
    rows = [
        KernelRow(**{**row, "tile": tuple(row["tile"]), "phases": _phases(row["phases"])})
        for row in (dict(zip(KernelRow._fields, values, strict=True)) for values in held["rows"])
    ]
    return Table(held["versions"], rows)


def write_table(table: Table, path: Path = FILE) -> None:
    """Write one row per line, so that diffs show the changed kernels."""
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
    """Return the same kernel without statistics, if `row` has statistics: same flags, dtype, dimension and target."""
    if row.family != "forward" or not row.name.endswith(", entropy"):
        return None
    wanted = row._replace(name=row.name.removesuffix("entropy") + "plain").key
    return next((other for other in rows if other.key == wanted), None)


def differences(known: KernelRow, found: KernelRow) -> list[str]:
    """Describe regressions of a kernel relative to the table; empty if there are none.

    Small compiler changes are tolerated: registers may grow by 8 and each loop by 3 %. Properties determined by the
    source must not change: loops, shared memory, matrix products, powers of two. Spills must not increase.
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
