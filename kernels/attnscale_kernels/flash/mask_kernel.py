"""Classification of the tiles of a mask, once per call, so that attention loops skip fully masked tiles.

`mask_squares_kernel` reads the mask and classifies blocks of 32 × 32. `mask_tiles_kernel` combines these classes with
bounds and padding into one tile list per program of the forward or backward pass: fully visible tiles first, then
partially visible ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import HIDDEN_BELOW, mask_pointers
from ..tiles import key_range, phase_edges, query_range

SQUARE = tl.constexpr(32)  # rows and keys of a block
# Block flags.
CHANGES = tl.constexpr(1)  # contains an element that hides a key or changes a score
SHOWS = tl.constexpr(2)  # contains an element that does not hide its key


@triton.jit
def mask_squares_kernel(
    squares_ptr,  # [B|1, H|1, squares of rows, squares of keys], uint8
    mask_ptr,  # [B|1, H|1, Tq|1, Tk|1], uint8 or None
    bias_ptr,  # instead of mask_ptr
    strides,  # of the mask
    heads,  # extents of the mask, as are rows and keys; 1 along broadcast axes
    rows,
    keys,
    ACROSS: tl.constexpr,  # adjacent blocks per program
):
    """Store the flags CHANGES and SHOWS of each mask block.

    A NaN in a bias counts as both: it changes the score and does not hide the key.
    """
    across = tl.cdiv(keys, SQUARE)
    down = tl.cdiv(rows, SQUARE)
    parts = tl.cdiv(across, ACROSS)
    part = tl.program_id(0) % parts
    square_row = tl.program_id(0) // parts
    head_index = square_row // down
    batch, head = (head_index // heads).to(tl.int64), (head_index % heads).to(tl.int64)
    row = square_row % down * SQUARE + tl.arange(0, SQUARE)
    slot = part * ACROSS * SQUARE + tl.arange(0, ACROSS * SQUARE)
    exists = (row < rows)[:, None] & (slot < keys)[None, :]
    if bias_ptr is not None:
        bias = tl.load(mask_pointers(bias_ptr, strides, batch, head, row, slot), mask=exists, other=0.0).to(tl.float32)
        changes, shows = bias != 0, ~(bias <= HIDDEN_BELOW)
    else:
        shows = tl.load(mask_pointers(mask_ptr, strides, batch, head, row, slot), mask=exists, other=0) != 0
        changes = ~shows
    held = _any_of_square(exists & changes, ACROSS) * CHANGES + _any_of_square(exists & shows, ACROSS) * SHOWS
    square = part * ACROSS + tl.arange(0, ACROSS)
    tl.store(squares_ptr + square_row.to(tl.int64) * across + square, held.to(tl.uint8), mask=square < across)


@triton.jit
def _any_of_square(found, ACROSS: tl.constexpr):
    """Reduce to 1 or 0 per block, for ACROSS adjacent blocks."""
    column = tl.max(found.to(tl.int32), axis=0)
    return tl.max(tl.reshape(column, [ACROSS, SQUARE]), axis=1)


@triton.jit
def mask_tiles_kernel(
    lists_ptr,  # [B|1, H|1, tiles, steps + 2], int32
    squares_ptr,
    stride_squares,  # 0 where the mask is broadcast
    rule,  # without the mask
    heads,  # of the lists
    queries,
    keys,
    OWN: tl.constexpr,  # rows of the program's own tile
    STEP: tl.constexpr,  # keys of the tiles it loops over
    BY_KEYS: tl.constexpr,  # the program owns a tile of keys and loops over rows
    CHUNK: tl.constexpr,  # tiles per step
):
    """Write the tile list of one program: fully visible tiles, partially visible tiles, then hidden tiles.

    The last two entries are the number of fully visible tiles, and of fully or partially visible tiles.
    """
    own_count, step_count = queries, keys
    if BY_KEYS:
        own_count, step_count = keys, queries
    tiles = tl.cdiv(own_count, OWN)
    steps = tl.cdiv(step_count, STEP)
    tile = tl.program_id(0) % tiles
    head_index = tl.program_id(0) // tiles
    batch, head = (head_index // heads).to(tl.int64), (head_index % heads).to(tl.int64)
    low = tile * OWN
    high = tl.minimum(low + OWN, own_count)
    if BY_KEYS:
        edges = phase_edges(rule, query_range(rule, batch, tile, low, high, queries), STEP)
    else:
        edges = phase_edges(rule, key_range(rule, batch, tile, low, high, keys), STEP)
    at = squares_ptr + batch * stride_squares[0] + head * stride_squares[1]
    list_at = lists_ptr + tl.program_id(0).to(tl.int64) * (steps + 2)

    whole_count = tl.program_id(0) * 0
    visited_count = whole_count
    for first in tl.range(0, steps, CHUNK):
        step = first + tl.arange(0, CHUNK)
        whole, visited = _classes(at, stride_squares, edges, tile, step, queries, keys, OWN, STEP, BY_KEYS)
        whole_count += tl.sum(whole)
        visited_count += tl.sum(visited)
    tl.store(list_at + steps, whole_count)
    tl.store(list_at + steps + 1, visited_count)

    next_whole = whole_count * 0
    next_edge = whole_count
    next_unseen = visited_count
    for first in tl.range(0, steps, CHUNK):
        step = first + tl.arange(0, CHUNK)
        whole, visited = _classes(at, stride_squares, edges, tile, step, queries, keys, OWN, STEP, BY_KEYS)
        edge, unseen = visited - whole, tl.where(step < steps, 1 - visited, 0)
        place = tl.where(whole == 1, next_whole + tl.cumsum(whole), next_edge + tl.cumsum(edge))
        place = tl.where(visited == 1, place, next_unseen + tl.cumsum(unseen)) - 1
        tl.store(list_at + place, step, mask=step < steps)
        next_whole += tl.sum(whole)
        next_edge += tl.sum(edge)
        next_unseen += tl.sum(unseen)


@triton.jit
def _classes(
    at,
    strides,
    edges,
    tile,
    step,
    queries,
    keys,
    OWN: tl.constexpr,
    STEP: tl.constexpr,
    BY_KEYS: tl.constexpr,
):
    """For tiles `step` [CHUNK], return 1 or 0: whether each is fully visible, and whether it is visible at all.

    A tile smaller than a mask block gets the class of the block.
    """
    DOWN: tl.constexpr = (OWN + SQUARE - 1) // SQUARE
    ACROSS: tl.constexpr = (STEP + SQUARE - 1) // SQUARE
    square = tl.arange(0, DOWN * ACROSS)[None, :]
    own = tile * OWN // SQUARE + square // ACROSS
    other = step[:, None] * STEP // SQUARE + square % ACROSS
    row, slot = own, other
    if BY_KEYS:
        row, slot = other, own
    exists = (row < tl.cdiv(queries, SQUARE)) & (slot < tl.cdiv(keys, SQUARE))
    where = at + row.to(tl.int64) * strides[2] + slot.to(tl.int64) * strides[3]
    held = tl.load(where, mask=exists, other=0).to(tl.int32)
    changes = tl.max(held & CHANGES, axis=1)
    shows = tl.max((held & SHOWS) // SHOWS, axis=1)
    low, clear_low, clear_high, end = edges
    left = step * STEP
    visited = (left >= low) & (left < end) & (shows == 1)
    whole = visited & (left >= clear_low) & (left < clear_high) & (changes == 0)
    return whole.to(tl.int32), visited.to(tl.int32)
