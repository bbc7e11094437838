"""Launches that find which tiles of scores a mask hides or leaves as they are, and when they pay."""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import Launch, Tile, cdiv
from ..visibility import Rule, Visibility, key_ranges, query_ranges
from .mask_kernel import mask_squares_kernel, mask_tiles_kernel

SQUARE = 32  # rows and keys of a mask that are summed up in one number, as in mask_kernel.py
ACROSS = 16  # squares of a program
CHUNK = 64  # tiles that a list is made of at a time
# Scores of a call from which on two launches more, about 10 µs, are little beside the attention to all of them.
LEAST_SCORES = 2**23


def pays(mask: Tensor, scores: tuple[int, int, int, int]) -> bool:
    """Whether a call with scores [B, H, Tq, Tk] is to look for tiles that its mask hides or leaves as they are.

    The mask has to be read once more for it. So it should have at most a byte for each score, which it has if it is
    bool, or shared by heads or sequences: a bias for each score seldom hides much.
    """
    batch, heads, rows, keys = _extents(mask)
    count = scores[0] * scores[1] * scores[2] * scores[3]
    return count >= max(LEAST_SCORES, batch * heads * rows * keys * mask.element_size())


def mask_squares(visibility: Visibility, scores: tuple[int, int, int, int]) -> tuple[tuple[Launch, ...], Tensor | None]:
    """What the squares of a mask hold, [B|1, H|1, rows, keys] in uint8, and the launch that finds it.

    Nothing where there is no mask, or it does not pay.
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
    """The rule of a launch whose programs take rows and go over keys, and what has to be launched before it."""
    ranges = key_ranges(visibility, queries, keys, tile.m)
    if squares is None:
        return (), visibility.rule(ranges)
    launch, lists = _tile_lists(visibility, squares, ranges, queries, keys, tile, by_keys=False)
    return (launch,), visibility.rule(ranges, lists)


def query_rule(
    visibility: Visibility, squares: Tensor | None, queries: int, keys: int, tile: Tile
) -> tuple[tuple[Launch, ...], Rule]:
    """The same for a launch whose programs take keys and go over rows."""
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
    """The tiles that each tile visits, [B|1, H|1, tiles, steps + 2] in int32 as `mask_tiles_kernel` has them."""
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
    """Of the part of a mask that lies in memory: 1 along axes that are broadcast."""
    return tuple([1 if stride == 0 else n for n, stride in zip(mask.shape, mask.stride(), strict=True)])
