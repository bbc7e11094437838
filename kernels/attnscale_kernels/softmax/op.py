"""The row softmax as operators that torch knows: autograd and torch.compile see through to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..availability import why_unavailable
from ..derivatives import refuse_others, refuse_second
from .kernel import RowSoftmax, softmax_backward, softmax_forward

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def softmax(
    scores: Tensor,
    beta: Tensor | float = 1.0,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    thresholds: Sequence[float] | Tensor | None = None,
    inplace: bool = False,
) -> RowSoftmax:
    """softmax(β·(s + bias)) over the last axis of scores [..., Tq, Tk], with statistics of each row, in one kernel.

    β broadcasts to [..., Tq], mask (bool, True: visible) and bias (at or below −1e4: hidden, as is a score of −∞) to
    the scores. Weights come in the dtype of the scores; lse, max_logit, w_max and entropy in fp32 and nats, with no
    gradient. `thresholds` asks for gap counts N(t) = #{j visible: s* − s_j ≤ t} [..., Tq, k] of s + bias; as a tensor
    on the device they cost no launch of their own. A row that sees nothing gives zeros, lse = max = −∞ and no gradient.

    `inplace` writes the weights over the scores and returns them as the same tensor; it can be trained through, as
    backward needs weights and β only. The gradient of β then comes from the logarithm of the weights: as good where
    |β| is not small, and NaN where β = 0 and the row sees several keys.
    """
    _check_scores(scores)
    rows = scores.shape[:-1]
    if isinstance(beta, Tensor):
        _check_operand("beta", beta, scores, rows)
        beta = beta.to(torch.float32)
    elif isinstance(beta, (int, float)) and not isinstance(beta, bool):
        beta = scores.new_full((), float(beta), dtype=torch.float32)
    else:
        raise TypeError(f"beta={beta!r} is a {type(beta).__name__}; a float or a floating-point tensor is accepted")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError(
                f"mask is {_kind(mask)}; a bool tensor (True: visible) is accepted, an additive mask goes into bias"
            )
        _check_operand("mask", mask, scores, scores.shape)
    if bias is not None:
        _check_operand("bias", bias, scores, scores.shape)
    gaps = None if thresholds is None else _as_thresholds(thresholds, scores)
    refuse_others(scores, beta, bias)
    arguments = scores, beta, mask, bias, gaps
    if not inplace:
        weights, *found = softmax_op(*arguments)
    else:
        _check_writable(scores)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (scores, beta, bias)):
            weights, *found = _SoftmaxInPlace.apply(*arguments)
        else:
            weights, found = scores, list(softmax_in_place_op(*arguments))
    lse, top, w_max, entropy, counts = (x.detach() for x in found)
    return RowSoftmax(weights, lse, top, w_max, entropy, None if gaps is None else counts)


@torch.library.custom_op("attnscale_kernels::softmax_forward", mutates_args=())
def softmax_op(
    scores: Tensor, beta: Tensor, mask: Tensor | None, bias: Tensor | None, thresholds: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Weights, and lse, largest logit, largest weight, entropy and gap counts per row; the last empty if not asked."""
    _check_device(scores)
    return _whole(softmax_forward(scores, beta, mask=mask, bias=bias, thresholds=thresholds))


@softmax_op.register_fake
def _(
    scores: Tensor, beta: Tensor, mask: Tensor | None, bias: Tensor | None, thresholds: Tensor | None
) -> tuple[Tensor, ...]:
    return scores.new_empty(scores.shape), *_statistics_like(scores, thresholds)


@torch.library.custom_op("attnscale_kernels::softmax_forward_", mutates_args=("scores",))
def softmax_in_place_op(
    scores: Tensor, beta: Tensor, mask: Tensor | None, bias: Tensor | None, thresholds: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Writes weights over scores and returns the statistics; knows no gradient, see `_SoftmaxInPlace`."""
    _check_device(scores)
    found = softmax_forward(scores, beta, mask=mask, bias=bias, thresholds=thresholds, in_place=True)
    return _whole(found)[1:]


@softmax_in_place_op.register_fake
def _(
    scores: Tensor, beta: Tensor, mask: Tensor | None, bias: Tensor | None, thresholds: Tensor | None
) -> tuple[Tensor, ...]:
    return _statistics_like(scores, thresholds)


@torch.library.custom_op("attnscale_kernels::softmax_backward", mutates_args=())
def softmax_backward_op(
    gradient: Tensor,
    weights: Tensor,
    beta: Tensor,
    scores: Tensor | None,
    bias: Tensor | None,
    dbeta: bool,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of scores, in fp32 if `wide`, and of β per row, or nothing."""
    dtype = torch.float32 if wide else weights.dtype
    found = softmax_backward(gradient, weights, beta, scores=scores, bias=bias, dbeta=dbeta, dtype=dtype)
    return found.scores, beta.new_empty(0) if found.beta is None else found.beta


@softmax_backward_op.register_fake
def _(
    gradient: Tensor,
    weights: Tensor,
    beta: Tensor,
    scores: Tensor | None,
    bias: Tensor | None,
    dbeta: bool,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    dscores = weights.new_empty(weights.shape, dtype=torch.float32 if wide else weights.dtype)
    return dscores, beta.new_empty(weights.shape[:-1] if dbeta else 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    scores, beta, _, bias, _ = inputs
    dbeta = ctx.needs_input_grad[1]  # only that needs the scores: a matrix less to keep
    _keep(ctx, beta, bias, output, scores if dbeta else None)


def _keep(ctx: Any, beta: Tensor, bias: Tensor | None, output: tuple[Tensor, ...], scores: Tensor | None) -> None:
    ctx.save_for_backward(output[0], beta, scores, bias if scores is not None else None)
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 5
    weights, beta, scores, bias = ctx.saved_tensors
    refuse_others(gradient, weights, beta, scores, bias)
    needs_scores, needs_beta, _, needs_bias, _ = ctx.needs_input_grad[:5]
    # A bias in fp32 gets a gradient that has not been through fp16.
    wide = needs_bias and ctx.bias[1] == torch.float32
    dscores, dbeta = softmax_backward_op(gradient, weights, beta, scores, bias, needs_beta, wide)
    return (
        dscores.to(weights.dtype) if needs_scores else None,
        dbeta.sum_to_size(beta.shape) if needs_beta else None,
        None,
        dscores.sum_to_size(ctx.bias[0]).to(ctx.bias[1]) if needs_bias else None,
        None,
    )


softmax_op.register_autograd(_backward, setup_context=_save)
softmax_backward_op.register_autograd(refuse_second)


class _SoftmaxInPlace(torch.autograd.Function):
    """Gradients of the operator that overwrites its input, for which torch.library has no way to register them."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, beta: Tensor, mask: Tensor | None, bias: Tensor | None, thresholds: Tensor | None
    ) -> tuple[Tensor, ...]:
        output = scores, *softmax_in_place_op(scores, beta, mask, bias, thresholds)
        ctx.mark_dirty(scores)
        _keep(ctx, beta, bias, output, None)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *gradients)


def _whole(found: RowSoftmax) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *given, counts = found
    if counts is None:
        counts = found.lse.new_empty((*found.lse.shape, 0), dtype=torch.int64)
    weights, lse, top, w_max, entropy = given
    return weights, lse, top, w_max, entropy, counts


def _statistics_like(scores: Tensor, thresholds: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = scores.new_empty(scores.shape[:-1], dtype=torch.float32)
    wanted = 0 if thresholds is None else thresholds.shape[0]
    counts = rows.new_empty((*rows.shape, wanted), dtype=torch.int64)
    return rows, torch.empty_like(rows), torch.empty_like(rows), torch.empty_like(rows), counts


def _check_device(scores: Tensor) -> None:
    reason = why_unavailable(scores.device)
    if reason is not None:
        raise ValueError(f"scores are on {scores.device}: {reason}")


def _check_scores(scores: Tensor) -> None:
    if not isinstance(scores, Tensor) or scores.dtype not in DTYPES:
        raise TypeError(f"scores is {_kind(scores)}; a tensor in {', '.join(map(str, DTYPES))} is accepted")
    if scores.ndim < 1:
        raise ValueError(f"scores has shape {tuple(scores.shape)}; [..., Tq, Tk] is accepted")


def _check_operand(name: str, x: Tensor, scores: Tensor, shape: torch.Size) -> None:
    """That a tensor can be broadcast to a shape, on the device of the scores, and is a float unless it is a mask."""
    if not isinstance(x, Tensor) or not (name == "mask" or x.is_floating_point()):
        raise TypeError(f"{name} is {_kind(x)}; a floating-point tensor is accepted")
    if x.device != scores.device:
        raise ValueError(f"{name} is on {x.device}; the device of scores, {scores.device}, is accepted")
    given, least = tuple(x.shape), (1,) * (len(shape) - x.ndim) + tuple(x.shape)
    if x.ndim > len(shape) or any(a not in (1, b) for a, b in zip(least, shape, strict=True)):
        raise ValueError(f"{name} has shape {given}; what broadcasts to {tuple(shape)} is accepted")


def _check_writable(scores: Tensor) -> None:
    if any(stride == 0 and extent > 1 for stride, extent in zip(scores.stride(), scores.shape, strict=True)):
        raise ValueError(
            f"inplace=True with scores of strides {scores.stride()}: elements share memory; "
            "inplace=False or scores.clone() is accepted"
        )
    if scores.requires_grad and scores.is_leaf and torch.is_grad_enabled():
        raise ValueError(
            "inplace=True with scores that are a leaf and require a gradient, which would be lost; "
            "inplace=False or scores computed from other tensors are accepted"
        )


def _as_thresholds(thresholds: Sequence[float] | Tensor, scores: Tensor) -> Tensor:
    """Thresholds [k] in fp32 on the device, without a copy from the host that would have to be waited for."""
    if isinstance(thresholds, Tensor):
        if thresholds.ndim != 1 or not thresholds.is_floating_point():
            raise ValueError(f"thresholds is {_kind(thresholds)}; a floating-point tensor [k] is accepted")
        if thresholds.device != scores.device:
            raise ValueError(
                f"thresholds is on {thresholds.device}; the device of scores, {scores.device}, is accepted"
            )
        return thresholds.to(torch.float32).contiguous()
    if not isinstance(thresholds, (tuple, list)) or not all(isinstance(t, (int, float)) for t in thresholds):
        raise TypeError(f"thresholds={thresholds!r}; numbers in a tuple or list, or a tensor [k], are accepted")
    if any(math.isnan(t) for t in thresholds):
        raise ValueError(f"thresholds={thresholds!r} holds NaN; numbers are accepted")
    if not thresholds:
        return scores.new_empty(0, dtype=torch.float32)
    return torch.stack([scores.new_full((), float(t), dtype=torch.float32) for t in thresholds])


def _kind(x: object) -> str:
    return f"a tensor {list(x.shape)} in {x.dtype}" if isinstance(x, Tensor) else f"{x!r}"
