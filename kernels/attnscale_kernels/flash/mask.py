"""Launches that classify the tiles of a mask, and the decision whether they pay off."""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import Launch, Tile, cdiv
from ..visibility import Rule, Visibility, key_ranges, query_ranges
from .mask_kernel import mask_squares_kernel, mask_tiles_kernel

SQUARE = 32  # rows and keys of a mask block, as in mask_kernel.py
ACROSS = 16  # blocks per program
CHUNK = 64  # tiles per step of the list construction
# Number of scores above which the cost of two additional launches, about 10 µs, is small.
LEAST_SCORES = 2**23


def pays(mask: Tensor, scores: tuple[int, int, int, int]) -> bool:
    """Whether a call with scores [B, H, Tq, Tk] should classify the tiles of its mask.

    Classification reads the mask once more. It pays off if the mask has at most one byte per score, that is, if it is
    bool or shared by heads or sequences. A bias with its own number for each score rarely hides much.
    """
    batch, heads, rows, keys = _extents(mask)
    count = scores[0] * scores[1] * scores[2] * scores[3]
    return count >= max(LEAST_SCORES, batch * heads * rows * keys * mask.element_size())


def mask_squares(visibility: Visibility, scores: tuple[int, int, int, int]) -> tuple[tuple[Launch, ...], Tensor | None]:
    """Return the launch that classifies the blocks of a mask, and its output [B|1, H|1, rows, keys] in uint8.

    Returns no launch and None if there is no mask or classification does not pay off.
    """
    mask = visibility.mask
    if mask is None or not pays(mask, scores):
        return (), None
    batch, heads, rows, keys = _extents(mask)
    across = cdiv(keys, SQUARE)
    squares = torch.empty((batch, heads, cdiv(rows, SQUARE), across), dtype=torch.uint8, device=mask.device)
    rule = visibility.rule()
    arguments: dict[str, object] = {
        "squares_ptr": squares,
        "mask_ptr": rule.mask_ptr,
        "bias_ptr": rule.bias_ptr,
        "strides": rule.stride_mask,
        "heads": heads,
        "rows": rows,
        "keys": keys,
    }
    grid = batch * heads * cdiv(rows, SQUARE) * cdiv(across, ACROSS)
    constants: dict[str, object] = {"ACROSS": ACROSS}
    return (Launch(mask_squares_kernel, grid, arguments, constants, 4, 1),), squares


def key_rule(
    visibility: Visibility, squares: Tensor | None, queries: int, keys: int, tile: Tile
) -> tuple[tuple[Launch, ...], Rule]:
    """Return the rule for programs that own rows and loop over keys, and the launches it depends on."""
    ranges = key_ranges(visibility, queries, keys, tile.m)
    if squares is None:
        return (), visibility.rule(ranges)
    launch, lists = _tile_lists(visibility, squares, ranges, queries, keys, tile, by_keys=False)
    return (launch,), visibility.rule(ranges, lists)


def query_rule(
    visibility: Visibility, squares: Tensor | None, queries: int, keys: int, tile: Tile
) -> tuple[tuple[Launch, ...], Rule]:
    """Return the rule for programs that own keys and loop over rows, and the launches it depends on."""
    ranges = query_ranges(visibility, queries, keys, tile.n)
    if squares is None:
        return (), visibility.rule(ranges)
    launch, lists = _tile_lists(visibility, squares, ranges, queries, keys, tile, by_keys=True)
    return (launch,), visibility.rule(ranges, lists)


def _tile_lists(
    visibility: Visibility,
    squares: Tensor,
    ranges: Tensor | None,
    queries: int,
    keys: int,
    tile: Tile,
    *,
    by_keys: bool,
) -> tuple[Launch, Tensor]:
    """Return the launch of `mask_tiles_kernel` and its tile lists [B|1, H|1, tiles, steps + 2] in int32."""
    (rows, own), (columns, step) = ((queries, tile.m), (keys, tile.n))[:: -1 if by_keys else 1]
    tiles, steps = cdiv(rows, own), cdiv(columns, step)
    heads = squares.shape[1]
    batch = max(squares.shape[0], 1 if ranges is None else ranges.shape[0])
    lists = torch.empty((batch, heads, tiles, steps + 2), dtype=torch.int32, device=squares.device)
    arguments: dict[str, object] = {
        "lists_ptr": lists,
        "squares_ptr": squares,
        "stride_squares": tuple([0 if n == 1 else s for n, s in zip(squares.shape, squares.stride(), strict=True)]),
        "rule": visibility._replace(mask=None).rule(ranges),
        "heads": heads,
        "queries": queries,
        "keys": keys,
    }
    constants: dict[str, object] = {"OWN": own, "STEP": step, "BY_KEYS": by_keys, "CHUNK": CHUNK}
    return Launch(mask_tiles_kernel, batch * heads * tiles, arguments, constants, 4, 1), lists


def _extents(mask: Tensor) -> tuple[int, ...]:
    """Return the extents of a mask in memory: 1 along broadcast axes."""
    return tuple([1 if stride == 0 else n for n, stride in zip(mask.shape, mask.stride(), strict=True)])
