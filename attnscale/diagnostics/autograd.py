"""How a tap hears what passes forward, and what comes back as gradients.

Everything noted in backward comes from what autograd saved, and so from recomputed tensors where activations are
checkpointed. In a compiled graph operators note it: they run, or return at once, as the moment asks, and turning a
listener on and off changes no graph. The number of a call, by which backward names it, is saved with the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _register_effectful_op
from torch._library.effects import EffectType
from torch.autograd import Function, forward_ad

from attnscale._util.tracing import is_watched
from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import Context
from attnscale.call.tap import Heard, Listener, Tap
from attnscale.diagnostics.recomputed_calls import UNKNOWN

T = TypeVar("T")


def hear(ticket: Tensor, call: AttentionCall, run: Callable[[AttentionCall], Tensor]) -> Tensor:
    """`run(call)`, with what goes in and comes out noted under a ticket, there and back."""
    if not torch.compiler.is_compiling():
        if call.query.device.type == "meta":  # there are no numbers to look at
            return run(call)
        if _is_transformed():
            _note_skipped(ticket, call)
            return run(call)
    noted, graph = _noted(call), torch.is_grad_enabled()
    if is_watched():
        query, key, value = _Inputs.apply(ticket, call.query, call.key, call.value)  # type: ignore[no-untyped-call]
        out = run(replace(call, query=query, key=key, value=value))
        result: Tensor = _Output.apply(out, graph, ticket, *noted)  # type: ignore[no-untyped-call]
        return result
    passing = Passing()
    query, key, value = _Passage.apply(passing, call.query, call.key, call.value, ticket, *noted)  # type: ignore[no-untyped-call]
    out = run(replace(call, query=query, key=key, value=value))
    lasting = out.requires_grad and out.device.type == "cpu"
    passing.number = _number_of(ticket, graph)
    _tell_forward(out, passing.number, graph, ticket, *noted, lasting=lasting)
    if out.requires_grad:
        out.register_hook(passing.arrive)  # type: ignore[no-untyped-call]
    return out


class Passing:
    """One call on its way: its number, and the gradient that has arrived at its output."""

    def __init__(self) -> None:
        self.number = UNKNOWN
        self.gradient: Tensor | None = None

    def arrive(self, gradient: Tensor) -> None:
        """Keep a gradient until backward has passed the call."""
        self.gradient = gradient


def _is_transformed() -> bool:
    """Whether a transform of torch.func or forward-mode AD is at work: it would have to pass through what notes."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


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
        ctx: Any, passing: Passing, query: Tensor, key: Tensor, value: Tensor, ticket: Tensor, *noted: Any
    ) -> tuple[Tensor, ...]:
        ctx.passing, ctx.numbers = passing, noted[TENSORS:]
        ctx.save_for_backward(ticket, *noted[:TENSORS])
        return query.view_as(query), key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ticket, *tensors = ctx.saved_tensors
        arrived, ctx.passing.gradient = ctx.passing.gradient, None
        if arrived is not None:
            _tell_backward(arrived, ctx.passing.number, ticket, *tensors, *ctx.numbers)
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
    def forward(ctx: Any, out: Tensor, graph: bool, ticket: Tensor, *noted: Any) -> Tensor:
        ctx.numbers = noted[TENSORS:]
        number = call_number(out, ticket, graph)
        note_forward(out, number, graph, ticket, *noted)
        ctx.save_for_backward(number, ticket, *noted[:TENSORS])
        return out.clone()  # an alias would forbid changing it in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        note_backward(gradient, *ctx.saved_tensors, *ctx.numbers)
        return gradient, *(None,) * (2 + TENSORS + len(ctx.numbers))


def _call_number(out: Tensor, ticket: Tensor, graph: bool) -> Tensor:
    """The number of a call that a listener is about to be told of; the output tells a graph which call it is."""
    return torch.tensor(_number_of(ticket, graph))


def _note_forward(out: Tensor, number: Tensor, graph: bool, ticket: Tensor, *noted: Any) -> None:
    """Tell the listener of a ticket of a call; a graph may use the memory of its tensors for others right after."""
    _tell_forward(out, int(number), graph, ticket, *noted)


def _note_backward(gradient: Tensor, number: Tensor, ticket: Tensor, *noted: Any) -> None:
    """Tell the listener of a ticket of a call that backward has come to."""
    _tell_backward(gradient, int(number), ticket, *noted)


def _number_of(ticket: Tensor, graph: bool) -> int:
    listener = Tap.find(ticket)
    number = None if listener is None else _tell(listener, ticket.device, listener.begin, graph)
    return UNKNOWN if number is None else number


def _tell_forward(out: Tensor, number: int, graph: bool, ticket: Tensor, *noted: Any, lasting: bool = False) -> None:
    """Tell the listener of a ticket of a call."""
    listener = Tap.find(ticket)
    # A checkpoint runs the forward once more inside backward: that is not another call.
    if listener is not None and torch._C._current_graph_task_id() == -1:
        _tell(listener, out.device, listener.forward, Heard(_call(*noted), out, lasting, graph), number)


def _tell_backward(gradient: Tensor, number: int, ticket: Tensor, *noted: Any) -> None:
    """Tell the listener of a ticket of a call that backward has come to."""
    listener = Tap.find(ticket)
    if listener is not None:
        _tell(listener, gradient.device, listener.backward, _call(*noted), gradient, number)


def _note_skipped(ticket: Tensor, call: AttentionCall) -> None:
    """Tell the listener of a ticket of a call that it cannot be told more of."""
    listener = Tap.find(ticket)
    if listener is not None:
        _tell(listener, call.query.device, listener.skip, call, "inside torch.func transforms or forward-mode AD")


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

# The number is an operator's of its own: one with a result and an effect cannot be computed again in a checkpoint.
call_number = torch.library.custom_op("attnscale::call_number", _call_number, mutates_args=())
note_forward = torch.library.custom_op(
    "attnscale::note_forward",
    _note_forward,
    mutates_args=(),
    schema=f"(Tensor out, Tensor number, bool graph, {_CALL}) -> ()",
)
note_backward = torch.library.custom_op(
    "attnscale::note_backward",
    _note_backward,
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor number, {_CALL}) -> ()",
)
note_gradients = torch.library.custom_op("attnscale::note_gradients", _note_gradients, mutates_args=())


@call_number.register_fake
def _no_number(*_: Any) -> Tensor:
    return torch.empty((), dtype=torch.int64)


@note_forward.register_fake
@note_backward.register_fake
@note_gradients.register_fake
def _nothing(*_: Any) -> None:
    return None


for _name in ("note_forward", "note_backward", "note_gradients"):
    _register_effectful_op(f"attnscale::{_name}", EffectType.ORDERED)


def _tell(listener: Listener, device: torch.device, what: Callable[..., T], *arguments: Any) -> T | None:
    """Whatever happens to a listener must not happen to the run: it is not told any more for now."""
    try:
        # Not every device knows autocast, and turning off what is not on takes its time.
        on = torch.is_autocast_enabled(device.type)
        with torch.no_grad(), torch.autocast(device.type, enabled=False) if on else nullcontext():
            return what(*arguments)
    except Exception as error:
        listener.give_up(error)
        return None


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
    return AttentionCall(query, key, value, context, scale, 0.0, softcap, sinks, beta=beta)
