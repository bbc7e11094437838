"""A few queries of each sequence against a long cache of keys, split over the keys and merged.

A program takes one sequence, one key head and one part of the keys, with all query heads of the group as rows of its
tile, so that a key is read once for all of them. It leaves m, l, u and the unfinished output of flash_forward.py in
scratch; a second kernel merges the parts, and a third counts gaps from the merged maximum. The cache may be paged.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import (
    BIAS,
    BOUNDS,
    HIDDEN,
    LN2,
    LOG2E,
    SEEN_ABOVE,
    first_phase,
    key_range,
    load_tile,
    phases,
    row_bounds,
    tanh,
    visible,
)
from ..flash.forward import LEAST_BETA
from ..launch import Launch, block_of, precision_of, resources_of, strides, unit_stride
from ..tiles import Tile, decode_splits, decode_tile
from ..visibility import Visibility
from .merge import Decode


@triton.jit
def _packed_rows(tile, kv_head, group, queries, BLOCK_M: tl.constexpr):
    """Heads of a group times queries as rows of tiles: number within the group, head, query (`queries`: no row)."""
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    return packed, kv_head * group + packed // queries, tl.where(packed < group * queries, packed % queries, queries)


@triton.jit
def _span(queries, keys, start_ptr, stop_ptr, slot, left, right, RANGE: tl.constexpr):
    """Of all queries: first slot that any may see, those that all see [clear, end), the last plus one."""
    if RANGE == BOUNDS:
        first = tl.load(start_ptr)
        end = tl.load(stop_ptr)
        clear_first = first
        clear_end = end
        for row in range(1, queries):
            start = tl.load(start_ptr + row)
            stop = tl.load(stop_ptr + row)
            first = tl.minimum(first, start)
            clear_first = tl.maximum(clear_first, start)
            clear_end = tl.minimum(clear_end, stop)
            end = tl.maximum(end, stop)
    else:
        first, clear_first, clear_end, end = key_range(0, queries, keys, start_ptr, slot, left, right, RANGE)
    return first, clear_first, clear_end, end


@triton.jit
def _part(first, end, split, splits, BLOCK: tl.constexpr):
    """The slots [low, high) of a split: whole tiles, as many as any other; none for some where tiles are few."""
    low = first // BLOCK * BLOCK
    tiles = tl.where(end > first, tl.cdiv(end - low, BLOCK), 0)
    share = tl.cdiv(tiles, splits) * BLOCK
    low += split * share
    return low, tl.minimum(low + share, end)


@triton.jit
def _locate(left_key, slots, exists, batch, pages_ptr, PAGE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Where slots lie in the cache: along its first axis, and along that of slots. Both are int64."""
    index = batch
    place = slots
    if PAGE:
        place = slots % PAGE
        if PAGE >= BLOCK:  # the tile lies in one page, which some row sees
            index = tl.load(pages_ptr + left_key // PAGE)
        elif MASKED:  # the table may hold anything for slots that nobody sees
            index = tl.load(pages_ptr + slots // PAGE, mask=exists, other=0)
        else:
            index = tl.load(pages_ptr + slots // PAGE)
    return index.to(tl.int64), place.to(tl.int64)


@triton.jit
def decode_split_kernel(
    q_ptr,  # [B, H, Tq, D]
    k_ptr,  # [B, Hkv, Tk, D], or [pages, Hkv, PAGE, D]
    v_ptr,  # [B, Hkv, Tk, DV], or [pages, Hkv, PAGE, DV]
    beta_ptr,  # [B|1, H|1, Tq] fp32
    pages_ptr,  # [B, pages of a sequence] int32
    lengths_ptr,  # [B] int32
    start_ptr,  # [B|1, Tq] int32
    stop_ptr,
    padding_ptr,  # [B|1, Tk] uint8
    mask_ptr,  # [B|1, H|1, Tq, Tk]
    rows_ptr,  # [splits, B, H, Tq, 4] fp32: m, l, u, largest raw score
    acc_ptr,  # [splits, B, H, Tq, DV] fp32
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_beta_b,
    stride_beta_h,
    stride_beta_m,
    stride_pages_b,
    stride_bound_b,
    stride_padding_b,
    stride_mask_b,
    stride_mask_h,
    stride_mask_row,
    stride_mask_key,
    rows,  # B·H·Tq
    kv_heads,
    group,
    queries,
    keys,
    splits,
    slot,
    left,
    right,
    scale,
    softcap,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    RANGE: tl.constexpr,
    PADDING: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    GAPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(group * queries, BLOCK_M)
    part_index = tl.program_id(0) // tiles
    split = part_index % splits
    kv_index = part_index // splits
    batch, kv_head = (kv_index // kv_heads).to(tl.int64), (kv_index % kv_heads).to(tl.int64)

    packed, head, row = _packed_rows(tl.program_id(0) % tiles, kv_head, group, queries, BLOCK_M)  # [BM]
    exists = row < queries
    row64 = row.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_at = q_ptr + batch * stride_qb + (head * stride_qh + row64 * stride_qm)[:, None] + d[None, :]
    q = tl.load(q_at, mask=exists[:, None] & (d < D)[None, :], other=0.0)
    beta_at = beta_ptr + batch * stride_beta_b + head * stride_beta_h + row64 * stride_beta_m
    beta = tl.load(beta_at, mask=exists, other=1.0)
    # As in flash_forward.py: the sign goes to the scores, so that c is positive.
    sign = tl.where(beta < 0, -1.0, 1.0)
    LINEAR: tl.constexpr = not SOFTCAP and MASK != BIAS
    c = tl.maximum(tl.abs(beta), LEAST_BETA) * (scale if LINEAR else 1.0) * LOG2E
    if LINEAR:
        q = q * sign[:, None].to(q.dtype)

    if PAGE:
        keys = tl.minimum(tl.load(lengths_ptr + batch), keys)
        slot = keys - queries
        pages_ptr += batch * stride_pages_b
    if RANGE == BOUNDS:
        start_ptr += batch * stride_bound_b
        stop_ptr += batch * stride_bound_b
    start, stop = row_bounds(row, queries, keys, start_ptr, stop_ptr, slot, left, right, RANGE)
    first, clear_first, clear_end, end = _span(queries, keys, start_ptr, stop_ptr, slot, left, right, RANGE)
    part_low, part_high = _part(first, end, split, splits, BLOCK_N)
    m = tl.full([BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    moment = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], HIDDEN, tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    k_ptr += kv_head * stride_kh
    v_ptr += kv_head * stride_vh
    mask_rows = mask_ptr
    if PADDING:
        padding_ptr += batch * stride_padding_b
    if MASK:
        mask_rows = mask_ptr + batch * stride_mask_b + (head * stride_mask_h)[:, None]  # [BM, 1]

    UNTOLD: tl.constexpr = PADDING or MASK != 0
    _, clear_low, clear_high = phases(first, clear_first, clear_end, end, BLOCK_N, UNTOLD)
    for phase in tl.static_range(first_phase(RANGE, UNTOLD), 3):
        if phase == 1:
            low, high = tl.maximum(part_low, clear_low), tl.minimum(part_high, clear_high)
        elif phase == 2:
            low, high = tl.maximum(part_low, clear_high), part_high
        else:
            low, high = part_low, tl.minimum(part_high, clear_low)
        for left_key in tl.range(low, high, BLOCK_N):
            slots = left_key + tl.arange(0, BLOCK_N)  # [BN]
            present = (slots >= first) & (slots < end)
            index, place = _locate(left_key, slots, present, batch, pages_ptr, PAGE, BLOCK_N, phase != 1)
            k_at = k_ptr + (index * stride_kb + place * stride_kn)[None, :] + d[:, None]  # [BD, BN]
            v_at = v_ptr + (index * stride_vb + place * stride_vn)[:, None] + dv[None, :]  # [BN, BDV]
            k = load_tile(k_at, (d < D)[:, None], present[None, :], D != BLOCK_D, phase != 1)
            v = load_tile(v_at, (dv < DV)[None, :], present[:, None], DV != BLOCK_DV, phase != 1)
            y = tl.dot(q, k, input_precision=PRECISION)  # [BM, BN]
            if SOFTCAP:
                y = softcap * tanh(y * (scale / softcap))
            if phase != 1:
                # A value that is no number must spoil the rows that see it and no other: 0·NaN would reach them all.
                zero = v.to(tl.float32) - v.to(tl.float32)  # or NaN
                broken = tl.sum(zero, axis=1)  # [BN]
                v = tl.where(zero == 0, v, 0.0)
                seen, bias = visible(
                    row, slots, start, stop, queries, keys, padding_ptr, mask_rows, stride_mask_row, stride_mask_key,
                    RANGE, PADDING, MASK,
                )  # fmt: skip
                if MASK == BIAS:
                    y = (y if SOFTCAP else y * scale) + bias
            if GAPS:
                raw = y * sign[:, None] if LINEAR else y
                if phase != 1:
                    raw = tl.where(seen, raw, HIDDEN)
                highest = tl.maximum(highest, tl.max(raw, axis=1))
            if not LINEAR:
                y *= sign[:, None]
            if phase != 1:
                y = tl.where(seen, y + broken[None, :], HIDDEN)
            peak = tl.maximum(m, tl.max(y, axis=1))
            fall = tl.maximum((m - peak) * c, -65536.0)  # finite where a row has seen nothing yet
            fade = tl.exp2(fall)
            base = peak * c
            if phase != 1:
                # The difference is one fused operation: of two hidden scores it would be the rounding of 1e30, not 0.
                base = tl.where(peak > SEEN_ABOVE, base, 0.0)
            x = y * c[:, None] - base[:, None]
            p = tl.exp2(x)
            if ENTROPY:
                moment = fade * (moment + fall * total) + tl.sum(p * x, axis=1)
            total = total * fade + tl.sum(p, axis=1)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
            m = peak

    # Heads of a group and their queries lie one after the other in the scratch, as they do in the tile.
    row_at = split.to(tl.int64) * rows + (batch * kv_heads + kv_head) * group * queries + packed
    tl.store(rows_ptr + row_at * 4, m, mask=exists)
    tl.store(rows_ptr + row_at * 4 + 1, total, mask=exists)
    if ENTROPY:
        tl.store(rows_ptr + row_at * 4 + 2, moment, mask=exists)
    if GAPS:
        tl.store(rows_ptr + row_at * 4 + 3, highest, mask=exists)
    tl.store(acc_ptr + row_at[:, None] * DV + dv[None, :], acc, mask=exists[:, None] & (dv < DV)[None, :])


@triton.jit
def decode_merge_kernel(
    rows_ptr,  # [splits, B, H, Tq, 4] fp32: m, l, u, largest raw score
    acc_ptr,  # [splits, B, H, Tq, DV] fp32
    beta_ptr,  # [B|1, H|1, Tq] fp32
    sinks_ptr,  # [H]
    out_ptr,  # [B, H, Tq, DV]
    lse_ptr,  # [B, H, Tq] fp32, and so the next three
    top_ptr,
    entropy_ptr,
    highest_ptr,
    stride_beta_b,
    stride_beta_h,
    stride_beta_m,
    rows,  # B·H·Tq
    heads,
    queries,
    splits,
    factor,  # the scale, or 1 where scores have it already
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SINKS: tl.constexpr,
    ENTROPY: tl.constexpr,
    GAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head_index = row // queries
    batch, head = head_index // heads, head_index % heads
    beta = tl.load(beta_ptr + batch * stride_beta_b + head * stride_beta_h + row % queries * stride_beta_m)
    nats = tl.maximum(tl.abs(beta), LEAST_BETA) * factor
    c = nats * LOG2E

    dv = tl.arange(0, BLOCK_DV)
    m = HIDDEN + 0.0 * c
    highest = m
    total = 0.0 * c
    moment = total
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for low in range(0, splits, BLOCK_S):
        split = low + tl.arange(0, BLOCK_S)  # [BS]
        inside = split < splits
        row_at = split.to(tl.int64) * rows + row
        part_m = tl.load(rows_ptr + row_at * 4, mask=inside, other=HIDDEN)
        part_total = tl.load(rows_ptr + row_at * 4 + 1, mask=inside, other=0.0)
        acc_at = acc_ptr + row_at[:, None] * DV + dv[None, :]
        part_acc = tl.load(acc_at, mask=inside[:, None] & (dv < DV)[None, :], other=0.0)  # [BS, BDV]
        peak = tl.maximum(m, tl.max(part_m, axis=0))
        # Finite for parts that have seen nothing: they are neutral, whatever they hold.
        fall, part_fall = tl.maximum((m - peak) * c, -65536.0), tl.maximum((part_m - peak) * c, -65536.0)
        fade, part_fade = tl.exp2(fall), tl.exp2(part_fall)
        if ENTROPY:
            part_moment = tl.load(rows_ptr + row_at * 4 + 2, mask=inside, other=0.0)
            moment = fade * (moment + fall * total)
            moment += tl.sum(part_fade * (part_moment + part_fall * part_total), axis=0)
        if GAPS:
            raw = tl.load(rows_ptr + row_at * 4 + 3, mask=inside, other=HIDDEN)
            highest = tl.maximum(highest, tl.max(raw, axis=0))
        total = total * fade + tl.sum(part_fade * part_total, axis=0)
        acc = acc * fade + tl.sum(part_fade[:, None] * part_acc, axis=0)
        m = peak

    seen = (m > SEEN_ABOVE) | (total != total)  # a NaN has been seen, though no maximum finds it
    total = tl.where(seen, total, 1.0)
    ln_total = tl.log2(total) * LN2
    top = m * nats
    share = tl.where(seen, 1.0, 0.0)  # of the weight that is left to the keys
    entropy = tl.where(seen, ln_total - moment / total * LN2, 0.0)
    lse = tl.where(seen, top + ln_total, -float("inf"))
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        sink = tl.where(sink == -float("inf"), HIDDEN, sink)  # as good as none, and −∞ − −∞ is no number
        high = tl.maximum(lse, sink)
        keys_part = tl.exp2((lse - high) * LOG2E)
        sink_part = tl.exp2((sink - high) * LOG2E)
        share = keys_part / (keys_part + sink_part)
        rest = sink_part / (keys_part + sink_part)
        lse = tl.where(high <= HIDDEN, -float("inf"), high + tl.log2(keys_part + sink_part) * LN2)
        if ENTROPY:
            mixing = tl.where(share > 0, share * tl.log2(tl.maximum(share, 1e-38)), 0.0)
            mixing += tl.where(rest > 0, rest * tl.log2(tl.maximum(rest, 1e-38)), 0.0)
            entropy = share * entropy - mixing * LN2
    tl.store(lse_ptr + row, lse)
    tl.store(top_ptr + row, tl.where(seen, top + (total - total), -float("inf")))
    if ENTROPY:
        tl.store(entropy_ptr + row, tl.where(entropy < 0, 0.0, entropy))
    if GAPS:
        tl.store(highest_ptr + row, highest)
    out = acc * (share / total)
    tl.store(out_ptr + row * DV + dv, out.to(out_ptr.dtype.element_ty), mask=dv < DV)


@triton.jit
def decode_count_kernel(
    q_ptr,  # [B, H, Tq, D]
    k_ptr,  # [B, Hkv, Tk, D], or [pages, Hkv, PAGE, D]
    thresholds_ptr,  # [thresholds] fp32
    highest_ptr,  # [B, H, Tq] fp32
    counts_ptr,  # [splits, B, H, Tq, thresholds] int32
    pages_ptr,  # [B, pages of a sequence] int32
    lengths_ptr,  # [B] int32
    start_ptr,  # [B|1, Tq] int32
    stop_ptr,
    padding_ptr,  # [B|1, Tk] uint8
    mask_ptr,  # [B|1, H|1, Tq, Tk]
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_pages_b,
    stride_bound_b,
    stride_padding_b,
    stride_mask_b,
    stride_mask_h,
    stride_mask_row,
    stride_mask_key,
    rows,  # B·H·Tq
    kv_heads,
    group,
    queries,
    keys,
    splits,
    slot,
    left,
    right,
    scale,
    softcap,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    RANGE: tl.constexpr,
    PADDING: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(group * queries, BLOCK_M)
    part_index = tl.program_id(0) // tiles
    split = part_index % splits
    kv_index = part_index // splits
    batch, kv_head = (kv_index // kv_heads).to(tl.int64), (kv_index % kv_heads).to(tl.int64)

    packed, head, row = _packed_rows(tl.program_id(0) % tiles, kv_head, group, queries, BLOCK_M)  # [BM]
    exists = row < queries
    d = tl.arange(0, BLOCK_D)
    q_at = q_ptr + batch * stride_qb + (head * stride_qh + row.to(tl.int64) * stride_qm)[:, None] + d[None, :]
    q = tl.load(q_at, mask=exists[:, None] & (d < D)[None, :], other=0.0)
    row_at = (batch * kv_heads + kv_head) * group * queries + packed
    highest = tl.load(highest_ptr + row_at, mask=exists, other=0.0)

    if PAGE:
        keys = tl.minimum(tl.load(lengths_ptr + batch), keys)
        slot = keys - queries
        pages_ptr += batch * stride_pages_b
    if RANGE == BOUNDS:
        start_ptr += batch * stride_bound_b
        stop_ptr += batch * stride_bound_b
    start, stop = row_bounds(row, queries, keys, start_ptr, stop_ptr, slot, left, right, RANGE)
    first, _, _, end = _span(queries, keys, start_ptr, stop_ptr, slot, left, right, RANGE)
    low, high = _part(first, end, split, splits, BLOCK_N)
    k_ptr += kv_head * stride_kh
    mask_rows = mask_ptr
    if PADDING:
        padding_ptr += batch * stride_padding_b
    if MASK:
        mask_rows = mask_ptr + batch * stride_mask_b + (head * stride_mask_h)[:, None]  # [BM, 1]

    unit = 1.0 if SOFTCAP or MASK == BIAS else 1.0 / scale  # of raw scores, in that of y
    t = tl.arange(0, BLOCK_T)
    counts = tl.zeros([BLOCK_M, BLOCK_T], tl.int32)
    for left_key in tl.range(low, high, BLOCK_N):
        slots = left_key + tl.arange(0, BLOCK_N)  # [BN]
        present = (slots >= first) & (slots < end)
        index, place = _locate(left_key, slots, present, batch, pages_ptr, PAGE, BLOCK_N, True)
        k_at = k_ptr + (index * stride_kb + place * stride_kn)[None, :] + d[:, None]  # [BD, BN]
        k = tl.load(k_at, mask=(d < D)[:, None] & present[None, :], other=0.0)
        y = tl.dot(q, k, input_precision=PRECISION)  # [BM, BN]
        if SOFTCAP:
            y = softcap * tanh(y * (scale / softcap))
        seen, bias = visible(
            row, slots, start, stop, queries, keys, padding_ptr, mask_rows, stride_mask_row, stride_mask_key,
            RANGE, PADDING, MASK,
        )  # fmt: skip
        if MASK == BIAS:
            y = (y if SOFTCAP else y * scale) + bias
        for number in tl.static_range(THRESHOLDS):
            # Compared, not subtracted: a difference fused with what y is made of would not be 0 at the maximum.
            edge = highest - tl.load(thresholds_ptr + number) * unit
            near = seen & (y >= edge[:, None])
            counts += tl.where(t[None, :] == number, tl.sum(near.to(tl.int32), axis=1)[:, None], 0)

    counts_at = counts_ptr + (split.to(tl.int64) * rows + row_at)[:, None] * THRESHOLDS + t[None, :]
    tl.store(counts_at, counts, mask=exists[:, None] & (t < THRESHOLDS)[None, :])


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    entropy: bool = False,
    thresholds: Tensor | None = None,
    splits: int | None = None,
    tile: Tile | None = None,
) -> Decode:
    """`flash_forward` for few queries [B, H, Tq, D] and many keys [B, Hkv, Tk, D], which `splits` programs share.

    `thresholds` [T] in fp32 asks for gap counts, N(t) = #{s* − s ≤ t} of the raw scores that a row sees. Works for any
    Tq, and is meant for 16 or fewer.
    """
    launches, result = decode_launches(
        query, key, value, beta, visibility, scale=scale, softcap=softcap, sinks=sinks, entropy=entropy,
        thresholds=thresholds, splits=splits, tile=tile,
    )  # fmt: skip
    return _run(launches, result, query)


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    beta: Tensor,
    *,
    window: int | None = None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    entropy: bool = False,
    thresholds: Tensor | None = None,
    splits: int | None = None,
    tile: Tile | None = None,
) -> Decode:
    """`decode` where keys and values [pages, page_size, Hkv, D] lie in pages that a table [B, max_pages] names.

    Row i of sequence b sits at slot `lengths[b] − Tq + i` and sees the slots up to its own, the last `window` of them
    if that is given. What the table holds for pages that no row sees is never looked at.
    """
    launches, result = paged_decode_launches(
        query, key_cache, value_cache, block_table, lengths, beta, window=window, scale=scale, softcap=softcap,
        sinks=sinks, entropy=entropy, thresholds=thresholds, splits=splits, tile=tile,
    )  # fmt: skip
    return _run(launches, result, query)


def decode_launches(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    entropy: bool,
    thresholds: Tensor | None,
    splits: int | None = None,
    tile: Tile | None = None,
) -> tuple[tuple[Launch, ...], Decode]:
    """The launches that `decode` makes, in order, and the tensors that they fill; gap counts are left in parts."""
    return _launches(
        query, key, value, beta, visibility, None, None, key.shape[2], scale=scale, softcap=softcap, sinks=sinks,
        entropy=entropy, thresholds=thresholds, splits=splits, tile=tile,
    )  # fmt: skip


def paged_decode_launches(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    beta: Tensor,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    entropy: bool,
    thresholds: Tensor | None,
    splits: int | None = None,
    tile: Tile | None = None,
) -> tuple[tuple[Launch, ...], Decode]:
    """The launches that `paged_decode` makes, in order, and the tensors that they will fill, as `decode_launches`."""
    page = key_cache.shape[1]
    if page < 16 or page & (page - 1):
        raise ValueError(f"pages of {page} slots are not accepted: expected a power of two >= 16")
    if window is not None and window < 1:
        raise ValueError(f"window={window!r} is not accepted: expected an int >= 1 or None")
    for name, x in (("block_table", block_table), ("lengths", lengths)):
        if x.dtype != torch.int32:
            raise TypeError(f"{name} of {x.dtype} is not accepted: expected torch.int32")
    visibility = Visibility(left=None if window is None else window - 1, right=0)  # the kernel knows the slot
    key, value = key_cache.transpose(1, 2), value_cache.transpose(1, 2)  # [pages, Hkv, page_size, D]
    return _launches(
        query, key, value, beta, visibility, unit_stride(block_table), lengths.contiguous(),
        block_table.shape[1] * page, scale=scale, softcap=softcap, sinks=sinks, entropy=entropy,
        thresholds=thresholds, splits=splits, tile=tile,
    )  # fmt: skip


def _launches(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    visibility: Visibility,
    pages: Tensor | None,
    lengths: Tensor | None,
    keys: int,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    entropy: bool,
    thresholds: Tensor | None,
    splits: int | None,
    tile: Tile | None,
) -> tuple[tuple[Launch, ...], Decode]:
    batch, heads, queries, dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[-1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not accepted: expected a multiple of the {kv_heads} key heads")
    if splits is not None and splits < 1:
        raise ValueError(f"splits={splits!r} is not accepted: expected an int >= 1 or None")
    query, key, value = (unit_stride(x) for x in (query, key, value))
    beta = beta.to(torch.float32).expand(batch, heads, queries)
    block_d, block_dv = block_of(dim), block_of(value_dim)
    group = heads // kv_heads
    tile = tile or decode_tile(group * queries, block_d, block_dv, query.element_size(), resources_of(query.device))
    programs = batch * kv_heads * triton.cdiv(group * queries, tile.m)
    splits = splits or decode_splits(programs, triton.cdiv(keys, tile.n), _multiprocessors(query.device))

    per_row = query.new_empty((batch, heads, queries), dtype=torch.float32)
    rows = per_row.new_empty(splits, *per_row.shape, 4)
    acc = per_row.new_empty(splits, *per_row.shape, value_dim)
    gaps = 0 if thresholds is None else len(thresholds)
    result = Decode(
        query.new_empty(batch, heads, queries, value_dim),
        per_row,
        torch.empty_like(per_row),
        torch.empty_like(per_row) if entropy else None,
        per_row.new_empty((splits, *per_row.shape, gaps), dtype=torch.int32) if gaps else None,
    )
    highest = torch.empty_like(per_row) if gaps else None
    seen = visibility.arguments(None)
    del seen["table_ptr"], seen["stride_table_b"]
    shared = {
        "q_ptr": query,
        "k_ptr": key,
        "pages_ptr": pages,
        "lengths_ptr": lengths,
        **strides("q", query, "bhm"),
        **strides("k", key, "bhn"),
        "stride_pages_b": 0 if pages is None else pages.stride(0),
        **seen,
        "rows": per_row.numel(),
        "kv_heads": kv_heads,
        "group": group,
        "queries": queries,
        "keys": keys,
        "splits": splits,
        "scale": scale,
        "softcap": softcap or 0.0,
    }
    constants = {
        "D": dim,
        "BLOCK_D": block_d,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "PAGE": 0 if pages is None else key.shape[2],
        **visibility.constants(),
        "SOFTCAP": softcap is not None,
        "PRECISION": precision_of(query),
    }
    split = Launch(
        decode_split_kernel,
        programs * splits,
        {
            **shared,
            "v_ptr": value,
            "beta_ptr": beta,
            "rows_ptr": rows,
            "acc_ptr": acc,
            **strides("v", value, "bhn"),
            **strides("beta_", beta, "bhm"),
        },
        {**constants, "DV": value_dim, "BLOCK_DV": block_dv, "ENTROPY": entropy, "GAPS": gaps > 0},
        tile.warps,
        tile.stages,
    )
    linear = softcap is None and visibility.mask_kind != BIAS.value
    merged = Launch(
        decode_merge_kernel,
        per_row.numel(),
        {
            "rows_ptr": rows,
            "acc_ptr": acc,
            "beta_ptr": beta,
            "sinks_ptr": None if sinks is None else sinks.contiguous(),
            "out_ptr": result.out,
            "lse_ptr": result.lse,
            "top_ptr": result.max_logit,
            "entropy_ptr": result.entropy,
            "highest_ptr": highest,
            **strides("beta_", beta, "bhm"),
            "rows": per_row.numel(),
            "heads": heads,
            "queries": queries,
            "splits": splits,
            "factor": scale if linear else 1.0,
        },
        {
            "DV": value_dim,
            "BLOCK_DV": block_dv,
            "BLOCK_S": min(triton.next_power_of_2(splits), 16),
            "SINKS": sinks is not None,
            "ENTROPY": entropy,
            "GAPS": gaps > 0,
        },
        4,
        1,
    )
    if thresholds is None or not gaps:
        return (split, merged), result
    count = Launch(
        decode_count_kernel,
        programs * splits,
        {
            **shared,
            "thresholds_ptr": thresholds.to(torch.float32).contiguous(),
            "highest_ptr": highest,
            "counts_ptr": result.gap_counts,
        },
        {**constants, "THRESHOLDS": gaps, "BLOCK_T": triton.next_power_of_2(gaps)},
        tile.warps,
        tile.stages,
    )
    return (split, merged, count), result


def _run(launches: tuple[Launch, ...], result: Decode, like: Tensor) -> Decode:
    for launch in launches:
        launch.run(like)
    return result if result.gap_counts is None else result._replace(gap_counts=result.gap_counts.sum(0))


def _multiprocessors(device: torch.device) -> int:
    """Of a device, asked for once; of an A100 where there is none."""
    return _query(device.index or 0) if device.type == "cuda" else 108


@functools.cache
def _query(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
