"""Reports each attention call to the listener of its tap, in the forward and, if it is measured, in the backward pass.

The backward report uses the tensors saved by autograd; under activation checkpointing these are the recomputed ones. In
eager mode the reports come from an autograd function and a hook. In compiled graphs they come from custom operators,
which look up the listener at run time, so enabling or disabling a listener does not recompile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _register_effectful_op
from torch._library.effects import EffectType
from torch.autograd import Function, forward_ad
from torch.library import custom_op

from attnscale._util.tracing import is_watched
from attnscale.call.attention_call import FLAT_CALL, TENSORS, AttentionCall, FlatCall
from attnscale.call.tap import Attended, CallEvent, Listener, Run, Tap
from attnscale.diagnostics.listener import UNKNOWN

T = TypeVar("T")


def run_reported(tap_id: Tensor, call: AttentionCall, run: Run, measured: AttentionCall | None = None) -> Tensor:
    """Return the output of `run(call)` and report the call to the listener of a tap, in forward and backward.

    A listener that only tracks the largest logits receives the forward pass alone. If a process holds only some of the
    keys, `measured` is the same call with all keys, for the row statistics. The reported gradients belong to `call`.
    """
    known = call if measured is None else measured
    graph = torch.is_grad_enabled()
    if not torch.compiler.is_compiling():
        if call.query.device.type == "meta":  # no values to report
            return run(call).out
        if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
            reason = "inside torch.func transforms or forward-mode AD"  # not supported by the autograd functions below
            _send(tap_id, call.query.device, lambda listener: listener.skip(call, reason))
            return run(call).out
        if Tap.find(tap_id) is None:
            found = run(call)
            if not is_watched():
                _send_call(CallEvent(known.detached(), found._replace(out=found.out.detach()), graph), UNKNOWN, tap_id)
                if found.out.requires_grad and Tap.find(tap_id, tracking=True) is not None:
                    found.out.register_hook(partial(_send_gradient, tap_id))  # type: ignore[no-untyped-call]
            return found.out
    parts = FlatCall.of(known.detached())
    if is_watched():
        query, key, value = _GraphInputs.apply(tap_id, call.query, call.key, call.value)  # type: ignore[no-untyped-call]
        found = run(replace(call, query=query, key=key, value=value))
        result: Tensor = _GraphOutput.apply(*found, graph, tap_id, *parts)  # type: ignore[no-untyped-call]
        return result
    eager = _EagerCall(tap_id)
    query, key, value = _EagerInputs.apply(eager, parts, call.query, call.key, call.value)  # type: ignore[no-untyped-call]
    found = run(replace(call, query=query, key=key, value=value))
    eager.number = _begin(tap_id, graph)
    _send_forward(*found, eager.number, graph, tap_id, *parts)
    if found.out.requires_grad:
        found.out.register_hook(partial(setattr, eager, "gradient"))  # type: ignore[no-untyped-call]
    return found.out


@dataclass(eq=False)
class _EagerCall:
    """State of a call for its backward pass: tap, call number, and the output gradient once it is available."""

    tap_id: Tensor
    number: int = UNKNOWN
    gradient: Tensor | None = None


class _EagerInputs(Function):
    """Identity of query, key and value; its backward reports the call and all gradients.

    A hook provides the output gradient. An autograd function on the output would have to copy it, and autograd would
    keep both copies: one extra activation per layer.
    """

    @staticmethod
    def forward(
        ctx: Any, eager: _EagerCall, parts: FlatCall, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.eager, ctx.constants = eager, parts[TENSORS:]
        ctx.save_for_backward(*parts[:TENSORS])
        return query.view_as(query), key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        eager = ctx.eager
        arrived, eager.gradient = eager.gradient, None
        if arrived is not None:
            _send_backward(arrived, eager.number, eager.tap_id, *ctx.saved_tensors, *ctx.constants)
            _send_gradients(eager.tap_id, *gradients)
        return None, None, *gradients


class _GraphInputs(Function):
    """Identity of query, key and value in a graph; its backward reports their gradients."""

    @staticmethod
    def forward(ctx: Any, tap_id: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(tap_id)
        return query.view_as(query), key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        report_gradients(*ctx.saved_tensors, *gradients)
        return None, *gradients


class _GraphOutput(Function):
    """Reports the output and its call in forward, and the output gradient in backward, in a graph."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, bound: Tensor | None, exact: bool, graph: bool, tap_id: Tensor, *parts: Any
    ) -> Tensor:
        ctx.constants = parts[TENSORS:]
        number = call_number(out, tap_id, graph)
        report_forward(out, bound, exact, number, graph, tap_id, *parts)
        ctx.save_for_backward(number, tap_id, *parts[:TENSORS])
        return out.clone()  # an alias would forbid in-place changes

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        report_backward(gradient, *ctx.saved_tensors, *ctx.constants)
        return gradient, *(None,) * (4 + TENSORS + len(ctx.constants))


def _send(
    tap_id: Tensor, device: torch.device, message: Callable[[Listener], T], *, tracking: bool = False
) -> T | None:
    """Send a message to the listener of a tap, with `tracking` also if it only tracks calls.

    If it raises, the listener is disabled until the end of the step.
    """
    listener = Tap.find(tap_id, tracking=tracking)
    if listener is None:
        return None
    try:
        # Only if autocast is enabled: some devices do not support it, and entering the context takes time.
        autocast = torch.is_autocast_enabled(device.type)
        with torch.no_grad(), torch.autocast(device.type, enabled=False) if autocast else nullcontext():
            return message(listener)
    except Exception as error:
        listener.give_up(error)
        return None


def _begin(tap_id: Tensor, graph: bool) -> int:
    number = _send(tap_id, tap_id.device, lambda listener: listener.begin(graph))
    return UNKNOWN if number is None else number


def _send_forward(
    out: Tensor,
    bound: Tensor | None,
    exact: bool,
    number: int | Tensor,
    graph: bool,
    tap_id: Tensor,
    *parts: Any,
) -> None:
    _send_call(CallEvent(FlatCall(*parts).to_call(), Attended(out, bound, exact), graph), int(number), tap_id)


def _send_call(event: CallEvent, number: int, tap_id: Tensor) -> None:
    def message(listener: Listener) -> None:
        # A recomputation by activation checkpointing, inside backward, is not a new call.
        if torch._C._current_graph_task_id() == -1:
            listener.forward(event, number)
        else:
            listener.repeat(event)

    _send(tap_id, event.result.out.device, message, tracking=True)


def _send_backward(gradient: Tensor, number: int | Tensor, tap_id: Tensor, *parts: Any) -> None:
    if Tap.find(tap_id) is None:
        _send_gradient(tap_id, gradient)
        return
    call = FlatCall(*parts).to_call()
    _send(tap_id, gradient.device, lambda listener: listener.backward(call, gradient, int(number)))


def _send_gradient(tap_id: Tensor, gradient: Tensor) -> None:
    _send(tap_id, gradient.device, lambda listener: listener.gradient(gradient), tracking=True)


def _send_gradients(tap_id: Tensor, query: Tensor, key: Tensor, value: Tensor) -> None:
    _send(tap_id, query.device, lambda listener: listener.gradients(query, key, value))


# A separate operator: an operator with both a result and an effect cannot be recomputed by checkpointing.
@custom_op("attnscale::call_number", mutates_args=())
def call_number(out: Tensor, tap_id: Tensor, graph: bool) -> Tensor:
    """Return the number of a call as a tensor. The argument `out` orders the operator after the call in a graph."""
    return torch.tensor(_begin(tap_id, graph), device="cpu")


@call_number.register_fake
def _fake_number(*_: Any) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _operator(name: str, send: Callable[..., None], schema: str) -> Any:
    """Wrap a send function as an effectful operator: compiled graphs neither remove nor reorder it."""
    operator = custom_op(f"attnscale::{name}", send, mutates_args=(), schema=f"({schema}) -> ()")
    operator.register_fake(lambda *_: None)
    _register_effectful_op(f"attnscale::{name}", EffectType.ORDERED)
    return operator


report_forward = _operator(
    "report_forward",
    _send_forward,
    f"Tensor out, Tensor? bound, bool exact, Tensor number, bool graph, Tensor tap_id, {FLAT_CALL}",
)
report_backward = _operator(
    "report_backward", _send_backward, f"Tensor gradient, Tensor number, Tensor tap_id, {FLAT_CALL}"
)
report_gradients = _operator(
    "report_gradients", _send_gradients, "Tensor tap_id, Tensor query, Tensor key, Tensor value"
)
