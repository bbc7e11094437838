"""Compilation targets, and the occupancy of a kernel on each.

A unit is a multiprocessor (SM) or compute unit (CU). It has four partitions; a warp or wavefront resides in one of
them.
"""

from __future__ import annotations

from typing import NamedTuple

from attnscale_kernels.launch import GFX_942, SM_80, SM_90, SM_100, Resources

PARTITIONS = 4  # per unit; the warps of a block are distributed over them


class Limits(NamedTuple):
    """Resources shared by the resident blocks of a unit."""

    warps: int  # maximum per partition
    blocks: int  # maximum
    shared_memory: int  # bytes
    reserved: int  # bytes reserved by the system per block
    registers: int = 512  # per lane and partition; 32 lanes of CUDA have 16384, 64 of CDNA have 32768
    register_step: int = 8  # allocation granularity per warp
    tensor_columns: int = 0  # tensor memory in columns of 128 lanes × 4 bytes


class Target(NamedTuple):
    """A device by its Triton name, with the resources that determine tiles, unit limits, and an example GPU."""

    backend: str
    arch: int | str
    resources: Resources
    limits: Limits
    card: str


# Desktop and inference GPUs have 99 KB of shared memory per block.
SM_89 = SM_80._replace(shared_memory=101_376, capability=89)
SM_120 = SM_89._replace(capability=120)

# To add a target, add a line here and run `make resources`; tiles go into attnscale_kernels/tile_rules.py. Sources:
# CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability", and the tuning guides for
# resident warps and blocks and shared memory of an SM (a block reserves 1 KB for the system); PTX manual for tensor
# memory. CDNA3 ISA guide: vector and accumulation registers share one file of 512, 8 wavefronts per SIMD unit, 64 KB of
# LDS.
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
    """Return the number of resident blocks of `warps` warps with `registers` per thread; 0 if none fits.

    255 registers per thread are allocated as 256, so two warps fill a partition and 8 an SM:

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
