"""Softmax of a materialised score matrix, with a temperature per row and row statistics."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnscale._util.checks import check_broadcasts, check_dense, check_floating, check_scores, read_number
from attnscale.backends.dispatch import why_kernels_distrusted
from attnscale.call.context import shown
from attnscale.errors import ArgumentError, BackendError, reject, reject_type
from attnscale.statistics import RowStats, StatsRequest, checked_request, row_statistics
from attnscale.statistics.gaps import FAR
from attnscale_kernels import interpreting, why_unavailable
from attnscale_kernels.availability import other_derivative


class SoftmaxOutput(NamedTuple):
    """Result of `softmax`.

    Attributes:
        weights: [..., Tq, Tk], in the dtype of the scores; differentiable.
        stats: `RowStats` with tensors [..., Tq]; detached unless the request is differentiable.

    Example:
        >>> weights, stats = softmax(torch.tensor([[0.0, 0.0]]))
        >>> weights, stats.w_max
        (tensor([[0.5000, 0.5000]]), tensor([0.5000]))
    """

    weights: Tensor
    stats: RowStats


def softmax(
    scores: Tensor,
    beta: Tensor | float = 1.0,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    request: StatsRequest | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> SoftmaxOutput:
    """softmax(β·(s + bias)) over the last axis of raw scores s, with statistics per row.

    Weights are differentiable in scores, β and bias. The fused kernel reads and writes the matrix once (twice for rows
    of more than 8192 keys) and supports first derivatives only.

    Args:
        scores: [..., Tq, Tk], raw scores. A score of −∞ or the lowest finite number hides its key.
        beta: the temperature, a number or a tensor that broadcasts to [..., Tq].
        mask: bool (True: visible), broadcasts to the scores.
        bias: floating, broadcasts to the scores. A bias at or below −1e4 hides its key.
        request: the statistics to compute. `StatsRequest.rows` does not apply: all rows are measured.
        backend: "torch", "triton", or "auto": the fused kernel on CUDA and ROCm devices if it is usable, else torch.

    Returns:
        `SoftmaxOutput(weights, stats)`. A row without visible keys has zero weights and lse = −∞.

    Raises:
        ArgumentError: a shape, value or device is not accepted.
        ArgumentTypeError: a type or dtype is not accepted.
        BackendError: backend="triton" cannot compute this softmax.

    Example:
        >>> weights, stats = softmax(torch.tensor([[0.0, 0.0, -1.0]]), beta=2.0)
        >>> weights
        tensor([[0.4683, 0.4683, 0.0634]])
        >>> stats.entropy, stats.visible
        (tensor([0.8854]), tensor([3]))
    """
    request = checked_request(request)
    check_scores(scores, mask)
    beta = _checked_beta(beta, scores)
    if bias is not None:
        _check_operand("bias", bias, scores, scores.shape)
    if mask is not None and mask.device != scores.device:
        raise ArgumentError(f"mask on {mask.device} is not accepted: expected the device of scores, {scores.device}")
    if backend not in ("auto", "torch", "triton"):
        reject("backend", backend, "'auto', 'torch' or 'triton'")
    obstacle = None if backend == "torch" else _why_no_kernel(scores, beta, bias, request)
    if backend == "triton" and obstacle is not None:
        raise BackendError(f"backend='triton' cannot compute this softmax: {obstacle}")
    kernel = backend != "torch" and obstacle is None
    if kernel and backend == "auto":  # only compiled kernels that passed the self-check of this device
        kernel = not interpreting() and why_kernels_distrusted(scores.device, scores.dtype) is None
    return (_by_kernel if kernel else _by_torch)(scores, beta, mask, bias, request)


def _by_torch(
    scores: Tensor, beta: Tensor, mask: Tensor | None, bias: Tensor | None, request: StatsRequest
) -> SoftmaxOutput:
    wide = torch.promote_types(scores.dtype, torch.float32)
    raw = scores.to(wide) if bias is None else scores.to(wide) + bias.to(wide)
    seen = _seen(raw, mask, bias)
    raw = raw.masked_fill(~seen, 0.0)  # no gradient through a hidden score, and no 0·∞
    logits = (raw * beta.to(wide)[..., None]).masked_fill(~seen, -math.inf)
    empty = ~seen.any(-1, keepdim=True)
    weights = logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return SoftmaxOutput(weights.to(scores.dtype), row_statistics(raw, beta, seen, request))


def _by_kernel(
    scores: Tensor, beta: Tensor, mask: Tensor | None, bias: Tensor | None, request: StatsRequest
) -> SoftmaxOutput:
    from attnscale_kernels.softmax.op import row_softmax

    found = row_softmax(scores, beta, mask=mask, bias=bias, thresholds=request.gap_thresholds)
    raw = scores.detach().to(torch.float32)
    raw = raw if bias is None else raw + bias.detach().to(torch.float32)
    seen = _seen(raw, mask, bias)
    # The kernel computes neither Λ nor n.
    rest = StatsRequest(False, False, False, False, accumulation=request.accumulation, min_rank=request.min_rank)
    names = ("lse", "max_logit", "w_max", "entropy", "gap_counts")
    stats = row_statistics(raw, beta, seen, rest)._replace(**{name: getattr(found, name) for name in names})
    return SoftmaxOutput(found.weights, stats.only(request))


def _seen(raw: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
    """The visible scores, bool [..., Tq, Tk]. A NaN is visible."""
    seen = ~(raw.detach() < -FAR)
    if bias is not None:
        seen = seen & shown(bias.detach())
    return seen if mask is None else seen & mask


def _why_no_kernel(scores: Tensor, beta: Tensor, bias: Tensor | None, request: StatsRequest) -> str | None:
    reason = why_unavailable(scores.device, scores.dtype)
    if reason is not None:
        return reason
    if request.with_gradients:
        return "the statistics of the softmax kernel carry no gradients"
    derivative = other_derivative(scores, beta, bias)
    return None if derivative is None else f"triton kernels have a first-order backward pass only, no {derivative}"


def _checked_beta(beta: object, scores: Tensor) -> Tensor:
    """β as a tensor in fp32 or wider that broadcasts to the rows."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    if isinstance(beta, Tensor):
        _check_operand("beta", beta, scores, scores.shape[:-1])
        return beta.to(wide)
    if isinstance(beta, bool):
        reject_type("beta", beta, "a number or a floating-point tensor")
    return scores.new_full((), read_number("beta", beta, "a number or a floating-point tensor"), dtype=wide)


def _check_operand(name: str, value: object, scores: Tensor, shape: torch.Size) -> None:
    if not isinstance(value, Tensor):
        reject_type(name, value, "a floating-point tensor")
    check_dense(name, value)
    check_floating(name, value)
    if value.device != scores.device:
        raise ArgumentError(f"{name} on {value.device} is not accepted: expected the device of scores, {scores.device}")
    check_broadcasts(name, value, shape)
