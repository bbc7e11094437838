"""Forward pass of attention with one temperature per row: one pass over the keys, which also collects statistics.

Per row the kernel keeps m = max y, l = Σ 2^x and u = Σ 2^x·x with x = (y − m)·c, and the slot of m. From these follow
lse, the largest logit and the entropy ln l − ln2·u/l. y and c are defined in device.py. Statistics that are not
requested are compiled out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import (
    HIDDEN,
    LN2,
    SEEN_ABOVE,
    as_column,
    as_factor,
    attention_scores,
    best_slot,
    finish_softmax,
    keep,
    no_winner_of_nan,
    product,
    product_less,
    program_rows,
    rounded_product,
    row_temperature,
    sign_for_winner,
    sum_in_parts,
    visible_keys,
)
from ..tiles import (
    end_phase,
    first_phase,
    head_strides,
    is_broken,
    listed_edges,
    load_beta,
    load_box,
    load_rows,
    load_tile,
    load_whole,
    load_whole_box,
    phase_edges,
    phase_range,
    store_block,
    tile_list,
)


@triton.jit
def flash_forward_kernel(
    q,  # [B, H, Tq, D]
    k,  # [B, Hkv, Tk, D]
    v,  # [B, Hkv, Tk, DV]
    k_box,  # TMA descriptors of k and v, instead of pointers
    v_box,
    beta,  # [B|1, H|1, Tq] fp32
    out,  # [B, H, Tq, DV]
    sinks_ptr,  # [H]
    seed_ptr,  # int64
    lse_ptr,  # [B, H, Tq] fp32, as are the next two
    top_ptr,
    entropy_ptr,
    winner_ptr,  # [B, H, Tq] int64
    rule,
    heads,
    group,
    queries,
    keys,
    scale,
    softcap,
    dropout_p,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    K_ROW: tl.constexpr,  # row strides of k and v; as constants they take no registers
    V_ROW: tl.constexpr,
    ALIGN: tl.constexpr,
    PARTS: tl.constexpr,
    SUMS_FIRST: tl.constexpr,
    COLUMNS: tl.constexpr,  # numbers per row are columns [BM, 1] instead of vectors, see tile_rules.py
    KEEP_POINTERS: tl.constexpr,  # keep the pointers of a key tile in registers
    SHORT: tl.constexpr,  # short rounding, see `as_factor`
    PAIRS: tl.constexpr,  # packed fp32 instructions, see device.py
    PRECISION: tl.constexpr,
):
    tile, head_index, batch, head, rows = program_rows(heads, queries, BLOCK_M, True)
    exists = rows < queries
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_tile = load_rows(q, batch, head, rows, queries, d, D, ALIGN)
    temperature = load_beta(beta, batch, head, rows, exists)
    sign, c = row_temperature(temperature)
    if winner_ptr is not None:
        sign = sign_for_winner(sign, temperature)
    q_tile = q_tile * sign[:, None].to(q_tile.dtype)
    if softcap is None and rule.bias_ptr is None:
        c *= scale

    start, stop, ranges = visible_keys(rule, batch, tile, rows, queries, keys, BLOCK_M)
    place = (batch, head, rows, start, stop, queries, keys)
    slope = c[:, None] if COLUMNS else c
    m = tl.full([BLOCK_M, 1] if COLUMNS else [BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_M, PARTS], tl.float32)  # reduced over PARTS at the end
    moment = tl.zeros([BLOCK_M, PARTS], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if winner_ptr is not None:
        winner = tl.full(m.shape, -1, tl.int32)
    kv_head = head // group
    k_batch, k_head, _ = head_strides(k, ALIGN)
    v_batch, v_head, _ = head_strides(v, ALIGN)
    k_ptr = k.ptr + batch * k_batch + kv_head * k_head
    v_ptr = v.ptr + batch * v_batch + kv_head * v_head
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)

    columns = tl.arange(0, BLOCK_N)
    LISTED: tl.constexpr = rule.list_ptr is not None
    STEP: tl.constexpr = 1 if LISTED else BLOCK_N
    if LISTED:
        tiles_at = tile_list(rule, batch, head, tile)
        edges = listed_edges(tiles_at, tl.cdiv(keys, BLOCK_N))
    else:
        edges = phase_edges(rule, ranges, BLOCK_N)
    for phase in tl.static_range(first_phase(rule), end_phase(rule)):
        low, high = phase_range(edges, phase)
        if phase == 3:
            broken = is_broken(acc)
            high = tl.where(broken, high, low)
            m = tl.where(broken, HIDDEN, m)
            total = tl.where(broken, 0.0, total)
            moment = tl.where(broken, 0.0, moment)
            acc = tl.where(broken, 0.0, acc)
        if LISTED:
            following = tl.load(tiles_at + low)
        for at in tl.range(low, high, STEP, num_stages=1 if phase == 3 else None, disable_licm=phase == 3):
            left_key = at
            if LISTED:
                left_key = following * BLOCK_N
                following = tl.load(tiles_at + at + 1)  # prefetched; unused after the last tile
            slots = left_key + tl.arange(0, BLOCK_N)  # [BN]
            if k_box is not None:
                k_tile = tl.trans(load_box(k_box, batch, kv_head, left_key))
                v_tile, broken_keys = load_whole_box(v_box, batch, kv_head, left_key, phase)
            else:
                if KEEP_POINTERS:
                    first = tl.cast(left_key, tl.int64)
                    k_at = k_ptr + first * K_ROW + (columns[None, :] * K_ROW + d[:, None])  # [BD, BN]
                    v_at = v_ptr + first * V_ROW + (columns[:, None] * V_ROW + dv[None, :])  # [BN, BDV]
                else:
                    k_at = k_ptr + d[:, None] + slots[None, :].to(tl.int64) * K_ROW
                    v_at = v_ptr + dv[None, :] + slots[:, None].to(tl.int64) * V_ROW
                k_tile = load_tile(k_at, (d < D)[:, None], (slots < keys)[None, :], D != BLOCK_D, phase != 1)
                v_tile, broken_keys = load_whole(
                    v_at, (dv < DV)[None, :], (slots < keys)[:, None], DV != BLOCK_DV, phase
                )
            y = attention_scores(
                q_tile, k_tile, broken_keys, sign, rule, place, left_key, slots, scale, softcap, PRECISION, phase
            )
            if winner_ptr is not None and phase != 3:  # non-finite values do not affect the winner
                winner = best_slot(y, left_key, m, winner)
            # The online softmax, duplicated in decode/kernel.py. As a shared device function it took more instructions
            # on sm_100, by 3 % at D = 64 and 5 % at D = 16 with entropy, because constants are then emitted in a
            # different order.
            peak = tl.maximum(m, tl.max(y, axis=1, keep_dims=COLUMNS))
            fall = tl.maximum((m - peak) * slope, -65536.0)  # finite for rows without a visible key so far
            fade = tl.exp2(fall)
            base = peak * slope
            if phase != 1:
                # x is one fused multiply-add. For two hidden scores it would be the rounding error of 1e30 instead of
                # 0.
                base = tl.where(peak > SEEN_ABOVE, base, 0.0)
            # With a bias tile, packed instructions exceed the registers of sm_100 and spilled 16 bytes.
            x = product_less(y, c[:, None], as_column(base), PAIRS and (phase == 1 or rule.bias_ptr is None))
            p = tl.exp2(x)
            if entropy_ptr is not None:
                terms = rounded_product(p, x, q.ptr.dtype.element_ty == tl.float32)
                moment = as_column(fade) * (moment + as_column(fall) * total) + sum_in_parts(terms, PARTS)
            total = total * as_column(fade) + sum_in_parts(p, PARTS)
            m = peak
            if SUMS_FIRST:
                # Makes the product depend on the sums; otherwise x and p of all scores stay live until after it. A NaN
                # sum makes its row NaN in any case.
                sums = tl.sum(total + moment, axis=1, keep_dims=COLUMNS)
                fade = tl.where(sums == sums, fade, sums)
            acc = product(acc, as_column(fade), PAIRS)
            if seed_ptr is not None:
                p = tl.where(keep(seed, head_index, rows, left_key, dropout_p, BLOCK_N), p, 0.0)
            acc = tl.dot(as_factor(p, v_tile.dtype, SHORT), v_tile, acc, input_precision=PRECISION)
        if winner_ptr is not None and phase != 3:
            _, winner = no_winner_of_nan(m, winner, tl.sum(total, axis=1, keep_dims=COLUMNS))

    m = tl.reshape(m, [BLOCK_M])
    total, moment = tl.sum(total, axis=1), tl.sum(moment, axis=1)
    seen = (m > SEEN_ABOVE) | (total != total)
    top = tile * BLOCK_M
    places = tl.arange(0, BLOCK_M)
    row_at = head_index.to(tl.int64) * queries + top + places
    factor = finish_softmax(
        seen,
        m * c * LN2,
        total,
        moment,
        sinks_ptr,
        lse_ptr,
        top_ptr,
        entropy_ptr,
        head,
        row_at,
        places < queries - top,
    )
    if winner_ptr is not None:
        tl.store(winner_ptr + row_at, tl.reshape(winner, [BLOCK_M]), mask=places < queries - top)
    if seed_ptr is not None:
        factor /= 1 - dropout_p
    store_block(out, batch, head, top, queries, dv, DV, acc * factor[:, None], ALIGN)
