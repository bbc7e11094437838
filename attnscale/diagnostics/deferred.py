"""When rows are looked at: at once, or those of all layers one right after the other.

Between two layers of a training step the CPU's caches are swept, and the first use of every operator after that costs
several times the next. So where a call's tensors are safe with autograd until backward has come to it, the look waits
until backward has come to all, and one pass serves forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from threading import RLock

import torch
from torch import Tensor

from attnscale._util.uncopied import Uncopied
from attnscale.call.attention_call import AttentionCall
from attnscale.call.tap import Listener
from attnscale.diagnostics.records.tally import Tally
from attnscale.diagnostics.tensor_identity import Same
from attnscale.statistics.rows.angles import angle_parts
from attnscale.statistics.rows.quantities import AGAIN_COLUMNS, Sums
from attnscale.statistics.rows.row_sums import look
from attnscale.statistics.rows.stacked_calls import kin

# Bytes of keys and values that may be held for a while; where there are more, nothing waits.
MOST_HELD = 20 * 2**20
# Rows of calls in one look, unless one alone has more: what it leaves of them takes memory too.
TOGETHER = 2**13


class Look(Uncopied):
    """The rows of one call, with their outputs [B, H, R, Dv]: to be looked at, or already seen.

    What is seen goes to a tally, the rows under keys of the given salt. With `answerable`, what backward will want to
    know of the rows is kept for it.
    """

    def __init__(
        self,
        listener: Listener,
        call: AttentionCall,
        out: Tensor,
        sources: Same,
        tally: Tally,
        salt: int = 0,
        answerable: bool = True,
    ) -> None:
        self.listener = listener
        self.sources = sources
        self.tally = tally
        self.salt = salt
        self.gradient: Tensor | None = None  # of the output, once backward has come
        self._answerable = answerable
        self._rows: tuple[AttentionCall, Tensor] | None = call, out
        self._unchanged = Same(call.key, call.value)
        self._sums: Tensor | None = None
        self.size = math.prod(call.query.shape[:3])  # rows, over heads and sequences

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

    def rows(self) -> tuple[AttentionCall, Tensor] | None:
        """What is to be seen, if it has not been, and is still what it was."""
        if self._rows is not None and not self._unchanged.are(self._rows[0].key, self._rows[0].value):
            self.drop()
        return self._rows

    def drop(self) -> None:
        """It will not happen any more."""
        self._rows = None

    def saw(self, sums: Tensor, angles: tuple[Tensor, Tensor], gradients: Tensor | None) -> None:
        """It has happened: the sums of rows, how far apart they point before and after, and what backward says."""
        self.drop()
        self.tally.pending.add_forward(sums, self.salt)
        self.tally.note(angle_in=angles[0].sum(0), angle_out=angles[1].sum(0))
        if gradients is not None:
            self.tally.pending.add_backward(sums[..., :AGAIN_COLUMNS], gradients, self.salt)
        elif self._answerable:  # backward is to come; copied, or all of the sums would stay with what is kept
            self._sums = sums[..., :AGAIN_COLUMNS].clone()

    def sums(self) -> Tensor | None:
        """What backward will want to know of the rows, [B, H, R, C]; None if they could not be seen."""
        see([self])
        return self._sums


def see(looks: Sequence[Look]) -> None:
    """Let looks happen that are of one kin, and that backward has come to, or to none of them."""
    found = [(one, rows) for one in looks if (rows := one.rows()) is not None]
    if not found:
        return
    calls, outs = [call for _, (call, _) in found], [out for _, (_, out) in found]
    upstream = [one.gradient for one, _ in found if one.gradient is not None]
    sums, gradients = look(calls, upstream or None)
    angles = angle_parts(calls, outs, Sums.unpacked(sums).visible > 0)
    for index, (one, _) in enumerate(found):
        answer = None if gradients is None else gradients[index]
        one.saw(sums[index], (angles[0][index], angles[1][index]), answer)


class Looks(Uncopied):
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
                see([one])
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
        """Nothing waits any more; a listener whose look fails gives up."""
        with self._lock, torch.no_grad(), torch.autocast("cpu", enabled=False):
            waiting, self._waiting, self._held = self._waiting, [], 0
            alike: dict[Hashable, list[Look]] = {}
            for one in waiting:
                if (rows := one.rows()) is not None:
                    alike.setdefault((kin(rows[0]), one.gradient is None), []).append(one)
            for looks in alike.values():
                number = max(1, TOGETHER // looks[0].size)
                for at in range(0, len(looks), number):
                    _try(looks[at : at + number])


def _try(looks: Sequence[Look]) -> None:
    """Let looks happen together, or those that can be."""
    try:
        see(looks)
    except Exception as error:
        left = [one for one in looks if one.waits]
        if len(looks) > 1:
            for one in left:
                _try([one])
        else:
            looks[0].drop()
            looks[0].listener.give_up(error)
