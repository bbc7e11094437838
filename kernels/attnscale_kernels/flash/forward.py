"""Attention with a temperature per row, forward: one pass over the keys, statistics on the way.

Per row it keeps m = max y, l = Σ 2^x and u = Σ 2^x·x with x = (y − m)·c, from which lse, the largest logit and the
entropy ln l − ln2·u/l follow; see device.py for y and c. What is not asked for is compiled out.
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
    HIDDEN,
    LN2,
    LOG2E,
    SEEN_ABOVE,
    first_phase,
    keep,
    key_range,
    load_tile,
    phases,
    row_bounds,
    sum_in_parts,
    tanh,
    visible,
)
from ..launch import Launch, block_of, precision_of, resources_of, strides, unit_stride
from ..tiles import Tile, forward_tile, parts_of_sums
from ..visibility import Visibility, key_ranges

LEAST_BETA = tl.constexpr(2.0**-60)  # hidden scores still fall to a weight of 0, and to seen ones it is 0


class Forward(NamedTuple):
    """What `flash_forward` returns: the output, and statistics per row in fp32 and nats (None: not asked for)."""

    out: Tensor  # [B, H, Tq, DV]
    lse: Tensor  # [B, H, Tq]
    max_logit: Tensor  # [B, H, Tq]
    entropy: Tensor | None  # [B, H, Tq]
    squares: Tensor | None  # [B, H, Tq], Σ w²


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
    lse_ptr,  # [B, H, Tq] fp32, and so the next three
    top_ptr,
    entropy_ptr,
    squares_ptr,
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
    SQUARES: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(queries, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles  # causal rows at the end have most to do, and begin first
    head_index = tl.program_id(0) // tiles
    batch, head = (head_index // heads).to(tl.int64), (head_index % heads).to(tl.int64)

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BM]
    exists = rows < queries
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_at = q_ptr + batch * stride_qb + head * stride_qh + rows[:, None].to(tl.int64) * stride_qm + d[None, :]
    q = tl.load(q_at, mask=exists[:, None] & (d < D)[None, :], other=0.0)
    beta_at = beta_ptr + batch * stride_beta_b + head * stride_beta_h + rows.to(tl.int64) * stride_beta_m
    beta = tl.load(beta_at, mask=exists, other=1.0)
    # A maximum is taken before c is applied, so c must be positive: the sign goes to the scores, and 0 is nearly 0.
    sign = tl.where(beta < 0, -1.0, 1.0)
    c = tl.maximum(tl.abs(beta), LEAST_BETA) * LOG2E
    LINEAR: tl.constexpr = not SOFTCAP and MASK != BIAS
    if LINEAR:
        q = q * sign[:, None].to(q.dtype)
        c *= scale

    if RANGE == BOUNDS:
        start_ptr += batch * stride_bound_b
        stop_ptr += batch * stride_bound_b
        table_ptr += batch * stride_table_b + tile * 4
    start, stop = row_bounds(rows, queries, keys, start_ptr, stop_ptr, slot, left, right, RANGE)
    bottom = tl.minimum(tile * BLOCK_M + BLOCK_M, queries)
    first, clear_first, clear_end, end = key_range(tile * BLOCK_M, bottom, keys, table_ptr, slot, left, right, RANGE)
    m = tl.full([BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_M, PARTS], tl.float32)  # summed over the parts at the end
    moment = tl.zeros([BLOCK_M, PARTS], tl.float32)
    squares = tl.zeros([BLOCK_M, PARTS], tl.float32)
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
            k_at = k_ptr + slots[None, :].to(tl.int64) * stride_kn + d[:, None]  # [BD, BN]
            v_at = v_ptr + slots[:, None].to(tl.int64) * stride_vn + dv[None, :]  # [BN, BDV]
            k = load_tile(k_at, (d < D)[:, None], (slots < keys)[None, :], D != BLOCK_D, phase != 1)
            v = load_tile(v_at, (dv < DV)[None, :], (slots < keys)[:, None], DV != BLOCK_DV, phase != 1)
            y = tl.dot(q, k, input_precision=PRECISION)  # [BM, BN]
            if SOFTCAP:
                y = softcap * tanh(y * (scale / softcap))
            if phase != 1:
                # A value that is no number must spoil the rows that see it and no other: 0·NaN would reach them all.
                zero = v.to(tl.float32) - v.to(tl.float32)  # or NaN
                broken = tl.sum(zero, axis=1)  # [BN]
                v = tl.where(zero == 0, v, 0.0)
                seen, bias = visible(
                    rows, slots, start, stop, queries, keys, padding_ptr, mask_ptr, stride_mask_row, stride_mask_key,
                    RANGE, PADDING, MASK,
                )  # fmt: skip
                if MASK == BIAS:
                    y = (y if SOFTCAP else y * scale) + bias
                y += broken[None, :]
            if not LINEAR:
                y *= sign[:, None]
            if phase != 1:
                y = tl.where(seen, y, HIDDEN)
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
                moment = fade[:, None] * (moment + fall[:, None] * total) + sum_in_parts(p * x, PARTS)
            if SQUARES:
                squares = squares * (fade * fade)[:, None] + sum_in_parts(p * p, PARTS)
            total = total * fade[:, None] + sum_in_parts(p, PARTS)
            if DROPOUT:
                p = tl.where(keep(seed, head_index, rows, slots, dropout_p), p, 0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
            m = peak

    total, moment, squares = tl.sum(total, axis=1), tl.sum(moment, axis=1), tl.sum(squares, axis=1)
    seen = (m > SEEN_ABOVE) | (total != total)  # a NaN has been seen, though no maximum finds it
    total = tl.where(seen, total, 1.0)
    ln_total = tl.log2(total) * LN2
    top = m * c * LN2
    lse = top + ln_total
    share = tl.where(seen, 1.0, 0.0)  # of the weight that is left to the keys
    entropy = tl.where(seen, ln_total - moment / total * LN2, 0.0)
    lse = tl.where(seen, lse, -float("inf"))
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
    row_at = head_index.to(tl.int64) * queries + rows
    tl.store(lse_ptr + row_at, lse, mask=exists)
    tl.store(top_ptr + row_at, tl.where(seen, top + (total - total), -float("inf")), mask=exists)
    if ENTROPY:
        tl.store(entropy_ptr + row_at, tl.where(entropy < 0, 0.0, entropy), mask=exists)
    if SQUARES:
        tl.store(squares_ptr + row_at, tl.where(seen, squares / (total * total) * share * share, 0.0), mask=exists)
    if DROPOUT:
        share /= 1 - dropout_p
    out = acc * (share / total)[:, None]
    out_at = out_ptr + batch * stride_ob + head * stride_oh + rows[:, None].to(tl.int64) * stride_om + dv[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=exists[:, None] & (dv < DV)[None, :])


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    entropy: bool = False,
    squares: bool = False,
    tile: Tile | None = None,
) -> Forward:
    """softmax(β·(softcap(scale·q·k) + bias))·v over what each row may see, with statistics of its rows.

    Query [B, H, Tq, D], key [B, Hkv, Tk, D] and value [B, Hkv, Tk, DV] in one dtype, β [B|1, H|1, Tq|1] in fp32. A row
    that sees nothing gives zeros and lse = −∞. A sink [H] is one more logit per head: in lse and entropy, not among
    the keys. `seed` is an int64 scalar on the device; the same one drops the same weights in `flash_backward`.
    """
    launch, result = forward_launch(
        query, key, value, beta, visibility, scale=scale, softcap=softcap, sinks=sinks, dropout_p=dropout_p,
        seed=seed, entropy=entropy, squares=squares, tile=tile,
    )  # fmt: skip
    launch.run(query)
    return result


def forward_launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    entropy: bool,
    squares: bool,
    tile: Tile | None = None,
) -> tuple[Launch, Forward]:
    """The launch that `flash_forward` makes, and the tensors that it will fill."""
    batch, heads, queries, dim = query.shape
    kv_heads, keys, value_dim = value.shape[1:]
    query, key, value = (unit_stride(x) for x in (query, key, value))
    beta = beta.to(torch.float32).expand(batch, heads, queries)
    resources = resources_of(query.device)
    padded = (block_of(dim), block_of(value_dim)) != (dim, value_dim)
    masked = visibility.padding is not None or visibility.mask is not None
    left_edge = visibility.start is not None or visibility.left is not None
    busy = padded or masked or softcap is not None or dropout_p > 0.0
    tile = tile or forward_tile(
        block_of(dim), block_of(value_dim), query.element_size(), resources, busy=busy, left_edge=left_edge
    )
    table = key_ranges(visibility, queries, tile.m)
    rows = query.new_empty((batch, heads, queries), dtype=torch.float32)
    result = Forward(
        query.new_empty(batch, heads, queries, value_dim),
        rows,
        torch.empty_like(rows),
        torch.empty_like(rows) if entropy else None,
        torch.empty_like(rows) if squares else None,
    )
    arguments = {
        "q_ptr": query,
        "k_ptr": key,
        "v_ptr": value,
        "beta_ptr": beta,
        "sinks_ptr": None if sinks is None else sinks.contiguous(),
        "seed_ptr": seed if dropout_p > 0.0 else None,
        "out_ptr": result.out,
        "lse_ptr": result.lse,
        "top_ptr": result.max_logit,
        "entropy_ptr": result.entropy,
        "squares_ptr": result.squares,
        **strides("q", query, "bhm"),
        **strides("k", key, "bhn"),
        **strides("v", value, "bhn"),
        **strides("o", result.out, "bhm"),
        **strides("beta_", beta, "bhm"),
        **visibility.arguments(table),
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
        "BLOCK_D": block_of(dim),
        "BLOCK_DV": block_of(value_dim),
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        **visibility.constants(),
        "SOFTCAP": softcap is not None,
        "SINKS": sinks is not None,
        "DROPOUT": dropout_p > 0.0,
        "ENTROPY": entropy,
        "SQUARES": squares,
        "PARTS": parts_of_sums(block_of(value_dim), resources) if entropy or squares else 1,
        "PRECISION": precision_of(query),
    }
    grid = batch * heads * triton.cdiv(queries, tile.m)
    return Launch(flash_forward_kernel, grid, arguments, constants, tile.warps, tile.stages), result
