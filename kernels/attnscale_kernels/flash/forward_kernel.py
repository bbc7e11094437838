"""Attention with a temperature per row, forward: one pass over the keys that also collects statistics.

Per row it keeps m = max y, l = Σ 2^x and u = Σ 2^x·x with x = (y − m)·c, from which lse, the largest logit and the
entropy ln l − ln2·u/l follow; see device.py for y and c. What is not asked for is compiled out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import (
    BIAS,
    HIDDEN,
    LN2,
    SEEN_ABOVE,
    attention_scores,
    finish_softmax,
    first_phase,
    keep,
    load_tile,
    online_softmax,
    phase_edges,
    phase_range,
    program_rows,
    row_pointers,
    row_temperature,
    visible_keys,
)


@triton.jit
def flash_forward_kernel(
    q_ptr,  # [B, H, Tq, D]
    k_ptr,  # [B, Hkv, Tk, D]
    v_ptr,  # [B, Hkv, Tk, DV]
    beta_ptr,  # [B|1, H|1, Tq] fp32
    sinks_ptr,  # [H]
    start_ptr,  # [B|1, Tq] int32
    stop_ptr,
    table_ptr,  # [B|1, tiles, 4] int32
    padding_ptr,  # [B|1, Tk] uint8
    mask_ptr,  # [B|1, H|1, Tq, Tk]
    seed_ptr,  # int64
    out_ptr,  # [B, H, Tq, DV]
    lse_ptr,  # [B, H, Tq] fp32, and so the next two
    top_ptr,
    entropy_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_ob,
    stride_oh,
    stride_om,
    stride_beta_b,
    stride_beta_h,
    stride_beta_m,
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
    SINKS: tl.constexpr,
    DROPOUT: tl.constexpr,
    ENTROPY: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, head_index, batch, head, rows = program_rows(heads, queries, BLOCK_M, True)
    exists = rows < queries
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_at = row_pointers(q_ptr, batch, head, rows, d, stride_qb, stride_qh, stride_qm)
    q = tl.load(q_at, mask=exists[:, None] & (d < D)[None, :], other=0.0)
    LINEAR: tl.constexpr = not SOFTCAP and MASK != BIAS
    sign, c = row_temperature(beta_ptr, batch, head, rows, exists, stride_beta_b, stride_beta_h, stride_beta_m)
    if LINEAR:
        q = q * sign[:, None].to(q.dtype)
        c *= scale

    start, stop, ranges = visible_keys(
        tile, rows, batch, queries, keys, start_ptr, stop_ptr, table_ptr, stride_bound_b, stride_table_b, slot, left,
        right, BLOCK_M, RANGE,
    )  # fmt: skip
    m = tl.full([BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_M, PARTS], tl.float32)  # summed over the parts at the end
    moment = tl.zeros([BLOCK_M, PARTS], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    kv_head = head // group
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    if PADDING:
        padding_ptr += batch * stride_padding_b
    if MASK:
        mask_ptr += batch * stride_mask_b + head * stride_mask_h
    if DROPOUT:
        seed = tl.load(seed_ptr)

    ALL_EDGE: tl.constexpr = PADDING or MASK != 0
    edges = phase_edges(ranges, BLOCK_N, ALL_EDGE)
    for phase in tl.static_range(first_phase(RANGE, ALL_EDGE), 3):
        low, high = phase_range(edges, phase)
        for left_key in tl.range(low, high, BLOCK_N):
            slots = left_key + tl.arange(0, BLOCK_N)  # [BN]
            k_at = k_ptr + slots[None, :].to(tl.int64) * stride_kn + d[:, None]  # [BD, BN]
            v_at = v_ptr + slots[:, None].to(tl.int64) * stride_vn + dv[None, :]  # [BN, BDV]
            k = load_tile(k_at, (d < D)[:, None], (slots < keys)[None, :], D != BLOCK_D, phase != 1)
            v = load_tile(v_at, (dv < DV)[None, :], (slots < keys)[:, None], DV != BLOCK_DV, phase != 1)
            y, v = attention_scores(
                q, k, v, sign, rows, slots, start, stop, queries, keys, padding_ptr, mask_ptr, stride_mask_row,
                stride_mask_key, scale, softcap, RANGE, PADDING, MASK, SOFTCAP, PRECISION, phase != 1,
            )  # fmt: skip
            p, fade, m, total, moment = online_softmax(y, c, m, total, moment, ENTROPY, PARTS, phase != 1)
            if DROPOUT:
                p = tl.where(keep(seed, head_index, rows, slots, dropout_p), p, 0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)

    total, moment = tl.sum(total, axis=1), tl.sum(moment, axis=1)
    seen = (m > SEEN_ABOVE) | (total != total)
    row_at = head_index.to(tl.int64) * queries + rows
    factor = finish_softmax(
        seen, m * c * LN2, total, moment, sinks_ptr, lse_ptr, top_ptr, entropy_ptr, head, row_at, exists, SINKS, ENTROPY
    )
    if DROPOUT:
        factor /= 1 - dropout_p
    out = acc * factor[:, None]
    out_at = row_pointers(out_ptr, batch, head, rows, dv, stride_ob, stride_oh, stride_om)
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=exists[:, None] & (dv < DV)[None, :])
