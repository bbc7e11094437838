"""How many blocks of a kernel are on a multiprocessor or compute unit at once, by what they take of it."""

from __future__ import annotations

from attnscale.bench.static.cards import Limits

PARTITIONS = 4  # of a unit; the warps of a block are spread over them


def blocks_per_unit(
    limits: Limits, *, registers: int, warps: int, shared_memory: int = 0, tensor_columns: int = 0
) -> int:
    """Blocks of `warps` warps, each thread with `registers`, that a unit has room for; 0 if not for one.

    A thread of 255 registers gets 256, so that two warps fill a partition, and 8 an SM:

    >>> from attnscale.bench.static.cards import CARDS
    >>> blocks_per_unit(CARDS["sm_80"].limits, registers=255, warps=8)
    1
    >>> blocks_per_unit(CARDS["sm_80"].limits, registers=128, warps=8, shared_memory=49_152)
    2
    """
    steps = -(-max(registers, 1) // limits.register_step)
    in_partition = min(limits.registers // (steps * limits.register_step), limits.warps)
    rooms = [limits.blocks, in_partition * PARTITIONS // warps]
    if shared_memory:
        rooms.append(limits.shared_memory // (shared_memory + limits.reserved))
    if tensor_columns:
        rooms.append(limits.tensor_columns // tensor_columns)
    return min(rooms)
