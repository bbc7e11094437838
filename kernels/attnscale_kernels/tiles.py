"""Device functions that read and write tiles of tensors, by pointers or by descriptors."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def head_strides(x, ALIGN: tl.constexpr):
    """Strides of the first three axes of a `View`, as numbers that the compiler knows to be multiples of ALIGN."""
    if ALIGN == 1:
        return x.strides[0], x.strides[1], x.strides[2]
    return x.strides[0] // ALIGN * ALIGN, x.strides[1] // ALIGN * ALIGN, x.strides[2] // ALIGN * ALIGN


@triton.jit
def row_pointers(x, batch, head, rows, columns, ALIGN: tl.constexpr):
    """Pointers to [rows, columns] of one head of a `View`, whose last axis is contiguous."""
    of_batch, of_head, of_row = head_strides(x, ALIGN)
    return x.ptr + batch * of_batch + head * of_head + rows[:, None].to(tl.int64) * of_row + columns[None, :]


@triton.jit
def load_rows(x, batch, head, rows, count, columns, width, ALIGN: tl.constexpr = 1):
    """[rows, columns] of one head, 0 from row `count` and column `width` on."""
    inside = (rows < count)[:, None] & (columns < width)[None, :]
    return tl.load(row_pointers(x, batch, head, rows, columns, ALIGN), mask=inside, other=0.0)


@triton.jit
def store_rows(x, batch, head, rows, count, columns, width, values, ALIGN: tl.constexpr = 1):
    """Stores [rows, columns] of one head, up to row `count` and column `width`."""
    inside = (rows < count)[:, None] & (columns < width)[None, :]
    tl.store(row_pointers(x, batch, head, rows, columns, ALIGN), values.to(x.ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_block(x, batch, head, top, count, columns, width, BLOCK: tl.constexpr, ALIGN: tl.constexpr = 1):
    """BLOCK rows from `top` on, as `load_rows` gives them, at the end of a program; see `store_block`."""
    at, inside = _block(x, batch, head, top, count, columns, width, BLOCK, ALIGN)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_block(x, batch, head, top, count, columns, width, values, ALIGN: tl.constexpr = 1):
    """Stores rows from `top` on, as `store_rows` does, at the end of a program.

    By their places in the block: the numbers that rows were loaded by at the beginning would be the same ones, and be
    kept in registers until the end, which spilled 48 bytes on sm_80.
    """
    at, inside = _block(x, batch, head, top, count, columns, width, values.shape[0], ALIGN)
    tl.store(at, values.to(x.ptr.dtype.element_ty), mask=inside)


@triton.jit
def _block(x, batch, head, top, count, columns, width, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """Pointers to [BLOCK, columns] of one head from row `top` on, and which of them exist."""
    of_batch, of_head, of_row = head_strides(x, ALIGN)
    places = tl.arange(0, BLOCK)
    inside = (places < count - top)[:, None] & (columns < width)[None, :]
    at = x.ptr + batch * of_batch + head * of_head + tl.cast(top, tl.int64) * of_row
    return at + (places[:, None] * of_row + columns[None, :]), inside


@triton.jit
def load_beta(beta, batch, head, rows, exists):
    """β of each row; 1 for rows that do not exist."""
    at = beta.ptr + batch * beta.strides[0] + head * beta.strides[1] + rows.to(tl.int64) * beta.strides[2]
    return tl.load(at, mask=exists, other=1.0)


@triton.jit
def load_box(box, batch, head, row):
    """Rows [BN, BD] of one head from `row` on, through a descriptor: 0 where there is no row or column."""
    tile = box.load([batch.to(tl.int32), head.to(tl.int32), row, 0])
    return tl.reshape(tile, [tile.shape[2], tile.shape[3]])


@triton.jit
def load_tile(at, inside, exists, PADDED: tl.constexpr, EDGE: tl.constexpr):
    """A tile whose head dimension may be padded and, at an edge, some of whose keys may not exist."""
    if EDGE:
        return tl.load(at, mask=inside & exists, other=0.0)
    if PADDED:
        return tl.load(at, mask=inside, other=0.0)
    return tl.load(at)


@triton.jit
def load_whole(at, inside, exists, PADDED: tl.constexpr, PHASE: tl.constexpr):
    """A tile [BN, columns] of keys or values whose weights of 0 must not meet a NaN, and per key 0 or NaN.

    0·NaN reaches every row of a product. So where one shows, the phase that repairs loads what is not finite as 0 and
    says which keys have it: added to their scores, it reaches the rows that see them and no others.
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
    """The same through a descriptor."""
    tile = load_box(box, batch, head, row)
    broken = 0.0
    if PHASE == 3:
        wide = tile.to(tl.float32)
        broken = tl.sum(wide - wide, axis=1)
        tile = tl.where((broken == 0)[:, None], tile, 0.0)
    return tile, broken
