"""Gradients of attention with a temperature per row, without atomics: dQ in one pass over keys, dK and dV in another.

With w = 2^(y·c − lse) and Δ = ⟨dO, O⟩ per row, dℓ = w·(dP − Δ) is the gradient of the logits ℓ = β·s. Then
dβ = Σ dℓ·s, which is scale·⟨q, dℓ·K⟩ where s is linear in q, dq = scale·β·dℓ·K, and the norm of β·dℓ over a row is
that of the gradient of its raw scores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import (
    BIAS,
    BOUNDS,
    LOG2E,
    first_phase,
    keep,
    key_range,
    load_tile,
    phases,
    query_range,
    row_bounds,
    tanh,
    visible,
)
from ..launch import Launch, block_of, precision_of, resources_of, strides, unit_stride
from ..tiles import Tile, backward_key_tile, backward_query_tile
from ..visibility import Visibility, key_ranges, query_ranges


class Backward(NamedTuple):
    """What `flash_backward` returns; None where not asked for."""

    query: Tensor  # [B, H, Tq, D]
    key: Tensor  # [B, Hkv, Tk, D]
    value: Tensor  # [B, Hkv, Tk, DV]
    beta: Tensor | None  # [B, H, Tq] fp32
    score_norm: Tensor | None  # [B, H, Tq] fp32: the norm of each row's gradient of raw scores
    sinks: Tensor | None  # [H] fp32


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
    """What the other two read of each row, side by side: c, lse in units of ln 2, β and Δ."""
    tiles = tl.cdiv(queries, BLOCK_M)
    tile = tl.program_id(0) % tiles
    head_index = tl.program_id(0) // tiles
    batch, head = (head_index // heads).to(tl.int64), (head_index % heads).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = rows < queries
    dv = tl.arange(0, BLOCK_DV)
    inside = exists[:, None] & (dv < DV)[None, :]
    row = rows.to(tl.int64)
    do_at = do_ptr + batch * stride_dob + head * stride_doh + row[:, None] * stride_dom + dv[None, :]
    out_at = out_ptr + batch * stride_ob + head * stride_oh + row[:, None] * stride_om + dv[None, :]
    do = tl.load(do_at, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(do * out, axis=1)
    beta = tl.load(
        beta_ptr + batch * stride_beta_b + head * stride_beta_h + row * stride_beta_m, mask=exists, other=1.0
    )
    lse = tl.load(lse_ptr + head_index.to(tl.int64) * queries + row, mask=exists, other=0.0)
    lse = tl.where(lse == -float("inf"), 1e30, lse)  # a row that sees nothing: every weight 2^(y − ∞) is 0
    at = rows_ptr + (head_index.to(tl.int64) * queries + row) * 4
    tl.store(at, beta * factor, mask=exists)
    tl.store(at + 1, lse * LOG2E, mask=exists)
    tl.store(at + 2, beta, mask=exists)
    tl.store(at + 3, delta, mask=exists)


@triton.jit
def _score(y, scale, softcap, bias, SOFTCAP: tl.constexpr, MASK: tl.constexpr):
    """s of raw products, as far as the row's c does not hold it, and the slope of the softcap."""
    slope = 1.0
    if SOFTCAP:
        t = tanh(y * (scale / softcap))
        slope = 1 - t * t
        y = softcap * t
    elif MASK == BIAS:
        y = y * scale
    if MASK == BIAS:
        y += bias
    return y, slope


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
    norm_ptr,  # [B, H, Tq] fp32
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
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(queries, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles
    head_index = tl.program_id(0) // tiles
    batch, head = (head_index // heads).to(tl.int64), (head_index % heads).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BM]
    exists = rows < queries
    row = rows.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_at = q_ptr + batch * stride_qb + head * stride_qh + row[:, None] * stride_qm + d[None, :]
    q = tl.load(q_at, mask=exists[:, None] & (d < D)[None, :], other=0.0)
    do_at = do_ptr + batch * stride_dob + head * stride_doh + row[:, None] * stride_dom + dv[None, :]
    do = tl.load(do_at, mask=exists[:, None] & (dv < DV)[None, :], other=0.0)
    row_at = head_index.to(tl.int64) * queries + row
    c = tl.load(rows_ptr + row_at * 4, mask=exists, other=1.0)
    lse = tl.load(rows_ptr + row_at * 4 + 1, mask=exists, other=0.0)
    beta = tl.load(rows_ptr + row_at * 4 + 2, mask=exists, other=1.0)
    delta = tl.load(rows_ptr + row_at * 4 + 3, mask=exists, other=0.0)

    if RANGE == BOUNDS:
        start_ptr += batch * stride_bound_b
        stop_ptr += batch * stride_bound_b
        table_ptr += batch * stride_table_b + tile * 4
    start, stop = row_bounds(rows, queries, keys, start_ptr, stop_ptr, slot, left, right, RANGE)
    bottom = tl.minimum(tile * BLOCK_M + BLOCK_M, queries)
    first, clear_first, clear_end, end = key_range(tile * BLOCK_M, bottom, keys, table_ptr, slot, left, right, RANGE)
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
    norm = tl.zeros([BLOCK_M], tl.float32)

    UNTOLD: tl.constexpr = PADDING or MASK != 0
    low, clear_low, clear_high = phases(first, clear_first, clear_end, end, BLOCK_N, UNTOLD)
    for phase in tl.static_range(first_phase(RANGE, UNTOLD), 3):
        if phase == 1:
            low, high = clear_low, clear_high
        elif phase == 2:
            low, high = clear_high, end
        else:
            high = tl.minimum(clear_low, end)
        for left_key in tl.range(low, high, BLOCK_N):
            slots = left_key + tl.arange(0, BLOCK_N)  # [BN]
            k_at = k_ptr + slots[:, None].to(tl.int64) * stride_kn + d[None, :]  # [BN, BD]
            v_at = v_ptr + slots[None, :].to(tl.int64) * stride_vn + dv[:, None]  # [BDV, BN]
            k = load_tile(k_at, (d < D)[None, :], (slots < keys)[:, None], D != BLOCK_D, phase != 1)
            v = load_tile(v_at, (dv < DV)[:, None], (slots < keys)[None, :], DV != BLOCK_DV, phase != 1)
            seen, bias = True, 0.0
            if phase != 1:
                k = tl.where(k.to(tl.float32) - k.to(tl.float32) == 0, k, 0.0)  # 0·NaN would reach every row
                seen, bias = visible(
                    rows, slots, start, stop, queries, keys, padding_ptr, mask_ptr, stride_mask_row, stride_mask_key,
                    RANGE, PADDING, MASK,
                )  # fmt: skip
            y = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BM, BN]
            y, slope = _score(y, scale, softcap, bias, SOFTCAP, MASK)
            p = tl.exp2(y * c[:, None] - lse[:, None])
            dp = tl.dot(do, v, input_precision=PRECISION)  # [BM, BN]
            if DROPOUT:
                dp = tl.where(keep(seed, head_index, rows, slots, dropout_p), dp / (1 - dropout_p), 0.0)
            dlogit = p * (dp - delta[:, None])
            if phase != 1:
                dlogit = tl.where(seen, dlogit, 0.0)
            if NORM:
                norm += tl.sum(dlogit * dlogit, axis=1)
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
    if NORM:
        tl.store(norm_ptr + row_at, tl.sqrt(norm) * tl.abs(beta), mask=exists)
    acc *= beta[:, None]
    dq_at = dq_ptr + batch * stride_dqb + head * stride_dqh + row[:, None] * stride_dqm + d[None, :]
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
    tiles = tl.cdiv(keys, BLOCK_N)
    tile = tl.program_id(0) % tiles
    kv_index = tl.program_id(0) // tiles
    kv_heads = heads // group
    batch, kv_head = (kv_index // kv_heads).to(tl.int64), (kv_index % kv_heads).to(tl.int64)
    slots = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BN]
    slot64 = slots.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    present = (slots < keys)[:, None]
    k_at = k_ptr + batch * stride_kb + kv_head * stride_kh + slot64[:, None] * stride_kn + d[None, :]
    v_at = v_ptr + batch * stride_vb + kv_head * stride_vh + slot64[:, None] * stride_vn + dv[None, :]
    k = tl.load(k_at, mask=present & (d < D)[None, :], other=0.0)
    v = tl.load(v_at, mask=present & (dv < DV)[None, :], other=0.0)

    if RANGE == BOUNDS:
        start_ptr += batch * stride_bound_b
        stop_ptr += batch * stride_bound_b
        table_ptr += batch * stride_table_b + tile * 4
    right_key = tl.minimum(tile * BLOCK_N + BLOCK_N, keys)
    first, clear_first, clear_end, end = query_range(
        tile * BLOCK_N, right_key, queries, table_ptr, slot, left, right, RANGE
    )
    if PADDING:
        padding_ptr += batch * stride_padding_b
    if DROPOUT:
        seed = tl.load(seed_ptr)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dvalue = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    UNTOLD: tl.constexpr = PADDING or MASK != 0
    # The last keys of a tile may not exist: their weights are dropped when they are not stored.
    edge_low, clear_low, clear_high = phases(first, clear_first, clear_end, end, BLOCK_M, UNTOLD)
    # Heads within a phase and not phases within a head, and nothing moved out of the loop over heads (which is worth
    # nothing there): what a phase keeps in registers is then only its own, where 264 bytes were spilled on sm_100.
    for phase in tl.static_range(2 if UNTOLD else 0, 3):
        if phase == 1:
            low, high = clear_low, clear_high
        elif phase == 2:
            low, high = clear_high, end
        else:
            low, high = edge_low, tl.minimum(clear_low, end)
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
                if phase != 1:
                    c = tl.load(rows_head + row * 4, mask=exists, other=1.0)
                    lse = tl.load(rows_head + row * 4 + 1, mask=exists, other=0.0)
                    beta = tl.load(rows_head + row * 4 + 2, mask=exists, other=0.0)
                    delta = tl.load(rows_head + row * 4 + 3, mask=exists, other=0.0)
                    start, stop = row_bounds(rows, queries, keys, start_ptr, stop_ptr, slot, left, right, RANGE)
                else:
                    c = tl.load(rows_head + row * 4)
                    lse = tl.load(rows_head + row * 4 + 1)
                    beta = tl.load(rows_head + row * 4 + 2)
                    delta = tl.load(rows_head + row * 4 + 3)
                seen, bias = True, 0.0
                if phase != 1:
                    seen, bias = visible(
                        rows, slots, start, stop, queries, keys, padding_ptr, mask_head, stride_mask_row,
                        stride_mask_key, RANGE, PADDING, MASK,
                    )  # fmt: skip
                    seen = tl.trans(seen)
                    if MASK == BIAS:
                        bias = tl.trans(bias)
                # Keys by rows, so that weights are where the next products want them: transposing them costs more.
                y = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BN, BM]
                y, slope = _score(y, scale, softcap, bias, SOFTCAP, MASK)
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
                    dscore = tl.where(seen, dscore, 0.0)  # 0·NaN, where a value is no number
                dk = tl.dot(dscore.to(q.dtype), q, dk, input_precision=PRECISION)

    dk *= scale
    dk_at = dk_ptr + batch * stride_dkb + kv_head * stride_dkh + slot64[:, None] * stride_dkn + d[None, :]
    dv_at = dv_ptr + batch * stride_dvb + kv_head * stride_dvh + slot64[:, None] * stride_dvn + dv[None, :]
    tl.store(dk_at, dk.to(dk_ptr.dtype.element_ty), mask=present & (d < D)[None, :])
    tl.store(dv_at, dvalue.to(dv_ptr.dtype.element_ty), mask=present & (dv < DV)[None, :])


def flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    visibility: Visibility,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    dbeta: bool = False,
    score_norm: bool = False,
    query_tile: Tile | None = None,
    key_tile: Tile | None = None,
) -> Backward:
    """Gradients for that of the output of `flash_forward`, given its arguments, its output and its lse.

    Deterministic: nothing is added to by two programs. `score_norm` asks for the norm of each row of the gradient of
    raw scores, ‖β·w·(dP − Δ)‖.
    """
    launches, result = backward_launches(
        gradient, query, key, value, beta, visibility, out, lse, scale=scale, softcap=softcap, dropout_p=dropout_p,
        seed=seed, dbeta=dbeta, score_norm=score_norm, query_tile=query_tile, key_tile=key_tile,
    )  # fmt: skip
    for launch in launches:
        launch.run(query)
    if sinks is not None:
        delta = launches[0].arguments["rows_ptr"][..., 3]  # type: ignore[index]
        share = torch.exp(sinks.to(torch.float32)[:, None] - lse.masked_fill(lse == -torch.inf, 0.0))
        result = result._replace(sinks=-(share * delta).sum((0, 2)))
    return result


def backward_launches(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    visibility: Visibility,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None,
    dropout_p: float,
    seed: Tensor | None,
    dbeta: bool,
    score_norm: bool,
    query_tile: Tile | None = None,
    key_tile: Tile | None = None,
) -> tuple[tuple[Launch, Launch, Launch], Backward]:
    """The launches that `flash_backward` makes, in order, and the tensors that they will fill."""
    batch, heads, queries, dim = query.shape
    kv_heads, keys, value_dim = value.shape[1:]
    query, key, value, gradient, out = (unit_stride(x) for x in (query, key, value, gradient.to(query.dtype), out))
    beta = beta.to(torch.float32).expand(batch, heads, queries)
    block_d, block_dv = block_of(dim), block_of(value_dim)
    shape = block_d, block_dv, query.element_size(), resources_of(query.device)
    padded = (block_d, block_dv) != (dim, value_dim)
    masked = visibility.padding is not None or visibility.mask is not None
    busy = padded or masked or softcap is not None or dropout_p > 0.0
    query_tile, key_tile = query_tile or backward_query_tile(*shape), key_tile or backward_key_tile(*shape, busy=busy)
    rows = query.new_empty((batch, heads, queries, 4), dtype=torch.float32)
    result = Backward(
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        rows.new_empty(rows.shape[:3]) if dbeta else None,
        rows.new_empty(rows.shape[:3]) if score_norm else None,
        None,
    )
    linear = softcap is None and visibility.mask_kind != BIAS.value
    per_row = Launch(
        flash_backward_rows_kernel,
        batch * heads * triton.cdiv(queries, 32),
        {
            "do_ptr": gradient,
            "out_ptr": out,
            "beta_ptr": beta,
            "lse_ptr": lse.contiguous(),
            "rows_ptr": rows,
            **strides("do", gradient, "bhm"),
            **strides("o", out, "bhm"),
            **strides("beta_", beta, "bhm"),
            "heads": heads,
            "queries": queries,
            "factor": LOG2E.value * (scale if linear else 1.0),
        },
        {"DV": value_dim, "BLOCK_DV": block_dv, "BLOCK_M": 32},
        4,
        1,
    )
    shared = {
        "q_ptr": query,
        "k_ptr": key,
        "v_ptr": value,
        "do_ptr": gradient,
        "rows_ptr": rows,
        "seed_ptr": seed if dropout_p > 0.0 else None,
        **strides("q", query, "bhm"),
        **strides("k", key, "bhn"),
        **strides("v", value, "bhn"),
        **strides("do", gradient, "bhm"),
        "heads": heads,
        "group": heads // kv_heads,
        "queries": queries,
        "keys": keys,
        "scale": scale,
        "softcap": softcap or 0.0,
        "dropout_p": dropout_p,
    }
    constants = {
        "D": dim,
        "DV": value_dim,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        **visibility.constants(),
        "SOFTCAP": softcap is not None,
        "DROPOUT": dropout_p > 0.0,
        "PRECISION": precision_of(query),
    }
    to_query = Launch(
        flash_backward_query_kernel,
        batch * heads * triton.cdiv(queries, query_tile.m),
        {
            **shared,
            **visibility.arguments(key_ranges(visibility, queries, query_tile.m)),
            "dq_ptr": result.query,
            "dbeta_ptr": result.beta,
            "norm_ptr": result.score_norm,
            **strides("dq", result.query, "bhm"),
        },
        {**constants, "BLOCK_M": query_tile.m, "BLOCK_N": query_tile.n, "DBETA": dbeta, "NORM": score_norm},
        query_tile.warps,
        query_tile.stages,
    )
    to_key = Launch(
        flash_backward_key_kernel,
        batch * kv_heads * triton.cdiv(keys, key_tile.n),
        {
            **shared,
            **visibility.arguments(query_ranges(visibility, keys, key_tile.n)),
            "dk_ptr": result.key,
            "dv_ptr": result.value,
            **strides("dk", result.key, "bhn"),
            **strides("dv", result.value, "bhn"),
        },
        {**constants, "BLOCK_M": key_tile.m, "BLOCK_N": key_tile.n},
        key_tile.warps,
        key_tile.stages,
    )
    return (per_row, to_query, to_key), result
