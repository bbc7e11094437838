"""The elementwise part of a tile, the numbers it gives for each row, and how those of two sets of keys are joined."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Softmax(NamedTuple):
    """Of logits [h, r, K] in units of ln 2: 2^(ℓ − m), and per row m, its sum, and Σ 2^(ℓ − m)·(ℓ − m) (or 0)."""

    powers: Tensor
    top: Tensor
    total: Tensor
    moment: Tensor


class Partial(NamedTuple):
    """Rows of attention over some of their keys: m, Σ 2^(ℓ − m), Σ 2^(ℓ − m)·(ℓ − m) and Σ 2^(ℓ − m)·v."""

    top: Tensor
    total: Tensor
    moment: Tensor
    mixed: Tensor

    def merge(self, other: Partial) -> Partial:
        """The same rows over the keys of both."""
        top = torch.maximum(self.top, other.top)
        a, b = self._seen_from(top), other._seen_from(top)
        return Partial(top, a.total + b.total, a.moment + b.moment, a.mixed + b.mixed)

    def _seen_from(self, top: Tensor) -> Partial:
        down = self.top - top
        fade = torch.exp2(down)
        moment = (self.moment + down * self.total) * fade
        return Partial(top, self.total * fade, moment, self.mixed * fade[..., None])


def softmax_tile(logits: Tensor, moment: bool, powers: Tensor) -> Softmax:
    """The elementwise part of a tile; overwrites the logits, and `powers` with 2^(ℓ − m)."""
    top = logits.amax(-1, keepdim=True)
    centred = logits.sub_(top)
    torch.exp2(centred, out=powers)  # half the price of exp
    total = powers.sum(-1)
    return Softmax(powers, top[..., 0], total, centred.mul_(powers).sum(-1) if moment else torch.zeros_like(total))
