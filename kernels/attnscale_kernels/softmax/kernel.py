"""Softmax of β·(s + bias) over the rows of a score matrix that exists, with statistics: for eager attention.

A row that fits one block is read once and written once. A longer one is read twice: online for its maximum, its sum
and its entropy, then for its weights and gap counts. Per row m = max ±(s + bias), by the sign of β, and with
x = (±(s + bias) − m)·|β|·log2 e the sums are l = Σ 2^x and u = Σ 2^x·x, as in flash_forward.py.

Backward, with Δ = Σ w·dW: dℓ = w·(dW − Δ), dS = β·dℓ, and dβ = Σ dℓ·s is the covariance of dW and s under w. As Σ dℓ is
0, any constant may be taken from s: ln w / β does as well where scores have been overwritten. A weight of 0 has no
gradient, so that backward needs no mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import HIDDEN, HIDDEN_BELOW, LN2, LOG2E, SEEN_ABOVE
from ..launch import Launch, Resources, block_of, resources_of, strides, unit_stride
from ..tiles import Tile

ONE_BLOCK = 8192  # keys of the longest row that is held in registers
CHUNK = 4096  # keys of a step through a longer one

NO_DBETA, FROM_SCORES, FROM_WEIGHTS = 0, 1, 2  # what dβ is made of


class RowSoftmax(NamedTuple):
    """Weights, and statistics per row in fp32 and nats (gap counts in int64; None: not asked for)."""

    weights: Tensor  # [..., Tq, Tk]
    lse: Tensor  # [..., Tq]
    max_logit: Tensor  # [..., Tq]
    w_max: Tensor  # [..., Tq]
    entropy: Tensor  # [..., Tq]
    gap_counts: Tensor | None  # [..., Tq, thresholds]


class SoftmaxGradient(NamedTuple):
    """What `softmax_backward` returns; None where not asked for."""

    scores: Tensor  # [..., Tq, Tk]
    beta: Tensor | None  # [..., Tq] fp32


@triton.jit
def _raw_scores(
    scores_ptr,
    mask_ptr,
    bias_ptr,
    row,
    exists,
    slots,
    keys,
    stride_sm,
    stride_mask_row,
    stride_mask_key,
    stride_bias_row,
    stride_bias_key,
    MASK: tl.constexpr,
    BIAS: tl.constexpr,
):
    """s + bias of [rows, slots] in fp32, HIDDEN where it does not count, and whether it does."""
    seen = exists[:, None] & (slots < keys)[None, :]
    inside = seen
    raw = tl.load(scores_ptr + row[:, None] * stride_sm + slots[None, :], mask=inside, other=0.0).to(tl.float32)
    slot = slots.to(tl.int64)[None, :]
    if MASK:
        mask_at = mask_ptr + row[:, None] * stride_mask_row + slot * stride_mask_key
        seen &= tl.load(mask_at, mask=inside, other=0) != 0
    if BIAS:
        bias_at = bias_ptr + row[:, None] * stride_bias_row + slot * stride_bias_key
        bias = tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)
        seen &= ~(bias <= HIDDEN_BELOW)  # a NaN hides no key: it has to reach the row
        raw += bias
    seen &= ~(raw < SEEN_ABOVE)  # a score of −∞ is hidden, one that is no number is seen
    return tl.where(seen, raw, HIDDEN), seen


@triton.jit
def _unnormalised(y, peak, c, seen):
    """x and 2^x, which is 0 where hidden: c may be 0 and then says nothing about who is."""
    x = (y - peak[:, None]) * c[:, None]
    x = tl.where(x < -65536.0, -65536.0, x)  # finite, so that 0·x is 0; and a NaN stays one
    return x, tl.where(seen, tl.exp2(x), 0.0)


@triton.jit
def _count_gaps(counts, raw, seen, best, thresholds_ptr, THRESHOLDS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Adds to [rows, thresholds] how many of [rows, slots] lie within each threshold of the best."""
    gap = best[:, None] - raw
    column = tl.arange(0, BLOCK_T)[None, :]
    for index in tl.range(0, THRESHOLDS):
        near = seen & (gap <= tl.load(thresholds_ptr + index))
        counts += tl.where(column == index, tl.sum(near.to(tl.int32), axis=1)[:, None], 0)
    return counts


@triton.jit
def softmax_forward_kernel(
    scores_ptr,  # [B, H, Tq, Tk]
    beta_ptr,  # [B, H, Tq] fp32
    mask_ptr,  # [B, H, Tq, Tk] uint8
    bias_ptr,  # [B, H, Tq, Tk]
    thresholds_ptr,  # [thresholds] fp32
    weights_ptr,  # [B, H, Tq, Tk]; the scores themselves if IN_PLACE
    lse_ptr,  # [B, H, Tq] fp32, and so the next three
    top_ptr,
    w_max_ptr,
    entropy_ptr,
    counts_ptr,  # [B, H, Tq, thresholds] int64
    stride_sb,
    stride_sh,
    stride_sm,
    stride_wb,
    stride_wh,
    stride_wm,
    stride_beta_b,
    stride_beta_h,
    stride_beta_m,
    stride_mask_b,
    stride_mask_h,
    stride_mask_row,
    stride_mask_key,
    stride_bias_b,
    stride_bias_h,
    stride_bias_row,
    stride_bias_key,
    heads,
    queries,
    keys,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LONG: tl.constexpr,
    MASK: tl.constexpr,
    BIAS: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    tiles = tl.cdiv(queries, BLOCK_M)
    tile = tl.program_id(0) % tiles
    head_index = tl.program_id(0) // tiles
    batch, head = (head_index // heads).to(tl.int64), (head_index % heads).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BM]
    exists = rows < queries
    row = rows.to(tl.int64)
    scores_ptr += batch * stride_sb + head * stride_sh
    weights_ptr += batch * stride_wb + head * stride_wh
    if MASK:
        mask_ptr += batch * stride_mask_b + head * stride_mask_h
    if BIAS:
        bias_ptr += batch * stride_bias_b + head * stride_bias_h
    beta_at = beta_ptr + batch * stride_beta_b + head * stride_beta_h + row * stride_beta_m
    beta = tl.load(beta_at, mask=exists, other=1.0)
    sign = tl.where(beta < 0, -1.0, 1.0)  # goes to the scores, of which the maximum is taken
    size = tl.abs(beta)
    c = size * LOG2E
    counts = tl.zeros([BLOCK_M, BLOCK_T], tl.int32)

    if LONG:
        m = tl.full([BLOCK_M], HIDDEN, tl.float32)
        best = tl.full([BLOCK_M], HIDDEN, tl.float32)  # of raw scores, whatever the sign of β
        total = tl.zeros([BLOCK_M], tl.float32)
        moment = tl.zeros([BLOCK_M], tl.float32)
        for first in tl.range(0, keys, BLOCK_N):
            slots = first + tl.arange(0, BLOCK_N)
            raw, seen = _raw_scores(
                scores_ptr, mask_ptr, bias_ptr, row, exists, slots, keys, stride_sm, stride_mask_row, stride_mask_key,
                stride_bias_row, stride_bias_key, MASK, BIAS,
            )  # fmt: skip
            y = tl.where(seen, raw * sign[:, None], HIDDEN)
            peak = tl.maximum(m, tl.max(y, axis=1))
            fall = tl.maximum((m - peak) * c, -65536.0)
            fade = tl.exp2(fall)
            x, p = _unnormalised(y, peak, c, seen)
            moment = fade * (moment + fall * total) + tl.sum(p * x, axis=1)
            total = total * fade + tl.sum(p, axis=1)
            m = peak
            if THRESHOLDS:
                best = tl.maximum(best, tl.max(raw, axis=1))
    else:
        slots = tl.arange(0, BLOCK_N)
        raw, seen = _raw_scores(
            scores_ptr, mask_ptr, bias_ptr, row, exists, slots, keys, stride_sm, stride_mask_row, stride_mask_key,
            stride_bias_row, stride_bias_key, MASK, BIAS,
        )  # fmt: skip
        y = tl.where(seen, raw * sign[:, None], HIDDEN)
        m = tl.max(y, axis=1)
        x, p = _unnormalised(y, m, c, seen)
        total = tl.sum(p, axis=1)
        moment = tl.sum(p * x, axis=1)
        if THRESHOLDS:
            best = tl.max(raw, axis=1)

    something = (total > 0) | (total != total)  # the largest has 2^0; a NaN has been seen, though no maximum finds it
    total = tl.where(something, total, 1.0)
    share = tl.where(something, 1 / total, 0.0)
    if LONG:
        for first in tl.range(0, keys, BLOCK_N):
            slots = first + tl.arange(0, BLOCK_N)
            raw, seen = _raw_scores(
                scores_ptr, mask_ptr, bias_ptr, row, exists, slots, keys, stride_sm, stride_mask_row, stride_mask_key,
                stride_bias_row, stride_bias_key, MASK, BIAS,
            )  # fmt: skip
            x, p = _unnormalised(tl.where(seen, raw * sign[:, None], HIDDEN), m, c, seen)
            if THRESHOLDS:
                counts = _count_gaps(counts, raw, seen, best, thresholds_ptr, THRESHOLDS, BLOCK_T)
            if IN_PLACE:
                tl.debug_barrier()  # all threads have read
            weights_at = weights_ptr + row[:, None] * stride_wm + slots[None, :]
            weights = (p * share[:, None]).to(weights_ptr.dtype.element_ty)
            tl.store(weights_at, weights, mask=exists[:, None] & (slots < keys)[None, :])
    else:
        if THRESHOLDS:
            counts = _count_gaps(counts, raw, seen, best, thresholds_ptr, THRESHOLDS, BLOCK_T)
        if IN_PLACE:
            tl.debug_barrier()
        weights_at = weights_ptr + row[:, None] * stride_wm + slots[None, :]
        weights = (p * share[:, None]).to(weights_ptr.dtype.element_ty)
        tl.store(weights_at, weights, mask=exists[:, None] & (slots < keys)[None, :])

    row_at = head_index.to(tl.int64) * queries + row
    top = m * size + (total - total)  # NaN if the sum is
    ln_total = tl.log2(total) * LN2
    entropy = ln_total - moment / total * LN2
    tl.store(lse_ptr + row_at, tl.where(something, top + ln_total, -float("inf")), mask=exists)
    tl.store(top_ptr + row_at, tl.where(something, top, -float("inf")), mask=exists)
    tl.store(w_max_ptr + row_at, share, mask=exists)
    # Neither part is negative, but for a log2 that is approximate near 1.
    tl.store(entropy_ptr + row_at, tl.where(entropy < 0, 0.0, entropy), mask=exists)
    if THRESHOLDS:
        column = tl.arange(0, BLOCK_T)[None, :]
        counts_at = counts_ptr + row_at[:, None] * THRESHOLDS + column
        tl.store(counts_at, counts.to(tl.int64), mask=exists[:, None] & (column < THRESHOLDS))


@triton.jit
def _weights_and_gradient(
    weights_ptr,
    dweights_ptr,
    scores_ptr,
    bias_ptr,
    row,
    exists,
    slots,
    keys,
    stride_wm,
    stride_dwm,
    stride_sm,
    stride_bias_row,
    stride_bias_key,
    BIAS: tl.constexpr,
    DBETA: tl.constexpr,
):
    """w, dW and what β multiplies, up to a constant (β·that, if FROM_WEIGHTS); the last two 0 where the weight is."""
    inside = exists[:, None] & (slots < keys)[None, :]
    w = tl.load(weights_ptr + row[:, None] * stride_wm + slots[None, :], mask=inside, other=0.0).to(tl.float32)
    dw = tl.load(dweights_ptr + row[:, None] * stride_dwm + slots[None, :], mask=inside, other=0.0).to(tl.float32)
    live = w != 0
    raw = w
    if DBETA == 1:
        raw = tl.load(scores_ptr + row[:, None] * stride_sm + slots[None, :], mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            slot = slots.to(tl.int64)[None, :]
            bias_at = bias_ptr + row[:, None] * stride_bias_row + slot * stride_bias_key
            raw += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)
        raw = tl.where(live, raw, 0.0)
    if DBETA == 2:
        raw = tl.log2(tl.where(live, w, 1.0)) * LN2
    return w, tl.where(live, dw, 0.0), raw


@triton.jit
def softmax_backward_kernel(
    weights_ptr,  # [B, H, Tq, Tk]
    dweights_ptr,  # [B, H, Tq, Tk]
    scores_ptr,  # [B, H, Tq, Tk]
    bias_ptr,  # [B, H, Tq, Tk]
    beta_ptr,  # [B, H, Tq] fp32
    dscores_ptr,  # [B, H, Tq, Tk]
    dbeta_ptr,  # [B, H, Tq] fp32
    stride_wb,
    stride_wh,
    stride_wm,
    stride_dwb,
    stride_dwh,
    stride_dwm,
    stride_sb,
    stride_sh,
    stride_sm,
    stride_dsb,
    stride_dsh,
    stride_dsm,
    stride_beta_b,
    stride_beta_h,
    stride_beta_m,
    stride_bias_b,
    stride_bias_h,
    stride_bias_row,
    stride_bias_key,
    heads,
    queries,
    keys,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LONG: tl.constexpr,
    BIAS: tl.constexpr,
    DBETA: tl.constexpr,
):
    tiles = tl.cdiv(queries, BLOCK_M)
    tile = tl.program_id(0) % tiles
    head_index = tl.program_id(0) // tiles
    batch, head = (head_index // heads).to(tl.int64), (head_index % heads).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BM]
    exists = rows < queries
    row = rows.to(tl.int64)
    weights_ptr += batch * stride_wb + head * stride_wh
    dweights_ptr += batch * stride_dwb + head * stride_dwh
    dscores_ptr += batch * stride_dsb + head * stride_dsh
    if DBETA == 1:
        scores_ptr += batch * stride_sb + head * stride_sh
        if BIAS:
            bias_ptr += batch * stride_bias_b + head * stride_bias_h
    beta_at = beta_ptr + batch * stride_beta_b + head * stride_beta_h + row * stride_beta_m
    beta = tl.load(beta_at, mask=exists, other=1.0)
    delta = tl.zeros([BLOCK_M], tl.float32)
    mean = tl.zeros([BLOCK_M], tl.float32)  # Σ w·s: without it dβ would be a small difference of large sums
    dbeta = tl.zeros([BLOCK_M], tl.float32)
    change = tl.zeros([BLOCK_M], tl.float32)

    if LONG:
        for first in tl.range(0, keys, BLOCK_N):
            slots = first + tl.arange(0, BLOCK_N)
            w, dw, raw = _weights_and_gradient(
                weights_ptr, dweights_ptr, scores_ptr, bias_ptr, row, exists, slots, keys, stride_wm, stride_dwm,
                stride_sm, stride_bias_row, stride_bias_key, BIAS, DBETA,
            )  # fmt: skip
            delta += tl.sum(w * dw, axis=1)
            if DBETA:
                mean += tl.sum(w * raw, axis=1)
        for first in tl.range(0, keys, BLOCK_N):
            slots = first + tl.arange(0, BLOCK_N)
            w, dw, raw = _weights_and_gradient(
                weights_ptr, dweights_ptr, scores_ptr, bias_ptr, row, exists, slots, keys, stride_wm, stride_dwm,
                stride_sm, stride_bias_row, stride_bias_key, BIAS, DBETA,
            )  # fmt: skip
            dlogits = w * (dw - delta[:, None])
            if DBETA:
                dbeta += tl.sum(dlogits * (raw - mean[:, None]), axis=1)
            if DBETA == 2:
                change += tl.sum(tl.abs(dlogits), axis=1)
            dscores_at = dscores_ptr + row[:, None] * stride_dsm + slots[None, :]
            dscores = (dlogits * beta[:, None]).to(dscores_ptr.dtype.element_ty)
            tl.store(dscores_at, dscores, mask=exists[:, None] & (slots < keys)[None, :])
    else:
        slots = tl.arange(0, BLOCK_N)
        w, dw, raw = _weights_and_gradient(
            weights_ptr, dweights_ptr, scores_ptr, bias_ptr, row, exists, slots, keys, stride_wm, stride_dwm,
            stride_sm, stride_bias_row, stride_bias_key, BIAS, DBETA,
        )  # fmt: skip
        delta = tl.sum(w * dw, axis=1)
        dlogits = w * (dw - delta[:, None])
        if DBETA:
            mean = tl.sum(w * raw, axis=1)
            dbeta = tl.sum(dlogits * (raw - mean[:, None]), axis=1)
        if DBETA == 2:
            change = tl.sum(tl.abs(dlogits), axis=1)
        dscores_at = dscores_ptr + row[:, None] * stride_dsm + slots[None, :]
        dscores = (dlogits * beta[:, None]).to(dscores_ptr.dtype.element_ty)
        tl.store(dscores_at, dscores, mask=exists[:, None] & (slots < keys)[None, :])

    if DBETA:
        if DBETA == 2:  # of scores that a β of 0 has wiped out nothing is known; a row of one key does not need them
            unknown = tl.where(change == 0, 0.0, float("nan"))
            dbeta = tl.where(beta == 0, unknown, dbeta / tl.where(beta == 0, 1.0, beta))
        tl.store(dbeta_ptr + head_index.to(tl.int64) * queries + row, dbeta, mask=exists)


def softmax_tile(queries: int, keys: int, resources: Resources) -> Tile:
    """Several short rows, one of at most ONE_BLOCK keys, or CHUNK keys of a longer one; 8 scores a thread, or 16."""
    n = block_of(keys) if keys <= ONE_BLOCK else CHUNK
    m = max(1, min(1024 // n, triton.next_power_of_2(queries)))
    return Tile(m, n, min(max(m * n // (8 * resources.warp_size), 1), 16), 1)


def softmax_forward(
    scores: Tensor,
    beta: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    thresholds: Tensor | None = None,
    in_place: bool = False,
    tile: Tile | None = None,
) -> RowSoftmax:
    """softmax(β·(s + bias)) over what the mask lets each row see, with statistics of its rows.

    Scores [..., Tq, Tk]; mask (True: visible) and bias (at or below −1e4: hidden) broadcast to them, β to [..., Tq].
    Gap counts are of s + bias, in fp32, at `thresholds` [k] in fp32 on the device. A row that sees nothing gives
    zeros, and lse = max = −∞. In place, weights are written over scores, and returned as the same tensor.
    """
    launch, result = softmax_forward_launch(
        scores, beta, mask=mask, bias=bias, thresholds=thresholds, in_place=in_place, tile=tile
    )
    launch.run(scores)
    if in_place:
        if launch.arguments["scores_ptr"].data_ptr() != scores.data_ptr():  # type: ignore[attr-defined]
            scores.copy_(result.weights)  # its strides are not for a kernel
        result = result._replace(weights=scores)
    return result


def softmax_forward_launch(
    scores: Tensor,
    beta: Tensor,
    *,
    mask: Tensor | None,
    bias: Tensor | None,
    thresholds: Tensor | None,
    in_place: bool = False,
    tile: Tile | None = None,
) -> tuple[Launch, RowSoftmax]:
    """The launch that `softmax_forward` makes, and the tensors that it will fill."""
    shape = scores.shape
    given = as_axes(unit_stride(scores), shape, 4)
    batch, heads, queries, keys = given.shape
    rows = scores.new_empty(shape[:-1], dtype=torch.float32)
    wanted = 0 if thresholds is None else thresholds.shape[0]
    result = RowSoftmax(
        given.view(shape) if in_place else scores.new_empty(shape),
        rows,
        torch.empty_like(rows),
        torch.empty_like(rows),
        torch.empty_like(rows),
        rows.new_empty((*shape[:-1], wanted), dtype=torch.int64) if wanted else None,
    )
    beta = as_axes(beta.to(torch.float32), shape[:-1], 3)
    seen = None if mask is None else as_axes(mask.view(torch.uint8), shape, 4)
    added = None if bias is None else as_axes(bias, shape, 4)
    weights = as_axes(result.weights, shape, 4)
    tile = tile or softmax_tile(queries, keys, resources_of(scores.device))
    arguments = {
        "scores_ptr": given,
        "beta_ptr": beta,
        "mask_ptr": seen,
        "bias_ptr": added,
        "thresholds_ptr": thresholds if wanted else None,
        "weights_ptr": weights,
        "lse_ptr": result.lse,
        "top_ptr": result.max_logit,
        "w_max_ptr": result.w_max,
        "entropy_ptr": result.entropy,
        "counts_ptr": result.gap_counts,
        **strides("s", given, "bhm"),
        **strides("w", weights, "bhm"),
        **strides("beta_", beta, "bhm"),
        **_broadcast_strides("mask", seen),
        **_broadcast_strides("bias", added),
        "heads": heads,
        "queries": queries,
        "keys": keys,
    }
    constants = {
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "LONG": tile.n < keys,
        "MASK": mask is not None,
        "BIAS": bias is not None,
        "THRESHOLDS": wanted,
        "BLOCK_T": triton.next_power_of_2(max(wanted, 1)),
        "IN_PLACE": in_place,
    }
    grid = batch * heads * triton.cdiv(queries, tile.m)
    return Launch(softmax_forward_kernel, grid, arguments, constants, tile.warps, tile.stages), result


def softmax_backward(
    gradient: Tensor,
    weights: Tensor,
    beta: Tensor,
    *,
    scores: Tensor | None = None,
    bias: Tensor | None = None,
    dbeta: bool = False,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> SoftmaxGradient:
    """Gradients of scores (which is also that of the bias, not yet summed to its shape) and of β, per row.

    Deterministic: nothing is added to by two programs. dβ is taken from scores and bias if they are given, else from
    the weights, whose logarithm it divides by β: as good where |β| is not small, and NaN in a row of several keys
    where it is 0. `dtype` is that of the gradient of scores, by default the weights'.
    """
    launch, result = softmax_backward_launch(
        gradient, weights, beta, scores=scores, bias=bias, dbeta=dbeta, dtype=dtype, tile=tile
    )
    launch.run(weights)
    return result


def softmax_backward_launch(
    gradient: Tensor,
    weights: Tensor,
    beta: Tensor,
    *,
    scores: Tensor | None,
    bias: Tensor | None,
    dbeta: bool,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> tuple[Launch, SoftmaxGradient]:
    """The launch that `softmax_backward` makes, and the tensors that it will fill."""
    shape = weights.shape
    source = NO_DBETA if not dbeta else FROM_WEIGHTS if scores is None else FROM_SCORES
    result = SoftmaxGradient(
        weights.new_empty(shape, dtype=dtype or weights.dtype),
        weights.new_empty(shape[:-1], dtype=torch.float32) if dbeta else None,
    )
    weights, gradient = (as_axes(unit_stride(x), shape, 4) for x in (weights, gradient))
    dscores = as_axes(result.scores, shape, 4)
    beta = as_axes(beta.to(torch.float32), shape[:-1], 3)
    given = as_axes(unit_stride(scores), shape, 4) if source == FROM_SCORES and scores is not None else None
    added = as_axes(bias, shape, 4) if source == FROM_SCORES and bias is not None else None
    batch, heads, queries, keys = weights.shape
    tile = tile or softmax_tile(queries, keys, resources_of(weights.device))
    arguments = {
        "weights_ptr": weights,
        "dweights_ptr": gradient,
        "scores_ptr": given,
        "bias_ptr": added,
        "beta_ptr": beta,
        "dscores_ptr": dscores,
        "dbeta_ptr": result.beta,
        **strides("w", weights, "bhm"),
        **strides("dw", gradient, "bhm"),
        **({"stride_sb": 0, "stride_sh": 0, "stride_sm": 0} if given is None else strides("s", given, "bhm")),
        **strides("ds", dscores, "bhm"),
        **strides("beta_", beta, "bhm"),
        **_broadcast_strides("bias", added),
        "heads": heads,
        "queries": queries,
        "keys": keys,
    }
    constants: dict[str, object] = {
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "LONG": tile.n < keys,
        "BIAS": added is not None,
        "DBETA": source,
    }
    grid = batch * heads * triton.cdiv(queries, tile.m)
    return Launch(softmax_backward_kernel, grid, arguments, constants, tile.warps, tile.stages), result


def as_axes(x: Tensor, shape: tuple[int, ...], axes: int) -> Tensor:
    """A tensor broadcast to a shape, the shape's first axes made one or added to: a view where strides allow."""
    x = x.expand(shape)
    return x.flatten(0, x.ndim - axes) if x.ndim > axes else x[(None,) * (axes - x.ndim)]


def _broadcast_strides(name: str, x: Tensor | None) -> dict[str, object]:
    """The four strides of a mask or a bias, 0 where there is none."""
    axes = ("b", "h", "row", "key")
    return dict(zip((f"stride_{name}_{axis}" for axis in axes), (0,) * 4 if x is None else x.stride(), strict=True))
