"""Split-K decode attention: a few queries of each sequence against a long KV cache.

A program handles one sequence, one key head and one split of the keys. All query heads of the group are rows of its
tile, so each key is loaded once for all of them. It writes m, l, u and the unnormalised output of the flash forward
kernel to scratch memory, and a second kernel merges the splits. With a single split it writes the result directly.

Arguments that change from token to token are not specialised, so one compiled variant serves all lengths. Triton always
specialises members of tuples, so the slot of the first query is a separate argument here and not part of the rule.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import (
    HIDDEN,
    LEAST_BETA,
    LN2,
    LOG2E,
    SEEN_ABOVE,
    as_column,
    attention_scores,
    best_slot,
    better,
    finish_softmax,
    no_winner_of_nan,
    rounded_product,
    row_bounds,
    row_temperature,
    sign_for_winner,
    within,
)
from ..tiles import (
    end_phase,
    first_phase,
    is_broken,
    key_range,
    load_beta,
    load_tile,
    load_whole,
    phase_edges,
    phase_range,
)

NO_SLOT = tl.constexpr(2**31 - 1)


@triton.jit
def _span(rule, batch, slot, queries, keys):
    """`key_range` of all queries. The few bounds are read here instead of from a table."""
    if rule.start_ptr is not None:
        at = batch * rule.stride_bound
        first = tl.load(rule.start_ptr + at)
        end = tl.load(rule.stop_ptr + at)
        clear_first = first
        clear_end = end
        for row in range(1, queries):
            start = tl.load(rule.start_ptr + at + row)
            stop = tl.load(rule.stop_ptr + at + row)
            first = tl.minimum(first, start)
            clear_first = tl.maximum(clear_first, start)
            clear_end = tl.minimum(clear_end, stop)
            end = tl.maximum(end, stop)
        first = tl.maximum(first, 0)  # bounds may hold any value
        clear_end = tl.minimum(clear_end, keys)
        end = tl.minimum(end, keys)
    else:
        first, clear_first, clear_end, end = key_range(rule, batch, 0, slot, slot + queries, keys)
    return first, clear_first, clear_end, end


@triton.jit
def _part(first, end, split, splits, BLOCK: tl.constexpr):
    """Return the slots [low, high) of a split: equal numbers of tiles, where the last splits may be empty."""
    low = first // BLOCK * BLOCK
    tiles = tl.where(end > first, tl.cdiv(end - low, BLOCK), 0)
    share = tl.cdiv(tiles, splits) * BLOCK
    low += split * share
    return low, tl.minimum(low + share, end)


@triton.jit
def _parts(scratch_ptr, splits, rows, DV: tl.constexpr):
    """Return pointers to the results of the splits: outputs [splits, B, H, Tq, DV], followed by m, l and u of each row.

    If the winner is requested, the largest score, including keys with non-finite values, and the bits of its slot
    follow. Both share one buffer, because a second allocation takes more than a microsecond on the host.
    """
    return scratch_ptr, scratch_ptr + (splits * DV).to(tl.int64) * rows


@triton.jit(do_not_specialize=["slot", "rows", "keys", "splits"])
def decode_split_kernel(
    q,  # [B, H, Tq, D]
    k,  # [B, Hkv, Tk, D]
    v,  # [B, Hkv, Tk, DV]
    beta,  # [B|1, H|1, Tq] fp32
    scratch_ptr,  # fp32, see `_parts`
    out,  # [B, H, Tq, DV]; this and the next five are used with a single split only
    sinks_ptr,  # [H]
    lse_ptr,  # [B, H, Tq] fp32, as are the next two
    top_ptr,
    entropy_ptr,
    winner_ptr,  # [B, H, Tq] int64
    rule,  # with slot 0
    slot,  # of the first query; 0 if the rule has bounds
    rows,  # B·H·Tq
    heads,
    group,
    queries,
    keys,
    splits,
    scale,
    softcap,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,  # as in flash/forward_kernel.py
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(group * queries, BLOCK_M)
    part_index = tl.program_id(0) // tiles
    split = part_index % splits
    kv_index = part_index // splits
    kv_heads = heads // group
    batch, kv_head = (kv_index // kv_heads).to(tl.int64), (kv_index % kv_heads).to(tl.int64)

    # Rows of the tile: heads of the group × queries.
    packed = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)  # [BM]
    exists = packed < group * queries
    head = kv_head * group + tl.where(exists, packed // queries, 0)
    row = tl.where(exists, packed % queries, queries)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    row_offset = head * q.strides[1] + row.to(tl.int64) * q.strides[2]
    q_at = q.ptr + batch * q.strides[0] + row_offset[:, None] + d[None, :]
    q_tile = tl.load(q_at, mask=exists[:, None] & (d < D)[None, :], other=0.0)
    temperature = load_beta(beta, batch, head, row, exists)
    sign, c = row_temperature(temperature)
    if winner_ptr is not None:
        sign = sign_for_winner(sign, temperature)
    q_tile = q_tile * sign[:, None].to(q_tile.dtype)
    if softcap is None and rule.bias_ptr is None:
        c *= scale

    start, stop = row_bounds(rule, batch, row + slot, queries + slot, keys)
    start, stop = within(rule, start, stop, keys)
    ranges = _span(rule, batch, slot, queries, keys)
    part_low, part_high = _part(ranges[0], ranges[3], split, splits, BLOCK_N)
    slope = c[:, None] if COLUMNS else c
    m = tl.full([BLOCK_M, 1] if COLUMNS else [BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros_like(m)
    moment = tl.zeros_like(m)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if winner_ptr is not None:
        best = m
        winner = tl.full(m.shape, -1, tl.int32)
    k_ptr = k.ptr + kv_head * k.strides[1]
    v_ptr = v.ptr + kv_head * v.strides[1]

    edges = phase_edges(rule, ranges, BLOCK_N)
    for phase in tl.static_range(first_phase(rule), end_phase(rule)):
        low, high = phase_range(edges, phase)
        low, high = tl.maximum(low, part_low), tl.minimum(high, part_high)
        if phase == 3:
            broken = is_broken(acc)
            high = tl.where(broken, high, low)
            m = tl.where(broken, HIDDEN, m)
            total = tl.where(broken, 0.0, total)
            moment = tl.where(broken, 0.0, moment)
            acc = tl.where(broken, 0.0, acc)
        for left_key in tl.range(low, high, BLOCK_N, num_stages=1 if phase == 3 else None):
            slots = left_key + tl.arange(0, BLOCK_N)  # [BN]
            # The batch offset is added inside the loop: hoisted, it raised the registers on gfx942 from 93 to 115.
            k_offset = batch * k.strides[0] + slots.to(tl.int64) * k.strides[2]
            v_offset = batch * v.strides[0] + slots.to(tl.int64) * v.strides[2]
            k_at = k_ptr + k_offset[None, :] + d[:, None]  # [BD, BN]
            v_at = v_ptr + v_offset[:, None] + dv[None, :]  # [BN, BDV]
            k_tile = load_tile(k_at, (d < D)[:, None], (slots < keys)[None, :], D != BLOCK_D, phase != 1)
            v_tile, broken_keys = load_whole(v_at, (dv < DV)[None, :], (slots < keys)[:, None], DV != BLOCK_DV, phase)
            place = (batch, head[:, None], row, start, stop, queries, keys)
            y = attention_scores(
                q_tile, k_tile, broken_keys, sign, rule, place, left_key, slots, scale, softcap, PRECISION, phase
            )
            # The online softmax of flash/forward_kernel.py.
            if winner_ptr is not None and phase != 3:
                winner = best_slot(y, left_key, m, winner)
            peak = tl.maximum(m, tl.max(y, axis=1, keep_dims=COLUMNS))
            fall = tl.maximum((m - peak) * slope, -65536.0)  # finite for rows without a visible key so far
            fade = tl.exp2(fall)
            base = peak * slope
            if phase != 1:
                # x is one fused multiply-add. For two hidden scores it would be the rounding error of 1e30 instead of
                # 0.
                base = tl.where(peak > SEEN_ABOVE, base, 0.0)
            x = y * c[:, None] - as_column(base)
            p = tl.exp2(x)
            if entropy_ptr is not None:
                terms = rounded_product(p, x, q.ptr.dtype.element_ty == tl.float32)
                moment = fade * (moment + fall * total) + tl.sum(terms, axis=1, keep_dims=COLUMNS)
            total = total * fade + tl.sum(p, axis=1, keep_dims=COLUMNS)
            m = peak
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * as_column(fade), input_precision=PRECISION)
        if winner_ptr is not None and phase != 3:
            best, winner = no_winner_of_nan(m, winner, total)

    m, total, moment = tl.reshape(m, [BLOCK_M]), tl.reshape(total, [BLOCK_M]), tl.reshape(moment, [BLOCK_M])
    if winner_ptr is not None:
        best, winner = tl.reshape(best, [BLOCK_M]), tl.reshape(winner, [BLOCK_M])
    # Heads of a group and their queries are contiguous in scratch memory, as in the tile.
    row_at = (batch * kv_heads + kv_head) * group * queries + packed
    if splits == 1:
        seen = (m > SEEN_ABOVE) | (total != total)
        factor = finish_softmax(
            seen, m * c * LN2, total, moment, sinks_ptr, lse_ptr, top_ptr, entropy_ptr, head, row_at, exists
        )
        if winner_ptr is not None:
            tl.store(winner_ptr + row_at, winner, mask=exists)
        out_offset = batch * out.strides[0] + head * out.strides[1] + row.to(tl.int64) * out.strides[2]
        result = (acc * factor[:, None]).to(out.ptr.dtype.element_ty)
        tl.store(out.ptr + out_offset[:, None] + dv[None, :], result, mask=exists[:, None] & (dv < DV)[None, :])
    else:
        acc_ptr, rows_ptr = _parts(scratch_ptr, splits, rows, DV)
        row_at += split.to(tl.int64) * rows
        NUMBERS: tl.constexpr = 3 if winner_ptr is None else 5
        tl.store(rows_ptr + row_at * NUMBERS, m, mask=exists)
        tl.store(rows_ptr + row_at * NUMBERS + 1, total, mask=exists)
        if entropy_ptr is not None:
            tl.store(rows_ptr + row_at * NUMBERS + 2, moment, mask=exists)
        if winner_ptr is not None:
            tl.store(rows_ptr + row_at * NUMBERS + 3, best, mask=exists)
            tl.store(rows_ptr + row_at * NUMBERS + 4, winner.to(tl.float32, bitcast=True), mask=exists)
        tl.store(acc_ptr + row_at[:, None] * DV + dv[None, :], acc, mask=exists[:, None] & (dv < DV)[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def decode_merge_kernel(
    scratch_ptr,  # fp32, see `_parts`
    beta,  # [B|1, H|1, Tq] fp32
    sinks_ptr,  # [H]
    out,  # [B, H, Tq, DV]
    lse_ptr,  # [B, H, Tq] fp32, as are the next two
    top_ptr,
    entropy_ptr,
    winner_ptr,  # [B, H, Tq] int64
    rows,  # B·H·Tq
    heads,
    queries,
    splits,
    factor,  # the scale, or 1 if scores already include it
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head_index = row // queries
    batch, head = head_index // heads, head_index % heads
    nats = tl.maximum(tl.abs(load_beta(beta, batch, head, row % queries, True)), LEAST_BETA) * factor
    c = nats * LOG2E

    acc_ptr, rows_ptr = _parts(scratch_ptr, splits, rows, DV)
    dv = tl.arange(0, BLOCK_DV)
    m = HIDDEN + 0.0 * c
    total = 0.0 * c
    moment = total
    acc = tl.zeros([BLOCK_DV], tl.float32)
    NUMBERS: tl.constexpr = 3 if winner_ptr is None else 5
    if winner_ptr is not None:
        best = tl.full([], HIDDEN, tl.float32)
        winner = tl.full([], -1, tl.int32)
    for low in range(0, splits, BLOCK_S):
        split = low + tl.arange(0, BLOCK_S)  # [BS]
        inside = split < splits
        row_at = split.to(tl.int64) * rows + row
        part_m = tl.load(rows_ptr + row_at * NUMBERS, mask=inside, other=HIDDEN)
        part_total = tl.load(rows_ptr + row_at * NUMBERS + 1, mask=inside, other=0.0)
        acc_at = acc_ptr + row_at[:, None] * DV + dv[None, :]
        part_acc = tl.load(acc_at, mask=inside[:, None] & (dv < DV)[None, :], other=0.0)  # [BS, BDV]
        peak = tl.maximum(m, tl.max(part_m, axis=0))
        # Finite for splits without a visible key; their sums are 0.
        fall, part_fall = tl.maximum((m - peak) * c, -65536.0), tl.maximum((part_m - peak) * c, -65536.0)
        fade, part_fade = tl.exp2(fall), tl.exp2(part_fall)
        if entropy_ptr is not None:
            part_moment = tl.load(rows_ptr + row_at * NUMBERS + 2, mask=inside, other=0.0)
            moment = fade * (moment + fall * total)
            moment += tl.sum(part_fade * (part_moment + part_fall * part_total), axis=0)
        total = total * fade + tl.sum(part_fade * part_total, axis=0)
        acc = acc * fade + tl.sum(part_fade[:, None] * part_acc, axis=0)
        m = peak
        if winner_ptr is not None:
            part_best = tl.load(rows_ptr + row_at * NUMBERS + 3, mask=inside, other=HIDDEN)
            bits = tl.load(rows_ptr + row_at * NUMBERS + 4, mask=inside, other=0.0)
            highest = tl.max(part_best, axis=0)
            leads = inside & (part_best == highest)
            first = tl.min(tl.where(leads, bits.to(tl.int32, bitcast=True), NO_SLOT), axis=0)
            best, winner = better((highest, first), (best, winner))

    seen = (m > SEEN_ABOVE) | (total != total)
    acc *= finish_softmax(seen, m * nats, total, moment, sinks_ptr, lse_ptr, top_ptr, entropy_ptr, head, row, True)
    if winner_ptr is not None:
        tl.store(winner_ptr + row, winner)
    out_at = out.ptr + batch * out.strides[0] + head * out.strides[1] + row % queries * out.strides[2]
    tl.store(out_at + dv, acc.to(out.ptr.dtype.element_ty), mask=dv < DV)
