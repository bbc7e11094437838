"""Device functions for tiles: loop phases, and loads and stores.

The tiles of a phase are either contiguous, as given by the rule, or listed explicitly (flash/mask_kernel.py). Tensors
are accessed through pointers or TMA descriptors.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_range(rule, batch, tile, top, bottom, keys):
    """For rows [top, bottom): slots [first, end) seen by any row, [clear_first, clear_end) seen by all."""
    if rule.table_ptr is not None:
        first, clear_first, clear_end, end = _load_four(rule.table_ptr + batch * rule.stride_table + tile * 4)
    else:
        first = 0
        clear_first = 0
        clear_end = keys
        end = keys
        if rule.left is not None:
            first = tl.minimum(tl.maximum(top + rule.slot - rule.left, 0), keys)
            clear_first = tl.minimum(tl.maximum(bottom - 1 + rule.slot - rule.left, 0), keys)
        if rule.right is not None:
            clear_end = tl.minimum(tl.maximum(top + rule.slot + rule.right + 1, 0), keys)
            end = tl.minimum(tl.maximum(bottom + rule.slot + rule.right, 0), keys)
        clear_end = tl.maximum(clear_first, clear_end)
        end = tl.maximum(first, end)
    return first, clear_first, clear_end, end


@triton.jit
def query_range(rule, batch, tile, left_key, right_key, queries):
    """For slots [left_key, right_key): the rows that see any of them and those that see all, as in `key_range`."""
    if rule.table_ptr is not None:
        first, clear_first, clear_end, end = _load_four(rule.table_ptr + batch * rule.stride_table + tile * 4)
    else:
        first = 0
        clear_first = 0
        clear_end = queries
        end = queries
        if rule.right is not None:  # row + slot + right >= key
            first = tl.minimum(tl.maximum(left_key - rule.slot - rule.right, 0), queries)
            clear_first = tl.minimum(tl.maximum(right_key - 1 - rule.slot - rule.right, 0), queries)
        if rule.left is not None:  # row + slot - left <= key
            clear_end = tl.minimum(tl.maximum(left_key + rule.left - rule.slot + 1, 0), queries)
            end = tl.minimum(tl.maximum(right_key + rule.left - rule.slot, 0), queries)
        end = tl.maximum(first, end)
        clear_first = tl.minimum(clear_first, end)
        clear_end = tl.minimum(tl.maximum(clear_first, clear_end), end)
    return first, clear_first, clear_end, end


@triton.jit
def _load_four(ptr):
    return tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2), tl.load(ptr + 3)


@triton.jit
def phase_edges(rule, ranges, BLOCK: tl.constexpr):
    """Return the boundaries of the three phases of a tile loop, given `key_range` or `query_range`.

    Phase 0 is the left edge, phase 1 the fully visible tiles, phase 2 the right edge. With a mask no tile is known to
    be fully visible, and all tiles belong to phase 2.
    """
    first, clear_first, clear_end, end = ranges
    low = first // BLOCK * BLOCK
    if all_edge(rule):
        clear_low = low
        clear_high = low
    else:
        clear_low = tl.cdiv(clear_first, BLOCK) * BLOCK
        clear_high = tl.maximum(clear_end // BLOCK * BLOCK, clear_low)
    return low, clear_low, clear_high, end


@triton.jit
def all_edge(rule):
    """Whether keys inside the interval of a row may be hidden without a table or list of the fully visible tiles."""
    PADDED: tl.constexpr = rule.padding_ptr is not None and rule.table_ptr is None
    return rule.list_ptr is None and (PADDED or rule.mask_ptr is not None or rule.bias_ptr is not None)


@triton.jit
def first_phase(rule, BY_KEYS: tl.constexpr = False):
    """Return the first phase of a loop over keys, or over rows if BY_KEYS.

    A left edge exists only if the first visible slot moves. In tile lists the fully visible tiles come first.
    """
    MOVES: tl.constexpr = BY_KEYS or rule.table_ptr is not None or rule.start_ptr is not None or rule.left is not None
    return 2 if all_edge(rule) else 0 if MOVES and rule.list_ptr is None else 1


@triton.jit
def end_phase(rule):
    """Return one past the last phase. The repair phase (3) is needed where keys inside a tile can be hidden."""
    BOUNDED: tl.constexpr = rule.start_ptr is not None or rule.left is not None or rule.right is not None
    MASKED: tl.constexpr = rule.list_ptr is not None or rule.padding_ptr is not None
    return 4 if BOUNDED or MASKED or all_edge(rule) else 3


@triton.jit
def is_broken(acc):
    """Whether an accumulator [rows, columns] contains a non-finite element, or its row sums overflow."""
    row = tl.sum(acc, axis=1)
    whole = tl.sum(tl.reshape(row - row, [1, acc.shape[0]]), axis=1)
    return tl.reshape(whole, []) != 0


@triton.jit
def phase_range(edges, PHASE: tl.constexpr):
    """Return [low, high) of a phase, given `phase_edges`."""
    if PHASE == 1:
        low, high = edges[1], edges[2]
    elif PHASE == 2:
        low, high = edges[2], edges[3]
    elif PHASE == 3:
        low, high = edges[0], edges[3]
    else:
        low, high = edges[0], tl.minimum(edges[1], edges[3])
    return low, high


@triton.jit
def tile_list(rule, batch, head, tile):
    """Return a pointer to the tile list of a program: tile indices, those of phase 1 before those of phase 2."""
    return rule.list_ptr + batch * rule.stride_list[0] + head * rule.stride_list[1] + tile * rule.stride_list[2]


@triton.jit
def listed_edges(tiles_at, tiles):
    """`phase_edges` as indices into a tile list, which ends with the tile counts of phase 1 and of both phases."""
    return 0, 0, tl.load(tiles_at + tiles), tl.load(tiles_at + tiles + 1)


@triton.jit
def head_strides(x, ALIGN: tl.constexpr):
    """Return the first three strides of a `View`, known to the compiler as multiples of ALIGN."""
    if ALIGN == 1:
        return x.strides[0], x.strides[1], x.strides[2]
    return x.strides[0] // ALIGN * ALIGN, x.strides[1] // ALIGN * ALIGN, x.strides[2] // ALIGN * ALIGN


@triton.jit
def row_pointers(x, batch, head, rows, columns, ALIGN: tl.constexpr):
    """Return pointers to [rows, columns] of one head of a `View`; its last axis is contiguous."""
    of_batch, of_head, of_row = head_strides(x, ALIGN)
    return x.ptr + batch * of_batch + head * of_head + rows[:, None].to(tl.int64) * of_row + columns[None, :]


@triton.jit
def load_rows(x, batch, head, rows, count, columns, width, ALIGN: tl.constexpr = 1):
    """Load [rows, columns] of one head; 0 from row `count` and column `width` on."""
    inside = (rows < count)[:, None] & (columns < width)[None, :]
    return tl.load(row_pointers(x, batch, head, rows, columns, ALIGN), mask=inside, other=0.0)


@triton.jit
def store_rows(x, batch, head, rows, count, columns, width, values, ALIGN: tl.constexpr = 1):
    """Store [rows, columns] of one head, up to row `count` and column `width`."""
    inside = (rows < count)[:, None] & (columns < width)[None, :]
    tl.store(row_pointers(x, batch, head, rows, columns, ALIGN), values.to(x.ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_block(x, batch, head, top, count, columns, width, BLOCK: tl.constexpr, ALIGN: tl.constexpr = 1):
    """`load_rows` of BLOCK rows from `top` on, for the end of a program; see `store_block`."""
    at, inside = _block(x, batch, head, top, count, columns, width, BLOCK, ALIGN)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_block(x, batch, head, top, count, columns, width, values, ALIGN: tl.constexpr = 1):
    """`store_rows` from row `top` on, for the end of a program.

    Addresses are computed from offsets in the block. The row indices used for the loads at the start would otherwise
    stay live in registers until here, which spilled 48 bytes on sm_80.
    """
    at, inside = _block(x, batch, head, top, count, columns, width, values.shape[0], ALIGN)
    tl.store(at, values.to(x.ptr.dtype.element_ty), mask=inside)


@triton.jit
def _block(x, batch, head, top, count, columns, width, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """Return pointers to [BLOCK, columns] of one head from row `top` on, and their bounds mask."""
    of_batch, of_head, of_row = head_strides(x, ALIGN)
    places = tl.arange(0, BLOCK)
    inside = (places < count - top)[:, None] & (columns < width)[None, :]
    at = x.ptr + batch * of_batch + head * of_head + tl.cast(top, tl.int64) * of_row
    return at + (places[:, None] * of_row + columns[None, :]), inside


@triton.jit
def load_beta(beta, batch, head, rows, exists):
    """Load β of each row; 1 for rows past the end."""
    at = beta.ptr + batch * beta.strides[0] + head * beta.strides[1] + rows.to(tl.int64) * beta.strides[2]
    return tl.load(at, mask=exists, other=1.0)


@triton.jit
def load_box(box, batch, head, row):
    """Load rows [BN, BD] of one head from `row` on through a TMA descriptor; out-of-bounds elements are 0."""
    tile = box.load([batch.to(tl.int32), head.to(tl.int32), row, 0])
    return tl.reshape(tile, [tile.shape[2], tile.shape[3]])


@triton.jit
def load_tile(at, inside, exists, PADDED: tl.constexpr, EDGE: tl.constexpr):
    """Load a tile with a possibly padded head dimension; at an edge, keys past the end are masked too."""
    if EDGE:
        return tl.load(at, mask=inside & exists, other=0.0)
    if PADDED:
        return tl.load(at, mask=inside, other=0.0)
    return tl.load(at)


@triton.jit
def load_whole(at, inside, exists, PADDED: tl.constexpr, PHASE: tl.constexpr):
    """Load a tile [BN, columns] of keys or values, and 0 or NaN per key.

    A weight of 0 times NaN would contaminate every row of the product. In the repair phase, keys with non-finite
    elements are therefore loaded as 0 and marked with NaN. Added to the scores, the mark reaches the rows that see the
    key, and no others.
    """
    tile = load_tile(at, inside, exists, PADDED, PHASE != 1)
    broken = 0.0
    if PHASE == 3:
        wide = tile.to(tl.float32)
        broken = tl.sum(wide - wide, axis=1)
        tile = tl.load(at, mask=inside & exists & (broken == 0)[:, None], other=0.0)
    return tile, broken


@triton.jit
def load_whole_box(box, batch, head, row, PHASE: tl.constexpr):
    """`load_whole` through a TMA descriptor."""
    tile = load_box(box, batch, head, row)
    broken = 0.0
    if PHASE == 3:
        wide = tile.to(tl.float32)
        broken = tl.sum(wide - wide, axis=1)
        tile = tl.where((broken == 0)[:, None], tile, 0.0)
    return tile, broken
