"""Resources of the kernels on absent targets: recompiled, and compared with limits and with the committed table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.static.compiling import Compiled, jobs, row_of
from scripts.static.counts import Counts, Phases
from scripts.static.per_score import misses
from scripts.static.table import KernelRow, Table, baseline, differences, read_table, static_table, write_table
from scripts.static.targets import TARGETS
from scripts.static.variants import variants

LIMITS = {  # bytes per block, as published
    "sm_80": 166_912,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
}

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Table:
    """Compile every variant once, for one target in turn, in a process without the interpreter.

    Triton's compilation cache is kept in pytest's cache; its key contains the kernel source.
    """
    folder = tmp_path_factory.mktemp("static")
    kept = getattr(pytestconfig, "cache", None)  # missing with -p no:cacheprovider
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache" if kept is None else kept.mkdir("triton"))
    done = subprocess.run(
        [sys.executable, "-m", "scripts.static", "--quick", "--write", str(folder / "found.json")],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return read_table(folder / "found.json")


def test_nothing_got_worse_than_the_table_says(compiled: Table) -> None:
    table = read_table()
    if compiled.versions != table.versions:
        pytest.skip(f"the table holds for {table.versions}, and here is {compiled.versions}")
    known = {row.key: row for row in table.rows}

    assert [row.key for row in compiled.rows if row.key not in known] == []
    assert {row.key: found for row in compiled.rows if (found := differences(known[row.key], row))} == {}


def test_every_family_is_compiled_and_the_large_ones_for_every_target(compiled: Table) -> None:
    families: dict[str, set[str]] = {}
    for row in compiled.rows:
        families.setdefault(row.family, set()).add(row.target)

    for family in ("forward", "backward dQ", "backward dK dV"):
        assert families[family] == set(TARGETS)
    assert families.keys() == {row.family for row in static_table()}


def test_tiles_of_every_row_are_those_that_are_launched() -> None:
    # Without compilation, therefore for all targets.
    rows, made = static_table(), variants()

    found = [
        row_of(
            made[index], target, Compiled(row.registers, row.spills, row.shared_memory, row.phases, row.tensor_columns)
        )
        for (index, target), row in zip(jobs(), rows, strict=True)
    ]

    assert found == rows


def test_every_loop_that_was_found_makes_all_products_of_a_tile(compiled: Table) -> None:
    # If the opcode encodes the shape: a misidentified or unrolled loop would have more or fewer. Not for fp32, whose
    # tiles on gfx942 have too few rows for its warps, so some products are computed twice.
    rows = [row for row in compiled.rows if row.dtype != "fp32" and row.dim in (64, 128)]

    made = {
        (*row.key, name): loop.mma_flops * row.warps / row.matrix_flops
        for row in rows
        if row.family in ("forward", "backward dQ", "gap bracket", "gap count")
        for name, loop in row.phases._asdict().items()
        if name in ("before", "hot", "after") and loop.mma_flops
    }

    assert {target for *_, target, _ in made} >= {"sm_80", "sm_89", "sm_90", "sm_120", "gfx942"}
    assert {key: ratio for key, ratio in made.items() if ratio != 1.0} == {}


def rows_of(compiled: Table) -> list[KernelRow]:
    """Freshly compiled rows, and the rest from the table, which differs in a flag."""
    fresh = {row.key for row in compiled.rows}
    return [*compiled.rows, *(row for row in static_table() if row.key not in fresh)]


def test_limits_are_those_of_the_targets() -> None:
    assert {name: target.resources.shared_memory for name, target in TARGETS.items()} == LIMITS


def test_goals_are_missed_only_where_it_is_known_and_by_as_much(compiled: Table) -> None:
    # The list holds the known misses: fixed ones must be removed, and new ones fixed. After `make resources`, `python
    # -m scripts.static --misses` prints it.
    known = json.loads((Path(__file__).parent / "known_misses.json").read_text())
    found = misses(rows_of(compiled))

    changed = {name for name in known | found if known.get(name) != found.get(name)}
    assert {name: (known.get(name), found.get(name)) for name in changed} == {}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dim", [64, 128])
def test_statistics_add_no_products_and_no_powers(compiled: Table, target: str, dim: int) -> None:
    rows = rows_of(compiled)
    (entropy,) = [row for row in rows if row.key == ("forward", "causal, entropy", "bf16", dim, target)]
    plain = baseline(entropy, rows)

    assert plain is not None
    if plain.tile == entropy.tile:
        assert entropy.loop.mma == plain.loop.mma > 0
        assert entropy.loop.ex2 == plain.loop.ex2 > 0


LOOP = Counts(mma=64, ex2=34, total=400)
EDGE = Counts(mma=64, ex2=34, total=500)
ROW = KernelRow(
    "forward",
    "causal, plain",
    "bf16",
    64,
    "sm_80",
    (128, 64),
    8,
    3,
    200,
    16,
    49152,
    0,
    1,
    1,
    Phases(hot=LOOP, after=EDGE, once=1000),
)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spills": 24}, "spills"),
        ({"registers": 209}, "registers"),
        ({"shared_memory": 49151}, "shared memory"),
        ({"tile": (64, 64)}, "tile"),
    ],
)
def test_what_got_worse_is_said(change: dict[str, object], said: str) -> None:
    (found,) = differences(ROW, ROW._replace(**change))

    assert said in found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hot": LOOP._replace(total=413)}, "instructions of the loop 'hot'"),
        ({"after": EDGE._replace(total=516)}, "instructions of the loop 'after'"),
        ({"once": 1031}, "instructions outside"),
        ({"hot": LOOP._replace(mma=63)}, "matrix products"),
        ({"hot": LOOP._replace(ex2=33)}, "powers of two"),
        ({"after": Counts()}, "loops"),
    ],
)
def test_a_loop_that_got_worse_is_named(change: dict[str, object], said: str) -> None:
    (found,) = differences(ROW, ROW._replace(phases=ROW.phases._replace(**change)))

    assert said in found


def test_small_moves_of_a_compiler_are_no_difference() -> None:
    moved = Phases(hot=LOOP._replace(total=412), after=EDGE._replace(total=515), once=1030)
    better = ROW._replace(registers=208, spills=0, phases=moved)

    assert differences(ROW, better) == []


def test_a_table_reads_as_it_was_written(tmp_path: Path) -> None:
    table = Table({"triton": "1"}, [ROW, ROW._replace(target="sm_90")])
    write_table(table, tmp_path / "table.json")

    assert read_table(tmp_path / "table.json") == table
