"""Flash attention as operators of torch.library, with fakes and gradients, for autograd and torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..derivatives import refuse_others, refuse_second
from ..visibility import Visibility
from .launch import Forward, flash_backward, flash_forward, new_forward


def flash_attention(
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
) -> Forward:
    """`flash_forward` with gradients of query, key, value, β and sinks; the statistics have none.

    Forward mode, torch.func's gradients and a second backward are refused: torch would take them for zero.
    """
    refuse_others(query, key, value, beta, sinks, visibility.mask)
    out, *stats = flash_forward_op(
        query, key, value, beta, *visibility, sinks, seed, scale, softcap, dropout_p, entropy
    )
    lse, top, disorder = (x.detach() for x in stats)
    return Forward(out, lse, top, disorder if entropy else None)


@torch.library.custom_op("attnscale_kernels::flash_forward", mutates_args=())
def flash_forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    slot: int,
    left: int | None,
    right: int | None,
    start: Tensor | None,
    stop: Tensor | None,
    padding: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout_p: float,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, and lse, largest logit and entropy per row; the last empty where not asked for."""
    return flash_forward(
        query, key, value, beta, Visibility(slot, left, right, start, stop, padding, mask), scale=scale,
        softcap=softcap, sinks=sinks, dropout_p=dropout_p, seed=seed, entropy=entropy,
    ).outputs()  # fmt: skip


@flash_forward_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return new_forward(query, value, entropy=others[-1]).outputs()


@torch.library.custom_op("attnscale_kernels::flash_backward", mutates_args=())
def flash_backward_op(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    slot: int,
    left: int | None,
    right: int | None,
    start: Tensor | None,
    stop: Tensor | None,
    padding: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
    dropout_p: float,
    dbeta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, β [B, H, Tq] and sinks; the last two empty where there are none."""
    found = flash_backward(
        gradient, query, key, value, beta, Visibility(slot, left, right, start, stop, padding, mask), out, lse,
        scale=scale, softcap=softcap, sinks=sinks, dropout_p=dropout_p, seed=seed, dbeta=dbeta,
    )  # fmt: skip
    of_beta, of_sinks = (lse.new_empty(0) if x is None else x for x in (found.beta, found.sinks))
    return found.query, found.key, found.value, of_beta, of_sinks


@flash_backward_op.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
    sinks, dbeta = others[8], others[-1]
    rows = query.new_empty(query.shape[:3], dtype=torch.float32)
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        rows if dbeta else rows.new_empty(0),
        rows.new_empty(0 if sinks is None else sinks.shape[0]),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, beta, *row_rule = inputs[:7]
    *tensors, scale, softcap, dropout_p, _ = inputs[7:]
    ctx.save_for_backward(query, key, value, beta, *tensors, output[0], output[1])
    ctx.row_rule, ctx.numbers = row_rule, (scale, softcap, dropout_p)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, beta, *tensors = ctx.saved_tensors
    sinks, needs_beta = tensors[4], ctx.needs_input_grad[3]
    refuse_others(gradient, query, key, value, beta, sinks)
    dq, dk, dv, dbeta, dsinks = flash_backward_op(
        gradient, query, key, value, beta, *ctx.row_rule, *tensors, *ctx.numbers, needs_beta
    )
    dbeta = dbeta.sum_to_size(beta.shape).to(beta.dtype) if needs_beta else None
    dsinks = None if sinks is None else dsinks.to(sinks.dtype)
    return (dq, dk, dv, dbeta, *(None,) * 7, dsinks, *(None,) * 5)


flash_forward_op.register_autograd(_backward, setup_context=_save)
flash_backward_op.register_autograd(refuse_second)
