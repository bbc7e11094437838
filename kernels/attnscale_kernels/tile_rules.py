"""Tile tables, one per kernel that computes scores, and compile-time options of flash attention.

Each tile fits into the shared memory of its devices. In the cases of the static table it spills no registers, unless
its reason mentions a spill. Numbers in reasons are instructions per score in the hot loop: bf16, causal, forward with
entropy, counted from assembly (triton 3.7.1). Nothing has been timed on a GPU. For `amd` and half precision most were
counted before `as_factor` (device.py), which takes three to ten fewer.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .launch import Resources, Tile

LARGE_TILE = 8192  # elements of a key tile; larger ones fill the registers of sm_80


class TileRow(NamedTuple):
    """A tile and the launches it applies to."""

    size: int  # bytes per element
    widest: int  # largest head dimension, padded to a power of two
    when: str  # required device traits and launch options; "!" excludes one
    tile: Tile
    reason: str

    def applies(self, size: int, widest: int, given: frozenset[str]) -> bool:
        """Whether the tile applies to a launch with these traits and options."""
        return (
            size == self.size
            and widest <= self.widest
            and all((word[1:] not in given) if word[0] == "!" else (word in given) for word in self.when.split())
        )


# The first matching row is used.
#
# Device traits: `amd`; `tensor_memory` (sm_100: all warps of a block compute one matrix product, and with 4 warps each
# thread owns a row, so row maxima and sums need no exchange); `large` and `small` shared memory (sm_90 and sm_100;
# sm_89, sm_120 and older devices).
TILES: dict[str, tuple[TileRow, ...]] = {
    # `boxed`: keys and values are loaded through TMA descriptors, without address registers; `masked`: a mask or a
    # bias; `capped`: a softcap; `busy`: more registers per score, for a padded head dimension or a third loop.
    "forward": (
        TileRow(4, 64, "amd", Tile(64, 32, 4, 2), "small tile, as fp32 products are unrolled"),
        TileRow(4, 128, "amd", Tile(32, 32, 4, 1), "small tile, as fp32 products are unrolled"),
        TileRow(4, 64, "", Tile(64, 32, 8, 1), "64 keys spill 168 bytes on sm_80"),
        TileRow(4, 128, "", Tile(32, 16, 8, 1, 128), "without a limit ptxas takes 64 registers and spills 16 bytes"),
        TileRow(4, 256, "", Tile(16, 16, 4, 1), "smallest tile of a matrix product"),
        TileRow(2, 32, "amd", Tile(128, 64, 4, 1), "13.0; with 32 keys 15.2"),
        TileRow(2, 64, "amd !busy", Tile(128, 64, 4, 1, 256), "13.1, two blocks at 256 registers; 64 rows take 31.4"),
        TileRow(2, 128, "amd", Tile(128, 64, 4, 1), "17.2; with 32 keys 19.3; at 256 registers 388 bytes spill"),
        TileRow(2, 256, "amd busy", Tile(64, 32, 4, 1), "128 rows take all of the 64 KB of shared memory"),
        TileRow(2, 256, "amd", Tile(128, 32, 4, 1), "27.4; with 64 rows 53.3"),
        TileRow(
            2, 128, "boxed tensor_memory !busy !masked !capped", Tile(128, 128, 4, 2), "5.6; 8 warps 7.2; a mask spills"
        ),
        TileRow(2, 64, "boxed busy", Tile(128, 64, 8, 3), "128 keys spill 8 bytes with dropout on sm_90"),
        TileRow(2, 64, "boxed", Tile(128, 128, 8, 3), "8.3 on sm_90; with 64 keys 10.8"),
        TileRow(2, 128, "boxed busy", Tile(128, 64, 8, 2), "128 keys spill 200 bytes with dropout, 64 with padding"),
        TileRow(2, 128, "boxed", Tile(128, 128, 8, 2), "8.9 on sm_90; with 64 keys 12.3"),
        TileRow(2, 64, "busy", Tile(128, 64, 8, 2), "128 keys spill 272 bytes with dropout on sm_80"),
        TileRow(2, 64, "", Tile(128, 128, 8, 2), "10.2 on sm_80, where 8 bytes spill outside of loops; 64 keys 11.5"),
        TileRow(2, 128, "masked dropout small", Tile(128, 16, 8, 2), "32 keys spill 8 bytes"),
        TileRow(2, 128, "masked", Tile(128, 32, 8, 2), "64 keys spill 40 bytes on sm_80"),
        TileRow(2, 128, "dropout", Tile(128, 32, 8, 2), "64 keys spill 128 bytes on sm_80"),
        TileRow(2, 128, "busy", Tile(128, 64, 8, 2), "128 keys spill 8 bytes with a window on sm_80"),
        TileRow(2, 128, "small", Tile(128, 64, 8, 2), "128 keys spill 8 bytes on sm_89, 112 on sm_120"),
        TileRow(2, 128, "entropy", Tile(128, 128, 8, 3), "14.7; 64 keys 16.6; two stages spill 16 bytes on sm_80"),
        TileRow(2, 128, "", Tile(128, 128, 8, 2), "13.5 without entropy; with 64 keys 15.0"),
        TileRow(
            2, 256, "boxed !busy", Tile(128, 64, 8, 2), "64 rows: 4 to 6 % fewer, but keys are loaded twice as often"
        ),
        TileRow(2, 256, "large", Tile(64, 32, 8, 2), "128 rows and 64 keys spill 136 bytes with a bias on sm_90"),
        TileRow(2, 256, "", Tile(32, 32, 4, 2), "55.5; 64 rows and 8 warps 87.3"),
    ),
    # dQ: one matrix product more than the forward pass. `busy`: softcap, or dβ, whose final product of queries and
    # gradients takes as many registers as both; `biased`: an additive mask; `entropy`: the entropy has a gradient.
    "dQ": (
        TileRow(4, 128, "amd", Tile(32, 32, 4, 1), "small tile, as fp32 products are unrolled"),
        TileRow(4, 64, "", Tile(32, 32, 8, 1), "small tile, as fp32 products are unrolled"),
        TileRow(4, 128, "", Tile(16, 16, 4, 1, 168), "without a limit ptxas takes 72 registers and spills 16 bytes"),
        TileRow(4, 256, "", Tile(16, 16, 4, 1), "smallest tile of a matrix product"),
        TileRow(
            2, 64, "amd !busy !dropout !biased !entropy", Tile(128, 64, 4, 1, 256), "9.6, two blocks at 256 registers"
        ),
        TileRow(2, 64, "amd", Tile(128, 64, 4, 1), "at 256 registers 80 bytes spill with dβ"),
        TileRow(2, 128, "amd", Tile(128, 32, 4, 1), "16.9; with 64 rows 37.7"),
        TileRow(2, 256, "amd", Tile(64, 16, 4, 1), "48.5; 32 keys spill 8 bytes"),
        TileRow(2, 128, "boxed busy", Tile(128, 128, 8, 2), "6.5; 4 warps spill 8 bytes with softcap, 16 with dβ"),
        TileRow(2, 128, "boxed", Tile(128, 64, 4, 2, 255), "6.3; at the 168 registers of ptxas 16 bytes spill"),
        TileRow(2, 64, "dropout", Tile(128, 64, 8, 2), "128 keys spill 24 bytes on sm_90; this spills 8 on sm_80"),
        TileRow(
            2, 128, "dropout large", Tile(128, 32, 8, 2), "64 keys take 254 registers even without mask or softcap"
        ),
        TileRow(2, 128, "dropout", Tile(128, 16, 8, 2), "39.1; with 32 keys 42.0, at 255 registers"),
        TileRow(2, 64, "biased", Tile(128, 64, 8, 2), "128 keys spill 72 bytes on sm_90, 4 warps up to 40 on sm_100"),
        TileRow(2, 64, "tensor_memory", Tile(128, 64, 4, 2, 255), "5.6; 8 warps 7.8; at 168 registers 16 bytes spill"),
        TileRow(2, 128, "tensor_memory !biased !busy", Tile(128, 64, 4, 2, 255), "6.4; with 8 warps 9.3"),
        TileRow(2, 64, "large", Tile(128, 128, 8, 2), "6.4; with 64 keys 7.7"),
        TileRow(2, 128, "large", Tile(128, 64, 8, 2), "8.9; with 32 keys 12.6"),
        TileRow(2, 64, "", Tile(128, 32, 4, 2), "9.8, two blocks; with 64 keys and 8 warps 10.3, one"),
        TileRow(2, 128, "", Tile(128, 32, 8, 2), "16.5; with 64 rows 19.1"),
        TileRow(
            2, 256, "large tensor_memory !dropout !biased !busy", Tile(128, 64, 8, 1), "15.7; dβ would spill 80 bytes"
        ),
        TileRow(2, 256, "large !dropout !biased !busy", Tile(128, 32, 8, 2), "16.4; dβ would spill 128 bytes"),
        TileRow(2, 256, "tensor_memory", Tile(64, 32, 4, 1), "27.4; with 8 warps 48.0; with dβ 40 bytes spill"),
        TileRow(2, 256, "", Tile(32, 32, 4, 2), "37.1; with one stage 56 bytes spill"),
    ),
    # dK and dV: two accumulators of n keys, steps of m rows. `busy`: a mask, a bias or softcap; `padded`: a head
    # dimension is not a power of two; `bounded`: per-row bounds or padding; `entropy`: the entropy has a gradient.
    "dK dV": (
        TileRow(4, 128, "amd", Tile(32, 16, 4, 1), "small tile, as fp32 products are unrolled"),
        TileRow(4, 128, "", Tile(32, 16, 8, 1), "small tile, as fp32 products are unrolled"),
        TileRow(4, 256, "", Tile(16, 16, 4, 1), "smallest tile of a matrix product"),
        TileRow(2, 32, "amd", Tile(16, 128, 4, 1), "28.3, four blocks; with 32 rows 26.2, two"),
        TileRow(
            2, 64, "amd !padded !dropout !busy !entropy", Tile(32, 128, 4, 1, 256), "30.9, two blocks at 256 registers"
        ),
        TileRow(2, 64, "amd", Tile(32, 128, 4, 1), "at 256 registers 136 bytes spill with softcap"),
        TileRow(
            2,
            128,
            "amd !padded !dropout !busy !bounded !entropy",
            Tile(32, 128, 4, 1),
            "27.5; with dentropy 4 bytes would spill",
        ),
        TileRow(2, 128, "amd dropout", Tile(16, 128, 4, 1), "32 rows spill 48 bytes; two stages take 486 registers"),
        TileRow(2, 128, "amd", Tile(16, 128, 4, 2), "32 rows spill 128 bytes with bounds, 4 with dentropy"),
        TileRow(2, 256, "amd", Tile(16, 64, 4, 1), "73.5; 32 rows spill 672 bytes"),
        TileRow(2, 64, "tensor_memory dropout", Tile(32, 64, 4, 2, 168), "without a limit ptxas spills 8 bytes"),
        TileRow(2, 64, "tensor_memory", Tile(64, 64, 4, 2), "12.0, two blocks; 128 keys 11.4, but edges add 12 %"),
        TileRow(2, 128, "tensor_memory dropout", Tile(32, 128, 8, 2), "64 rows spill 8 bytes"),
        TileRow(2, 128, "tensor_memory entropy", Tile(32, 128, 8, 2), "64 rows spill 72 bytes"),
        TileRow(2, 128, "tensor_memory", Tile(64, 128, 8, 2), "14.5; with 32 rows 20.9"),
        TileRow(2, 256, "tensor_memory", Tile(32, 64, 8, 1), "58.3; 64 rows spill 152 bytes"),
        TileRow(2, 64, "large dropout", Tile(32, 64, 4, 2), "64 rows and 128 keys spill 72 bytes"),
        TileRow(2, 64, "large busy", Tile(32, 64, 4, 2), "64 rows and 128 keys spill 32 bytes with a mask"),
        TileRow(2, 64, "large", Tile(64, 128, 8, 3), "10.5; with 32 rows 13.3; with 64 keys 48 bytes spill"),
        TileRow(2, 128, "large dropout", Tile(16, 128, 8, 3), "32 rows spill 8 bytes"),
        TileRow(2, 128, "large busy", Tile(32, 128, 8, 2), "16.3 with a mask; with three stages 16.9"),
        TileRow(2, 128, "large", Tile(32, 128, 8, 3), "16.6; with 16 rows 24.5"),
        TileRow(2, 32, "!padded !dropout !busy", Tile(64, 128, 8, 2), "10.9; 32 rows 11.9; with dropout 8 bytes spill"),
        TileRow(2, 64, "", Tile(32, 128, 8, 2), "15.4; 64 rows and keys spill 8 bytes"),
        TileRow(
            2, 128, "!small !padded !dropout !busy !bounded", Tile(32, 64, 4, 2), "24.1, two blocks; bounds would spill"
        ),
        TileRow(2, 128, "padded", Tile(16, 128, 8, 1), "25.3 at 104 dimensions; with two stages 25.9"),
        TileRow(2, 128, "", Tile(16, 128, 8, 2), "25.4; accumulators take half the registers"),
        TileRow(2, 256, "", Tile(32, 32, 4, 1), "46.0; on sm_90 64 keys spill 752 bytes"),
    ),
    # Few rows, many keys: many keys in flight hide memory latency. `many_rows`: a group of heads has more than 16 rows.
    # Shared memory limits the occupancy, so 255 registers cost nothing.
    "decode": (
        TileRow(4, 64, "amd", Tile(16, 32, 4, 1), "small tile, as fp32 products are unrolled"),
        TileRow(4, 64, "", Tile(16, 32, 4, 2), "small tile, as fp32 products are unrolled"),
        TileRow(4, 256, "amd", Tile(16, 16, 4, 1), "smallest tile of a matrix product"),
        TileRow(4, 128, "", Tile(16, 16, 4, 1), "smallest tile of a matrix product"),
        TileRow(4, 256, "", Tile(16, 16, 8, 1), "as above, with the accumulator split over 8 warps"),
        TileRow(2, 128, "amd many_rows", Tile(32, 64, 4, 1), "more rows share each loaded key"),
        TileRow(2, 128, "amd", Tile(16, 64, 4, 1), "smallest number of rows of a matrix product"),
        TileRow(2, 256, "amd", Tile(16, 32, 4, 1), "as many bytes in flight as 64 keys of 128 dimensions"),
        TileRow(2, 128, "many_rows", Tile(32, 64, 8, 3, 255), "more rows share each loaded key"),
        TileRow(2, 64, "", Tile(16, 128, 4, 3, 255), "smallest number of rows of a matrix product"),
        TileRow(2, 128, "", Tile(16, 64, 4, 3, 255), "as many bytes in flight as 128 keys of 64 dimensions"),
        TileRow(2, 256, "", Tile(16, 32, 4, 3, 255), "as many bytes in flight as 128 keys of 64 dimensions"),
    ),
    # No accumulator. A byte counts the keys of a tile, so at most 128 keys. `biased`: an additive mask.
    "gaps": (
        TileRow(4, 64, "amd", Tile(64, 32, 4, 1), "small tile, as fp32 products are unrolled"),
        TileRow(4, 128, "amd", Tile(32, 32, 4, 1), "small tile, as fp32 products are unrolled"),
        TileRow(4, 256, "amd", Tile(16, 16, 4, 1), "smallest tile of a matrix product"),
        TileRow(4, 64, "", Tile(32, 32, 8, 1), "small tile, as fp32 products are unrolled"),
        TileRow(4, 256, "", Tile(16, 16, 8, 1), "smallest tile of a matrix product; spills above 128"),
        TileRow(2, 128, "amd", Tile(128, 64, 4, 1), "tile of the forward kernel"),
        TileRow(2, 256, "amd", Tile(64, 32, 4, 1), "tile of a busy forward kernel"),
        TileRow(2, 64, "", Tile(128, 64, 8, 2), "tile of a busy forward kernel"),
        TileRow(2, 128, "biased", Tile(128, 32, 8, 2), "wide heads leave no room for a tile of bias"),
        TileRow(2, 128, "", Tile(128, 64, 8, 2), "tile of a busy forward kernel"),
        TileRow(2, 256, "", Tile(64, 64, 8, 2), "a query tile has as many bytes as at 128 dimensions"),
    ),
}


# Cached: every backward pass selects two tiles, among few combinations.
@functools.cache
def tile_for(kernel: str, widest: int, size: int, resources: Resources, **options: bool) -> Tile:
    """Return the tile of a kernel.

    Args:
        kernel: A key of `TILES`.
        widest: The largest head dimension, padded to a power of two.
        size: Bytes per element.
        resources: The target device.
        options: The launch options that the table of the kernel distinguishes.

    >>> from .launch import SM_90
    >>> tile_for("forward", 128, 2, SM_90, boxed=True)
    Tile(m=128, n=128, warps=8, stages=2, registers=0)
    """
    given = frozenset([*traits_of(resources), *(name for name, is_given in options.items() if is_given)])
    return next(row.tile for row in TILES[kernel] if row.applies(size, widest, given))


def traits_of(resources: Resources) -> list[str]:
    """Return the device traits that the tables distinguish."""
    traits = {
        "amd": resources.warp_size == 64,
        "tensor_memory": resources.has_tensor_memory,
        "large": resources.shared_memory > 200_000,
        "small": resources.shared_memory <= 160_000,
    }
    return [name for name, has in traits.items() if has]


def sums_first(value_dim: int, size: int, tile: Tile, resources: Resources, *, boxed: bool, entropy: bool) -> bool:
    """Whether row sums are computed before the second matrix product, so that p and x do not stay live in registers.

    ptxas schedules the sums after the product and spills up to 240 bytes. Where it does not spill, the default order
    takes 2 to 6 % fewer instructions.
    """
    if resources.has_tensor_memory:
        return size == 2
    if boxed or resources.warp_size == 64:
        return False
    if value_dim <= 64:
        return entropy and resources.capability >= 120 and tile.n > 64
    return entropy or tile.n * value_dim > LARGE_TILE


def parts_of_sums(first: bool, size: int, resources: Resources, *, entropy: bool, masked: bool) -> int:
    """Return the number of partial sums per row, given `sums_first`; see `sum_in_parts` in device.py.

    `masked`: a bool mask, or a bias in half precision. In their layout a row is spread over many threads, and Triton
    would give it to the partial sums too: 58 shuffles per warp and 16 keys on sm_80, with one part 8.
    """
    if resources.has_tensor_memory:
        return 2 if size == 2 else 1
    if resources.warp_size == 64:
        return 8
    return 8 if entropy and not first and not masked else 1


def rounds_bits(dtype: torch.dtype, bias: torch.dtype | None, resources: Resources) -> bool:
    """Whether factors of matrix products are rounded to bf16 by integer arithmetic; see `as_factor` in device.py.

    gfx942 has no conversion instruction; gfx950, with more shared memory, has one. The rounding loses a NaN of ones. A
    NaN from bf16 ends in zeros, arithmetic makes none of ones, and numbers per row are stored without any. In the
    forward pass a NaN weight makes the sum of its row NaN. That leaves a `bias` in another dtype, for gradients.
    """
    without = resources.warp_size == 64 and resources.shared_memory <= 65_536
    return without and dtype is torch.bfloat16 and bias in (None, torch.bfloat16)


def keeps_columns(mask: Tensor | None, resources: Resources) -> bool:
    """Whether numbers per row are columns [rows, 1] in loops over keys, instead of vectors [rows].

    Triton gives vectors the layout of the mask, and columns that of the matrix product. On sm_80, a mask with unaligned
    rows is loaded with each row spread over 32 threads: in that layout all scores are exchanged through shared memory,
    with 5 times the shuffles and a quarter more instructions (`make compiled`). With aligned rows, and on sm_90, where
    8 bytes would spill, columns take 2 to 4 % more instructions than vectors; on gfx942 4 % fewer.
    """
    if mask is None or resources.copies_boxes:
        return False
    return resources.warp_size == 64 or not has_aligned_rows(mask)


def has_aligned_rows(mask: Tensor) -> bool:
    """Whether a mask is loaded in pieces of several keys: its strides are multiples of 16."""
    return mask.data_ptr() % 16 == 0 and all(
        n == 1 or stride % 16 == 0 for n, stride in zip(mask.shape[:-1], mask.stride()[:-1], strict=True)
    )


def backward_takes_boxes(widest: int, size: int, resources: Resources, *, busy: bool) -> bool:
    """Whether the dQ kernel loads keys and values through TMA descriptors, if their layout allows it.

    On sm_100 with the same tile, descriptors take 2 to 6 % fewer instructions at 128 dimensions; at 64, pointers take 4
    % fewer. With a mask or more work per score (`busy`) registers run out: softcap alone would spill 432 bytes. sm_90
    would spill up to 40 bytes.
    """
    return resources.has_tensor_memory and size == 2 and 64 < widest <= 128 and not busy


def edge_stages(widest: int, resources: Resources, *, masked: bool) -> int | None:
    """Return the pipeline stages of the dK/dV loop that reads a bool mask, or None for the default.

    Two stages at 128 dimensions would spill 176 bytes on sm_80.
    """
    return 1 if masked and widest > 64 and resources.shared_memory <= 200_000 else None


def clamps_rows(tile: Tile, resources: Resources, *, busy: bool) -> bool:
    """Whether edge tiles of the dK/dV kernel load the numbers of existing rows only, four at once.

    On gfx942 a guarded load takes an instruction per number: 770 instead of 528 per edge tile at 128 dimensions.
    `busy`: a padded head dimension or a gradient of the entropy, where 4 and 104 bytes would spill; at 64 dimensions
    and the 256 registers of the tile, 56.
    """
    return resources.warp_size == 64 and not tile.registers and not busy


def draws_fours(resources: Resources) -> bool:
    """Whether the dK/dV kernel draws dropout for four slots at once; see `keep_by_slot` in device.py.

    At 128 dimensions this reduces 92 to 85 instructions per score on sm_90, and spills 80 bytes on sm_80.
    """
    return resources.shared_memory > 200_000 or resources.warp_size == 64


def keeps_pointers(widest: int, tile: Tile, resources: Resources) -> bool:
    """Whether the forward kernel keeps key and value pointers in registers instead of recomputing them each step."""
    return resources.warp_size == 32 and tile.n * widest <= LARGE_TILE


def works_in_pairs(size: int, resources: Resources) -> bool:
    """Whether the forward and dQ kernels use packed fp32 instructions; see `PAIRS` in device.py.

    The dK/dV kernel would take 5 % more instructions, because the subtrahends of a pair differ there.
    """
    return resources.has_tensor_memory and size == 2
