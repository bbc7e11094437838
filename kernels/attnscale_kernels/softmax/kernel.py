"""Softmax of β·(s + bias) over the rows of a materialised score matrix, with statistics; for eager attention.

A row that fits into one block is read once and written once. A longer row is read twice: online for its maximum, sum
and entropy, then for its weights and gap counts. Per row m = max ±(s + bias), with the sign of β, and x = (±(s + bias)
− m)·|β|·log2 e; the sums are l = Σ 2^x and u = Σ 2^x·x, as in flash attention. The difference is taken before the
product, because these scores may have a large common offset.

Backward, with Δ = Σ w·dW: dℓ = w·(dW − Δ), dS = β·dℓ, and dβ = Σ dℓ·s is the covariance of dW and s under w. A weight
of 0 has no gradient, so the backward pass needs no mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import HIDDEN, HIDDEN_BELOW, LOG2E, SEEN_ABOVE, finish_softmax, mask_pointers, program_rows
from ..tiles import load_beta, load_rows, store_rows


@triton.jit
def _raw_scores(scores, mask, bias, batch, head, rows, slots, queries, keys, ALIGN: tl.constexpr):
    """Return s + bias of [rows, slots] in fp32, HIDDEN where masked, and the visibility."""
    inside = (rows < queries)[:, None] & (slots < keys)[None, :]
    seen = inside
    raw = load_rows(scores, batch, head, rows, queries, slots, keys, ALIGN).to(tl.float32)
    if mask is not None:
        mask_at = mask_pointers(mask.ptr, mask.strides, batch, head, rows, slots)
        seen &= tl.load(mask_at, mask=inside, other=0) != 0
    if bias is not None:
        bias_at = mask_pointers(bias.ptr, bias.strides, batch, head, rows, slots)
        added = tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)
        seen &= ~(added <= HIDDEN_BELOW)  # NaN does not hide the key: it must propagate to the row
        raw += added
    seen &= ~(raw < SEEN_ABOVE)  # −∞ is hidden, NaN is visible
    return tl.where(seen, raw, HIDDEN), seen


@triton.jit
def _unnormalised(y, peak, c, seen):
    """Return x and 2^x, which is set to 0 for hidden keys: x does not mark them if c is 0."""
    x = (y - peak[:, None]) * c[:, None]
    x = tl.where(x < -65536.0, -65536.0, x)  # finite, so that 0·x is 0; NaN is preserved
    return x, tl.where(seen, tl.exp2(x), 0.0)


@triton.jit
def _count_gaps(counts, raw, seen, best, thresholds_ptr, THRESHOLDS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Add to counts [rows, thresholds] the number of [rows, slots] within each threshold of the best."""
    gap = best[:, None] - raw
    column = tl.arange(0, BLOCK_T)[None, :]
    for index in tl.range(0, THRESHOLDS):
        near = seen & (gap <= tl.load(thresholds_ptr + index))
        counts += tl.where(column == index, tl.sum(near.to(tl.int32), axis=1)[:, None], 0)
    return counts


@triton.jit
def softmax_forward_kernel(
    scores,  # [B, H, Tq, Tk]
    beta,  # [B, H, Tq] fp32
    mask,  # [B, H, Tq, Tk] uint8
    bias,  # [B, H, Tq, Tk]
    weights,  # [B, H, Tq, Tk]
    thresholds_ptr,  # [thresholds] fp32
    lse_ptr,  # [B, H, Tq] fp32, as are the next three
    top_ptr,
    w_max_ptr,
    entropy_ptr,
    counts_ptr,  # [B, H, Tq, thresholds] int64
    heads,
    queries,
    keys,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
    LONG: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    if ALIGN > 1:
        keys = keys // ALIGN * ALIGN  # exposes the divisibility to the compiler
    _, head_index, batch, head, rows = program_rows(heads, queries, BLOCK_M, False)
    exists = rows < queries
    row_beta = load_beta(beta, batch, head, rows, exists)
    sign = tl.where(row_beta < 0, -1.0, 1.0)  # applied to the scores before the maximum is taken
    size = tl.abs(row_beta)
    c = size * LOG2E
    counts = tl.zeros([BLOCK_M, BLOCK_T], tl.int32)

    if LONG:
        m = tl.full([BLOCK_M], HIDDEN, tl.float32)
        best = tl.full([BLOCK_M], HIDDEN, tl.float32)  # of raw scores, regardless of the sign of β
        total = tl.zeros([BLOCK_M], tl.float32)
        moment = tl.zeros([BLOCK_M], tl.float32)
        for first in tl.range(0, keys, BLOCK_N):
            slots = first + tl.arange(0, BLOCK_N)
            raw, seen = _raw_scores(scores, mask, bias, batch, head, rows, slots, queries, keys, ALIGN)
            y = tl.where(seen, raw * sign[:, None], HIDDEN)
            peak = tl.maximum(m, tl.max(y, axis=1))
            fall = tl.maximum((m - peak) * c, -65536.0)  # finite for rows without a visible key so far
            fade = tl.exp2(fall)
            x, p = _unnormalised(y, peak, c, seen)
            moment = fade * (moment + fall * total) + tl.sum(p * x, axis=1)
            total = total * fade + tl.sum(p, axis=1)
            m = peak
            if THRESHOLDS:
                best = tl.maximum(best, tl.max(raw, axis=1))
    else:
        slots = tl.arange(0, BLOCK_N)
        raw, seen = _raw_scores(scores, mask, bias, batch, head, rows, slots, queries, keys, ALIGN)
        y = tl.where(seen, raw * sign[:, None], HIDDEN)
        m = tl.max(y, axis=1)
        x, p = _unnormalised(y, m, c, seen)
        total = tl.sum(p, axis=1)
        moment = tl.sum(p * x, axis=1)
        if THRESHOLDS:
            best = tl.max(raw, axis=1)

    something = (total > 0) | (total != total)  # the largest term is 2^0
    share = tl.where(something, 1 / tl.where(something, total, 1.0), 0.0)
    if LONG:
        for first in tl.range(0, keys, BLOCK_N):
            slots = first + tl.arange(0, BLOCK_N)
            raw, seen = _raw_scores(scores, mask, bias, batch, head, rows, slots, queries, keys, ALIGN)
            x, p = _unnormalised(tl.where(seen, raw * sign[:, None], HIDDEN), m, c, seen)
            if THRESHOLDS:
                counts = _count_gaps(counts, raw, seen, best, thresholds_ptr, THRESHOLDS, BLOCK_T)
            store_rows(weights, batch, head, rows, queries, slots, keys, p * share[:, None], ALIGN)
    else:
        if THRESHOLDS:
            counts = _count_gaps(counts, raw, seen, best, thresholds_ptr, THRESHOLDS, BLOCK_T)
        store_rows(weights, batch, head, rows, queries, slots, keys, p * share[:, None], ALIGN)

    row_at = head_index.to(tl.int64) * queries + rows
    finish_softmax(something, m * size, total, moment, None, lse_ptr, top_ptr, entropy_ptr, head, row_at, exists)
    tl.store(w_max_ptr + row_at, share, mask=exists)
    if THRESHOLDS:
        column = tl.arange(0, BLOCK_T)[None, :]
        counts_at = counts_ptr + row_at[:, None] * THRESHOLDS + column
        tl.store(counts_at, counts.to(tl.int64), mask=exists[:, None] & (column < THRESHOLDS))


@triton.jit
def _weights_and_gradient(
    weights, grad_weights, scores, bias, batch, head, rows, slots, queries, keys, ALIGN: tl.constexpr
):
    """Return w, dW and s + bias; the last two are 0 where the weight is 0."""
    w = load_rows(weights, batch, head, rows, queries, slots, keys, ALIGN).to(tl.float32)
    dw = load_rows(grad_weights, batch, head, rows, queries, slots, keys, ALIGN).to(tl.float32)
    live = w != 0
    raw = w
    if scores is not None:
        raw = load_rows(scores, batch, head, rows, queries, slots, keys, ALIGN).to(tl.float32)
        if bias is not None:
            inside = (rows < queries)[:, None] & (slots < keys)[None, :]
            bias_at = mask_pointers(bias.ptr, bias.strides, batch, head, rows, slots)
            raw += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)
        raw = tl.where(live, raw, 0.0)
    return w, tl.where(live, dw, 0.0), raw


@triton.jit
def softmax_backward_kernel(
    weights,  # [B, H, Tq, Tk]
    grad_weights,  # [B, H, Tq, Tk]
    scores,  # [B, H, Tq, Tk]; None: no dβ
    bias,  # [B, H, Tq, Tk]
    beta,  # [B, H, Tq] fp32
    grad_scores,  # [B, H, Tq, Tk]
    dbeta_ptr,  # [B, H, Tq] fp32
    heads,
    queries,
    keys,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
    LONG: tl.constexpr,
):
    if ALIGN > 1:
        keys = keys // ALIGN * ALIGN  # exposes the divisibility to the compiler
    _, head_index, batch, head, rows = program_rows(heads, queries, BLOCK_M, False)
    exists = rows < queries
    row_beta = load_beta(beta, batch, head, rows, exists)
    delta = tl.zeros([BLOCK_M], tl.float32)
    mean = tl.zeros([BLOCK_M], tl.float32)  # Σ w·s, subtracted to avoid cancellation in dβ
    dbeta = tl.zeros([BLOCK_M], tl.float32)

    if LONG:
        for first in tl.range(0, keys, BLOCK_N):
            slots = first + tl.arange(0, BLOCK_N)
            w, dw, raw = _weights_and_gradient(
                weights, grad_weights, scores, bias, batch, head, rows, slots, queries, keys, ALIGN
            )
            delta += tl.sum(w * dw, axis=1)
            if scores is not None:
                mean += tl.sum(w * raw, axis=1)
        for first in tl.range(0, keys, BLOCK_N):
            slots = first + tl.arange(0, BLOCK_N)
            w, dw, raw = _weights_and_gradient(
                weights, grad_weights, scores, bias, batch, head, rows, slots, queries, keys, ALIGN
            )
            dlogits = w * (dw - delta[:, None])
            if scores is not None:
                dbeta += tl.sum(dlogits * (raw - mean[:, None]), axis=1)
            store_rows(grad_scores, batch, head, rows, queries, slots, keys, dlogits * row_beta[:, None], ALIGN)
    else:
        slots = tl.arange(0, BLOCK_N)
        w, dw, raw = _weights_and_gradient(
            weights, grad_weights, scores, bias, batch, head, rows, slots, queries, keys, ALIGN
        )
        delta = tl.sum(w * dw, axis=1)
        dlogits = w * (dw - delta[:, None])
        if scores is not None:
            mean = tl.sum(w * raw, axis=1)
            dbeta = tl.sum(dlogits * (raw - mean[:, None]), axis=1)
        store_rows(grad_scores, batch, head, rows, queries, slots, keys, dlogits * row_beta[:, None], ALIGN)

    if scores is not None:
        tl.store(dbeta_ptr + head_index.to(tl.int64) * queries + rows, dbeta, mask=exists)
