"""Taps: hooks in attention modules that report calls to a listener, in the forward and backward pass.

Modules route their calls through `Tap.report`. The owner of the tap provides the report function; for the monitor it is
in `attnscale.diagnostics.autograd`. Calls of torch's own function have no module of ours: `next_tap` returns the tap of
the module whose forward pass makes the call.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from attnscale._util import state
from attnscale._util.handles import Uncopied
from attnscale.call.attention_call import AttentionCall


class Attended(NamedTuple):
    """Output of a call, and an upper bound of each row's largest logit if the backend computes one.

    The bound is detached: the largest logit itself if `exact`, otherwise the lse, at most ln n above the largest logit.
    It is −∞ in rows without visible keys, and NaN in rows with a visible NaN.
    """

    out: Tensor  # [B, H, Tq, Dv]
    bound: Tensor | None = None  # [B, H, Tq]
    exact: bool = False


Run = Callable[[AttentionCall], Attended]

_CALL_MODULE = nn.Module._call_impl.__code__
_CHECKPOINTED = (
    "it is made by a function passed to torch.utils.checkpoint inside a module. Pass a module to checkpoint instead"
)


class CallEvent(NamedTuple):
    """One call in the forward pass, detached."""

    call: AttentionCall
    result: Attended
    graph: bool = True  # gradients were enabled


class Listener(Protocol):
    """Receives the reports of a tap, on the thread of the call, without gradients and autocast.

    Each call has a number that links its forward and backward pass.
    """

    listening: bool  # calls are measured, forward and backward
    failed: bool  # reports are suspended

    @property
    def tracking(self) -> bool:
        """Whether the largest logits of forward calls are tracked."""

    @property
    def limit(self) -> float:
        """Logits above it must be known exactly."""

    def begin(self, graph: bool) -> int:
        """Assign a number to a call. `graph`: gradients are enabled.

        A call recomputed by activation checkpointing has the number of the original call.
        """

    def forward(self, event: CallEvent, number: int) -> None:
        """A call in the forward pass."""
        return

    def repeat(self, event: CallEvent) -> None:
        """A forward call that activation checkpointing recomputes inside backward."""
        return

    def backward(self, call: AttentionCall, gradient: Tensor, number: int) -> None:
        """A call in the backward pass, and the gradient of its output."""
        return

    def gradient(self, gradient: Tensor) -> None:
        """The gradient of an output, of a call that is tracked only."""
        return

    def gradients(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """The gradients of query, key and value."""
        return

    def skip(self, call: AttentionCall | None, reason: str) -> None:
        """A call that cannot be reported. None if its arguments could not be parsed."""
        return

    def give_up(self, error: Exception) -> None:
        """The listener raised an exception. Reports to it are suspended."""
        return


class Report(Protocol):
    """Runs and reports a call. `measured` is the call for the listener, including the keys of other processes."""

    def __call__(
        self, tap_id: Tensor, call: AttentionCall, run: Run, measured: AttentionCall | None = None
    ) -> Tensor: ...


class Tap(Uncopied):
    """Connects a module to a listener. `report` runs a call and reports it to the listener with the given tap id.

    The id is a tensor, so modules with different taps share one compiled graph. A tap that is attached over another one
    sets `previous` and passes calls on to it.
    """

    previous: Tap | None = None

    def __init__(self, listener: Listener, report: Report) -> None:
        number = next(state.TAP_NUMBERS)
        self.listener = listener
        self.report = report
        self.id = torch.tensor(number, device="cpu")
        state.TAPS[number] = self

    def attach(self, module: Any) -> None:
        """Install this tap in a module."""
        module.tap = self

    def detach(self, module: Any) -> None:
        """Remove this tap from a module, also from beneath another one. No-op if the module does not have it."""
        above, tap = None, vars(module).get("tap")
        while tap is not None and tap is not self:
            above, tap = tap, tap.previous
        if tap is None:
            return
        if above is not None:
            above.previous = self.previous
        elif self.previous is not None:
            module.tap = self.previous
        else:
            del module.tap

    @property
    def open(self) -> bool:
        """Whether all calls must go through the tap. Always True in a compiled graph, which outlives the current step.

        False if by-products of the backend suffice: see `tracking`.
        """
        return torch.compiler.is_compiling() or self.listener.listening or self.listener.limit < math.inf

    @property
    def tracking(self) -> bool:
        """Whether calls whose backend computes a bound of the largest logits go through the tap."""
        return self.open or self.listener.tracking

    @staticmethod
    def find(tap_id: Tensor, *, tracking: bool = False) -> Listener | None:
        """The listener of a tap id; None if it has failed, or neither measures nor (with `tracking`) tracks calls."""
        tap = state.TAPS.get(int(tap_id))
        if tap is None or tap.listener.failed:
            return None
        listener: Listener = tap.listener
        return listener if listener.listening or (tracking and listener.tracking) else None


class ModuleCall:
    """A running forward pass of a module: the taps of its attention calls, in order, and the enclosing forward pass."""

    def __init__(self, module: nn.Module, taps: Sequence[Tap], within: ModuleCall | None) -> None:
        self.module = module
        self.taps = taps
        self.within = within
        self.number = 0  # of attention calls so far


def enter_module(module: nn.Module, taps: Sequence[Tap]) -> None:
    """Start the forward pass of a module, in this thread. Its attention calls go to the taps, in order.

    The last tap also takes all further calls.
    """
    _mutate(_enter, module, taps)


def leave_module(module: nn.Module) -> None:
    """End the forward pass of a module, if it is the innermost one of this thread."""
    _mutate(_leave, module)


def leave_all_modules() -> None:
    """Forget the forward passes of this thread. An interrupted forward pass (Ctrl-C) does not reach its end."""
    state.MODULE_CALLS.innermost = None


def next_tap() -> Tap | None:
    """Return the tap of an attention call made now, in this thread. None if it is not to be reported.

    Calls within one forward pass of a module are numbered, so this function is to be called once per attention call.
    """
    innermost: ModuleCall | None = getattr(state.MODULE_CALLS, "innermost", None)
    if innermost is None:
        return None
    tap = innermost.taps[min(innermost.number, len(innermost.taps) - 1)]
    if not tap.tracking:
        return None
    if not torch.compiler.is_compiling():
        reached = _caller(sys._getframe(), innermost.module)
        if reached is None:
            return None  # left over from an interrupted forward pass
        if reached.f_code is not _CALL_MODULE:
            tap.listener.skip(None, _CHECKPOINTED)
            return None
    _mutate(_count, innermost)
    return tap


def _caller(frame: FrameType | None, module: nn.Module) -> FrameType | None:
    """Return the frame in which the module was called, or of a checkpoint inside its forward pass; None if neither.

    A checkpoint repeats its function in the backward pass, where the module is not running. If only the first run were
    reported, the two would save different tensors, which raises an error.
    """
    while frame is not None:
        if frame.f_code is _CALL_MODULE and frame.f_locals["self"] is module:
            return frame
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return frame
        frame = frame.f_back
    return None


def _enter(module: nn.Module, taps: Sequence[Tap]) -> None:
    state.MODULE_CALLS.innermost = ModuleCall(module, taps, getattr(state.MODULE_CALLS, "innermost", None))


def _leave(module: nn.Module) -> None:
    innermost: ModuleCall | None = getattr(state.MODULE_CALLS, "innermost", None)
    if innermost is not None and innermost.module is module:
        state.MODULE_CALLS.innermost = innermost.within


def _count(running: ModuleCall) -> None:
    running.number += 1


def _mutate(change: Callable[..., None], *arguments: Any) -> None:
    """Call a function that changes `state.MODULE_CALLS`.

    torch.compile rejects such changes inside a checkpoint, because its backward pass would not repeat them. There is no
    need to repeat these changes: the end of the forward pass of the module undoes them.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(change, *arguments)
    else:
        change(*arguments)
