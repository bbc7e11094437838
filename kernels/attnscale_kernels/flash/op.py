"""Flash attention as operators of torch.library, with fakes and gradients, for autograd and torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from ..arguments import check_attention, check_backward, check_numbers
from ..availability import refuse_others, refuse_second
from ..errors import reject_type
from ..launch import Forward, empty_like_layout, new_forward, run
from ..operators import is_eager, needs_gradient, operator
from ..visibility import SCHEMA, Visibility
from .launch import flash_backward, flash_forward, forward_launches


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
    winner: bool = False,
) -> Forward:
    """`flash_forward` with gradients of query, key, value, β and sinks; the statistics have none.

    Forward mode, torch.func's gradients, a second backward and a gradient of an additive mask are refused: torch would
    take them for zero.
    """
    if not isinstance(visibility, Visibility):
        reject_type("visibility", visibility, "a Visibility")
    tensors: tuple[Tensor, ...] = (query, key, value, beta)
    if sinks is not None:
        tensors += (sinks,)
    if visibility.mask is not None:
        tensors += (visibility.mask,)
    eager = is_eager(*tensors)
    recorded = eager and needs_gradient(*tensors)
    # Tensors that have escaped from a transform of torch.func are for the operator: autograd records them by it alone.
    if eager and not (recorded and any(map(is_functorch_wrapped_tensor, (query, key, value, beta)))):
        if recorded and visibility.mask is not None and visibility.mask.requires_grad:
            raise RuntimeError(NO_GRADIENT_OF_MASK)
        made = forward_launches(
            query, key, value, beta, visibility, scale=scale, softcap=softcap, sinks=sinks, dropout_p=dropout_p,
            seed=seed, entropy=entropy, winner=winner,
        )  # fmt: skip
        found = run(made, query)
        if not recorded:
            return found
        numbers = float(scale), softcap, float(dropout_p)
        out = _record(query, key, value, beta, sinks, found, visibility, seed, numbers)
        return Forward(out, *found[1:])
    check_attention(query, key, value, beta, visibility, sinks, seed)
    check_numbers(scale, softcap, dropout_p)
    refuse_others(*tensors)
    out, *stats = flash_forward_op(
        query, key, value, beta, *visibility, sinks, seed, scale, softcap, dropout_p, entropy, winner
    )
    lse, top, disorder, slots = (x.detach() for x in stats)
    return Forward(out, lse, top, disorder if entropy else None, slots if winner else None)


# What forward and backward are given, before and after what only one of them needs.
TENSORS = f"Tensor query, Tensor key, Tensor value, Tensor beta, {SCHEMA}, Tensor? sinks, Tensor? seed"
NUMBERS = "float scale, float? softcap, float dropout_p"


def _forward(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, and lse, largest logit, entropy and winner per row; the last two empty where not asked for."""
    *visibility, sinks, seed, scale, softcap, dropout_p, entropy, winner = others
    return flash_forward(
        query, key, value, beta, Visibility(*visibility), scale=scale, softcap=softcap, sinks=sinks,
        dropout_p=dropout_p, seed=seed, entropy=entropy, winner=winner,
    ).outputs()  # fmt: skip


flash_forward_op = operator(
    "flash_forward",
    f"({TENSORS}, {NUMBERS}, bool entropy, bool winner) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)(_forward)


@flash_forward_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, *others: Any) -> tuple[Tensor, ...]:
    check_attention(query, key, value, beta, Visibility(*others[:7]), *others[7:9])
    return new_forward(query, value.shape[-1], entropy=others[-2], winner=others[-1]).outputs()


def _gradients(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, β [B, H, Tq] and sinks; the last two empty where there are none."""
    sinks, seed, out, lse, scale, softcap, dropout_p, dbeta = arguments[12:]
    found = flash_backward(
        *arguments[:5], Visibility(*arguments[5:12]), out, lse, scale=scale, softcap=softcap, sinks=sinks,
        dropout_p=dropout_p, seed=seed, dbeta=dbeta,
    )  # fmt: skip
    of_beta, of_sinks = (lse.new_empty(0) if x is None else x for x in (found.beta, found.sinks))
    return found.query, found.key, found.value, of_beta, of_sinks


flash_backward_op = operator(
    "flash_backward",
    f"(Tensor gradient, {TENSORS}, Tensor out, Tensor lse, {NUMBERS}, bool dbeta)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)(_gradients)


@flash_backward_op.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *visibility, sinks, seed, out, lse, _, _, _, dbeta = others
    check_attention(query, key, value, beta, Visibility(*visibility), sinks, seed)
    check_backward(gradient, query, value, out, lse)
    rows = query.new_empty(query.shape[:3], dtype=torch.float32)
    return (
        *(empty_like_layout(x, x.shape[-1]) for x in (query, key, value)),
        rows if dbeta else rows.new_empty(0),
        rows.new_empty(0 if sinks is None else sinks.shape[0]),
    )


NO_GRADIENT_OF_MASK = "flash_attention has no gradient of an additive mask: detach it, or use plain torch"
MASK = 10  # the place of the mask among the inputs of the forward


def _save(ctx: Any, tensors: Sequence[Tensor | None], row_rule: Sequence[int | None], numbers: Sequence[Any]) -> None:
    ctx.save_for_backward(*tensors)
    ctx.row_rule, ctx.numbers = row_rule, numbers
    ctx.set_materialize_grads(False)  # of the statistics there are none


def _differentiate(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value, β and sinks, in their dtypes and shapes."""
    if gradient is None:
        return (None,) * 5
    query, key, value, beta, *tensors = ctx.saved_tensors
    sinks, needs_beta = tensors[4], ctx.needs_input_grad[3]
    given = (gradient, query, key, value, beta) if sinks is None else (gradient, query, key, value, beta, sinks)
    refuse_others(*given)
    # A second derivative is refused by the operator.
    differentiate = _gradients if is_eager(*given) and not torch.is_grad_enabled() else flash_backward_op
    dq, dk, dv, dbeta, dsinks = differentiate(
        gradient, query, key, value, beta, *ctx.row_rule, *tensors, *ctx.numbers, needs_beta
    )
    dbeta = dbeta.sum_to_size(beta.shape).to(beta.dtype) if needs_beta else None
    return dq, dk, dv, dbeta, None if sinks is None else dsinks.to(sinks.dtype)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    if ctx.needs_input_grad[MASK]:
        raise RuntimeError(NO_GRADIENT_OF_MASK)
    *tensors, scale, softcap, dropout_p, _, _ = inputs[7:]
    _save(ctx, (*inputs[:4], *tensors, *output[:2]), inputs[4:7], (scale, softcap, dropout_p))
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, gradient: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    *others, dsinks = _differentiate(ctx, gradient)
    return (*others, *(None,) * 7, dsinks, *(None,) * 6)


flash_forward_op.register_autograd(_backward, setup_context=_save_inputs)
flash_backward_op.register_autograd(refuse_second)


class _EagerAttention(torch.autograd.Function):
    """The same for autograd alone, which sees what has a gradient and nothing else: each tensor more takes its time."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        beta: Tensor,
        sinks: Tensor | None,
        found: Forward,
        visibility: Visibility,
        seed: Tensor | None,
        numbers: tuple[float, float | None, float],
    ) -> Tensor:
        """The output, which was found before."""
        out, lse = found[:2]
        _save(ctx, (query, key, value, beta, *visibility[3:], sinks, seed, out, lse), visibility[:3], numbers)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return *_differentiate(ctx, gradient), None, None, None, None


# Not `Function.apply`, which takes as long as autograd itself to look for transforms of torch.func, and for tensors
# that have escaped from one: `flash_attention` looks for both.
_record = super(torch.autograd.Function, _EagerAttention).apply
