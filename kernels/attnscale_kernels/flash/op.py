"""Flash attention as torch.library operators with fake kernels and gradients, for autograd and torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from ..arguments import check_attention, check_backward, check_numbers
from ..availability import refuse_others, refuse_second
from ..errors import reject_type
from ..launch import Forward, empty_like_layout, new_forward, run
from ..operators import FLAT_ATTENTION, TENSORS, FlatAttention, is_eager, needs_gradient, operator
from ..visibility import Visibility
from .launch import NO_GRADIENTS, StatisticsGradients, flash_backward, flash_forward, forward_launches


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
    differentiable: bool = False,
) -> Forward:
    """Attention with one temperature per query row: softmax(β·(softcap(scale·q·k) + bias))·v.

    Differentiable with respect to query, key, value, β and sinks; statistics only with `differentiable`.

    Args:
        query: [B, H, Tq, D] in fp32, fp16 or bf16, D ≤ 256.
        key: [B, Hkv, Tk, D]; Hkv divides H.
        value: [B, Hkv, Tk, DV], DV ≤ 256.
        beta: The temperatures, any shape that broadcasts to [B, H, Tq].
        visibility: The keys that each row may see, and an additive mask (bias).
        scale: Factor of q·k.
        softcap: c for c·tanh(scale·q·k / c), or None.
        sinks: Attention sink logits [H], not scaled by β, or None.
        dropout_p: Dropout probability of the weights. Requires `seed` if > 0.
        seed: int64 scalar on the device of the query.
        entropy: Also return the entropy of each row.
        winner: Also return the slot of the largest logit of each row.
        differentiable: lse and entropy carry gradients. That of the largest logit follows from the winner's slot.

    Returns:
        A `Forward` with the output [B, H, Tq, DV] and the statistics of each row. Rows without a visible key give zeros
        and lse = −∞.

    Raises:
        KernelArgumentError: An argument has an unsupported shape, device or value.
        KernelTypeError: An argument has an unsupported type, dtype or layout.
        KernelUnavailableError: Triton does not support the device.
        RuntimeError: Forward-mode AD, torch.func gradients, double backward, or the gradient of an additive mask. These
            are not supported; torch would silently treat them as zero.

    Example:
        >>> from attnscale_kernels import interpreting
        >>> device = "cpu" if interpreting() else "cuda"
        >>> q, k, v = (torch.randn(1, 2, 8, 16, device=device) for _ in range(3))
        >>> beta = torch.arange(2.0, 10.0, device=device).log()
        >>> flash_attention(q, k, v, beta, Visibility(right=0), scale=0.25).out.shape
        torch.Size([1, 2, 8, 16])
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
    # Tensors that escaped from a torch.func transform must go through the operator: autograd records them only there.
    direct = eager and not (recorded and (differentiable or any(map(is_functorch_wrapped_tensor, tensors[:4]))))
    if direct:
        if recorded and visibility.mask is not None and visibility.mask.requires_grad:
            raise RuntimeError(NO_GRADIENT_OF_MASK)
        made = forward_launches(
            query, key, value, beta, visibility, scale=scale, softcap=softcap, sinks=sinks, dropout_p=dropout_p,
            seed=seed, entropy=entropy, winner=winner,
        )  # fmt: skip
        found = run(made, query)
        if not recorded:
            return found
        flat = FlatAttention.of(
            query, key, value, beta, visibility, sinks, seed, scale=scale, softcap=softcap, dropout_p=dropout_p
        )
        return Forward(_record(query, key, value, beta, sinks, found, flat), *found[1:])
    check_attention(query, key, value, beta, visibility, sinks, seed)
    check_numbers(scale, softcap, dropout_p)
    refuse_others(*tensors)
    flat = FlatAttention.of(
        query, key, value, beta, visibility, sinks, seed, scale=scale, softcap=softcap, dropout_p=dropout_p
    )
    out, lse, top, disorder, slots = flash_forward_op(*flat, entropy, winner, differentiable)
    if not differentiable:
        lse, disorder = lse.detach(), disorder.detach()
    return Forward(out, lse, top.detach(), disorder if entropy else None, slots.detach() if winner else None)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return output, lse, largest logit, entropy and winner; the last two are empty if not requested."""
    flat, (entropy, winner, _) = FlatAttention.split(arguments)
    return flash_forward(*flat.tensors, **flat.options, entropy=entropy, winner=winner).outputs()


flash_forward_op = operator(
    "flash_forward",
    f"({FLAT_ATTENTION}, bool entropy, bool winner, bool differentiable) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)(_forward)


@flash_forward_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    flat, (entropy, winner, _) = FlatAttention.split(arguments)
    check_attention(*flat.tensors, flat.sinks, flat.seed)
    return new_forward(flat.query, flat.value.shape[-1], entropy=entropy, winner=winner).outputs()


def _gradients(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of query, key, value, β [B, H, Tq] and sinks; the last two are empty if not requested."""
    flat, (gradient, out, lse, dbeta, *of_stats) = FlatAttention.split(arguments)
    given = StatisticsGradients(*of_stats)
    found = flash_backward(gradient, *flat.tensors, out, lse, **flat.options, dbeta=dbeta, of_stats=given)
    of_beta, of_sinks = (lse.new_empty(0) if x is None else x for x in (found.beta, found.sinks))
    return found.query, found.key, found.value, of_beta, of_sinks


flash_backward_op = operator(
    "flash_backward",
    f"({FLAT_ATTENTION}, Tensor gradient, Tensor out, Tensor lse, bool dbeta, Tensor? shift, Tensor? slope)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)(_gradients)


@flash_backward_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    flat, (gradient, out, lse, dbeta, *_) = FlatAttention.split(arguments)
    check_attention(*flat.tensors, flat.sinks, flat.seed)
    check_backward(gradient, flat.query, flat.value, out, lse)
    rows = flat.query.new_empty(flat.query.shape[:3], dtype=torch.float32)
    return (
        *(empty_like_layout(x, x.shape[-1]) for x in (flat.query, flat.key, flat.value)),
        rows if dbeta else rows.new_empty(0),
        rows.new_empty(0 if flat.sinks is None else flat.sinks.shape[0]),
    )


NO_GRADIENT_OF_MASK = (
    "flash_attention has no gradient of an additive mask: detach the mask or use a plain torch backend"
)


def _save(ctx: Any, flat: FlatAttention, out: Tensor, lse: Tensor, *stats: Tensor) -> None:
    """Save the call, its output and lse. `stats` are largest logit and entropy, if statistics carry gradients."""
    held = flat._asdict()
    ctx.save_for_backward(*map(held.pop, TENSORS), out, lse, *stats)
    ctx.constants = held
    ctx.set_materialize_grads(False)  # outputs that are not part of a loss have no gradients


def _differentiate(
    ctx: Any,
    gradient: Tensor | None,
    dlse: Tensor | None = None,
    dentropy: Tensor | None = None,
    *,
    needs_beta: bool,
) -> dict[str, Tensor | None]:
    """Return the gradients of query, key, value, β and sinks, in their dtypes and shapes."""
    if gradient is None and dlse is None and dentropy is None:
        return {}
    saved = ctx.saved_tensors
    tensors, (out, lse, *stats) = saved[: len(TENSORS)], saved[len(TENSORS) :]
    gradient = torch.zeros_like(out) if gradient is None else gradient
    terms = _terms(dlse, dentropy, lse, *stats) if stats else NO_GRADIENTS
    flat = FlatAttention(**ctx.constants, **dict(zip(TENSORS, tensors, strict=True)))
    beta, sinks = flat.beta, flat.sinks
    given = [gradient, flat.query, flat.key, flat.value, beta]
    given += [x for x in (sinks, dlse, dentropy) if x is not None]
    refuse_others(*given)
    # The operator raises on double backward.
    differentiate = _gradients if is_eager(*given) and not torch.is_grad_enabled() else flash_backward_op
    dq, dk, dv, dbeta, dsinks = differentiate(*flat, gradient, out, lse, needs_beta, *terms)
    dbeta = dbeta.sum_to_size(beta.shape).to(beta.dtype) if needs_beta else None
    dsinks = None if sinks is None else dsinks.to(sinks.dtype)
    return {"query": dq, "key": dk, "value": dv, "beta": dbeta, "sinks": dsinks}


def _terms(
    dlse: Tensor | None, dentropy: Tensor | None, lse: Tensor, top: Tensor, entropy: Tensor
) -> StatisticsGradients:
    """Return the terms of the backward pass: dℓ = w·(dP − Δ − shift − slope·ln w), shift = dH·H − dlse, slope = dH.

    Rows without visible keys contribute nothing; the lse of a row with a sink alone depends on the sink.
    """
    shift = None if dlse is None else -dlse
    slope = None if dentropy is None else dentropy.masked_fill(top == -torch.inf, 0.0)
    if slope is not None:
        shift = slope * entropy if shift is None else shift + slope * entropy
    return StatisticsGradients(None if shift is None else shift.masked_fill(lse == -torch.inf, 0.0), slope)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    flat, others = FlatAttention.split(inputs)
    if ctx.needs_input_grad[flat._fields.index("mask")]:
        raise RuntimeError(NO_GRADIENT_OF_MASK)
    *_, differentiable = others
    out, lse, top, disorder, slots = output
    _save(ctx, flat, out, lse, *((top, disorder) if differentiable else ()))
    ctx.others = len(others)
    ctx.mark_non_differentiable(top, slots, *(() if differentiable else (lse, disorder)))


def _backward(ctx: Any, gradient: Tensor | None, *of_stats: Tensor | None) -> tuple[Tensor | None, ...]:
    dlse, _, dentropy, _ = of_stats
    needs_beta = ctx.needs_input_grad[FlatAttention._fields.index("beta")]
    found = _differentiate(ctx, gradient, dlse, dentropy, needs_beta=needs_beta)
    return *FlatAttention.gradients(**found), *(None,) * ctx.others


flash_forward_op.register_autograd(_backward, setup_context=_save_inputs)
flash_backward_op.register_autograd(refuse_second)


class _EagerAttention(torch.autograd.Function):
    """The same gradients for eager mode. Only differentiable tensors are inputs, as each tensor costs host time."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        beta: Tensor,
        sinks: Tensor | None,
        found: Forward,
        flat: FlatAttention,
    ) -> Tensor:
        """Return the output that was computed before; `flat` holds the same tensors."""
        _save(ctx, flat, found.out, found.lse)
        return found.out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        found = _differentiate(ctx, gradient, needs_beta=ctx.needs_input_grad[3])
        return *map(found.get, ("query", "key", "value", "beta", "sinks")), None, None


# Bypasses `Function.apply`, which spends as much time as autograd itself on checks for torch.func transforms and
# escaped tensors. `flash_attention` has already made both checks.
_record = super(torch.autograd.Function, _EagerAttention).apply
