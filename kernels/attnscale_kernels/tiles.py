"""Which tile a kernel works on: by head dimension, dtype and what the device has, not by its name."""

from __future__ import annotations

from typing import NamedTuple

from .launch import Resources


class Tile(NamedTuple):
    """Query rows and keys of a tile, warps of a program, and how many tiles of keys are in flight."""

    m: int
    n: int
    warps: int
    stages: int


def forward_tile(
    dim: int, value_dim: int, size: int, resources: Resources, *, busy: bool = False, left_edge: bool = False
) -> Tile:
    """For the forward, with head dimensions as padded and bytes of an element.

    `busy`: registers are taken by what is computed for each score (softcap, dropout, a bias, any mask) or by a padded
    head dimension; `left_edge`: by a third loop. Tiles are the largest that spill nothing, by the table of
    attnscale/bench/static, among those with the fewest cycles for a score in its model. Products of
    fp32 are unrolled in full where no matrix unit makes them, so that tiles have to be small.
    """
    widest = max(dim, value_dim)
    amd = resources.warp_size == 64
    if size == 4:
        if amd:
            return Tile(64, 32, 4, 2) if widest <= 64 else Tile(32, 32, 4, 1) if widest <= 128 else Tile(16, 16, 4, 1)
        return Tile(64, 32, 8, 1) if widest <= 64 else Tile(32, 16, 8, 1) if widest <= 128 else Tile(16, 16, 4, 1)
    if amd:
        return Tile(128, 64, 4, 1) if widest <= 64 else Tile(128, 32, 4, 1) if widest <= 128 else Tile(64, 32, 4, 1)
    if widest <= 64:
        return Tile(128, 64, 8, 3)
    if widest <= 128 and resources.shared_memory > 200_000:
        return Tile(128, 32, 8, 3) if busy else Tile(128, 64, 8, 2 if left_edge else 3)
    if widest <= 128:
        return Tile(128, 16, 8, 2) if busy else Tile(128, 32, 8, 3)
    return Tile(64, 32, 8, 2) if resources.shared_memory > 200_000 else Tile(32, 32, 4, 2)


def parts_of_sums(value_dim: int, resources: Resources) -> int:
    """Parts that the sums of a row are kept in where there are statistics; see sum_in_parts of device.py.

    At 128 dimensions 8 parts would take 425 → 413 instructions on sm_90, but 436 → 482 and a spill on sm_100.
    """
    return 8 if value_dim <= 64 or resources.warp_size == 64 else 1


def backward_query_tile(dim: int, value_dim: int, size: int, resources: Resources) -> Tile:
    """For the gradient of queries: like the forward, with one product more."""
    widest = max(dim, value_dim)
    amd = resources.warp_size == 64
    if size == 4:
        if amd:
            return Tile(32, 32, 4, 1) if widest <= 128 else Tile(16, 16, 4, 1)
        return Tile(32, 32, 8, 1) if widest <= 64 else Tile(16, 16, 4, 1)
    if amd:
        return Tile(128, 64, 4, 1) if widest <= 64 else Tile(128, 32, 4, 1) if widest <= 128 else Tile(64, 32, 4, 1)
    if widest <= 64:
        return Tile(128, 64, 8, 2)
    return Tile(128, 32, 8, 2) if widest <= 128 else Tile(64, 32, 8, 1)


def backward_key_tile(dim: int, value_dim: int, size: int, resources: Resources, *, busy: bool = False) -> Tile:
    """For the gradients of keys and values, which hold two accumulators; m is the rows of a step.

    Up to 128 dimensions tiles are those that spill nothing in the table of attnscale/bench/static. At 128 the
    accumulators take half of the registers, and scores of 32 rows are too many beside what is kept from one loop to the
    next, unless shared memory holds three steps in flight and nothing more is computed for a score (`busy`, as in
    `forward_tile`). Up to 64 the assembler of sm_100 spills a few bytes to keep two blocks of 8 warps on a
    multiprocessor, which smaller blocks need not.
    """
    widest = max(dim, value_dim)
    amd = resources.warp_size == 64
    large = resources.shared_memory > 200_000
    if size == 4:
        return Tile(32, 16, 4 if amd else 8, 1) if widest <= 128 else Tile(16, 16, 4, 1)
    if amd:
        return Tile(32, 128, 4, 1) if widest <= 64 else Tile(16, 128, 4, 1) if widest <= 128 else Tile(32, 64, 4, 1)
    if widest <= 64:
        return Tile(32, 64, 4, 2) if large else Tile(32, 128, 8, 2)
    if widest <= 128:
        return Tile(32, 128, 8, 3) if large and not busy else Tile(16, 128, 8, 3)
    return Tile(32, 64, 8, 1)


def decode_tile(rows: int, dim: int, value_dim: int, size: int, resources: Resources) -> Tile:
    """For few rows against many keys: as many rows as there are, and keys in flight, since it waits for memory."""
    widest = max(dim, value_dim)
    m = min(max(16, 1 << (rows - 1).bit_length()), 32 if size < 4 and widest <= 128 else 16)
    if size == 4:
        amd = resources.warp_size == 64
        return Tile(m, 32, 4, 1 if amd else 2) if widest <= 64 else Tile(m, 16, 4 if amd or widest <= 128 else 8, 1)
    if resources.warp_size == 64:
        return Tile(m, 64 if widest <= 128 else 32, 4, 1)
    if m > 16:
        return Tile(m, 64 if widest <= 128 else 32, 8, 3)
    return Tile(m, 128 if widest <= 64 else 64 if widest <= 128 else 32, 4, 3)


def decode_splits(programs: int, tiles: int, multiprocessors: int) -> int:
    """Parts that keys are split into: two programs for each multiprocessor, and two tiles of keys or more for each."""
    return max(1, min(2 * multiprocessors // max(programs, 1), tiles // 2, 128))


def gap_tile(dim: int, size: int, resources: Resources, biased: bool) -> Tile:
    """For the two passes of gap counting, which hold no accumulator; a byte counts the keys of a tile: 128 at most.

    A bias is a tile more to hold, which wide heads leave no room for. In fp32, heads wider than 128 spill.
    """
    amd = resources.warp_size == 64
    if size == 4:
        if amd:
            return Tile(64, 32, 4, 1) if dim <= 64 else Tile(32, 32, 4, 1) if dim <= 128 else Tile(16, 16, 4, 1)
        return Tile(32, 32, 8, 1) if dim <= 64 else Tile(16, 16, 8, 1)
    if amd:
        return Tile(128, 64, 4, 1) if dim <= 128 else Tile(64, 32, 4, 1)
    return Tile(128, 32 if biased and dim > 64 else 64, 8, 2) if dim <= 128 else Tile(64, 64, 8, 2)
