"""Gap counts N(t), the number of keys within t of the best score, and Λ = sup ln N(t)/t, exact or as bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnscale._util.checks import check_scores, read_int
from attnscale_kernels.gaps import bins

# Largest relative distance of the two bounds of Λ. The kernels use the same constant.
BRACKET_WIDTH = bins.WIDTH

# Least number of columns in the search for the largest values of a row.
LEAST_COLUMNS = 64

# Score of a hidden key in tiles. Finite, because 0·(−∞) would be NaN.
HIDDEN = -1e30
# A score at or below −FAR belongs to a hidden key: −∞ or `HIDDEN`.
FAR = 1e29


class Accumulation(NamedTuple):
    """Bounds of Λ per row: lower ≤ Λ ≤ upper. The two are equal if Λ is exact.

    Attributes:
        lower: lower bound, [...].
        upper: upper bound, [...].
    """

    lower: Tensor
    upper: Tensor

    @property
    def middle(self) -> Tensor:
        """Geometric mean of the two bounds."""
        return torch.where(self.upper == self.lower, self.lower, (self.lower * self.upper).sqrt())


class Contact(NamedTuple):
    """Λ, the rank k* that attains the supremum, and the keys of rank 1 and k*; all [...]."""

    value: Tensor
    rank: Tensor
    first: Tensor
    key: Tensor


def accumulation_scale(scores: Tensor, min_rank: int = 2, mask: Tensor | None = None) -> Tensor:
    """Λ, the largest ln k / Δ_k over ranks k ≥ `min_rank`. Δ_k is the gap between the best and the k-th best score.

    Λ of single rows is heavy-tailed because of the first ranks. A `min_rank` of 8 or 16 reduces this.

    Args:
        scores: [..., Tk], raw scores.
        min_rank: the first rank, at least 2.
        mask: bool (True: visible), broadcasts to the scores.

    Returns:
        Λ [...]: ∞ for a tie at the top (−0.0 and 0.0 tie), 0 for fewer than `min_rank` visible keys, NaN if a visible
        score is NaN.

    Raises:
        ArgumentError: a shape or `min_rank` is not accepted.
        ArgumentTypeError: a type or dtype is not accepted.

    Example:
        >>> accumulation_scale(torch.tensor([[0.0, -1.0, -1.0, -1.0], [5.0, 5.0, 1.0, 0.0]]))
        tensor([1.3863,    inf])
    """
    return find_contact(scores, min_rank, mask).value


def accumulation_scales(scores: Tensor, min_ranks: Sequence[int], mask: Tensor | None = None) -> list[Tensor]:
    """`accumulation_scale` for several `min_ranks`, with a single sort.

    >>> accumulation_scales(torch.tensor([0.0, -1.0, -4.0, -4.0]), (2, 3))
    [tensor(0.6931), tensor(0.3466)]
    """
    ordered = prepared(scores, mask).sort(dim=-1, descending=True).values
    nothing = ordered.new_zeros(ordered.shape[:-1])
    return [_slopes(ordered, rank).amax(-1) if rank <= scores.shape[-1] else nothing for rank in min_ranks]


def find_contact(scores: Tensor, min_rank: int = 2, mask: Tensor | None = None) -> Contact:
    """Λ and the rank that attains it, by sorting. `first` and `key` index the last axis."""
    min_rank = read_int("min_rank", min_rank, "an int >= 2", least=2)
    scores = prepared(scores, mask)
    if scores.shape[-1] < min_rank:
        nothing = scores.new_zeros(scores.shape[:-1])
        zero = torch.zeros_like(nothing, dtype=torch.int64)
        return Contact(nothing, zero + 1, zero, zero)
    ordered, keys = scores.sort(dim=-1, descending=True, stable=True)
    value, at = _slopes(ordered, min_rank).max(-1)
    at = at + min_rank - 1
    return Contact(value, at + 1, keys[..., 0], keys.gather(-1, at[..., None])[..., 0])


def count_gaps(
    scores: Tensor, thresholds: tuple[float, ...], mask: Tensor | None = None, *, best: Tensor | None = None
) -> Tensor:
    """N(t) [..., thresholds] as int64: the number of visible keys with s* − s ≤ t, including the best key.

    All counts are 0 in a row without visible keys, or with a visible NaN. For a part of a row's keys, pass the best
    score s* over all keys as `best` [...]; the counts of the parts can then be added.

    >>> count_gaps(torch.tensor([3.0, 2.5, 0.0]), (0.0, 0.5, 10.0))
    tensor([1, 2, 3])
    """
    scores = prepared(scores, mask)
    if not scores.shape[-1]:
        return torch.zeros(*scores.shape[:-1], len(thresholds), dtype=torch.int64, device=scores.device)
    top = scores.amax(-1, keepdim=True) if best is None else best[..., None]
    return count_within(top - scores, top, thresholds)


def count_within(gaps: Tensor, best: Tensor, thresholds: tuple[float, ...], room: Tensor | None = None) -> Tensor:
    """N(t) [..., thresholds] as int64, from gaps [..., K] below the best score [..., 1]. Overwrites `room`.

    With `room`, ones and zeros are summed in floating point: on the CPU, summing bools is several times slower.
    """
    # Hidden keys never count, not even for an infinite threshold or in a row without visible keys.
    within = [torch.le(gaps, min(t, FAR), out=room).sum(-1, dtype=gaps.dtype) for t in thresholds]
    counts = torch.stack(within, dim=-1) if within else gaps[..., :0]
    return counts.to(torch.int64).masked_fill_(best <= -FAR, 0)


class Spectrum(NamedTuple):
    """Input for the bounds of Λ from rank k on: the k best scores of a row, and a histogram of all gaps."""

    best: Tensor  # [..., k] in descending order, filled up with −∞ or `HIDDEN`
    counts: Tensor  # [..., BINS], see `attnscale_kernels.gaps.bins`


def bracket_accumulation(scores: Tensor, min_rank: int = 2, mask: Tensor | None = None) -> Accumulation:
    """Bounds of Λ [...], at most `BRACKET_WIDTH` apart, from the best scores and a histogram instead of a sort.

    >>> bracket_accumulation(torch.tensor([[0.0, -1.0, -1.0, -1.0]])).upper
    tensor([1.3863])
    """
    min_rank = read_int("min_rank", min_rank, "an int >= 2", least=2)
    scores = prepared(scores, mask)
    best = largest(scores, min_rank)
    return bracket(Spectrum(best, count_bins(best, best[..., :1] - scores)))


def count_bins(best: Tensor, gaps: Tensor) -> Tensor:
    """Histogram [..., BINS] of the gaps [..., Tk], given the best scores of the rows. Overwrites gaps.

    The leading bits of a floating-point number are its octave and the linear step within, so no logarithm is needed.
    Histograms of several parts of a row's keys can be added.
    """
    ratios = gaps.mul_(((2 + bins.EPSILON) / _reach(best))[..., None]).sub_(bins.EPSILON)
    integer, mantissa, bias = (torch.int32, 23, 127) if ratios.dtype == torch.float32 else (torch.int64, 52, 1023)
    shift = mantissa - int(math.log2(bins.STEPS_PER_OCTAVE))
    two = (bias + 1) * bins.STEPS_PER_OCTAVE  # the bits of 2.0, shifted
    index = ratios.view(integer).bitwise_right_shift_(shift).clamp_(two, two + bins.BINS - 1)  # a NaN is clamped too
    rows = ratios.shape[:-1]
    if ratios.device.type != "cpu":  # bincount would synchronise
        empty = torch.zeros(*rows, bins.BINS, dtype=ratios.dtype, device=ratios.device)
        return empty.scatter_add_(-1, (index - two).to(torch.int64), empty.new_ones(()).expand(index.shape))
    offset = torch.arange(rows.numel(), dtype=integer, device="cpu").view(*rows, 1) * bins.BINS - two
    counts = torch.bincount(index.add_(offset).flatten(), minlength=rows.numel() * bins.BINS)
    return counts.view(*rows, bins.BINS).to(ratios.dtype)


def bracket(spectrum: Spectrum) -> Accumulation:
    """Bounds of Λ from the spectrum of each row: 0 for fewer keys than ranks, ∞ for a tie, NaN for a visible NaN."""
    best, reach, rank = spectrum.best, _reach(spectrum.best), spectrum.best.shape[-1]
    first, last = best[..., 0], best[..., -1]
    edges = torch.tensor(bins.STARTS, dtype=best.dtype, device=best.device)
    ln_counts = spectrum.counts.cumsum(-1).clamp_(min=1.0).log_()  # of N up to the end of each bin
    upper = (ln_counts / edges).amax(-1) * ((1 + bins.SLACK) / reach)
    lower = (ln_counts[..., :-1] / edges[1:]).amax(-1).clamp(min=math.log(rank)) * ((1 - bins.SLACK) / reach)
    gap = first - last
    enough = (gap < FAR) & (last > -FAR)  # excludes hidden keys; the gap of two hidden keys is 0
    lower = torch.where(enough, torch.where(gap == 0, math.inf, lower), 0.0)
    upper = torch.where(enough, torch.where(gap >= bins.TIED_BELOW, upper, math.inf), 0.0)
    broken = first.isnan() | (last == math.inf)
    return Accumulation(*(end.masked_fill(broken, math.nan) for end in (lower, upper)))


def largest(x: Tensor, ranks: int) -> Tensor:
    """The largest values [..., ranks] of each row [..., K], in descending order, filled up with −∞.

    The row is reshaped to [runs, columns]. The largest values are in the columns with the largest maxima. A fast
    reduction and two short searches replace one long search.
    """
    if ranks == 1:
        return x.amax(-1, keepdim=True)
    keys = x.shape[-1]
    width = max(LEAST_COLUMNS, 8 * ranks)
    runs = keys // width
    if runs < 4:
        found = x.topk(min(ranks, keys), dim=-1).values
        return found if keys >= ranks else pad(found, (0, ranks - keys), value=-math.inf)
    side_by_side = x[..., : runs * width].unflatten(-1, (runs, width))  # type: ignore[no-untyped-call]
    columns = _best(side_by_side.amax(-2), ranks)[1]
    found = side_by_side.gather(-1, columns[..., None, :].expand(*x.shape[:-1], runs, ranks)).flatten(-2)
    if keys > runs * width:
        found = torch.cat([found, x[..., runs * width :]], dim=-1)
    return _best(found, ranks)[0]


def _best(x: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """topk of rows [..., K]. For two ranks, two maxima are cheaper."""
    if ranks != 2:
        found = x.topk(ranks, dim=-1)
        return found.values, found.indices
    first = x.max(-1, keepdim=True)
    second = x.scatter(-1, first.indices, -math.inf).max(-1, keepdim=True)
    # If all other values are −∞, the second maximum may be found at the place of the first.
    place = torch.where(second.indices == first.indices, (first.indices + 1) % x.shape[-1], second.indices)
    return torch.cat([first.values, second.values], -1), torch.cat([first.indices, place], -1)


def _reach(best: Tensor) -> Tensor:
    """The gap of the last of the best scores, or 1 if it is hidden or (nearly) tied."""
    gap = best[..., 0] - best[..., -1]
    return torch.where((gap >= bins.TIED_BELOW) & (gap < FAR), gap, 1.0)


def prepared(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Detached scores in fp32 or wider; hidden ones are −∞."""
    check_scores(scores, mask)
    scores = scores.detach().to(torch.promote_types(scores.dtype, torch.float32))
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _slopes(ordered: Tensor, min_rank: int) -> Tensor:
    """ln k / Δ_k of scores in descending order, from `min_rank` on: ∞ for a tie, 0 for a hidden key, NaN for a NaN."""
    ranks = torch.arange(min_rank, ordered.shape[-1] + 1, dtype=ordered.dtype, device=ordered.device)
    later = ordered[..., min_rank - 1 :]
    gaps = (ordered[..., :1] - later).abs()  # −0.0 − 0.0 is −0.0, which would give −∞ for a tie
    return torch.where(later <= -FAR, 0.0, ranks.log() / gaps)
