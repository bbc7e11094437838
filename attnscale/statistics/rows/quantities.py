"""What is told of rows: from the sums that a look at them leaves, for many calls at once.

Everything is in fp32, and NaN for a row that sees nothing: such rows are in no aggregate.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.statistics.gaps import TOP, Spectrum, bracket, histogram_width

# Gaps at which N(t) is counted: in units of raw scores, from a tie to the whole row.
THRESHOLDS = (0.5, 1.0, 2.0, 4.0, 8.0)
MIN_RANK = 2


def gap_name(threshold: float) -> str:
    """The name of N(t)."""
    return f"gap_count_{threshold:g}"


# What backward looks at again, to see whether it was recomputed as it had been.
AGAIN = ("w_max", "entropy", *map(gap_name, THRESHOLDS))
FORWARD = (*AGAIN, "visible", "beta", "relative_entropy", "max_logit", "accumulation", "criticality", "prominence")
BACKWARD = (*AGAIN, "score_gradient", "beta_gradient")


class Sums(NamedTuple):
    """What a look at rows leaves of each, [...]: enough for every quantity, and small."""

    best: Tensor  # the largest raw scores, [..., ranks]
    top: Tensor  # the largest logit of a key
    beta: Tensor
    total: Tensor  # Σ e^(ℓ − top), over keys and sink
    moment: Tensor  # Σ e^(ℓ − top)·(ℓ − top)
    size: Tensor  # Σ s, of raw scores
    squares: Tensor  # Σ s²
    visible: Tensor
    counts: Tensor  # N(t) of each threshold, [..., T]
    histogram: Tensor  # of gaps, [..., bins]: with the best scores, the spectrum of a row

    def with_sink(self, sink: Tensor) -> Sums:
        """The same with one more logit, which is not a key's."""
        beyond = sink - self.top
        weight = beyond.exp()
        return self._replace(total=self.total + weight, moment=self.moment + weight * beyond)

    def packed(self) -> Tensor:
        """As one tensor [..., C]."""
        return torch.cat([self.best, torch.stack(self[1:8], dim=-1), self.counts, self.histogram], dim=-1)

    @classmethod
    def unpacked(cls, packed: Tensor) -> Sums:
        """The way back."""
        best, numbers, counts = torch.split(packed[..., :AGAIN_COLUMNS], [TOP, 7, len(THRESHOLDS)], dim=-1)
        top, beta, total, moment, size, squares, visible = numbers.unbind(-1)
        histogram = packed[..., AGAIN_COLUMNS:]
        return cls(best, top, beta, total, moment, size, squares, visible, counts, histogram)


# How many of the first columns are enough for backward, which has no use for the histogram.
AGAIN_COLUMNS = TOP + 7 + len(THRESHOLDS)


def columns(longest: int) -> int:
    """How many there are for rows of at most so many keys."""
    return AGAIN_COLUMNS + histogram_width(longest, MIN_RANK)


def forward_quantities(packed: Tensor) -> Tensor:
    """Each quantity of `FORWARD` [Q, ...] of sums [..., C]."""
    sums = Sums.unpacked(packed)
    accumulation = bracket(Spectrum(sums.best, sums.histogram), MIN_RANK).middle
    # Rows of one key or a tie at the top have none: Λ is 0 or infinite there, and would spoil any mean.
    accumulation = torch.where((accumulation < math.inf) & (accumulation > 0), accumulation, math.nan)
    again = _again(sums)
    relative = again[1] / torch.where(sums.visible > 1, sums.visible, math.nan).log()
    criticality = sums.beta / accumulation
    others = sums.visible, sums.beta, relative, sums.top, accumulation, criticality, _prominence(sums)
    return _where_seen(sums, [*again, *others])


def again_quantities(packed: Tensor) -> Tensor:
    """Those of `AGAIN`."""
    sums = Sums.unpacked(packed)
    return _where_seen(sums, _again(sums))


def backward_quantities(packed: Tensor, gradients: Tensor) -> Tensor:
    """Each quantity of `BACKWARD` [Q, ...] of sums [..., C], and of the norm of dℓ and dβ of each row, [..., 2]."""
    sums = Sums.unpacked(packed)
    norm, product = gradients.unbind(-1)
    return _where_seen(sums, [*_again(sums), norm * sums.beta.abs(), product])


def _again(sums: Sums) -> list[Tensor]:
    return [1 / sums.total, sums.total.log() - sums.moment / sums.total, *sums.counts.unbind(-1)]


def _prominence(sums: Sums) -> Tensor:
    """How far the best raw score lies above the mean, over what the largest of n draws of noise reaches, σ·√(2 ln n).

    At most 1: the winner may be noise. NaN for fewer than three keys, or where all scores are the same.
    """
    mean = sums.size / sums.visible
    deviation = (sums.squares / sums.visible - mean.square()).clamp(min=0.0).sqrt()
    reach = deviation * (2 * sums.visible.clamp(min=2).log()).sqrt()
    return torch.where((sums.visible > 2) & (reach > 0), (sums.best[..., 0] - mean) / reach, math.nan)


def _where_seen(sums: Sums, quantities: list[Tensor]) -> Tensor:
    return torch.where(sums.visible > 0, torch.stack(quantities).to(torch.float32), math.nan)
