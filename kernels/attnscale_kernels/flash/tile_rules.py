"""Tiles and options of the kernels of flash attention, by head dimensions and device; the static table checks them.

Tiles were chosen among those that fit and spill nothing, by instructions for a score and blocks per multiprocessor;
none was timed on a card. scripts/static has what they take. With tensor memory (sm_100) a product is of all warps of a
block together, and 4 warps have a row of 128 for each thread, which exchanges no maximum and no sum.
"""

from __future__ import annotations

from ..launch import Resources, Tile

LARGE_TILE = 8192  # elements of a tile of keys; those of a larger one fill the registers of sm_80


def forward_tile(
    dim: int,
    value_dim: int,
    size: int,
    resources: Resources,
    *,
    boxed: bool = False,
    busy: bool = False,
    masked: bool = False,
    dropout: bool = False,
    capped: bool = False,
    entropy: bool = False,
) -> Tile:
    """For the forward, by padded head dimensions and bytes of an element.

    `boxed`: keys and values come by descriptors, which takes no registers for addresses; `busy`: more registers are
    needed for each score (softcap, dropout, a bias, any mask), for a padded head dimension, or for a third loop;
    `masked`: any mask or bias, which is in registers too; `capped`: softcap. With entropy sm_80 takes three stages, or
    it would spill. Products of fp32 are unrolled completely where no matrix unit computes them, so that tiles have to
    be small.
    """
    widest = max(dim, value_dim)
    amd = resources.warp_size == 64
    if size == 4:
        if amd:
            return Tile(64, 32, 4, 2) if widest <= 64 else Tile(32, 32, 4, 1) if widest <= 128 else Tile(16, 16, 4, 1)
        if widest > 128:
            return Tile(16, 16, 4, 1)
        return Tile(64, 32, 8, 1) if widest <= 64 else Tile(32, 16, 8, 1, registers=128)
    if amd and widest <= 128:
        return Tile(128, 64, 4, 1, registers=256 if widest == 64 and not busy else 0)
    if amd:
        return Tile(64 if busy else 128, 32, 4, 1)  # 128 rows take all of the 64 KB of shared memory
    if widest <= 128 and boxed and resources.has_tensor_memory and not (busy or masked or capped):
        return Tile(128, 128, 4, 2)
    if widest <= 128 and boxed:
        return Tile(128, 64 if busy else 128, 8, 3 if widest <= 64 else 2)
    if widest <= 64:
        return Tile(128, 64 if busy else 128, 8, 2)
    if widest <= 128:
        small = resources.shared_memory <= 160_000  # sm_89 and sm_120, which spill where sm_80 does not
        if masked or dropout:
            return Tile(128, 16 if masked and dropout and small else 32, 8, 2)
        if busy or small:
            return Tile(128, 64, 8, 2)
        return Tile(128, 128, 8, 3 if entropy else 2)
    if boxed and not busy:
        return Tile(128, 64, 8, 2)
    return Tile(64, 32, 8, 2) if resources.shared_memory > 200_000 else Tile(32, 32, 4, 2)


def sums_first(value_dim: int, size: int, tile: Tile, resources: Resources, *, boxed: bool, entropy: bool) -> bool:
    """Whether the sums of a tile are made before its second product, so that nothing of it waits in registers.

    CUDA's assembler puts them behind it, and spills up to 240 bytes; where it need not, that takes 2 to 6 % less.
    """
    if resources.has_tensor_memory:
        return size == 2
    if boxed or resources.warp_size == 64:
        return False
    if value_dim <= 64:
        return entropy and resources.capability >= 120 and tile.n > 64
    return entropy or tile.n * value_dim > LARGE_TILE


def parts_of_sums(first: bool, size: int, resources: Resources, entropy: bool) -> int:
    """Parts that the sums of a row are kept in, given `sums_first`; see sum_in_parts of device.py."""
    if resources.has_tensor_memory:
        return 2 if size == 2 else 1
    return 8 if resources.warp_size == 64 or (entropy and not first) else 1


def backward_query_tile(
    dim: int,
    value_dim: int,
    size: int,
    resources: Resources,
    *,
    boxed: bool = False,
    dropout: bool = False,
    biased: bool = False,
    busy: bool = False,
) -> Tile:
    """For the gradient of queries: like the forward, with one product more.

    `boxed`: keys and values come by descriptors; `busy`: softcap, or dβ, whose product of queries and gradients takes
    as many registers as both at the end. With 4 warps they would spill 8 and 16 bytes at 128 dimensions, and a bias
    (`biased`) up to 40.
    """
    if boxed:
        return Tile(128, 128, 8, 2) if busy else Tile(128, 64, 4, 2, registers=255)  # at 168, 16 bytes spill
    widest = max(dim, value_dim)
    amd = resources.warp_size == 64
    large = resources.shared_memory > 200_000
    if size == 4:
        if amd:
            return Tile(32, 32, 4, 1) if widest <= 128 else Tile(16, 16, 4, 1)
        if widest > 128:
            return Tile(16, 16, 4, 1)
        return Tile(32, 32, 8, 1) if widest <= 64 else Tile(16, 16, 4, 1, registers=168)
    if amd:
        return Tile(128, 64, 4, 1) if widest <= 64 else Tile(128, 32, 4, 1) if widest <= 128 else Tile(64, 16, 4, 1)
    if widest > 128:
        if large and not (dropout or biased or busy):
            return Tile(128, 64, 8, 1) if resources.has_tensor_memory else Tile(128, 32, 8, 2)
        return Tile(64, 32, 4, 1) if resources.has_tensor_memory else Tile(32, 32, 4, 2)
    if dropout:
        return Tile(128, 64 if widest <= 64 else 32 if large else 16, 8, 2)
    if biased and widest <= 64:
        return Tile(128, 64, 8, 2)
    if resources.has_tensor_memory and (widest <= 64 or not (biased or busy)):
        return Tile(128, 64, 4, 2, registers=255)  # else ptxas takes 168, and spills 16 bytes
    if large:
        return Tile(128, 128 if widest <= 64 else 64, 8, 2)
    return Tile(128, 32, 4, 2) if widest <= 64 else Tile(128, 32, 8, 2)


def backward_takes_boxes(dim: int, value_dim: int, size: int, resources: Resources, *, busy: bool) -> bool:
    """Whether the gradient of queries takes keys and values by descriptors, where their layout allows it.

    At 128 dimensions that takes 2 to 6 % fewer instructions in the same tile on sm_100; at 64, pointers take 4 % fewer.
    Where a mask is read or more is computed for a score (`busy`) there is no room: softcap alone would spill 432 bytes.
    sm_90 would spill up to 40.
    """
    return resources.has_tensor_memory and size == 2 and 64 < max(dim, value_dim) <= 128 and not busy


def backward_key_tile(
    dim: int,
    value_dim: int,
    size: int,
    resources: Resources,
    *,
    padded: bool = False,
    bounded: bool = False,
    dropout: bool = False,
    busy: bool = False,
) -> Tile:
    """For the gradients of keys and values, which hold two accumulators; m is the rows of a step.

    `padded`: a head dimension is, and needs a mask; `busy`: a mask, a bias or softcap. At 128 dimensions accumulators
    take half of the registers. sm_80 has room for the scores of 32 rows only with 64 keys and if there is none of
    these, and it and gfx942 only if rows are not `bounded` by a table or padding, which would spill 56 and 128 bytes.
    """
    widest = max(dim, value_dim)
    amd = resources.warp_size == 64
    crowded = padded or dropout or busy
    if size == 4:
        return Tile(32, 16, 4 if amd else 8, 1) if widest <= 128 else Tile(16, 16, 4, 1)
    if amd and widest <= 64:
        return Tile(16, 128, 4, 1) if widest <= 32 else Tile(32, 128, 4, 1, registers=0 if crowded else 256)
    if amd and widest > 128:
        return Tile(16, 64, 4, 1)
    if amd:
        return Tile(16, 128, 4, 1 if dropout else 2) if crowded or bounded else Tile(32, 128, 4, 1)
    if widest > 128:
        return Tile(32, 64, 8, 1) if resources.has_tensor_memory else Tile(32, 32, 4, 1)
    if resources.has_tensor_memory:
        if widest <= 64:
            return Tile(32, 64, 4, 2, registers=168) if dropout else Tile(64, 64, 4, 2)
        return Tile(32 if dropout else 64, 128, 8, 2)
    if resources.shared_memory > 200_000:
        if widest <= 64:
            return Tile(32, 64, 4, 2) if dropout or busy else Tile(64, 128, 8, 3)
        return Tile(16, 128, 8, 3) if dropout else Tile(32, 128, 8, 2 if busy else 3)
    if widest <= 64:
        return Tile(32 if widest > 32 or crowded else 64, 128, 8, 2)
    if resources.shared_memory > 160_000 and not (crowded or bounded):
        return Tile(32, 64, 4, 2)  # two blocks at once, for which sm_89 and sm_120 have no room
    return Tile(16, 128, 8, 1 if padded else 2)


def edge_stages(dim: int, value_dim: int, resources: Resources, *, masked: bool) -> int | None:
    """Steps in flight where the gradients of keys and values read a bool mask, if fewer than elsewhere.

    With two at 128 dimensions, sm_80 would spill 176 bytes.
    """
    return 1 if masked and max(dim, value_dim) > 64 and resources.shared_memory <= 200_000 else None


def draws_fours(resources: Resources) -> bool:
    """Whether the gradients of keys and values draw for four slots at once; see keep_by_slot of device.py.

    At 128 dimensions that takes 92 → 85 instructions a score on sm_90, and spills 80 bytes on sm_80.
    """
    return resources.shared_memory > 200_000 or resources.warp_size == 64


def keeps_pointers(dim: int, tile: Tile, resources: Resources) -> bool:
    """Whether the forward advances pointers to keys and values, which takes registers, or makes them anew each step."""
    return resources.warp_size == 32 and tile.n * dim <= LARGE_TILE


def works_in_pairs(size: int, resources: Resources) -> bool:
    """Whether the forward and the gradient of queries work on two fp32 numbers at once; see pairs.py.

    The gradients of keys and values would take 5 % more instructions: what is subtracted there differs between the two.
    """
    return resources.has_tensor_memory and size == 2
