"""Blocks of a unit against the makers' occupancy tables, and the model of a tile against cycles computed by hand."""

from __future__ import annotations

import pytest

from attnscale.bench.static.cards import CARDS
from attnscale.bench.static.counts import Counts
from attnscale.bench.static.occupancy import blocks_per_unit
from attnscale.bench.static.phases import Phases
from attnscale.bench.static.roofline import roofline
from attnscale.bench.static.table import Row
from attnscale.bench.static.tile_model import cycles_per_score


@pytest.mark.parametrize(
    ("target", "registers", "threads", "blocks"),
    [
        ("sm_80", 255, 256, 1),
        ("sm_80", 129, 256, 1),  # 136 of each lane: three warps of a partition
        ("sm_80", 128, 256, 2),
        ("sm_80", 168, 128, 3),
        ("sm_80", 169, 128, 2),
        ("sm_80", 96, 256, 2),  # five warps of a partition: 20, and not 24
        ("sm_80", 32, 256, 8),  # 2048 threads
        ("sm_89", 32, 256, 6),  # 1536 threads
        ("sm_90", 255, 128, 2),
        ("sm_80", 16, 32, 32),  # blocks of a multiprocessor
        ("sm_120", 16, 32, 24),
        ("gfx942", 512, 256, 1),
        ("gfx942", 257, 256, 1),
        ("gfx942", 256, 256, 2),
        ("gfx942", 128, 256, 4),
        ("gfx942", 24, 256, 8),  # wavefronts of a vector unit
    ],
)
def test_registers_and_threads_leave_room_for_as_many_blocks_as_is_published(
    target: str, registers: int, threads: int, blocks: int
) -> None:
    warps = threads // (64 if target == "gfx942" else 32)

    assert blocks_per_unit(CARDS[target].limits, registers=registers, warps=warps) == blocks


@pytest.mark.parametrize(
    ("target", "kilobytes", "blocks"),
    [("sm_80", 163, 1), ("sm_80", 64, 2), ("sm_80", 164, 0), ("sm_89", 99, 1), ("sm_89", 49, 2), ("sm_89", 50, 1),
     ("sm_90", 227, 1), ("sm_90", 113, 2), ("sm_100", 75, 3), ("gfx942", 64, 1), ("gfx942", 32, 2)],
)  # fmt: skip
def test_a_block_takes_its_shared_memory_and_what_the_system_reserves(target: str, kilobytes: int, blocks: int) -> None:
    found = blocks_per_unit(CARDS[target].limits, registers=64, warps=4, shared_memory=kilobytes * 1024)

    assert found == blocks


@pytest.mark.parametrize(("columns", "blocks"), [(512, 1), (256, 2), (128, 4)])
def test_blocks_share_the_columns_of_tensor_memory(columns: int, blocks: int) -> None:
    assert blocks_per_unit(CARDS["sm_100"].limits, registers=64, warps=8, tensor_columns=columns) == blocks


def row(target: str, warps: int) -> Row:
    loop = Counts(mma=64, ex2=34, fp32=106, alu=102, shared=38, total=372, shared_bytes=600)
    held = ("forward", "causal, plain", "bf16", 64, target, (128, 64), warps, 3, 128, 0, 49152, 2_097_152, 16384)
    return Row(*held, Phases(hot=loop))


def test_more_warps_that_take_turns_hide_more_of_what_is_shorter() -> None:
    # On the A100 1024 cycles of products, and 1200 of shared memory with 8 warps: see test_roofline.py.
    scores = 128 * 64

    assert cycles_per_score(row("sm_80", 8), 1) == (1200 + 1024 / 2) / scores
    assert cycles_per_score(row("sm_80", 8), 2) == (1200 + 1024 / 4) / scores
    assert cycles_per_score(row("sm_80", 4), 1) == (600 + 1024) / scores == roofline(row("sm_80", 4)).slowest / scores


def test_a_block_that_multiplies_in_tensor_memory_takes_one_turn() -> None:
    model = roofline(row("sm_100", 8))
    one = cycles_per_score(row("sm_100", 8), 1, tensor_columns=256)
    two = cycles_per_score(row("sm_100", 8), 2, tensor_columns=256)

    assert one * 128 * 64 == model.slowest
    assert two * 128 * 64 == (model.slowest + model.fastest) / 2
