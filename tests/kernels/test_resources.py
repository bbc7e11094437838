"""What kernels take on targets that are not here: compiled anew, held against limits and against the checked table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnscale.bench.static.counts import Counts
from attnscale.bench.static.phases import Phases
from attnscale.bench.static.table import Row, Table, baseline, differences, read_table, static_table, write_table
from attnscale.bench.static.targets import TARGETS

LIMITS = {  # bytes of a block
    "sm_80": 166_912,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
}

COMPILE = """
import sys
from pathlib import Path
from attnscale.bench.static.building import build_table, jobs
from attnscale.bench.static.table import write_table
if __name__ == "__main__":
    write_table(build_table(jobs(all_targets=False), workers=2), Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Table:
    """Everything once, in a process that has triton as a compiler: here it interprets."""
    folder = tmp_path_factory.mktemp("static")
    script = folder / "compile_all.py"
    script.write_text(COMPILE)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "found.json")], env=environment, capture_output=True, text=True
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


def test_every_loop_that_was_found_makes_all_products_of_a_tile(compiled: Table) -> None:
    # Where the name of the instruction tells its shape: a loop named wrongly, or unrolled, would make more or fewer.
    # Not for fp32, whose tiles on gfx942 have fewer rows than its warps can share without making some products twice.
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


def rows_of(compiled: Table) -> list[Row]:
    """What was compiled just now, and the rest from the table, which differs in a flag."""
    fresh = {row.key for row in compiled.rows}
    return [*compiled.rows, *(row for row in static_table() if row.key not in fresh)]


def test_shared_memory_is_within_the_limit_of_each_target(compiled: Table) -> None:
    assert {name: target.resources.shared_memory for name, target in TARGETS.items()} == LIMITS
    assert {row.key: row.shared_memory for row in rows_of(compiled) if row.shared_memory > LIMITS[row.target]} == {}


def test_forward_never_spills(compiled: Table) -> None:
    rows = [row for row in rows_of(compiled) if row.family == "forward"]

    assert {row.target for row in rows} == set(LIMITS)
    assert {row.key: row.spills for row in rows if row.spills} == {}


def test_backward_never_spills_up_to_128_dimensions(compiled: Table) -> None:
    rows = [row for row in rows_of(compiled) if row.family.startswith("backward") and row.dim <= 128]
    families = {"backward rows", "backward dQ", "backward dK dV"}

    assert {(row.family, row.target) for row in rows} == {(family, target) for family in families for target in LIMITS}
    assert {row.key: row.spills for row in rows if row.spills} == {}


@pytest.mark.parametrize("target", LIMITS)
@pytest.mark.parametrize("dim", [64, 128])
def test_statistics_add_little_to_the_inner_loop(compiled: Table, target: str, dim: int) -> None:
    rows = compiled.rows
    (entropy,) = [row for row in rows if row.key == ("forward", "causal, entropy", "bf16", dim, target)]
    plain = baseline(entropy, rows)

    assert plain is not None
    assert entropy.loop.total <= 1.12 * plain.loop.total
    assert entropy.loop.mma == plain.loop.mma > 0
    assert entropy.loop.ex2 == plain.loop.ex2 > 0


LOOP = Counts(mma=64, ex2=34, total=400)
EDGE = Counts(mma=64, ex2=34, total=500)
ROW = Row(
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
