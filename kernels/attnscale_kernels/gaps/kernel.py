"""Gap counting without a score matrix: a certified bracket of Λ per row, and exact counts N(t).

Both take two passes over the keys of a row, on raw scores: the first finds the best, the second counts how far behind
the others are. For Λ = max ln k/Δ_k over all ranks k ≥ 2, the first pass also finds the gap g of the second best, the
second bins gaps by the leading bits of x = (2 + ε)·gap/g − ε, a number in fp32 that is 2 for the second best: four bins
to the octave, or two. With N(b) keys up to the end of a bin (a, b], a rank inside has a slope of at most ln N(b)/a, and
one of at least ln N(b)/b exists. As Λ ≥ ln 2/g, what lies beyond the last bin can be no more than ln n/(E·g), E the end
of that bin. The ε makes every bin a little narrower than a quarter (or a half) of its start, which is what rounding is
paid from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import (
    BIAS,
    BOUNDS,
    HIDDEN,
    LN2,
    SEEN_ABOVE,
    first_phase,
    key_range,
    load_tile,
    phases,
    row_bounds,
    tanh,
    visible,
)
from ..flash.forward import Forward, flash_forward
from ..launch import Launch, block_of, precision_of, resources_of, strides, unit_stride
from ..tiles import Tile, gap_tile
from ..visibility import BIAS as MASK_BIAS
from ..visibility import Visibility, key_ranges

EPSILON = tl.constexpr(2.0**-10)
SLACK = tl.constexpr(2.0**-20)  # of a gap over g (three roundings), of an approximate logarithm, and of their quotient
TIED_BELOW = tl.constexpr(2.0**-100)  # a gap so small that gaps over it may overflow has no upper bound
ODD_NIBBLES = tl.constexpr(0x0F0F0F0F0F0F0F0F)

LARGEST_TILE = 128  # keys, which a byte can count

# An infinite threshold admits every visible key, and no hidden one.
FARTHEST = 5e29

# Bits of the field that counts a bin, of a 64-bit word per row: 16 nibbles or 8 bytes. The last counts what is beyond.
FIELD_BITS = {15: 4, 7: 8}


class GapBracket(NamedTuple):
    """What `gap_bracket` returns, all [B, H, Tq] in fp32."""

    top: Tensor  # the best raw score, −∞ where a row sees nothing
    second_gap: Tensor  # how far behind the second best is, ∞ where there is none
    lower: Tensor  # lower ≤ Λ ≤ upper
    upper: Tensor


@triton.jit
def gap_scores(
    q,
    k_ptr,
    d,
    rows,
    slots,
    start,
    stop,
    queries,
    keys,
    padding_ptr,
    mask_ptr,
    stride_kn,
    stride_mask_row,
    stride_mask_key,
    scale,
    softcap,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RANGE: tl.constexpr,
    PADDING: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Scores y [BM, BN] of a tile as device.py has them, and at an edge which of them count (elsewhere all do)."""
    k_at = k_ptr + slots[None, :].to(tl.int64) * stride_kn + d[:, None]  # [BD, BN]
    k = load_tile(k_at, (d < D)[:, None], (slots < keys)[None, :], D != BLOCK_D, EDGE)
    y = tl.dot(q, k, input_precision=PRECISION)
    if SOFTCAP:
        y = softcap * tanh(y * (scale / softcap))
    seen = (slots >= 0)[None, :]
    if EDGE:
        seen, bias = visible(
            rows, slots, start, stop, queries, keys, padding_ptr, mask_ptr, stride_mask_row, stride_mask_key,
            RANGE, PADDING, MASK,
        )  # fmt: skip
        if MASK == BIAS:
            y = (y if SOFTCAP else y * scale) + bias
    return y, seen


@triton.jit
def halves(x):
    """The left and the right half of [BM, N]: of those columns a thread has both, so that nothing moves."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@triton.constexpr_function
def folds(columns):
    """How often to halve a tile for the best two: down to eight columns, at least once."""
    return max(1, (columns // 8).bit_length() - 1)


@triton.jit
def best_two(y, FOLDS: tl.constexpr):
    """The best and the second best of [BM, N] among columns that fold onto each other, [BM, N / 2^FOLDS]."""
    a, b = halves(y)
    best = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    second = tl.minimum(a, b)
    for _ in tl.static_range(FOLDS - 1):
        a, b = halves(best)
        c, e = halves(second)
        best = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
        second = tl.maximum(tl.minimum(a, b), tl.maximum(c, e))
    return best, second


@triton.jit
def count_fields(word, counts, odd_counts, BITS: tl.constexpr):
    """Adds the fields of words [BM, BN], each a single one, to counts [BM, 8] of the even and of the odd fields.

    A nibble overflows at 16, so that only eight columns are added as nibbles; a byte holds a whole tile of up to 128.
    """
    byte = tl.arange(0, 8) * 8
    if BITS == 4:
        GROUPS: tl.constexpr = max(1, word.shape[1] // 64)
        EACH: tl.constexpr = word.shape[1] // GROUPS // 8
        nibbles = tl.sum(tl.reshape(word, [word.shape[0], GROUPS, EACH, 8]), axis=2)
        nibbles = tl.reshape(nibbles, [word.shape[0], GROUPS * 8])
        odd = tl.sum((nibbles >> 4) & ODD_NIBBLES, axis=1)
        odd_counts += ((odd[:, None] >> byte[None, :]) & 255).to(tl.int32)
        word = nibbles & ODD_NIBBLES
    total = tl.sum(word, axis=1)
    counts += ((total[:, None] >> byte[None, :]) & 255).to(tl.int32)
    return counts, odd_counts


@triton.jit
def field_start(field, BITS: tl.constexpr):
    """Where a field begins, as a multiple of the second best's gap."""
    bits = (field + 512) << 21 if BITS == 4 else (field + 256) << 22  # of 2, and a quarter or half octave per field
    return (bits.to(tl.float32, bitcast=True) + EPSILON) / (2 + EPSILON)


@triton.jit
def gap_bracket_kernel(
    q_ptr,  # [B, H, Tq, D]
    k_ptr,  # [B, Hkv, Tk, D]
    start_ptr,  # [B|1, Tq] int32
    stop_ptr,
    table_ptr,  # [B|1, tiles, 4] int32
    padding_ptr,  # [B|1, Tk] uint8
    mask_ptr,  # [B|1, H|1, Tq, Tk]
    top_ptr,  # [B, H, Tq] fp32, and so the next three
    gap_ptr,
    lower_ptr,
    upper_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_bound_b,
    stride_table_b,
    stride_padding_b,
    stride_mask_b,
    stride_mask_h,
    stride_mask_row,
    stride_mask_key,
    heads,
    group,
    queries,
    keys,
    slot,
    left,
    right,
    scale,
    softcap,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANGE: tl.constexpr,
    PADDING: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(queries, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles  # causal rows at the end have most to do, and begin first
    head_index = tl.program_id(0) // tiles
    batch, head = (head_index // heads).to(tl.int64), (head_index % heads).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BM]
    exists = rows < queries
    d = tl.arange(0, BLOCK_D)
    q_at = q_ptr + batch * stride_qb + head * stride_qh + rows[:, None].to(tl.int64) * stride_qm + d[None, :]
    q = tl.load(q_at, mask=exists[:, None] & (d < D)[None, :], other=0.0)
    LINEAR: tl.constexpr = not SOFTCAP and MASK != BIAS
    if LINEAR:
        q = q * tl.where(scale < 0, -1.0, 1.0).to(q.dtype)  # the best product is then that of the best score

    if RANGE == BOUNDS:
        start_ptr += batch * stride_bound_b
        stop_ptr += batch * stride_bound_b
        table_ptr += batch * stride_table_b + tile * 4
    start, stop = row_bounds(rows, queries, keys, start_ptr, stop_ptr, slot, left, right, RANGE)
    bottom = tl.minimum(tile * BLOCK_M + BLOCK_M, queries)
    first, clear_first, clear_end, end = key_range(tile * BLOCK_M, bottom, keys, table_ptr, slot, left, right, RANGE)
    k_ptr += batch * stride_kb + head // group * stride_kh
    if PADDING:
        padding_ptr += batch * stride_padding_b
    if MASK:
        mask_ptr += batch * stride_mask_b + head * stride_mask_h
    UNTOLD: tl.constexpr = PADDING or MASK != 0
    edge_low, clear_low, clear_high = phases(first, clear_first, clear_end, end, BLOCK_N, UNTOLD)

    FOLDS: tl.constexpr = folds(BLOCK_N)
    best = tl.full([BLOCK_M, BLOCK_N >> FOLDS], HIDDEN, tl.float32)
    second = tl.full([BLOCK_M, BLOCK_N >> FOLDS], HIDDEN, tl.float32)
    for phase in tl.static_range(first_phase(RANGE, UNTOLD), 3):
        if phase == 1:
            low, high = clear_low, clear_high
        elif phase == 2:
            low, high = clear_high, end
        else:
            low, high = edge_low, tl.minimum(clear_low, end)
        for left_key in tl.range(low, high, BLOCK_N):
            slots = left_key + tl.arange(0, BLOCK_N)  # [BN]
            y, seen = gap_scores(
                q, k_ptr, d, rows, slots, start, stop, queries, keys, padding_ptr, mask_ptr, stride_kn,
                stride_mask_row, stride_mask_key, scale, softcap, D, BLOCK_D, RANGE, PADDING, MASK, SOFTCAP, PRECISION,
                phase != 1,
            )  # fmt: skip
            if phase != 1:
                y = tl.where(seen, y, HIDDEN)
            best_here, second_here = best_two(y, FOLDS)
            second = tl.maximum(tl.minimum(best, best_here), tl.maximum(second, second_here))
            best = tl.maximum(best, best_here, propagate_nan=tl.PropagateNan.ALL)

    top = tl.max(best, axis=1) + tl.sum(best - best, axis=1)  # the sum is 0, or NaN where a score is
    at_top = best == top[:, None]
    runner_up = tl.maximum(tl.max(second, axis=1), tl.max(tl.where(at_top, HIDDEN, best), axis=1))
    runner_up = tl.where(tl.sum(at_top.to(tl.int32), axis=1) > 1, top, runner_up)
    gap = top - runner_up
    paired = runner_up > SEEN_ABOVE
    apart = paired & (gap >= TIED_BELOW)
    factor = (2 + EPSILON) / tl.where(apart, gap, 1.0)

    counts = tl.zeros([BLOCK_M, 8], tl.int32)
    odd_counts = tl.zeros([BLOCK_M, 8], tl.int32)
    for phase in tl.static_range(first_phase(RANGE, UNTOLD), 3):
        if phase == 1:
            low, high = clear_low, clear_high
        elif phase == 2:
            low, high = clear_high, end
        else:
            low, high = edge_low, tl.minimum(clear_low, end)
        for left_key in tl.range(low, high, BLOCK_N):
            slots = left_key + tl.arange(0, BLOCK_N)  # [BN]
            y, seen = gap_scores(
                q, k_ptr, d, rows, slots, start, stop, queries, keys, padding_ptr, mask_ptr, stride_kn,
                stride_mask_row, stride_mask_key, scale, softcap, D, BLOCK_D, RANGE, PADDING, MASK, SOFTCAP, PRECISION,
                phase != 1,
            )  # fmt: skip
            one = tl.full([BLOCK_M, BLOCK_N], 1, tl.int64)
            if phase != 1:
                y = tl.where(seen, y, top[:, None])
                one = seen.to(tl.int64)
            # The best itself goes to the first bin with the second. From 2 on, the lowest bits of the exponent and the
            # highest of the mantissa are the number of the bin.
            x = tl.maximum((top[:, None] - y) * factor[:, None] - EPSILON, 2.0)
            x = tl.minimum(x, 28.0)  # in the last field, of sixteen or of eight
            shift = (x.to(tl.int32, bitcast=True) >> 19) & (64 - BITS)
            counts, odd_counts = count_fields(one << shift.to(tl.int64), counts, odd_counts, BITS)

    # Of field i the start a, the end b, and N(b); the last has no end.
    FIELDS: tl.constexpr = 64 // BITS
    fields = tl.arange(0, FIELDS)
    if BITS == 4:
        counts = tl.reshape(tl.join(counts, odd_counts), [BLOCK_M, FIELDS])
    ln_count = tl.log2(tl.maximum(tl.cumsum(counts, axis=1), 1).to(tl.float32)) * LN2
    upper = tl.max(ln_count / field_start(fields, BITS)[None, :], axis=1) * (1 + SLACK)
    within = tl.where((fields < FIELDS - 1)[None, :], ln_count / field_start(fields + 1, BITS)[None, :], 0.0)
    lower = tl.maximum(tl.max(within, axis=1), LN2) * (1 - SLACK)
    any_key = top > SEEN_ABOVE
    broken = top - top
    if LINEAR:
        top *= tl.abs(scale)
        gap *= tl.abs(scale)
    # A tie has Λ = ∞, and what is nearly one a lower bound only. Fewer than two keys have Λ = 0.
    divisor = tl.maximum(gap, TIED_BELOW)
    lower = tl.where(gap == 0, float("inf"), tl.where(apart, lower, LN2 * (1 - SLACK)) / divisor)
    upper = tl.where(apart & (gap >= TIED_BELOW), upper / divisor, float("inf"))
    row_at = head_index.to(tl.int64) * queries + rows
    tl.store(top_ptr + row_at, tl.where(any_key, top, -float("inf")) + broken, mask=exists)
    tl.store(gap_ptr + row_at, tl.where(paired, gap, float("inf")) + broken, mask=exists)
    tl.store(lower_ptr + row_at, tl.where(paired, lower, 0.0) + broken, mask=exists)
    tl.store(upper_ptr + row_at, tl.where(paired, upper, 0.0) + broken, mask=exists)


@triton.jit
def gap_count_kernel(
    q_ptr,  # [B, H, Tq, D]
    k_ptr,  # [B, Hkv, Tk, D]
    start_ptr,  # [B|1, Tq] int32
    stop_ptr,
    table_ptr,  # [B|1, tiles, 4] int32
    padding_ptr,  # [B|1, Tk] uint8
    mask_ptr,  # [B|1, H|1, Tq, Tk]
    thresholds_ptr,  # [T] fp32, in units of y
    counts_ptr,  # [B, H, Tq, T] int32
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_bound_b,
    stride_table_b,
    stride_padding_b,
    stride_mask_b,
    stride_mask_h,
    stride_mask_row,
    stride_mask_key,
    heads,
    group,
    queries,
    keys,
    slot,
    left,
    right,
    scale,
    softcap,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    T: tl.constexpr,
    BLOCK_T: tl.constexpr,
    RANGE: tl.constexpr,
    PADDING: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(queries, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles
    head_index = tl.program_id(0) // tiles
    batch, head = (head_index // heads).to(tl.int64), (head_index % heads).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BM]
    exists = rows < queries
    d = tl.arange(0, BLOCK_D)
    q_at = q_ptr + batch * stride_qb + head * stride_qh + rows[:, None].to(tl.int64) * stride_qm + d[None, :]
    q = tl.load(q_at, mask=exists[:, None] & (d < D)[None, :], other=0.0)
    if not SOFTCAP and MASK != BIAS:
        q = q * tl.where(scale < 0, -1.0, 1.0).to(q.dtype)

    if RANGE == BOUNDS:
        start_ptr += batch * stride_bound_b
        stop_ptr += batch * stride_bound_b
        table_ptr += batch * stride_table_b + tile * 4
    start, stop = row_bounds(rows, queries, keys, start_ptr, stop_ptr, slot, left, right, RANGE)
    bottom = tl.minimum(tile * BLOCK_M + BLOCK_M, queries)
    first, clear_first, clear_end, end = key_range(tile * BLOCK_M, bottom, keys, table_ptr, slot, left, right, RANGE)
    k_ptr += batch * stride_kb + head // group * stride_kh
    if PADDING:
        padding_ptr += batch * stride_padding_b
    if MASK:
        mask_ptr += batch * stride_mask_b + head * stride_mask_h
    UNTOLD: tl.constexpr = PADDING or MASK != 0
    edge_low, clear_low, clear_high = phases(first, clear_first, clear_end, end, BLOCK_N, UNTOLD)

    FOLDS: tl.constexpr = folds(BLOCK_N)
    best = tl.full([BLOCK_M, BLOCK_N >> FOLDS], HIDDEN, tl.float32)
    for phase in tl.static_range(first_phase(RANGE, UNTOLD), 3):
        if phase == 1:
            low, high = clear_low, clear_high
        elif phase == 2:
            low, high = clear_high, end
        else:
            low, high = edge_low, tl.minimum(clear_low, end)
        for left_key in tl.range(low, high, BLOCK_N):
            slots = left_key + tl.arange(0, BLOCK_N)  # [BN]
            y, seen = gap_scores(
                q, k_ptr, d, rows, slots, start, stop, queries, keys, padding_ptr, mask_ptr, stride_kn,
                stride_mask_row, stride_mask_key, scale, softcap, D, BLOCK_D, RANGE, PADDING, MASK, SOFTCAP, PRECISION,
                phase != 1,
            )  # fmt: skip
            if phase != 1:
                y = tl.where(seen, y, HIDDEN)
            best_here, _ = best_two(y, FOLDS)
            best = tl.maximum(best, best_here, propagate_nan=tl.PropagateNan.ALL)

    top = tl.max(best, axis=1) + tl.sum(best - best, axis=1)  # NaN where a score is: no gap is within anything then
    t = tl.arange(0, BLOCK_T)
    counts = tl.zeros([BLOCK_M, BLOCK_T], tl.int32)
    for phase in tl.static_range(first_phase(RANGE, UNTOLD), 3):
        if phase == 1:
            low, high = clear_low, clear_high
        elif phase == 2:
            low, high = clear_high, end
        else:
            low, high = edge_low, tl.minimum(clear_low, end)
        for left_key in tl.range(low, high, BLOCK_N):
            slots = left_key + tl.arange(0, BLOCK_N)  # [BN]
            y, seen = gap_scores(
                q, k_ptr, d, rows, slots, start, stop, queries, keys, padding_ptr, mask_ptr, stride_kn,
                stride_mask_row, stride_mask_key, scale, softcap, D, BLOCK_D, RANGE, PADDING, MASK, SOFTCAP, PRECISION,
                phase != 1,
            )  # fmt: skip
            if phase != 1:
                y = tl.where(seen, y, HIDDEN)
            gap = top[:, None] - y
            for i in tl.static_range(T):
                within = tl.sum((gap <= tl.load(thresholds_ptr + i)).to(tl.int32), axis=1)
                counts += tl.where((t == i)[None, :], within[:, None], 0)

    counts = tl.where((top > SEEN_ABOVE)[:, None], counts, 0)
    counts_at = counts_ptr + (head_index.to(tl.int64) * queries + rows)[:, None] * T + t[None, :]
    tl.store(counts_at, counts, mask=exists[:, None] & (t < T)[None, :])


def gap_bracket(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
    bins: int = 15,
    tile: Tile | None = None,
) -> GapBracket:
    """A certified bracket of Λ = max ln k/Δ_k, over ranks k ≥ 2, of the raw scores softcap(scale·q·k) + bias.

    Query [B, H, Tq, D], key [B, Hkv, Tk, D]. With 15 bins upper ≤ 1.25·lower for rows of up to 180,000 keys, with 7
    upper ≤ 1.5·lower up to 260,000; beyond that the bracket holds, but widens slowly. Fewer than two visible keys have
    Λ = 0, a tie at the top has Λ = ∞, both exactly. A visible score that is no number makes its row NaN.
    """
    launch, result = bracket_launch(query, key, visibility, scale=scale, softcap=softcap, bins=bins, tile=tile)
    launch.run(query)
    return result


def bracket_launch(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    softcap: float | None,
    bins: int,
    tile: Tile | None = None,
) -> tuple[Launch, GapBracket]:
    """The launch that `gap_bracket` makes, and the tensors that it will fill."""
    if bins not in FIELD_BITS:
        raise ValueError(f"bins={bins!r} is not accepted: expected 15 or 7")
    shared, constants, grid, tile = _prepare(query, key, visibility, scale, softcap, tile)
    result = GapBracket(*(query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(4)))
    outputs = {f"{name}_ptr": x for name, x in zip(("top", "gap", "lower", "upper"), result, strict=True)}
    constants["BITS"] = FIELD_BITS[bins]
    return Launch(gap_bracket_kernel, grid, {**shared, **outputs}, constants, tile.warps, tile.stages), result


def gap_count(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    thresholds: Sequence[float],
    *,
    scale: float,
    softcap: float | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """N(t) [B, H, Tq, thresholds] in int32: visible keys whose raw score is within t of the best, that one included.

    A key at the threshold counts; a threshold of ∞ counts all that a row sees.
    """
    launch, counts = count_launch(query, key, visibility, thresholds, scale=scale, softcap=softcap, tile=tile)
    launch.run(query)
    return counts


def count_launch(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    thresholds: Sequence[float],
    *,
    scale: float,
    softcap: float | None,
    tile: Tile | None = None,
) -> tuple[Launch, Tensor]:
    """The launch that `gap_count` makes, and the tensor that it will fill."""
    shared, constants, grid, tile = _prepare(query, key, visibility, scale, softcap, tile)
    linear = softcap is None and visibility.mask_kind != MASK_BIAS
    edges = [_in_products(t, scale) if linear else t for t in thresholds]
    counts = query.new_empty((*query.shape[:3], len(edges)), dtype=torch.int32)
    arguments = {**shared, "thresholds_ptr": _on_device(edges, query), "counts_ptr": counts}
    constants |= {"T": len(edges), "BLOCK_T": triton.next_power_of_2(max(1, len(edges)))}
    return Launch(gap_count_kernel, grid * bool(edges), arguments, constants, tile.warps, tile.stages), counts


def adaptive_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    *,
    r: float,
    floor: float,
    ceiling: float,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    entropy: bool = False,
    squares: bool = False,
    bins: int = 15,
) -> tuple[Forward, Tensor]:
    """`flash_forward` at β = r·Λ of each row, between `floor` and `ceiling`; and β [B, H, Tq] in fp32.

    Λ is the upper end of its bracket, so that r > 1 keeps its promise of w_max ≥ 1/ζ(r). A tie at the top gets the
    ceiling, a row of fewer than two keys the floor.
    """
    found = gap_bracket(query, key, visibility, scale=scale, softcap=softcap, bins=bins)
    beta = (r * found.upper).clamp(floor, ceiling)
    forward = flash_forward(
        query, key, value, beta, visibility, scale=scale, softcap=softcap, sinks=sinks, dropout_p=dropout_p, seed=seed,
        entropy=entropy, squares=squares,
    )  # fmt: skip
    return forward, beta


def _prepare(
    query: Tensor, key: Tensor, visibility: Visibility, scale: float, softcap: float | None, tile: Tile | None
) -> tuple[dict[str, object], dict[str, object], int, Tile]:
    """What both kernels are given and compiled for, how many programs, and the tile."""
    batch, heads, queries, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    query, key = unit_stride(query.detach()), unit_stride(key.detach())
    biased = visibility.mask_kind == MASK_BIAS
    tile = tile or gap_tile(block_of(dim), query.element_size(), resources_of(query.device), biased)
    if tile.n > LARGEST_TILE:
        raise ValueError(f"tile={tile!r} is not accepted: expected at most {LARGEST_TILE} keys, which a byte can count")
    arguments = {
        "q_ptr": query,
        "k_ptr": key,
        **strides("q", query, "bhm"),
        **strides("k", key, "bhn"),
        **visibility.arguments(key_ranges(visibility, queries, tile.m)),
        "heads": heads,
        "group": heads // kv_heads,
        "queries": queries,
        "keys": keys,
        "scale": scale,
        "softcap": softcap or 0.0,
    }
    constants = {
        "D": dim,
        "BLOCK_D": block_of(dim),
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        **visibility.constants(),
        "SOFTCAP": softcap is not None,
        "PRECISION": precision_of(query),
    }
    return arguments, constants, batch * heads * triton.cdiv(queries, tile.m), tile


def _in_products(threshold: float, scale: float) -> float:
    """A threshold in units of q·k; where the scale is 0 every gap is 0."""
    if scale == 0.0:
        return math.copysign(math.inf, threshold) if threshold != 0.0 else math.inf
    return threshold / abs(scale)


def _on_device(numbers: list[float], like: Tensor) -> Tensor:
    """Numbers as fp32 on a tensor's device, by filling: a copy would wait for the device and could not be captured."""
    held = like.new_empty(len(numbers), dtype=torch.float32)
    for i, number in enumerate(numbers):
        held[i].fill_(min(number, FARTHEST))
    return held
