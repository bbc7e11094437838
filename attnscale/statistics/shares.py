"""What share of the softmax over all keys each of two parts of the keys has."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# A largest weight below this is that of keys beside a far larger sink, and its reciprocal may not be finite.
LEAST_WEIGHT = 1e-30


class SoftmaxPart(NamedTuple):
    """The sum of e^logit over some keys: e^lse, or e^max_logit / w_max where both are known.

    The second is the more exact: lse is rounded relative to its own size, which e^lse makes an error of the weights.
    """

    lse: Tensor
    max_logit: Tensor | None = None
    w_max: Tensor | None = None

    def scaled(self) -> tuple[Tensor, Tensor]:
        """The sum as e^a·b; −∞ and 1 for a row without keys."""
        if self.max_logit is None or self.w_max is None:
            return self.lse, torch.ones_like(self.lse)
        usable = self.w_max > LEAST_WEIGHT
        scale = torch.where(usable, self.max_logit, self.lse)
        return scale, torch.where(usable, self.w_max, 1.0).reciprocal()


class Shares(NamedTuple):
    """The shares of two parts, and lse and the largest weight of both together."""

    first: Tensor
    second: Tensor
    lse: Tensor
    w_max: Tensor | None


def join_parts(first: SoftmaxPart, second: SoftmaxPart) -> Shares:
    """The parts of disjoint keys, joined; in a row without keys both shares are 0."""
    (a, of_a), (b, of_b) = first.scaled(), second.scaled()
    top = torch.maximum(a, b)
    pivot = top.masked_fill(top == -math.inf, 0.0)
    of_a, of_b = of_a * torch.exp(a - pivot), of_b * torch.exp(b - pivot)
    total = of_a + of_b
    divisor = torch.where(total == 0, 1.0, total)
    w_max = None
    if first.max_logit is not None and second.max_logit is not None:
        w_max = torch.exp(torch.maximum(first.max_logit, second.max_logit) - pivot) / divisor
    return Shares(of_a / divisor, of_b / divisor, top + total.log(), w_max)
