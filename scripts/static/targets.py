"""The devices that kernels are compiled for without having one, and how many blocks of a kernel fit on a unit of each.

A unit is a multiprocessor (SM) or compute unit (CU). It has four partitions; a warp or wavefront lives in one of them.
"""

from __future__ import annotations

from typing import NamedTuple

from attnscale_kernels.launch import GFX_942, SM_80, SM_90, SM_100, Resources

PARTITIONS = 4  # of a unit; the warps of a block are spread over them


class Limits(NamedTuple):
    """What the blocks that are on a unit at once share."""

    warps: int  # of a partition, at most
    blocks: int  # at most
    shared_memory: int  # bytes
    reserved: int  # bytes of it that each block takes for the system
    registers: int = 512  # of a lane in a partition; 32 lanes of CUDA have 16384, 64 of CDNA have 32768
    register_step: int = 8  # they are given to a warp in multiples of it
    tensor_columns: int = 0  # of 128 lanes of 4 bytes: where matrix products stay outside of registers


class Target(NamedTuple):
    """A device as triton names it, what tiles are chosen by on it, the limits of a unit, and a card that has it."""

    backend: str
    arch: int | str
    resources: Resources
    limits: Limits
    card: str


# Cards for desktops and for inference have 99 KB of shared memory for a block.
SM_89 = SM_80._replace(shared_memory=101_376, capability=89)
SM_120 = SM_89._replace(capability=120)

# Another target is one line here and `make resources`; tiles of its own go into attnscale_kernels/tile_rules.py.
# CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability", and the tuning guides: resident
# warps and blocks, shared memory of an SM, of which a block takes 1 KB for the system; PTX manual: tensor memory.
# CDNA3 ISA guide: vector and accumulation registers are one file of 512, 8 wavefronts of a vector unit, 64 KB of LDS.
TARGETS = {
    "sm_80": Target("cuda", 80, SM_80, Limits(16, 32, 164 * 1024, 1024), "A100"),
    "sm_89": Target("cuda", 89, SM_89, Limits(12, 24, 100 * 1024, 1024), "L40S"),
    "sm_90": Target("cuda", 90, SM_90, Limits(16, 32, 228 * 1024, 1024), "H100"),
    "sm_100": Target("cuda", 100, SM_100, Limits(16, 32, 228 * 1024, 1024, tensor_columns=512), "B200"),
    "sm_120": Target("cuda", 120, SM_120, Limits(12, 24, 100 * 1024, 1024), "RTX 5090"),
    "gfx942": Target("hip", "gfx942", GFX_942, Limits(8, 16, 64 * 1024, 0), "MI300X"),
}


def blocks_per_unit(
    limits: Limits, *, registers: int, warps: int, shared_memory: int = 0, tensor_columns: int = 0
) -> int:
    """Blocks of `warps` warps, each thread with `registers`, that a unit has room for; 0 if not for one.

    A thread of 255 registers gets 256, so that two warps fill a partition, and 8 an SM:

    >>> blocks_per_unit(TARGETS["sm_80"].limits, registers=255, warps=8)
    1
    >>> blocks_per_unit(TARGETS["sm_80"].limits, registers=128, warps=8, shared_memory=49_152)
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
