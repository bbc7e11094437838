"""A tile of raw scores: some rows against some keys, and which of these the rows may see."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attnscale._util.scratch import room
from attnscale._util.tracing import is_watched
from attnscale.statistics.gaps import HIDDEN

# Scores of a tile that is cut from a call: few enough that they and what is computed from them stay in a cache, and
# enough that operators are not all overhead.
NUMBERS = 2**18
LOG2E = 1 / math.log(2)


class ScoreTile:
    """Raw scores [..., r, K], 0 where hidden; `visible` is 1 and 0 and broadcasts to them, β [..., r] to their rows.

    `masked` and `logits` may be overwritten by their last user, the scores may not.
    """

    def __init__(self, raw: Tensor, visible: Tensor, beta: Tensor) -> None:
        self.raw = raw
        self.visible = visible
        self._beta = beta
        self._hidden = (visible - 1).mul_(-HIDDEN)
        # Made when first used. Not cached_property, whose lock in Python 3.10 and 3.11 torch.compile cannot trace.
        self._masked: Tensor | None = None
        self._logits: Tensor | None = None

    @classmethod
    def without_keys(cls, beta: Tensor) -> ScoreTile:
        """Rows [..., r] that see nothing: one hidden slot, as reductions need one."""
        nothing = torch.zeros_like(beta)[..., None]
        return cls(nothing, nothing, beta)

    @property
    def masked(self) -> Tensor:
        """Raw scores, `HIDDEN` where hidden."""
        if self._masked is None:
            self._masked = self.compute("masked", torch.add, self.raw, self._hidden)
        return self._masked

    @property
    def logits(self) -> Tensor:
        """β·s in units of ln 2, `HIDDEN` where hidden."""
        if self._logits is None:
            factor = (self._beta * LOG2E)[..., None]
            self._logits = self.compute("logits", torch.addcmul, self._hidden, self.raw, factor)
        return self._logits

    def compute(self, purpose: str, operator: Callable[..., Tensor], *inputs: Tensor | float) -> Tensor:
        """A result of the shape of the scores; where possible in memory that all tiles share for this purpose."""
        if self.raw.numel() > NUMBERS or self.raw.device.type != "cpu" or is_watched():
            return operator(*inputs)
        return operator(*inputs, out=tile_room(purpose, self.raw.shape, self.raw))


def tile_room(purpose: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Memory for a tensor like the scores of a tile; valid until this thread asks for the same purpose again."""
    numel = math.prod(shape)
    return room(f"tile {purpose}", (max(NUMBERS, numel),), like)[:numel].view(shape)
