"""The row softmax as operators of torch.library, with fakes and gradients, for autograd and torch.compile."""

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
    """softmax(β·(s + bias)) over the last axis of scores [..., Tq, Tk], with statistics of each row, in one kernel.

    β broadcasts to [..., Tq], mask (bool, True: visible) and bias (at or below −1e4: hidden, as is a score of −∞) to
    the scores. Weights come in the dtype of the scores; lse, max_logit, w_max and entropy in fp32 and nats, with no
    gradient. `thresholds` asks for gap counts N(t) = #{j visible: s* − s_j ≤ t} [..., Tq, k] of s + bias. A row that
    sees nothing gives zeros, lse = max = −∞ and no gradient.
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
    """Weights, and lse, largest logit, largest weight, entropy and gap counts per row; the last empty if not asked."""
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
    """Gradients of scores, in fp32 if `wide`, and of β per row, empty without scores."""
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
    keep = ctx.needs_input_grad[1]  # only the gradient of β needs scores and bias
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
    # The gradient of a bias in fp32 is not rounded to fp16 before it is summed.
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
