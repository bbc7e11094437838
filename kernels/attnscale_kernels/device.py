"""What the kernels share on the device: who sees what, the online softmax, softcap and dropout.

Scores y are raw accumulators q·k where logits are linear in them, else softcap(scale·q·k) + bias. Logits in units of
ln 2 are y·c with one c per row, so that a temperature costs no instruction. Hidden scores are a finite number.
"""

from __future__ import annotations

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1e30)  # finite: a weight of 0 times its logit is 0, not NaN
SEEN_ABOVE = tl.constexpr(-1e29)
HIDDEN_BELOW = tl.constexpr(-1e4)  # an additive mask at or below this hides the key
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

RIGHT = tl.constexpr(1)  # bits of RANGE; see visibility.py
LEFT = tl.constexpr(2)
BOUNDS = tl.constexpr(4)
BOOL_MASK = tl.constexpr(1)
BIAS = tl.constexpr(2)


@triton.jit
def row_bounds(rows, queries, keys, start_ptr, stop_ptr, slot, left, right, RANGE: tl.constexpr):
    """First visible slot and the one after the last, [rows]; both 0 for rows that do not exist."""
    exists = rows < queries
    if RANGE == BOUNDS:
        start = tl.load(start_ptr + rows, mask=exists, other=0)
        stop = tl.load(stop_ptr + rows, mask=exists, other=0)
    else:
        start = tl.zeros_like(rows)
        stop = tl.where(exists, keys, 0)
        if LEFT & RANGE:
            start = tl.maximum(rows + slot - left, 0)
        if RIGHT & RANGE:
            stop = tl.where(exists, tl.minimum(tl.maximum(rows + slot + right + 1, 0), keys), 0)
    return start, stop


@triton.jit
def key_range(top, bottom, keys, table_ptr, slot, left, right, RANGE: tl.constexpr):
    """Of the rows [top, bottom): first slot that any may see, those that all see [clear, end), the last plus one."""
    if RANGE == BOUNDS:
        first = tl.load(table_ptr)
        clear_first = tl.load(table_ptr + 1)
        clear_end = tl.load(table_ptr + 2)
        end = tl.load(table_ptr + 3)
    else:
        first = 0
        clear_first = 0
        clear_end = keys
        end = keys
        if LEFT & RANGE:
            first = tl.minimum(tl.maximum(top + slot - left, 0), keys)
            clear_first = tl.minimum(tl.maximum(bottom - 1 + slot - left, 0), keys)
        if RIGHT & RANGE:
            clear_end = tl.minimum(tl.maximum(top + slot + right + 1, 0), keys)
            end = tl.minimum(tl.maximum(bottom + slot + right, 0), keys)
        clear_end = tl.maximum(clear_first, clear_end)
        end = tl.maximum(first, end)
    return first, clear_first, clear_end, end


@triton.jit
def query_range(left_key, right_key, queries, table_ptr, slot, left, right, RANGE: tl.constexpr):
    """Of the slots [left_key, right_key): first row that may see any, those that see all, the last row plus one."""
    if RANGE == BOUNDS:
        first = tl.load(table_ptr)
        clear_first = tl.load(table_ptr + 1)
        clear_end = tl.load(table_ptr + 2)
        end = tl.load(table_ptr + 3)
    else:
        first = 0
        clear_first = 0
        clear_end = queries
        end = queries
        if RIGHT & RANGE:  # row + slot + right >= key
            first = tl.minimum(tl.maximum(left_key - slot - right, 0), queries)
            clear_first = tl.minimum(tl.maximum(right_key - 1 - slot - right, 0), queries)
        if LEFT & RANGE:  # row + slot - left <= key
            clear_end = tl.minimum(tl.maximum(left_key + left - slot + 1, 0), queries)
            end = tl.minimum(tl.maximum(right_key + left - slot, 0), queries)
        end = tl.maximum(first, end)
        clear_first = tl.minimum(clear_first, end)
        clear_end = tl.minimum(tl.maximum(clear_first, clear_end), end)
    return first, clear_first, clear_end, end


@triton.jit
def phases(first, clear_first, clear_end, end, BLOCK: tl.constexpr, UNTOLD: tl.constexpr):
    """Where tiles begin, and which of them every row sees whole; with padding or a mask there is no telling."""
    low = first // BLOCK * BLOCK
    if UNTOLD:
        clear_low = low
        clear_high = low
    else:
        clear_low = tl.cdiv(clear_first, BLOCK) * BLOCK
        clear_high = tl.maximum(clear_end // BLOCK * BLOCK, clear_low)
    return low, clear_low, clear_high


@triton.constexpr_function
def first_phase(RANGE, UNTOLD):
    """Tiles come in three phases: the left edge, those that every row sees whole, the right edge. Which come at all."""
    if UNTOLD:
        return 2
    return 0 if RANGE & 6 else 1  # LEFT, or BOUNDS


@triton.jit
def load_tile(at, inside, exists, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """A tile whose head dimension may be padded and, at an edge, some of whose keys may not exist."""
    if MASKED:
        return tl.load(at, mask=inside & exists, other=0.0)
    if PADDED:
        return tl.load(at, mask=inside, other=0.0)
    return tl.load(at)


@triton.jit
def visible(
    rows,
    slots,
    start,
    stop,
    queries,
    keys,
    padding_ptr,
    mask_ptr,
    stride_mask_row,
    stride_mask_key,
    RANGE: tl.constexpr,
    PADDING: tl.constexpr,
    MASK: tl.constexpr,
):
    """Which of the scores [rows, slots] count, and their bias (0 where there is none)."""
    seen = slots[None, :] < stop[:, None]
    if (LEFT | BOUNDS) & RANGE:
        seen &= slots[None, :] >= start[:, None]
    bias = 0.0
    if PADDING:
        hidden = tl.load(padding_ptr + slots, mask=slots < keys, other=1)
        seen &= (hidden == 0)[None, :]
    if MASK:
        at = mask_ptr + rows[:, None].to(tl.int64) * stride_mask_row + slots[None, :].to(tl.int64) * stride_mask_key
        exists = (rows < queries)[:, None] & (slots < keys)[None, :]
        if MASK == BOOL_MASK:
            seen &= tl.load(at, mask=exists, other=0) != 0
        else:
            bias = tl.load(at, mask=exists, other=0.0).to(tl.float32)
            seen &= ~(bias <= HIDDEN_BELOW)  # a NaN hides no key: it has to reach the row
            bias = tl.where(seen, bias, 0.0)
    return seen, bias


@triton.jit
def tanh(x):
    """Through 2^x, which every device has; exact to rounding at both ends."""
    shrunk = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    return tl.where(x < 0, -1.0, 1.0) * (1 - shrunk) / (1 + shrunk)


@triton.jit
def keep(seed, head, rows, slots, dropout_p):
    """Which of [rows, slots] dropout keeps: a counter-based draw at (head, row, slot), the same in every kernel."""
    row = rows[:, None] + 0 * slots[None, :]
    slot = slots[None, :] + 0 * rows[:, None]
    draw, _, _, _ = tl.philox(seed, slot, row, slot * 0 + head, slot * 0, 7)
    return (draw >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0) >= dropout_p


@triton.jit
def sum_in_parts(x, PARTS: tl.constexpr):
    """Row sums [rows, PARTS], each over every PARTS-th column: with 8, no two threads have to exchange anything.

    A matrix product leaves columns that are 8 apart with one thread on sm_80, sm_90 and gfx942, and all of them on
    sm_100. Instructions of the loop, bf16 and 64 dimensions, from 1 to 8 parts: with entropy 414 → 402 on sm_80, 349 →
    337 on sm_90, 351 → 355 on sm_100, 465 → 436 on gfx942; for the sum of weights alone 303 → 295 on sm_90, 331 → 345
    on sm_100, 418 → 411 on gfx942. So what has statistics takes 8, and what has none takes 1, or sm_100 would lose 4 %.
    """
    if PARTS == 1:
        return tl.sum(x, axis=1)[:, None]
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // PARTS, PARTS]), axis=1)
