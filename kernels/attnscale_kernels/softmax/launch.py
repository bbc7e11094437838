"""Host side of the row softmax: tiles, launches and results."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..arguments import check_softmax, check_softmax_backward
from ..launch import Launch, Resources, Tile, block_of, cdiv, launched, resources_of, unit_stride, view
from .kernel import softmax_backward_kernel, softmax_forward_kernel

ONE_BLOCK = 8192  # longest row, in keys, that is held in registers
CHUNK = 4096  # keys per step of a longer row


class RowSoftmax(NamedTuple):
    """Weights, and statistics per row in fp32 and nats.

    Attributes:
        weights: [..., Tq, Tk] in the dtype of the scores.
        lse: [..., Tq]; −∞ for rows without a visible key.
        max_logit: [..., Tq]; −∞ for rows without a visible key.
        w_max: The largest weight [..., Tq].
        entropy: [..., Tq].
        gap_counts: N(t) [..., Tq, thresholds] in int64, or None if not requested.
    """

    weights: Tensor  # [..., Tq, Tk]
    lse: Tensor  # [..., Tq]
    max_logit: Tensor  # [..., Tq]
    w_max: Tensor  # [..., Tq]
    entropy: Tensor  # [..., Tq]
    gap_counts: Tensor | None  # [..., Tq, thresholds]


class SoftmaxGradient(NamedTuple):
    """Results of `backward_launches`."""

    scores: Tensor  # [..., Tq, Tk]
    beta: Tensor | None  # [..., Tq] fp32; None: not requested


def softmax_tile(queries: int, keys: int, resources: Resources) -> Tile:
    """Return a tile of short rows, one row of at most ONE_BLOCK keys, or CHUNK keys; 8 or 16 scores per thread."""
    n = block_of(keys) if keys <= ONE_BLOCK else CHUNK
    m = max(1, min(1024 // n, triton.next_power_of_2(queries)))
    return Tile(m, n, min(max(m * n // (8 * resources.warp_size), 1), 16), 1)


def forward_launches(
    scores: Tensor,
    beta: Tensor,
    *,
    mask: Tensor | None,
    bias: Tensor | None,
    thresholds: Tensor | None,
    tile: Tile | None = None,
) -> tuple[tuple[Launch], RowSoftmax]:
    """Build the launch of softmax(β·(s + bias)) over the visible keys of each row.

    Scores [..., Tq, Tk]; mask (True: visible) and bias (at or below −1e4: hidden) broadcast to them, β to [..., Tq].
    Gap counts refer to s + bias in fp32; `thresholds` [k] is an fp32 tensor on the device. Rows without a visible key
    give zeros and lse = max = −∞.
    """
    check_softmax(scores, beta, mask, bias, thresholds)
    shape = scores.shape
    rows = scores.new_empty(shape[:-1], dtype=torch.float32)
    wanted = 0 if thresholds is None else thresholds.shape[0]
    result = RowSoftmax(
        scores.new_empty(shape),
        rows,
        torch.empty_like(rows),
        torch.empty_like(rows),
        torch.empty_like(rows),
        rows.new_empty((*shape[:-1], wanted), dtype=torch.int64) if wanted else None,
    )
    arguments = {
        "scores": view(as_axes(unit_stride(scores), shape, 4)),
        "mask": None if mask is None else view(as_axes(mask.view(torch.uint8), shape, 4)),
        "bias": None if bias is None else view(as_axes(bias, shape, 4)),
        "weights": view(as_axes(result.weights, shape, 4)),
        "thresholds_ptr": thresholds if wanted else None,
        "lse_ptr": result.lse,
        "top_ptr": result.max_logit,
        "w_max_ptr": result.w_max,
        "entropy_ptr": result.entropy,
        "counts_ptr": result.gap_counts,
    }
    constants = {"THRESHOLDS": wanted, "BLOCK_T": triton.next_power_of_2(max(wanted, 1))}
    return (_launch(softmax_forward_kernel, result.weights, beta, tile, arguments, constants),), result


softmax_forward = launched(forward_launches)


def backward_launches(
    gradient: Tensor,
    weights: Tensor,
    beta: Tensor,
    *,
    scores: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> tuple[tuple[Launch], SoftmaxGradient]:
    """Build the launch of the gradients of scores and β.

    The gradient of the bias is that of the scores, summed to the shape of the bias. Deterministic: no two programs
    write to the same element. dβ needs scores and bias, and is None without scores. `dtype` is the dtype of the
    gradient of the scores, by default that of the weights.
    """
    check_softmax_backward(gradient, weights, beta, scores, bias)
    shape = weights.shape
    result = SoftmaxGradient(
        weights.new_empty(shape, dtype=dtype or weights.dtype),
        None if scores is None else weights.new_empty(shape[:-1], dtype=torch.float32),
    )
    arguments = {
        "weights": view(as_axes(unit_stride(weights), shape, 4)),
        "grad_weights": view(as_axes(unit_stride(gradient), shape, 4)),
        "scores": None if scores is None else view(as_axes(unit_stride(scores), shape, 4)),
        "bias": None if scores is None or bias is None else view(as_axes(bias, shape, 4)),
        "grad_scores": view(as_axes(result.scores, shape, 4)),
        "dbeta_ptr": result.beta,
    }
    return (_launch(softmax_backward_kernel, result.scores, beta, tile, arguments, {}),), result


softmax_backward = launched(backward_launches)


def _launch(
    kernel: Any, matrix: Tensor, beta: Tensor, tile: Tile | None, arguments: dict[str, Any], constants: dict[str, Any]
) -> Launch:
    """Return a launch over all rows of a matrix [..., Tq, Tk], with the arguments common to both kernels."""
    batch, heads, queries, keys = as_axes(matrix, matrix.shape, 4).shape
    tile = tile or softmax_tile(queries, keys, resources_of(matrix.device))
    row_beta = as_axes(beta.to(torch.float32), matrix.shape[:-1], 3)
    arguments |= {"beta": view(row_beta), "heads": heads, "queries": queries, "keys": keys}
    constants |= {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "ALIGN": _alignment(keys, arguments), "LONG": tile.n < keys}
    grid = batch * heads * cdiv(queries, tile.m)
    return Launch(kernel, grid, arguments, constants, tile.warps, tile.stages)


def _alignment(keys: int, arguments: dict[str, Any]) -> int:
    """Return 8 if rows start and end at multiples of 8 but not of 16 elements, which Triton does not detect; else 1."""
    names = ("scores", "weights", "grad_weights", "grad_scores")
    views = [x for name in names if (x := arguments.get(name)) is not None]
    extents = [keys, *(stride for x in views for stride in x.strides[:-1])]
    told = all(extent % 16 == 0 for extent in extents) or any(extent % 8 for extent in extents)
    return 1 if told else 8


def as_axes(x: Tensor, shape: tuple[int, ...], axes: int) -> Tensor:
    """Broadcast a tensor to a shape and merge or add leading axes up to `axes`; a view where possible."""
    x = x.expand(shape)
    return x.flatten(0, x.ndim - axes) if x.ndim > axes else x[(None,) * (axes - x.ndim)]
