"""How a tap hears what passes forward, and what comes back as gradients.

Everything noted in backward comes from what autograd saved, and so from recomputed tensors where activations are
checkpointed. In a compiled graph operators note it that have no results: they run, or return at once, as the moment
asks, and turning a listener on and off changes no graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _register_effectful_op
from torch._library.effects import EffectType
from torch.autograd import Function

from attnscale.backends.call import AttentionCall
from attnscale.context import Context
from attnscale.scratch import is_watched
from attnscale.tap import Heard, Listener, Tap, give_up


def hear(ticket: Tensor, call: AttentionCall, run: Callable[[AttentionCall], Tensor]) -> Tensor:
    """`run(call)`, with what goes in and comes out noted under a ticket, there and back."""
    noted = _noted(call)
    if is_watched():
        query, key, value = _Inputs.apply(ticket, call.query, call.key, call.value)  # type: ignore[no-untyped-call]
        out = run(replace(call, query=query, key=key, value=value))
        result: Tensor = _Output.apply(out, ticket, *noted)  # type: ignore[no-untyped-call]
        return result
    arrived: list[Tensor] = []
    query, key, value = _Passage.apply(arrived, call.query, call.key, call.value, ticket, *noted)  # type: ignore[no-untyped-call]
    out = run(replace(call, query=query, key=key, value=value))
    _note_forward(out, ticket, *noted, lasting=out.requires_grad and out.device.type == "cpu")
    if out.requires_grad:
        out.register_hook(arrived.append)  # type: ignore[no-untyped-call]
    return out


def _noted(call: AttentionCall) -> tuple[Tensor | float | None, ...]:
    """All that is noted of a call besides its output: tensors, and after them numbers."""
    context, slot, beta = call.context, call.context.slot, call.beta
    return (
        call.query.detach(),
        call.key.detach(),
        call.value.detach(),
        beta.detach() if isinstance(beta, Tensor) else torch.full((1, 1, 1), beta, device=call.query.device),
        slot if isinstance(slot, Tensor) else None,
        context.first,
        context.last,
        context.padding,
        None if context.mask is None else context.mask.detach(),
        None if call.sinks is None else call.sinks.detach(),
        0 if isinstance(slot, Tensor) else slot,
        context.causal,
        *context.window,
        call.scale,
        call.softcap,
    )


class _Passage(Function):
    """Query, key and value. On the way back, the gradient that has arrived at the output and theirs are noted.

    A hook on the output leaves it there. Had the output passed through a function too, it would have to be a copy, and
    autograd would keep both: one more activation a layer.
    """

    @staticmethod
    def forward(
        ctx: Any, arrived: list[Tensor], query: Tensor, key: Tensor, value: Tensor, ticket: Tensor, *noted: Any
    ) -> tuple[Tensor, ...]:
        ctx.arrived, ctx.numbers = arrived, noted[TENSORS:]
        ctx.save_for_backward(ticket, *noted[:TENSORS])
        return query.view_as(query), key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ticket, *tensors = ctx.saved_tensors
        if ctx.arrived:
            _note_backward(ctx.arrived.pop(), ticket, *tensors, *ctx.numbers)
            _note_gradients(ticket, *gradients)
        return None, *gradients, *(None,) * (1 + len(tensors) + len(ctx.numbers))


class _Inputs(Function):
    """Query, key and value in a graph, whose gradients are noted."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(ticket)
        return query.view_as(query), key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        note_gradients(*ctx.saved_tensors, *gradients)
        return None, *gradients


class _Output(Function):
    """The output in a graph, noted with the call that made it; again in backward, from what was saved."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, ticket: Tensor, *noted: Any) -> Tensor:
        ctx.numbers = noted[TENSORS:]
        note_forward(out, ticket, *noted)
        ctx.save_for_backward(ticket, *noted[:TENSORS])
        return out.clone()  # an alias would forbid changing it in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        note_backward(gradient, *ctx.saved_tensors, *ctx.numbers)
        return gradient, *(None,) * (1 + TENSORS + len(ctx.numbers))


def _note_forward(out: Tensor, ticket: Tensor, *noted: Any, lasting: bool = False) -> None:
    """Tell the listener of a ticket of a call; a graph may use the memory of its tensors for others right after."""
    listener = Tap.find(ticket)
    # A checkpoint runs the forward once more inside backward: that is not another call.
    if listener is not None and torch._C._current_graph_task_id() == -1:
        _tell(listener, out.device, listener.forward, Heard(_call(*noted), out, lasting))


def _note_backward(gradient: Tensor, ticket: Tensor, *noted: Any) -> None:
    """Tell the listener of a ticket of a call that backward has come to."""
    listener = Tap.find(ticket)
    if listener is not None:
        _tell(listener, gradient.device, listener.backward, _call(*noted), gradient)


def _note_gradients(ticket: Tensor, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Tell the listener of a ticket of the gradients of a call's inputs."""
    listener = Tap.find(ticket)
    if listener is not None:
        _tell(listener, query.device, listener.gradients, query, key, value)


# A ticket, and what `_noted` gives: so many tensors, and the numbers.
TENSORS = 10
_CALL = (
    "Tensor ticket, Tensor query, Tensor key, Tensor value, Tensor beta, Tensor? slots, Tensor? first, Tensor? last, "
    "Tensor? padding, Tensor? mask, Tensor? sinks, "
    "SymInt slot, bool causal, SymInt? left, SymInt? right, float scale, float? softcap"
)

note_forward = torch.library.custom_op(
    "attnscale::note_forward", _note_forward, mutates_args=(), schema=f"(Tensor out, {_CALL}) -> ()"
)
note_backward = torch.library.custom_op(
    "attnscale::note_backward", _note_backward, mutates_args=(), schema=f"(Tensor gradient, {_CALL}) -> ()"
)
note_gradients = torch.library.custom_op("attnscale::note_gradients", _note_gradients, mutates_args=())


@note_forward.register_fake
@note_backward.register_fake
@note_gradients.register_fake
def _nothing(*_: Any) -> None:
    return None


for _name in ("note_forward", "note_backward", "note_gradients"):
    _register_effectful_op(f"attnscale::{_name}", EffectType.ORDERED)


def _tell(listener: Listener, device: torch.device, what: Callable[..., None], *arguments: Any) -> None:
    """Whatever happens to a listener must not happen to the run: it is not told any more."""
    try:
        # Not every device knows autocast, and turning off what is not on takes its time.
        on = torch.is_autocast_enabled(device.type)
        with torch.no_grad(), torch.autocast(device.type, enabled=False) if on else nullcontext():
            what(*arguments)
    except Exception as error:
        give_up(listener, error)


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    slots: Tensor | None,
    first: Tensor | None,
    last: Tensor | None,
    padding: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    slot: int,
    causal: bool,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float | None,
) -> AttentionCall:
    place = slot if slots is None else slots
    context = Context(
        query.shape[2], key.shape[2], query.device, causal, place, (left, right), first, last, padding, mask
    )
    return AttentionCall(query, key, value, context, beta, scale, 0.0, softcap, sinks)
