"""Gradients of attention with a temperature per row, without atomics: dQ in one pass over keys, dK and dV in another.

With w = 2^(y·c − lse) and Δ = ⟨dO, O⟩ per row, dℓ = w·(dP − Δ) is the gradient of the logits ℓ = β·s. Then
dβ = Σ dℓ·s, which is scale·⟨q, dℓ·K⟩ where s is linear in q, and dq = scale·β·dℓ·K.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import (
    BIAS,
    BOUNDS,
    LOG2E,
    capped_scores,
    first_phase,
    keep,
    load_tile,
    phase_edges,
    phase_range,
    program_rows,
    query_range,
    row_bounds,
    row_pointers,
    visible,
    visible_keys,
)


@triton.jit
def flash_backward_rows_kernel(
    do_ptr,  # [B, H, Tq, DV]
    out_ptr,  # [B, H, Tq, DV]
    beta_ptr,  # [B|1, H|1, Tq] fp32
    lse_ptr,  # [B, H, Tq] fp32
    rows_ptr,  # [B, H, Tq, 4] fp32
    stride_dob,
    stride_doh,
    stride_dom,
    stride_ob,
    stride_oh,
    stride_om,
    stride_beta_b,
    stride_beta_h,
    stride_beta_m,
    heads,
    queries,
    factor,  # of β in c
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """What the other two kernels read of each row, side by side: c, lse in units of ln 2, β and Δ."""
    _, head_index, batch, head, rows = program_rows(heads, queries, BLOCK_M, False)
    exists = rows < queries
    dv = tl.arange(0, BLOCK_DV)
    inside = exists[:, None] & (dv < DV)[None, :]
    do_at = row_pointers(do_ptr, batch, head, rows, dv, stride_dob, stride_doh, stride_dom)
    out_at = row_pointers(out_ptr, batch, head, rows, dv, stride_ob, stride_oh, stride_om)
    do = tl.load(do_at, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(do * out, axis=1)
    row = rows.to(tl.int64)
    beta_at = beta_ptr + batch * stride_beta_b + head * stride_beta_h + row * stride_beta_m
    beta = tl.load(beta_at, mask=exists, other=1.0)
    row_at = head_index.to(tl.int64) * queries + row
    lse = tl.load(lse_ptr + row_at, mask=exists, other=0.0)
    lse = tl.where(lse == -float("inf"), 1e30, lse)  # a row that sees nothing: every weight 2^(y − ∞) is 0
    at = rows_ptr + row_at * 4
    tl.store(at, beta * factor, mask=exists)
    tl.store(at + 1, lse * LOG2E, mask=exists)
    tl.store(at + 2, beta, mask=exists)
    tl.store(at + 3, delta, mask=exists)


@triton.jit
def _row_numbers(at, exists, EDGE: tl.constexpr):
    """c, lse in units of ln 2, β and Δ of rows; at an edge some rows may not exist."""
    if EDGE:
        c = tl.load(at, mask=exists, other=1.0)
        lse = tl.load(at + 1, mask=exists, other=0.0)
        beta = tl.load(at + 2, mask=exists, other=0.0)
        delta = tl.load(at + 3, mask=exists, other=0.0)
    else:
        c, lse, beta, delta = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    return c, lse, beta, delta


@triton.jit
def flash_backward_query_kernel(
    q_ptr,  # [B, H, Tq, D]
    k_ptr,  # [B, Hkv, Tk, D]
    v_ptr,  # [B, Hkv, Tk, DV]
    do_ptr,  # [B, H, Tq, DV]
    rows_ptr,  # [B, H, Tq, 4] fp32
    start_ptr,  # [B|1, Tq] int32
    stop_ptr,
    table_ptr,  # [B|1, tiles, 4] int32
    padding_ptr,  # [B|1, Tk] uint8
    mask_ptr,  # [B|1, H|1, Tq, Tk]
    seed_ptr,  # int64
    dq_ptr,  # [B, H, Tq, D]
    dbeta_ptr,  # [B, H, Tq] fp32
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_dob,
    stride_doh,
    stride_dom,
    stride_dqb,
    stride_dqh,
    stride_dqm,
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
    dropout_p,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANGE: tl.constexpr,
    PADDING: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    DBETA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, head_index, batch, head, rows = program_rows(heads, queries, BLOCK_M, True)
    exists = rows < queries
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_at = row_pointers(q_ptr, batch, head, rows, d, stride_qb, stride_qh, stride_qm)
    q = tl.load(q_at, mask=exists[:, None] & (d < D)[None, :], other=0.0)
    do_at = row_pointers(do_ptr, batch, head, rows, dv, stride_dob, stride_doh, stride_dom)
    do = tl.load(do_at, mask=exists[:, None] & (dv < DV)[None, :], other=0.0)
    row_at = head_index.to(tl.int64) * queries + rows.to(tl.int64)
    c, lse, beta, delta = _row_numbers(rows_ptr + row_at * 4, exists, True)

    start, stop, ranges = visible_keys(
        tile, rows, batch, queries, keys, start_ptr, stop_ptr, table_ptr, stride_bound_b, stride_table_b, slot, left,
        right, BLOCK_M, RANGE,
    )  # fmt: skip
    kv_head = head // group
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    if PADDING:
        padding_ptr += batch * stride_padding_b
    if MASK:
        mask_ptr += batch * stride_mask_b + head * stride_mask_h
    if DROPOUT:
        seed = tl.load(seed_ptr)
    LINEAR: tl.constexpr = not SOFTCAP and MASK != BIAS
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dbeta = tl.zeros([BLOCK_M], tl.float32)

    ALL_EDGE: tl.constexpr = PADDING or MASK != 0
    edges = phase_edges(ranges, BLOCK_N, ALL_EDGE)
    for phase in tl.static_range(first_phase(RANGE, ALL_EDGE), 3):
        low, high = phase_range(edges, phase)
        for left_key in tl.range(low, high, BLOCK_N):
            slots = left_key + tl.arange(0, BLOCK_N)  # [BN]
            k_at = k_ptr + slots[:, None].to(tl.int64) * stride_kn + d[None, :]  # [BN, BD]
            v_at = v_ptr + slots[None, :].to(tl.int64) * stride_vn + dv[:, None]  # [BDV, BN]
            k = load_tile(k_at, (d < D)[None, :], (slots < keys)[:, None], D != BLOCK_D, phase != 1)
            v = load_tile(v_at, (dv < DV)[:, None], (slots < keys)[None, :], DV != BLOCK_DV, phase != 1)
            if phase != 1:
                k = tl.where(k.to(tl.float32) - k.to(tl.float32) == 0, k, 0.0)  # 0·NaN would reach every row
            seen, bias = visible(
                rows, slots, start, stop, queries, keys, padding_ptr, mask_ptr, stride_mask_row, stride_mask_key,
                RANGE, PADDING, MASK, phase != 1,
            )  # fmt: skip
            y = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BM, BN]
            y, slope = capped_scores(y, bias, scale, softcap, SOFTCAP, MASK)
            p = tl.exp2(y * c[:, None] - lse[:, None])
            dp = tl.dot(do, v, input_precision=PRECISION)  # [BM, BN]
            if DROPOUT:
                dp = tl.where(keep(seed, head_index, rows, slots, dropout_p), dp / (1 - dropout_p), 0.0)
            dlogit = p * (dp - delta[:, None])
            if phase != 1:
                dlogit = tl.where(seen, dlogit, 0.0)
            if DBETA and not LINEAR:
                dbeta += tl.sum(dlogit * y, axis=1)
            if SOFTCAP:
                dlogit *= slope
            acc = tl.dot(dlogit.to(k.dtype), k, acc, input_precision=PRECISION)

    acc *= scale
    if DBETA:
        if LINEAR:
            dbeta = tl.sum(q.to(tl.float32) * acc, axis=1)
        tl.store(dbeta_ptr + row_at, dbeta, mask=exists)
    acc *= beta[:, None]
    dq_at = row_pointers(dq_ptr, batch, head, rows, d, stride_dqb, stride_dqh, stride_dqm)
    tl.store(dq_at, acc.to(dq_ptr.dtype.element_ty), mask=exists[:, None] & (d < D)[None, :])


@triton.jit
def flash_backward_key_kernel(
    q_ptr,  # [B, H, Tq, D]
    k_ptr,  # [B, Hkv, Tk, D]
    v_ptr,  # [B, Hkv, Tk, DV]
    do_ptr,  # [B, H, Tq, DV]
    rows_ptr,  # [B, H, Tq, 4] fp32
    start_ptr,  # [B|1, Tq] int32
    stop_ptr,
    table_ptr,  # [B|1, tiles, 4] int32
    padding_ptr,  # [B|1, Tk] uint8
    mask_ptr,  # [B|1, H|1, Tq, Tk]
    seed_ptr,  # int64
    dk_ptr,  # [B, Hkv, Tk, D]
    dv_ptr,  # [B, Hkv, Tk, DV]
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_dob,
    stride_doh,
    stride_dom,
    stride_dkb,
    stride_dkh,
    stride_dkn,
    stride_dvb,
    stride_dvh,
    stride_dvn,
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
    dropout_p,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANGE: tl.constexpr,
    PADDING: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, _, batch, kv_head, slots = program_rows(heads // group, keys, BLOCK_N, False)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    present = (slots < keys)[:, None]
    k_at = row_pointers(k_ptr, batch, kv_head, slots, d, stride_kb, stride_kh, stride_kn)
    v_at = row_pointers(v_ptr, batch, kv_head, slots, dv, stride_vb, stride_vh, stride_vn)
    k = tl.load(k_at, mask=present & (d < D)[None, :], other=0.0)
    v = tl.load(v_at, mask=present & (dv < DV)[None, :], other=0.0)

    if RANGE == BOUNDS:
        start_ptr += batch * stride_bound_b
        stop_ptr += batch * stride_bound_b
        table_ptr += batch * stride_table_b + tile * 4
    right_key = tl.minimum(tile * BLOCK_N + BLOCK_N, keys)
    ranges = query_range(tile * BLOCK_N, right_key, queries, table_ptr, slot, left, right, RANGE)
    if PADDING:
        padding_ptr += batch * stride_padding_b
    if DROPOUT:
        seed = tl.load(seed_ptr)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dvalue = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    ALL_EDGE: tl.constexpr = PADDING or MASK != 0
    # The last keys of a tile may not exist: their gradients are computed and not stored.
    edges = phase_edges(ranges, BLOCK_M, ALL_EDGE)
    # The loop over heads is inside the phases, and nothing is moved out of it: each phase then keeps only its own
    # values in registers. The other order spilled 264 bytes on sm_100.
    for phase in tl.static_range(2 if ALL_EDGE else 0, 3):
        low, high = phase_range(edges, phase)
        for member in tl.range(0, group, disable_licm=True):
            head = kv_head * group + member
            head_index = batch * heads + head
            q_head = q_ptr + batch * stride_qb + head * stride_qh
            do_head = do_ptr + batch * stride_dob + head * stride_doh
            rows_head = rows_ptr + head_index * queries * 4
            mask_head = mask_ptr
            if MASK:
                mask_head = mask_ptr + batch * stride_mask_b + head * stride_mask_h
            for top in tl.range(low, high, BLOCK_M):
                rows = top + tl.arange(0, BLOCK_M)  # [BM]
                exists = rows < queries
                row = rows.to(tl.int64)
                q_at = q_head + row[:, None] * stride_qm + d[None, :]  # [BM, BD]
                do_at = do_head + row[:, None] * stride_dom + dv[None, :]  # [BM, BDV]
                q = load_tile(q_at, (d < D)[None, :], exists[:, None], D != BLOCK_D, phase != 1)
                do = load_tile(do_at, (dv < DV)[None, :], exists[:, None], DV != BLOCK_DV, phase != 1)
                c, lse, beta, delta = _row_numbers(rows_head + row * 4, exists, phase != 1)
                start, stop = row_bounds(rows, queries, keys, start_ptr, stop_ptr, slot, left, right, RANGE)
                seen, bias = visible(
                    rows, slots, start, stop, queries, keys, padding_ptr, mask_head, stride_mask_row, stride_mask_key,
                    RANGE, PADDING, MASK, phase != 1,
                )  # fmt: skip
                seen = tl.trans(seen)
                if MASK == BIAS:
                    bias = tl.trans(bias)
                # Keys by rows: the next products take the weights in this layout, and a transposition costs more.
                y = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BN, BM]
                y, slope = capped_scores(y, bias, scale, softcap, SOFTCAP, MASK)
                p = tl.exp2(y * c[None, :] - lse[None, :])
                if phase != 1:
                    p = tl.where(seen, p, 0.0)
                dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)  # [BN, BM]
                kept = p
                if DROPOUT:
                    kept_here = tl.trans(keep(seed, head_index.to(tl.int32), rows, slots, dropout_p))
                    kept = tl.where(kept_here, p / (1 - dropout_p), 0.0)
                    dp = tl.where(kept_here, dp / (1 - dropout_p), 0.0)
                dvalue = tl.dot(kept.to(do.dtype), do, dvalue, input_precision=PRECISION)
                dscore = p * (dp * beta[None, :] - (beta * delta)[None, :])
                if SOFTCAP:
                    dscore *= slope
                if phase != 1:
                    dscore = tl.where(seen, dscore, 0.0)  # 0·NaN, where a value is not finite
                dk = tl.dot(dscore.to(q.dtype), q, dk, input_precision=PRECISION)

    dk *= scale
    dk_at = row_pointers(dk_ptr, batch, kv_head, slots, d, stride_dkb, stride_dkh, stride_dkn)
    dv_at = row_pointers(dv_ptr, batch, kv_head, slots, dv, stride_dvb, stride_dvh, stride_dvn)
    tl.store(dk_at, dk.to(dk_ptr.dtype.element_ty), mask=present & (d < D)[None, :])
    tl.store(dv_at, dvalue.to(dv_ptr.dtype.element_ty), mask=present & (dv < DV)[None, :])
