"""From tiles of scores to a few numbers per row, from which every statistic is read: the one place that defines them.

The definitions hold for a matrix of scores as for the rows of a call, whose keys may come in several tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscale.statistics.gaps import (
    HIDDEN,
    Accumulation,
    Spectrum,
    bracket,
    count_bins,
    count_within,
    find_contact,
    largest,
)
from attnscale.statistics.request import StatsRequest
from attnscale.statistics.row_stats import RowStats, criticality
from attnscale.statistics.rows.tiles import LOG2E, tile_room


class RowMeasures(NamedTuple):
    """What is measured of rows, each [...]; 0 where not asked for."""

    max_logit: Tensor
    lse: Tensor
    w_max: Tensor
    entropy: Tensor
    lower: Tensor  # of Λ, as the next
    upper: Tensor
    prominence: Tensor
    winner: Tensor  # int64
    gap_counts: Tensor  # [..., thresholds], int64

    @property
    def accumulation(self) -> Accumulation:
        """Λ."""
        return Accumulation(self.lower, self.upper)

    def packed(self) -> tuple[Tensor, Tensor]:
        """As two tensors [..., C], of floating numbers and of integers."""
        integers = torch.cat([self.winner[..., None], self.gap_counts], dim=-1)
        return torch.stack(self[:FLOATS], dim=-1), integers

    @classmethod
    def unpacked(cls, floats: Tensor, integers: Tensor) -> RowMeasures:
        """Inverse of `packed`, as views."""
        return cls._make([*floats.unbind(-1), integers[..., 0], integers[..., 1:]])

    def to_stats(self, request: StatsRequest, known: RowStats, beta: Tensor) -> RowStats:
        """What is known of the rows and what was asked for; β [...] is that of the rows."""
        asked: dict[str, Any] = {name: getattr(self, name) for name in request.of_softmax}
        if request.gap_thresholds is not None:
            asked["gap_counts"] = self.gap_counts
        if request.accumulation is not None:
            asked |= {"accumulation": self.accumulation, "criticality": criticality(beta, self.accumulation)}
        return known._replace(**asked)


FLOATS = RowMeasures._fields.index("winner")


class RowSums(NamedTuple):
    """Sums over some keys of rows [..., r], logits ℓ in units of ln 2, kept as [..., r, 1].

    m = max ℓ, Σ 2^(ℓ − m), Σ 2^(ℓ − m)·(ℓ − m), Σ 2^(ℓ − m)·v [..., r, Dv], and the slot of m; the third, fourth and
    fifth where they are asked for.
    """

    top: Tensor
    total: Tensor
    moment: Tensor | None
    mixed: Tensor | None
    winner: Tensor | None


def add_keys(
    seen: RowSums | None,
    logits: Tensor,
    request: StatsRequest,
    *,
    tile: bool = False,
    values: Tensor | None = None,
    kept: Tensor | None = None,
    left: int = 0,
) -> RowSums:
    """Add the keys of a tile [..., r, K], which begins with the slot `left`, to the sums of its rows.

    Overwrites `seen` and the logits; `tile` says that memory of tiles may be used. `kept`, the dropout mask, multiplies
    the powers before the product with the values.
    """
    winner: Tensor | None = None
    if request.winner:
        top, winner = logits.max(-1, keepdim=True)
        winner += left
    else:
        top = logits.amax(-1, keepdim=True)
    if seen is not None:
        if winner is not None and seen.winner is not None:
            winner = torch.where(seen.top >= top, seen.winner, winner)
        torch.maximum(top, seen.top, out=top)
    centred = logits.sub_(top)
    powers = torch.exp2(
        centred, out=tile_room("powers", logits.shape, logits) if tile else None
    )  # half the price of exp
    total = powers.sum(-1, keepdim=True)
    moment = centred.mul_(powers).sum(-1, keepdim=True) if request.entropy else None
    if kept is not None:
        powers.mul_(kept)
    if seen is None:
        return RowSums(top, total, moment, None if values is None else torch.bmm(powers, values), winner)
    down = seen.top - top
    fade = torch.exp2(down)
    if moment is not None and seen.moment is not None:
        moment += seen.moment.addcmul_(down, seen.total).mul_(fade)
    total += seen.total.mul_(fade)
    mixed = None
    if values is not None and seen.mixed is not None:
        mixed = seen.mixed.mul_(fade).baddbmm_(powers, values)
    return RowSums(top, total, moment, mixed, winner)


class GapMeasures(NamedTuple):
    """What the raw scores of rows tell, each [...]; 0 where not asked for."""

    counts: Tensor  # N(t) [..., thresholds], int64
    lower: Tensor  # of Λ, as the next
    upper: Tensor
    prominence: Tensor


class GapSums(NamedTuple):
    """Sums over some keys of rows [...], counted from the best score over all; sums of several tiles are added up."""

    counts: Tensor  # N(t) [..., thresholds], int64
    bins: Tensor  # [..., BINS], or empty
    moments: Tensor  # how many keys, Σ s and Σ s²: [..., 3], or empty

    def plus(self, other: GapSums) -> GapSums:
        """Those over the keys of both."""
        return GapSums(*(a + b for a, b in zip(self, other, strict=True)))


def best_scores(seen: Tensor | None, scores: Tensor, request: StatsRequest) -> Tensor:
    """The best raw scores [..., ranks] of rows, of the keys of a tile [..., K] and of those `seen` before."""
    best = largest(scores, request.min_rank if request.accumulation == "bracket" else 1)
    return best if seen is None else largest(torch.cat([seen, best], dim=-1), best.shape[-1])


def gap_sums(
    scores: Tensor, best: Tensor, request: StatsRequest, *, prominence: bool = False, tile: bool = False
) -> GapSums:
    """Of raw scores [..., K], hidden ones at most `HIDDEN`; of a `tile` in the memory of tiles."""
    nothing = scores[..., :0]
    moments = _moments(scores) if prominence else nothing
    gaps = torch.sub(best[..., :1], scores, out=tile_room("gaps", scores.shape, scores) if tile else None)
    room = tile_room("powers", scores.shape, scores) if tile else None
    counts = count_within(gaps, best[..., :1], request.gap_thresholds or (), room)
    return GapSums(counts, count_bins(best, gaps) if request.accumulation == "bracket" else nothing, moments)


def measure_gaps(
    tiles: Sequence[Callable[[], Tensor]],
    best: Tensor,
    request: StatsRequest,
    *,
    prominence: bool = False,
    tile: bool = False,
) -> GapMeasures:
    """From the tiles of raw scores of the same rows, which hold all of their keys, and the best of them."""
    each = (gap_sums(make(), best, request, prominence=prominence, tile=tile) for make in tiles)
    return gap_measures(best, reduce(GapSums.plus, each), request, tiles)


def gap_measures(
    best: Tensor, sums: GapSums, request: StatsRequest, tiles: Sequence[Callable[[], Tensor]] = ()
) -> GapMeasures:
    """What follows from the sums of rows; an exact Λ needs all of their scores."""
    nothing = torch.zeros_like(best[..., 0])
    lower = upper = spread = nothing
    if request.accumulation == "bracket":
        lower, upper = bracket(Spectrum(best, sums.bins))
    elif request.accumulation == "exact":  # by sorting whole rows
        scores = torch.cat([make().clone() for make in tiles], dim=-1)
        lower = upper = find_contact(scores, request.min_rank).value
    if sums.moments.shape[-1]:
        spread = _prominence(best, sums.moments)
    return GapMeasures(sums.counts, lower, upper, spread)


def _moments(scores: Tensor) -> Tensor:
    seen = scores > HIDDEN / 2
    raw = torch.where(seen, scores, 0.0)
    number = seen.sum(-1, dtype=scores.dtype)
    return torch.stack([number, raw.sum(-1), torch.linalg.vector_norm(raw, dim=-1).square_()], dim=-1)


def _prominence(best: Tensor, moments: Tensor) -> Tensor:
    """How far the best raw score lies above the mean, over what the largest of n draws of noise reaches, σ·√(2 ln n).

    At most 1: the winner may be noise. NaN for fewer than three keys, or where all scores are the same.
    """
    visible, total, squares = moments.unbind(-1)
    mean = total / visible
    deviation = (squares / visible - mean.square()).clamp(min=0.0).sqrt()
    reach = deviation * (2 * visible.clamp(min=2).log()).sqrt()
    return torch.where((visible > 2) & (reach > 0), (best[..., 0] - mean) / reach, math.nan)


def row_measures(sums: RowSums, gaps: GapMeasures, sinks: Tensor | None) -> RowMeasures:
    """All measures from the sums of rows, here [...]; `sinks` are logits that broadcast to the rows."""
    top, moment = sums.top, sums.moment
    unseen = top <= HIDDEN / 2
    total = sums.total.masked_fill(unseen, 1.0)
    max_logit = (top / LOG2E).masked_fill(unseen, -math.inf)
    log_total, w_max = total.log(), total.reciprocal()  # more exact than e^(m − lse), where these are large
    lse = max_logit + log_total
    entropy = torch.zeros_like(total) if moment is None else (log_total - moment / (LOG2E * total)).clamp(min=0.0)
    if sinks is not None:
        sinks = sinks.to(lse.dtype).expand_as(lse)
        log_total, keys_alone = torch.logaddexp(log_total, sinks - max_logit), log_total
        lse = torch.where(unseen, sinks, max_logit + log_total)
        share = torch.exp(keys_alone - log_total)  # of the weight that is left to the keys
        w_max = w_max * share
        if moment is not None:
            entropy = share * entropy + torch.special.entr(share) + torch.special.entr(1 - share)
    winner = torch.zeros_like(top, dtype=torch.int64) if sums.winner is None else sums.winner
    winner = winner.masked_fill(unseen | top.isnan(), -1)
    w_max, entropy = w_max.masked_fill(unseen, 0.0), entropy.masked_fill(unseen, 0.0)
    return RowMeasures(max_logit, lse, w_max, entropy, gaps.lower, gaps.upper, gaps.prominence, winner, gaps.counts)
