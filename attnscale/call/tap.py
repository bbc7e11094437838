"""The place in an attention module where its calls can be listened to, forward and backward.

Modules send their calls through `Tap.report`. How a call is reported is given to the tap by its owner: for the monitor,
`attnscale.diagnostics.autograd`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from attnscale._util import state
from attnscale._util.handles import Uncopied
from attnscale.call.attention_call import AttentionCall

Run = Callable[[AttentionCall], Tensor]


class CallEvent(NamedTuple):
    """One call in forward, detached."""

    call: AttentionCall
    out: Tensor  # [B, H, Tq, Dv]
    graph: bool = True  # gradients were enabled


class Listener(Protocol):
    """What a tap reports to, on the thread of the call, without gradients and without autocast.

    A call has a number, by which backward refers to it.
    """

    listening: bool
    failed: bool  # nothing more is reported to it for now

    def begin(self, graph: bool) -> int:
        """The number of a call that is made, with gradients enabled or not. A call that a checkpoint repeats inside
        backward has the number of the first.
        """

    def forward(self, event: CallEvent, number: int) -> None:
        """A call in forward."""
        return

    def backward(self, call: AttentionCall, gradient: Tensor, number: int) -> None:
        """A call that backward has reached, and the gradient of its output."""
        return

    def gradients(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """The gradients of query, key and value."""
        return

    def skip(self, call: AttentionCall, reason: str) -> None:
        """A call that cannot be reported."""
        return

    def give_up(self, error: Exception) -> None:
        """The listener has raised an exception; nothing more is reported to it for now."""
        return


class Report(Protocol):
    """How a call is run and reported; `measured` is the same call for the listener, with keys of other processes."""

    def __call__(
        self, tap_id: Tensor, call: AttentionCall, run: Run, measured: AttentionCall | None = None
    ) -> Tensor: ...


class Tap(Uncopied):
    """Connects a module to a listener; `report` runs a call and reports it to the listener of a tap's id.

    The id is a tensor, so that modules with different taps share one compiled graph.
    """

    def __init__(self, listener: Listener, report: Report) -> None:
        number = next(state.TAP_NUMBERS)
        self.listener = listener
        self.report = report
        self.id = torch.tensor(number, device="cpu")
        state.TAPS[number] = self

    def attach(self, module: Any) -> None:
        """Become the tap of a module."""
        module.tap = self

    def detach(self, module: Any) -> None:
        """Leave a module, unless it has another tap by now or none."""
        if vars(module).get("tap") is self:
            del module.tap

    @property
    def open(self) -> bool:
        """Whether calls must go through the tap: in a compiled graph always, since it outlives the present step."""
        return torch.compiler.is_compiling() or self.listener.listening

    @staticmethod
    def find(tap_id: Tensor) -> Listener | None:
        """The listener of a tap, if it is listening now."""
        tap = state.TAPS.get(int(tap_id))
        return tap.listener if tap is not None and tap.listener.listening and not tap.listener.failed else None
