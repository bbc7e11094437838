"""Where attention can be listened to: what passes forward, and what comes back as gradients.

A module with a `tap` sends its calls through `listen`; how they are heard is in `attnscale.diagnostics.notes`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from attnscale.backends.call import AttentionCall


class Heard(NamedTuple):
    """One call as it passed a tap: what `AttentionCall` says of it, detached."""

    call: AttentionCall
    out: Tensor  # [B, H, Tq, Dv]
    lasting: bool = False  # autograd keeps query, key and value as they are until backward has come to the call


class Listener(Protocol):
    """Whoever a tap reports to; all of it on the thread of the call, without gradients and without autocast."""

    listening: bool
    failed: bool  # set where it raised an exception; it is not told anything more

    def forward(self, heard: Heard) -> None:
        """A call, in forward."""
        ...

    def backward(self, call: AttentionCall, gradient: Tensor) -> None:
        """The same call as backward sees it, and the gradient of its output."""
        ...

    def gradients(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """The gradients of query, key and value."""
        ...


class Tap:
    """A listener's place in a module. The ticket is its number as a tensor: graphs of many modules stay one graph."""

    _all: ClassVar[weakref.WeakValueDictionary[int, Tap]] = weakref.WeakValueDictionary()
    _count = 0

    def __init__(self, listener: Listener) -> None:
        # Its operators take long to register, and most programs have no tap.
        from attnscale.diagnostics.notes import hear

        Tap._count += 1
        self.hear = hear
        self.listener = listener
        self.ticket = torch.tensor(Tap._count)
        Tap._all[Tap._count] = self

    def __deepcopy__(self, memo: object) -> None:
        """A copy of a model is not listened to."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Nor is one that is saved and loaded."""
        return type(None), ()

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


def give_up(listener: Listener, error: Exception) -> None:
    """A listener that fails is warned of once and told nothing more."""
    listener.failed = True
    warnings.warn(f"attnscale: a listener failed and hears no more: {error!r}", RuntimeWarning, stacklevel=3)
