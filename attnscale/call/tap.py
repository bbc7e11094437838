"""Where attention can be listened to: what passes forward, and what comes back as gradients.

A module with a `tap` sends its calls through `listen`; how they are heard is in `attnscale.diagnostics.autograd`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from attnscale.call.attention_call import AttentionCall


class Heard(NamedTuple):
    """One call as it passed a tap: what `AttentionCall` says of it, detached."""

    call: AttentionCall
    out: Tensor  # [B, H, Tq, Dv]
    lasting: bool = False  # autograd keeps query, key and value as they are until backward has come to the call
    graph: bool = True  # gradients were enabled


class Listener(Protocol):
    """Whoever a tap reports to; all of it on the thread of the call, without gradients and without autocast.

    A call has a number, by which backward names the call that it has come to.
    """

    listening: bool
    failed: bool  # it is not told anything more for now

    def begin(self, graph: bool) -> int:
        """A call is made, with gradients enabled or not: its number. One that a checkpoint makes again inside backward
        has the number of the first.
        """
        ...

    def forward(self, heard: Heard, number: int) -> None:
        """A call, in forward."""
        ...

    def backward(self, call: AttentionCall, gradient: Tensor, number: int) -> None:
        """A call as backward sees it, the gradient of its output, and its number."""
        ...

    def gradients(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """The gradients of query, key and value."""
        ...

    def skip(self, call: AttentionCall, reason: str) -> None:
        """A call that cannot be listened to."""
        ...

    def give_up(self, error: Exception) -> None:
        """It has raised an exception: to be told nothing more for now."""
        ...


class Tap:
    """A listener's place in a module. The ticket is its number as a tensor: graphs of many modules stay one graph."""

    _all: ClassVar[weakref.WeakValueDictionary[int, Tap]] = weakref.WeakValueDictionary()
    _count = 0

    def __init__(self, listener: Listener) -> None:
        # Its operators take long to register, and most programs have no tap.
        from attnscale.diagnostics.autograd import hear

        Tap._count += 1
        self.hear = hear
        self.listener = listener
        self.ticket = torch.tensor(Tap._count)
        Tap._all[Tap._count] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a model is not listened to, nor is one that is saved and loaded."""
        return type(None), ()

    def attach(self, module: Any) -> None:
        """Become the tap of a module."""
        module.tap = self

    def detach(self, module: Any) -> None:
        """Leave a module, unless it has another tap by now or none."""
        if vars(module).get("tap") is self:
            del module.tap

    @property
    def open(self) -> bool:
        """Whether calls must pass here: always in a graph, which outlives the moment it was made in."""
        return torch.compiler.is_compiling() or self.listener.listening

    @classmethod
    def find(cls, ticket: Tensor) -> Listener | None:
        """Who listens under a ticket at the moment."""
        tap = cls._all.get(int(ticket))
        return tap.listener if tap is not None and tap.listener.listening and not tap.listener.failed else None


def listen(tap: Tap, call: AttentionCall, run: Callable[[AttentionCall], Tensor]) -> Tensor:
    """`run(call)`, heard by a tap on the way there and back."""
    return tap.hear(tap.ticket, call, run)
