"""Backward pass of attention with one temperature per row, without atomics: a dQ kernel and a dK/dV kernel.

With w = 2^(y·c − lse) and Δ = ⟨dO, O⟩ per row, the gradient of the logits ℓ = β·s is dℓ = w·(dP − Δ). Then dβ = Σ dℓ·s,
which is scale·⟨q, dℓ·K⟩ where s is linear in q, and dq = scale·β·dℓ·K.

Gradients of row statistics: that of the lse is part of Δ, that of the entropy adds −w·slope·log2 w. That of the largest
logit concerns one key per row, and a comparison with every slot would take up to 7 instructions per score: it is
computed outside of the kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import (
    HIDDEN,
    LOG2E,
    as_factor,
    bounds_of_keys,
    capped_scores,
    difference,
    keep,
    keep_by_slot,
    less_product,
    plain_nan,
    product,
    product_less,
    program_rows,
    visible,
    visible_from,
    visible_keys,
)
from ..tiles import (
    end_phase,
    first_phase,
    head_strides,
    is_broken,
    listed_edges,
    load_beta,
    load_block,
    load_box,
    load_rows,
    load_tile,
    load_whole,
    load_whole_box,
    phase_edges,
    phase_range,
    query_range,
    store_block,
    tile_list,
)


@triton.jit
def flash_backward_rows_kernel(
    grad_out,  # [B, H, Tq, DV]
    out,  # [B, H, Tq, DV]
    beta,  # [B|1, H|1, Tq] fp32
    lse_ptr,  # [B, H, Tq] fp32
    shift_ptr,  # [B, H, Tq] fp32, added to Δ
    rows_ptr,  # [B, H, Tq, 4] fp32
    heads,
    queries,
    factor,  # c = β·factor
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Preprocess: store c, lse in units of ln 2, β and Δ of each row, for the other two kernels."""
    _, head_index, batch, head, rows = program_rows(heads, queries, BLOCK_M, False)
    exists = rows < queries
    dv = tl.arange(0, BLOCK_DV)
    do = load_rows(grad_out, batch, head, rows, queries, dv, DV).to(tl.float32)
    delta = tl.sum(do * load_rows(out, batch, head, rows, queries, dv, DV).to(tl.float32), axis=1)
    row_beta = load_beta(beta, batch, head, rows, exists)
    row_at = head_index.to(tl.int64) * queries + rows
    if shift_ptr is not None:
        delta += tl.load(shift_ptr + row_at, mask=exists, other=0.0)
    lse = tl.load(lse_ptr + row_at, mask=exists, other=0.0)
    lse = tl.where(lse == -float("inf"), 1e30, lse)  # row without visible keys: every weight 2^(y − ∞) is 0
    at = rows_ptr + row_at * 4
    tl.store(at, plain_nan(row_beta * factor), mask=exists)
    tl.store(at + 1, plain_nan(lse * LOG2E), mask=exists)
    tl.store(at + 2, plain_nan(row_beta), mask=exists)
    tl.store(at + 3, plain_nan(delta), mask=exists)


@triton.jit
def _row_numbers(head_at, row, queries, EDGE: tl.constexpr, CLAMP: tl.constexpr):
    """Load c, lse in units of ln 2, β and Δ of rows; at an edge some rows may be past the end.

    Those rows load as zeros, without a select instruction: their weights are 1, their queries and gradients 0. With
    CLAMP they load as the last row, with an lse of ∞: their weights are 0, and the four numbers are loaded at once.
    """
    exists = row < queries
    if EDGE and not CLAMP:
        at = head_at + row * 4
        c = tl.load(at, mask=exists, other=0.0)
        lse = tl.load(at + 1, mask=exists, other=0.0)
        beta = tl.load(at + 2, mask=exists, other=0.0)
        delta = tl.load(at + 3, mask=exists, other=0.0)
    else:
        at = head_at + (tl.minimum(row, queries - 1) if EDGE else row) * 4
        c, lse, beta, delta = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        if EDGE:
            lse = tl.where(exists, lse, 1e30)
    return c, lse, beta, delta


@triton.jit
def flash_backward_query_kernel(
    q,  # [B, H, Tq, D]
    k,  # [B, Hkv, Tk, D]
    v,  # [B, Hkv, Tk, DV]
    k_box,  # TMA descriptors of k and v, instead of pointers
    v_box,
    grad_out,  # [B, H, Tq, DV]
    grad_q,  # [B, H, Tq, D]
    rows_ptr,  # [B, H, Tq, 4] fp32
    seed_ptr,  # int64
    slope_ptr,  # [B, H, Tq] fp32
    dbeta_ptr,  # [B, H, Tq] fp32
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
    K_ROW: tl.constexpr,  # row strides of k and v
    V_ROW: tl.constexpr,
    ALIGN: tl.constexpr,
    PAIRS: tl.constexpr,  # packed fp32 instructions, see device.py
    SHORT: tl.constexpr,  # short rounding, see `as_factor`
    PRECISION: tl.constexpr,
):
    tile, head_index, batch, head, rows = program_rows(heads, queries, BLOCK_M, True)
    exists = rows < queries
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_tile = load_rows(q, batch, head, rows, queries, d, D, ALIGN)
    do = load_rows(grad_out, batch, head, rows, queries, dv, DV, ALIGN)
    row_at = head_index.to(tl.int64) * queries + rows
    first_number = rows_ptr + head_index.to(tl.int64) * queries * 4
    c, lse, beta, delta = _row_numbers(first_number, rows.to(tl.int64), queries, True, False)
    if slope_ptr is not None:
        slope_of_entropy = plain_nan(tl.load(slope_ptr + row_at, mask=exists, other=0.0))

    start, stop, ranges = visible_keys(rule, batch, tile, rows, queries, keys, BLOCK_M)
    kv_head = head // group
    k_batch, k_head, _ = head_strides(k, ALIGN)
    v_batch, v_head, _ = head_strides(v, ALIGN)
    k_ptr = k.ptr + batch * k_batch + kv_head * k_head
    v_ptr = v.ptr + batch * v_batch + kv_head * v_head
    columns = tl.arange(0, BLOCK_N)
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
    LINEAR: tl.constexpr = softcap is None and rule.bias_ptr is None
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dbeta = tl.zeros([BLOCK_M], tl.float32)

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
            acc = tl.where(broken, 0.0, acc)
            dbeta = tl.where(broken, 0.0, dbeta)
        if LISTED:
            following = tl.load(tiles_at + low)
        for at in tl.range(low, high, STEP, num_stages=1 if phase == 3 else None, disable_licm=phase == 3):
            left_key = at
            if LISTED:
                left_key = following * BLOCK_N
                following = tl.load(tiles_at + at + 1)  # prefetched, as in the forward kernel
            slots = left_key + tl.arange(0, BLOCK_N)  # [BN]
            if k_box is not None:
                k_tile, broken_keys = load_whole_box(k_box, batch, kv_head, left_key, phase)
                v_tile = tl.trans(load_box(v_box, batch, kv_head, left_key))
            else:
                first = tl.cast(left_key, tl.int64)
                k_at = k_ptr + first * K_ROW + (columns[:, None] * K_ROW + d[None, :])  # [BN, BD]
                v_at = v_ptr + first * V_ROW + (columns[None, :] * V_ROW + dv[:, None])  # [BDV, BN]
                k_tile, broken_keys = load_whole(k_at, (d < D)[None, :], (slots < keys)[:, None], D != BLOCK_D, phase)
                v_tile = load_tile(v_at, (dv < DV)[:, None], (slots < keys)[None, :], DV != BLOCK_DV, phase != 1)
            seen, bias = visible(rule, batch, head, rows, left_key, slots, start, stop, queries, keys, phase != 1)
            y = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [BM, BN]
            if phase == 3:
                y = tl.where(seen, y + broken_keys[None, :], 0.0)
            y, slope = capped_scores(y, bias, rule, scale, softcap, phase != 1)
            x = product_less(y, c[:, None], lse[:, None], PAIRS)
            if phase != 1:
                x = tl.where(seen, x, HIDDEN)
            p = tl.exp2(x)
            dp = tl.dot(do, v_tile, input_precision=PRECISION)  # [BM, BN]
            if seed_ptr is not None:
                dp = tl.where(keep(seed, head_index, rows, left_key, dropout_p, BLOCK_N), dp / (1 - dropout_p), 0.0)
            change = difference(dp, delta[:, None], PAIRS)
            if slope_ptr is not None:
                change = less_product(change, x, slope_of_entropy[:, None], PAIRS)
            if phase == 3:
                change = tl.where(seen, change, 0.0)  # 0·∞ or 0·NaN, if a value is not finite
            dlogit = product(p, change, PAIRS)
            if dbeta_ptr is not None and not LINEAR:
                dbeta += tl.sum(dlogit * y, axis=1)
            if softcap is not None:
                dlogit *= slope
            acc = tl.dot(as_factor(dlogit, k_tile.dtype, SHORT), k_tile, acc, input_precision=PRECISION)

    acc *= scale
    top = tile * BLOCK_M
    if dbeta_ptr is not None:
        if LINEAR:
            dbeta = tl.sum(load_block(q, batch, head, top, queries, d, D, BLOCK_M, ALIGN).to(tl.float32) * acc, axis=1)
        places = tl.arange(0, BLOCK_M)
        tl.store(dbeta_ptr + (head_index.to(tl.int64) * queries + top) + places, dbeta, mask=places < queries - top)
    store_block(grad_q, batch, head, top, queries, d, D, acc * beta[:, None], ALIGN)


@triton.jit
def flash_backward_key_kernel(
    q,  # [B, H, Tq, D]
    k,  # [B, Hkv, Tk, D]
    v,  # [B, Hkv, Tk, DV]
    grad_out,  # [B, H, Tq, DV]
    grad_k,  # [B, Hkv, Tk, D]
    grad_v,  # [B, Hkv, Tk, DV]
    rows_ptr,  # [B, H, Tq, 4] fp32
    seed_ptr,  # int64
    slope_ptr,  # [B, H, Tq] fp32, times β
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
    Q_ROW: tl.constexpr,  # row strides of q and grad_out
    DO_ROW: tl.constexpr,
    CLAMP_ROWS: tl.constexpr,  # how edge tiles load the numbers of rows, see `_row_numbers`
    DRAW_FOURS: tl.constexpr,  # dropout draws for four slots at once, if registers allow
    EDGE_STAGES: tl.constexpr,  # pipeline stages of phase 2; None: as in the other phases
    ALIGN: tl.constexpr,
    SHORT: tl.constexpr,  # short rounding, see `as_factor`
    PRECISION: tl.constexpr,
):
    tile, _, batch, kv_head, slots = program_rows(heads // group, keys, BLOCK_N, False)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    k_tile = load_rows(k, batch, kv_head, slots, keys, d, D, ALIGN)
    v_tile = load_rows(v, batch, kv_head, slots, keys, dv, DV, ALIGN)
    right_key = tl.minimum(tile * BLOCK_N + BLOCK_N, keys)
    bounds = bounds_of_keys(rule, batch, slots, queries, keys)
    ranges = query_range(rule, batch, tile, tile * BLOCK_N, right_key, queries)
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
    q_batch, q_head, _ = head_strides(q, ALIGN)
    do_batch, do_head, _ = head_strides(grad_out, ALIGN)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dvalue = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    # Keys past the end of the last tile get gradients too; they are not stored.
    LISTED: tl.constexpr = rule.list_ptr is not None
    STEP: tl.constexpr = 1 if LISTED else BLOCK_M
    edges = phase_edges(rule, ranges, BLOCK_M)
    # The head loop is nested in the phase loop, with loop-invariant code motion disabled: each phase then keeps only
    # its own values in registers. The other order spilled 264 bytes on sm_100.
    for phase in tl.static_range(first_phase(rule, True), 3):
        if not LISTED:
            low, high = phase_range(edges, phase)
        for member in tl.range(0, group, disable_licm=True):
            head = kv_head * group + member
            head_index = batch * heads + head
            q_ptr = q.ptr + batch * q_batch + head * q_head
            do_ptr = grad_out.ptr + batch * do_batch + head * do_head
            rows_head = rows_ptr + head_index * queries * 4
            if LISTED:  # per head, as masks may differ
                tiles_at = tile_list(rule, batch, head, tile)
                low, high = phase_range(listed_edges(tiles_at, tl.cdiv(queries, BLOCK_M)), phase)
                following = tl.load(tiles_at + low)
            for at in tl.range(low, high, STEP, num_stages=EDGE_STAGES if phase == 2 else None):
                top = at
                if LISTED:
                    top = following * BLOCK_M
                    following = tl.load(tiles_at + at + 1)
                rows = top + tl.arange(0, BLOCK_M)  # [BM]
                exists = rows < queries
                row = rows.to(tl.int64)
                q_at = q_ptr + row[:, None] * Q_ROW + d[None, :]  # [BM, BD]
                do_at = do_ptr + row[:, None] * DO_ROW + dv[None, :]  # [BM, BDV]
                q_tile = load_tile(q_at, (d < D)[None, :], exists[:, None], D != BLOCK_D, phase != 1)
                do = load_tile(do_at, (dv < DV)[None, :], exists[:, None], DV != BLOCK_DV, phase != 1)
                c, lse, beta, delta = _row_numbers(rows_head, row, queries, phase != 1, CLAMP_ROWS)
                if slope_ptr is not None:
                    slope_at = slope_ptr + head_index * queries + row
                    slope_of_entropy = tl.load(slope_at, mask=exists, other=0.0) if phase != 1 else tl.load(slope_at)
                    if SHORT:
                        slope_of_entropy = plain_nan(slope_of_entropy)
                if rule.bias_ptr is not None:
                    seen, bias = visible_from(rule, batch, head, top, rows, slots, bounds, queries, keys, phase != 1)
                # [keys, rows]: the following products take the weights in this layout, and a transposition costs more.
                y = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)  # [BN, BM]
                # A bias is loaded before the product, a bool mask after it. The opposite order spilled 32 bytes on
                # sm_90 with a bias, and 32 and 72 bytes on sm_80 and sm_120 with a mask.
                if rule.bias_ptr is None:
                    seen, bias = visible_from(rule, batch, head, top, rows, slots, bounds, queries, keys, phase != 1)
                y, slope = capped_scores(y, bias, rule, scale, softcap, phase != 1)
                # Hidden scores are masked before the multiplication. LLVM moves a select on the products behind their
                # rounding, which takes four instructions per score instead of one.
                x = y * c[None, :] - lse[None, :]
                if phase != 1:
                    x = tl.where(seen, x, HIDDEN)
                p = tl.exp2(x)
                dp = tl.dot(v_tile, tl.trans(do), input_precision=PRECISION)  # [BN, BM]
                kept = p
                if seed_ptr is not None:
                    if DRAW_FOURS:
                        kept_here = tl.trans(
                            keep(seed, head_index.to(tl.int32), rows, tile * BLOCK_N, dropout_p, BLOCK_N)
                        )
                    else:
                        kept_here = keep_by_slot(seed, head_index.to(tl.int32), rows, slots, dropout_p)
                    kept = tl.where(kept_here, p / (1 - dropout_p), 0.0)
                    dp = tl.where(kept_here, dp / (1 - dropout_p), 0.0)
                dvalue = tl.dot(as_factor(kept, do.dtype, SHORT), do, dvalue, input_precision=PRECISION)
                change = dp * beta[None, :] - (beta * delta)[None, :]
                if slope_ptr is not None:
                    change -= slope_of_entropy[None, :] * x
                if softcap is not None:
                    change *= slope
                if phase != 1:
                    change = tl.where(seen, change, 0.0)  # 0·NaN, if a value is not finite
                dscore = p * change
                dk = tl.dot(as_factor(dscore, q_tile.dtype, SHORT), q_tile, dk, input_precision=PRECISION)

    store_block(grad_k, batch, kv_head, tile * BLOCK_N, keys, d, D, dk * scale, ALIGN)
    store_block(grad_v, batch, kv_head, tile * BLOCK_N, keys, dv, DV, dvalue, ALIGN)
