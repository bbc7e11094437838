"""Occupancy compared with the vendors' tables."""

from __future__ import annotations

import pytest

from scripts.static.table import static_table
from scripts.static.targets import TARGETS, blocks_per_unit


@pytest.mark.parametrize(
    ("target", "registers", "threads", "blocks"),
    [
        ("sm_80", 255, 256, 1),
        ("sm_80", 129, 256, 1),  # 136 per lane: three warps per partition
        ("sm_80", 128, 256, 2),
        ("sm_80", 168, 128, 3),
        ("sm_80", 169, 128, 2),
        ("sm_80", 96, 256, 2),  # five warps per partition: 20, not 24
        ("sm_80", 32, 256, 8),  # 2048 threads
        ("sm_89", 32, 256, 6),  # 1536 threads
        ("sm_90", 255, 128, 2),
        ("sm_80", 16, 32, 32),  # blocks per multiprocessor
        ("sm_120", 16, 32, 24),
        ("gfx942", 512, 256, 1),
        ("gfx942", 257, 256, 1),
        ("gfx942", 256, 256, 2),
        ("gfx942", 128, 256, 4),
        ("gfx942", 24, 256, 8),  # wavefronts per SIMD unit
    ],
)
def test_registers_and_threads_leave_room_for_as_many_blocks_as_is_published(
    target: str, registers: int, threads: int, blocks: int
) -> None:
    warps = threads // TARGETS[target].resources.warp_size

    assert blocks_per_unit(TARGETS[target].limits, registers=registers, warps=warps) == blocks


@pytest.mark.parametrize(
    ("target", "kilobytes", "blocks"),
    [("sm_80", 163, 1), ("sm_80", 64, 2), ("sm_80", 164, 0), ("sm_89", 99, 1), ("sm_89", 49, 2), ("sm_89", 50, 1),
     ("sm_90", 227, 1), ("sm_90", 113, 2), ("sm_100", 75, 3), ("gfx942", 64, 1), ("gfx942", 32, 2)],
)  # fmt: skip
def test_a_block_takes_its_shared_memory_and_what_the_system_reserves(target: str, kilobytes: int, blocks: int) -> None:
    found = blocks_per_unit(TARGETS[target].limits, registers=64, warps=4, shared_memory=kilobytes * 1024)

    assert found == blocks


@pytest.mark.parametrize(("columns", "blocks"), [(512, 1), (256, 2), (128, 4)])
def test_blocks_share_the_columns_of_tensor_memory(columns: int, blocks: int) -> None:
    assert blocks_per_unit(TARGETS["sm_100"].limits, registers=64, warps=8, tensor_columns=columns) == blocks


def test_every_kernel_of_the_table_that_fits_a_block_fits_a_unit() -> None:
    rows = [row for row in static_table() if row.shared_memory <= TARGETS[row.target].resources.shared_memory]

    assert {row.key: row.blocks for row in rows if row.blocks < 1} == {}
    assert {row.family for row in rows if row.tensor_columns} >= {"forward", "backward dQ", "backward dK dV"}
    assert {row.target for row in rows if row.tensor_columns} == {"sm_100"}
