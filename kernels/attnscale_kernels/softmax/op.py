"""The row softmax as torch.library operators with fake kernels and gradients, for autograd and torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_softmax, check_softmax_backward, finite, numbers
from ..availability import refuse_others, refuse_second
from ..launch import on_device
from ..operators import operator
from .launch import RowSoftmax, softmax_backward, softmax_forward


def row_softmax(
    scores: Tensor,
    beta: Tensor | float = 1.0,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    thresholds: Sequence[float] | None = None,
) -> RowSoftmax:
    """softmax(β·(s + bias)) over the last axis of a score matrix, with statistics of each row, in one kernel.

    Differentiable with respect to scores, β and bias; the statistics have no gradient.

    Args:
        scores: [..., Tq, Tk] in fp32, fp16 or bf16. A score of −∞ is hidden.
        beta: A number, or a tensor that broadcasts to [..., Tq].
        mask: bool, broadcasts to the scores; True: visible.
        bias: Broadcasts to the scores; values at or below −1e4 hide the key.
        thresholds: Gap thresholds t for N(t) = #{j visible: s* − s_j ≤ t} of s + bias, or None.

    Returns:
        A `RowSoftmax`: weights in the dtype of the scores, and statistics in fp32 and nats. Rows without a visible key
            give zeros, lse = max = −∞ and no gradient.

    Raises:
        KernelArgumentError: An argument has an unsupported shape, device or value.
        KernelTypeError: An argument has an unsupported type, dtype or layout.
        KernelUnavailableError: Triton does not support the device.
        RuntimeError: Forward-mode AD, torch.func gradients or double backward, which are not supported.

    Example:
        >>> from attnscale_kernels import interpreting
        >>> device = "cpu" if interpreting() else "cuda"
        >>> found = row_softmax(torch.zeros(2, 4, device=device), beta=3.0, thresholds=[0.5])
        >>> found.weights[0].tolist(), found.gap_counts.tolist()
        ([0.25, 0.25, 0.25, 0.25], [[4], [4]])
    """
    if not isinstance(beta, Tensor) and isinstance(scores, Tensor):
        number = finite("beta", beta, "a finite number or a tensor")
        beta = torch.full((), number, dtype=torch.float32, device=scores.device)
    check_softmax(scores, beta, mask, bias)
    refuse_others(scores, beta, bias)
    gaps = None if thresholds is None else on_device(numbers("thresholds", thresholds), scores)
    weights, *found = softmax_op(scores, beta.to(torch.float32), mask, bias, gaps)
    lse, top, w_max, entropy, counts = (x.detach() for x in found)
    return RowSoftmax(weights, lse, top, w_max, entropy, None if gaps is None else counts)


@operator("softmax_forward")
def softmax_op(
    scores: Tensor, beta: Tensor, mask: Tensor | None, bias: Tensor | None, thresholds: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return weights, lse, max logit, max weight, entropy and gap counts; the last is empty if not requested."""
    found = softmax_forward(scores, beta, mask=mask, bias=bias, thresholds=thresholds)
    weights, lse, top, w_max, entropy, counts = found
    counts = lse.new_empty((*lse.shape, 0), dtype=torch.int64) if counts is None else counts
    return weights, lse, top, w_max, entropy, counts


@softmax_op.register_fake
def _(
    scores: Tensor, beta: Tensor, mask: Tensor | None, bias: Tensor | None, thresholds: Tensor | None
) -> tuple[Tensor, ...]:
    check_softmax(scores, beta, mask, bias, thresholds)
    rows = [scores.new_empty(scores.shape[:-1], dtype=torch.float32) for _ in range(4)]
    wanted = 0 if thresholds is None else thresholds.shape[0]
    return scores.new_empty(scores.shape), *rows, rows[0].new_empty((*rows[0].shape, wanted), dtype=torch.int64)


@operator("softmax_backward")
def softmax_backward_op(
    gradient: Tensor, weights: Tensor, beta: Tensor, scores: Tensor | None, bias: Tensor | None, wide: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of scores, in fp32 if `wide`, and of β per row, empty without scores."""
    dtype = torch.float32 if wide else weights.dtype
    found = softmax_backward(gradient, weights, beta, scores=scores, bias=bias, dtype=dtype)
    return found.scores, beta.new_empty(0) if found.beta is None else found.beta


@softmax_backward_op.register_fake
def _(
    gradient: Tensor, weights: Tensor, beta: Tensor, scores: Tensor | None, bias: Tensor | None, wide: bool
) -> tuple[Tensor, Tensor]:
    check_softmax_backward(gradient, weights, beta, scores, bias)
    dscores = weights.new_empty(weights.shape, dtype=torch.float32 if wide else weights.dtype)
    return dscores, beta.new_empty(0 if scores is None else weights.shape[:-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    scores, beta, _, bias, _ = inputs
    keep = ctx.needs_input_grad[1]  # scores and bias are needed for the gradient of β only
    ctx.save_for_backward(output[0], beta, scores if keep else None, bias if keep else None)
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 5
    weights, beta, scores, bias = ctx.saved_tensors
    refuse_others(gradient, weights, beta, scores, bias)
    needs_scores, needs_beta, _, needs_bias, _ = ctx.needs_input_grad
    # The gradient of an fp32 bias is summed before it is rounded to fp16.
    wide = needs_bias and ctx.bias[1] == torch.float32
    dscores, dbeta = softmax_backward_op(gradient, weights, beta, scores, bias, wide)
    return (
        dscores.to(weights.dtype) if needs_scores else None,
        dbeta.sum_to_size(beta.shape) if needs_beta else None,
        None,
        dscores.sum_to_size(ctx.bias[0]).to(ctx.bias[1]) if needs_bias else None,
        None,
    )


softmax_op.register_autograd(_backward, setup_context=_save)
softmax_backward_op.register_autograd(refuse_second)
