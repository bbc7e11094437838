"""Taps: hooks in attention modules that report calls to a listener, in the forward and backward pass.

Modules route their calls through `Tap.report`. The owner of the tap provides the report function; for the monitor it is
in `attnscale.diagnostics.autograd`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

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

    def gradients(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """The gradients of query, key and value."""
        return

    def skip(self, call: AttentionCall, reason: str) -> None:
        """A call that cannot be reported."""
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

    The id is a tensor, so modules with different taps share one compiled graph.
    """

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
        """Remove this tap from a module. No-op if the module has another tap or none."""
        if vars(module).get("tap") is self:
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
