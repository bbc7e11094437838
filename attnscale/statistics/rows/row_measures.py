"""From tiles of raw scores to a few numbers per row, from which every statistic is read.

The definitions hold for a matrix of scores as for the rows of a call, whose keys may come in several tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.statistics.gaps import (
    FAR,
    HIDDEN,
    TOP,
    Accumulation,
    Spectrum,
    bracket,
    find_contact,
    largest,
    spectrum_of,
)
from attnscale.statistics.request import StatsRequest
from attnscale.statistics.row_stats import RowStats, criticality
from attnscale.statistics.rows.score_tile import LOG2E, ScoreTile


class RowMeasures(NamedTuple):
    """What is measured of rows, each [...]; 0 where not asked for."""

    visible: Tensor  # how many keys, as a floating number
    max_logit: Tensor
    lse: Tensor
    w_max: Tensor
    entropy: Tensor
    lower: Tensor  # of Λ, as the next
    upper: Tensor
    prominence: Tensor
    gap_counts: Tensor  # [..., thresholds], as floating numbers

    def packed(self) -> Tensor:
        """As one tensor [..., C]."""
        return torch.cat([torch.stack(self[:-1], dim=-1), self.gap_counts], dim=-1)

    @classmethod
    def unpacked(cls, packed: Tensor) -> RowMeasures:
        """Inverse of `packed`, as views."""
        return cls._make([*packed[..., :SCALARS].unbind(-1), packed[..., SCALARS:]])

    @property
    def accumulation(self) -> Accumulation:
        """Λ."""
        return Accumulation(self.lower, self.upper)

    def to_stats(self, request: StatsRequest, visible: Tensor, beta: Tensor) -> RowStats:
        """What was asked for of the statistics; n and β [...] of the rows are given."""
        stats = RowStats(visible, self.lse, self.max_logit, self.w_max, self.entropy).only(request)
        if request.gap_thresholds is not None:
            stats = stats._replace(gap_counts=self.gap_counts.to(torch.int64))
        if request.accumulation is None:
            return stats
        return stats._replace(accumulation=self.accumulation, criticality=criticality(beta, self.accumulation))


SCALARS = len(RowMeasures._fields) - 1
# Tiles of the same rows; called once for each pass over their keys.
Tiles = Callable[[], Iterable[ScoreTile]]


def measure_tiles(
    tiles: Tiles, request: StatsRequest, sinks: Tensor | None = None, *, keys: int, prominence: bool = False
) -> RowMeasures:
    """The measures of rows whose tiles hold all of their `keys`, with the logits of a sink that broadcast to the rows.

    `prominence` needs a request for gaps.
    """
    tops: list[Tensor] = []
    bests: list[Tensor] = []
    for tile in tiles():
        if request.softmax:
            tops.append(tile.logits.amax(-1))
        if request.gaps:
            bests.append(largest(tile.masked, max(TOP, request.min_rank)))
    top = reduce(torch.maximum, tops) if tops else None
    best = None if not bests else bests[0] if len(bests) == 1 else largest(torch.cat(bests, -1), bests[0].shape[-1])
    exact = None
    if request.accumulation == "exact":  # by sorting whole rows
        exact = find_contact(torch.cat([tile.masked.clone() for tile in tiles()], dim=-1), request.min_rank).value
    parts = [_sums(tile, request, top, best, keys, prominence) for tile in tiles()]
    visible, total, moment, counts, histogram, size, squares = (
        reduce(torch.add, column) for column in zip(*parts, strict=True)
    )
    nothing = torch.zeros_like(visible)
    max_logit = lse = w_max = entropy = lower = upper = spread = nothing
    if top is not None:
        max_logit, lse, w_max, entropy = _softmax_measures(top, total, moment, sinks)
    if best is not None:
        counts = torch.where(best[..., :1] <= HIDDEN / 2, 0.0, counts)
        if request.accumulation == "bracket":
            lower, upper = bracket(Spectrum(best, histogram), request.min_rank)
        if prominence:
            spread = _prominence(best[..., 0], visible, size, squares)
    if exact is not None:
        lower = upper = exact
    return RowMeasures(visible, max_logit, lse, w_max, entropy, lower, upper, spread, counts)


def _sums(
    tile: ScoreTile, request: StatsRequest, top: Tensor | None, best: Tensor | None, keys: int, prominence: bool
) -> list[Tensor]:
    """What a tile adds for its rows: visible keys, Σ 2^x, Σ 2^x·x (x = logit − top, in units of ln 2), N(t), histogram
    of gaps, Σ s and Σ s². It uses up the tile.
    """
    visible = tile.visible.sum(-1).expand(tile.raw.shape[:-1])
    nothing = torch.zeros_like(visible)
    total = moment = histogram = size = squares = nothing
    counts = nothing[..., None][..., :0]
    if best is not None:
        gaps = tile.compute("masked", torch.sub, best[..., :1], tile.masked)
        if request.gap_thresholds is not None:
            # An infinite threshold must not admit hidden keys. Ones and zeros are added up as numbers like the scores:
            # on the CPU, adding up bools is several times slower.
            within = (tile.compute("powers", torch.le, gaps, min(t, FAR)) for t in request.gap_thresholds)
            counts = torch.stack([one.sum(-1, dtype=gaps.dtype) for one in within], dim=-1)
        if request.accumulation == "bracket":
            histogram = spectrum_of(best, gaps, request.min_rank, keys).counts
    if top is not None:
        exponents = tile.logits.sub_(top[..., None])
        powers = tile.compute("powers", torch.exp2, exponents)
        total = powers.sum(-1)
        if request.entropy:
            moment = exponents.mul_(powers).sum(-1)
    if prominence:
        size, squares = tile.raw.sum(-1), torch.linalg.vector_norm(tile.raw, dim=-1).square_()
    return [visible, total, moment, counts, histogram, size, squares]


def _softmax_measures(top: Tensor, total: Tensor, moment: Tensor, sinks: Tensor | None) -> tuple[Tensor, ...]:
    """Largest logit, lse, largest weight and entropy of rows, from the sums over their keys."""
    unseen = top <= HIDDEN / 2
    max_logit = (top / LOG2E).masked_fill(unseen, -math.inf)
    log_total, w_max = total.log(), total.reciprocal()
    entropy = (log_total - moment / (LOG2E * total)).clamp(min=0.0)
    lse = max_logit + log_total
    if sinks is not None:
        sinks = sinks.to(lse.dtype).expand_as(lse)
        log_total, keys_alone = torch.logaddexp(log_total, sinks - max_logit), log_total
        lse = torch.where(unseen, sinks, max_logit + log_total)
        share = torch.exp(keys_alone - log_total)  # of the weight that is left to the keys
        w_max = w_max * share
        entropy = share * entropy + torch.special.entr(share) + torch.special.entr(1 - share)
    return max_logit, lse, w_max.masked_fill(unseen, 0.0), entropy.masked_fill(unseen, 0.0)


def _prominence(best: Tensor, visible: Tensor, size: Tensor, squares: Tensor) -> Tensor:
    """How far the best raw score lies above the mean, over what the largest of n draws of noise reaches, σ·√(2 ln n).

    At most 1: the winner may be noise. NaN for fewer than three keys, or where all scores are the same.
    """
    mean = size / visible
    deviation = (squares / visible - mean.square()).clamp(min=0.0).sqrt()
    reach = deviation * (2 * visible.clamp(min=2).log()).sqrt()
    return torch.where((visible > 2) & (reach > 0), (best - mean) / reach, math.nan)
