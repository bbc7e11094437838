"""Flash attention as operators that torch knows: autograd, torch.compile and CUDA graphs see through to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..derivatives import refuse_others, refuse_second
from ..visibility import Visibility
from .backward import flash_backward
from .forward import Forward, flash_forward


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
    squares: bool = False,
    probe: Tensor | None = None,
) -> Forward:
    """`flash_forward` with gradients of query, key, value, β and sinks; the statistics have none.

    Forward mode, torch.func's gradients and a second backward are refused: torch would take them for zero.

    A `probe` [B, H, Tq] takes no part; its gradient is the norm of each row's gradient of raw scores, which is how
    that statistic leaves a backward pass. Zeros with `requires_grad`, and not a parameter, will do.
    """
    refuse_others(query, key, value, beta, sinks, visibility.mask, probe)
    out, lse, top, disorder, squared = flash_attention_forward(
        query,
        key,
        value,
        beta,
        visibility.start,
        visibility.stop,
        visibility.padding,
        visibility.mask,
        sinks,
        seed,
        probe,
        visibility.slot,
        visibility.left,
        visibility.right,
        scale,
        softcap,
        dropout_p,
        entropy,
        squares,
    )
    stats = (x.detach() for x in (lse, top, disorder, squared))
    lse, top, disorder, squared = stats
    return Forward(out, lse, top, disorder if entropy else None, squared if squares else None)


@torch.library.custom_op("attnscale_kernels::flash_forward", mutates_args=())
def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    padding: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    probe: Tensor | None,
    slot: int,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float | None,
    dropout_p: float,
    entropy: bool,
    squares: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, and lse, largest logit, entropy and Σ w² per row; the last two empty where not asked for."""
    visibility = Visibility(slot, left, right, start, stop, padding, mask)
    found = flash_forward(
        query, key, value, beta, visibility, scale=scale, softcap=softcap, sinks=sinks, dropout_p=dropout_p,
        seed=seed, entropy=entropy, squares=squares,
    )  # fmt: skip
    disorder, squared = (found.lse.new_empty(0) if x is None else x for x in (found.entropy, found.squares))
    return found.out, found.lse, found.max_logit, disorder, squared


@flash_attention_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    query, value, (entropy, squares) = arguments[0], arguments[2], arguments[17:]
    rows = query.new_empty(query.shape[:3], dtype=torch.float32)
    optional = (torch.empty_like(rows) if asked else rows.new_empty(0) for asked in (entropy, squares))
    return query.new_empty(*query.shape[:3], value.shape[-1]), rows, torch.empty_like(rows), *optional


@torch.library.custom_op("attnscale_kernels::flash_backward", mutates_args=())
def flash_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    padding: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    slot: int,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float | None,
    dropout_p: float,
    dbeta: bool,
    score_norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, β [B, H, Tq] and sinks, and the norms; empty where there is nothing to give."""
    visibility = Visibility(slot, left, right, start, stop, padding, mask)
    found = flash_backward(
        gradient, query, key, value, beta, visibility, out, lse, scale=scale, softcap=softcap, sinks=sinks,
        dropout_p=dropout_p, seed=seed, dbeta=dbeta, score_norm=score_norm,
    )  # fmt: skip
    optional = found.beta, found.sinks, found.score_norm
    dbeta_rows, dsinks, norms = (lse.new_empty(0) if x is None else x for x in optional)
    return found.query, found.key, found.value, dbeta_rows, dsinks, norms


@flash_attention_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    query, key, value, sinks, (dbeta, score_norm) = *arguments[1:4], arguments[9], arguments[19:]
    rows = query.new_empty(query.shape[:3], dtype=torch.float32)
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        rows if dbeta else rows.new_empty(0),
        rows.new_empty(0 if sinks is None else sinks.shape[0]),
        torch.empty_like(rows) if score_norm else rows.new_empty(0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:10], output[0], output[1])
    ctx.numbers = inputs[11:17]
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, beta, start, stop, padding, mask, sinks, seed, out, lse = ctx.saved_tensors
    needed = ctx.needs_input_grad
    refuse_others(gradient, query, key, value, beta, sinks)
    dq, dk, dv, dbeta, dsinks, norm = flash_attention_backward(
        gradient, query, key, value, beta, start, stop, padding, mask, sinks, seed, out, lse, *ctx.numbers,
        needed[3], needed[10],
    )  # fmt: skip
    dbeta = dbeta.sum_to_size(beta.shape).to(beta.dtype) if needed[3] else None
    dsinks = None if sinks is None else dsinks.to(sinks.dtype)
    rows = (dbeta, None, None, None, None, dsinks, None, norm if needed[10] else None)
    return (dq, dk, dv, *rows, *(None,) * 8)


flash_attention_forward.register_autograd(_backward, setup_context=_save)
flash_attention_backward.register_autograd(refuse_second)
