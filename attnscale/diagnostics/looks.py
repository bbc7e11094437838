"""When rows are looked at: at once, or those of all layers one right after the other.

Between two layers of a training step the CPU's caches are swept, and the first use of every operator after that costs
several times the next. So where a call's tensors are safe with autograd until backward has come to it, the look waits
until backward has come to all, and one pass serves forward and backward.
"""

from __future__ import annotations

from threading import RLock
from typing import Protocol

import torch
from torch import Tensor

from attnscale.backends.call import AttentionCall
from attnscale.diagnostics.measure import look
from attnscale.diagnostics.pending import Pending
from attnscale.diagnostics.rows import AGAIN_COLUMNS
from attnscale.diagnostics.same import Same
from attnscale.tap import Listener, give_up

# Bytes of keys and values that may be held for a while; where there are more, nothing waits.
MOST_HELD = 20 * 2**20


class Viewer(Listener, Protocol):
    """A listener that is told what a look has shown."""

    def saw(self, call: AttentionCall, out: Tensor, sums: Tensor, gradients: Tensor | None) -> None:
        """Rows, their outputs, their sums and, if it was asked for, what backward says of them."""
        ...


class Look:
    """The rows of one call, with their outputs [B, H, R, Dv]: to be looked at, or already seen."""

    def __init__(self, viewer: Viewer, call: AttentionCall, out: Tensor, sources: Same) -> None:
        self.viewer = viewer
        self.sources = sources
        self.gradient: Tensor | None = None  # of the output, once backward has come
        self._rows: tuple[AttentionCall, Tensor] | None = call, out
        self._unchanged = Same(call.key, call.value)
        self._sums: Tensor | None = None

    @property
    def waits(self) -> bool:
        """Whether it is still to happen."""
        return self._rows is not None

    @property
    def held(self) -> int:
        """Bytes that stay in memory until it has happened."""
        if self._rows is None:
            return 0
        call = self._rows[0]
        tensors = (call.query, call.key, call.value, call.context.mask)
        storages = [x.untyped_storage() for x in tensors if x is not None]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def happen(self) -> None:
        """See the rows, if they have not been seen, and are still what they were."""
        if self._rows is None:
            return
        (call, out), self._rows = self._rows, None
        if not self._unchanged.are(call.key, call.value):
            return
        sums, gradients = look(call, self.gradient)
        self.viewer.saw(call, out, sums, gradients)
        # The rest is dropped with the report: copied, or it would stay with what is kept.
        self._sums = sums if sums.numel() <= Pending.SMALL else sums[..., :AGAIN_COLUMNS].clone()

    def sums(self) -> Tensor | None:
        """What backward will want to know of the rows, [B, H, R, C]; None if they could not be seen."""
        self.happen()
        return self._sums


class Looks:
    """Those of all layers of a model that wait for each other."""

    def __init__(self) -> None:
        self._waiting: list[Look] = []
        self._held = 0
        self._lock = RLock()

    def add(self, one: Look) -> None:
        """Let a look wait, if there is room."""
        with self._lock:
            held = one.held
            if self._held + held > MOST_HELD:
                self.happen()
            if held > MOST_HELD:
                one.happen()
            else:
                self._waiting.append(one)
                self._held += held

    def answer(self, one: Look, gradient: Tensor) -> None:
        """Backward has come to one that waits; with the last of them, all happen."""
        with self._lock:
            one.gradient = gradient
            if all(other.gradient is not None or not other.waits for other in self._waiting):
                self.happen()

    def happen(self) -> None:
        """Nothing waits any more; a listener whose look fails is given up."""
        with self._lock, torch.no_grad(), torch.autocast("cpu", enabled=False):
            waiting, self._waiting, self._held = self._waiting, [], 0
            for one in waiting:
                try:
                    one.happen()
                except Exception as error:
                    give_up(one.viewer, error)
