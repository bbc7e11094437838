"""Gap counting: N(t), how many keys lie within t of the best, and Λ = sup ln N(t)/t, exact and bracketed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnscale._util.checks import check_scores, read_int

# For the bracket: ranks taken exactly, and the bins behind them, sixteen to the octave. A bin is at most 1/16 wide, so
# the upper end of a bracket is at most 6.25 % above the lower one.
TOP = 4
STEPS_PER_OCTAVE = 16

# The score of a hidden key in tiles: finite, so that a weight of 0 times its logit is 0 and not NaN.
HIDDEN = -1e30
# A score at or below −FAR is that of a hidden key: −∞ or `HIDDEN`.
FAR = 1e29


class Accumulation(NamedTuple):
    """Λ per row, known to lie in [lower, upper]; the two are equal where it is exact."""

    lower: Tensor
    upper: Tensor

    @property
    def middle(self) -> Tensor:
        """The geometric mean of the two ends."""
        return torch.where(self.upper == self.lower, self.lower, (self.lower * self.upper).sqrt())


class Contact(NamedTuple):
    """Where the supremum is attained: Λ, its rank k*, and the keys of rank 1 and k*; all [...]."""

    value: Tensor
    rank: Tensor
    first: Tensor
    key: Tensor


def accumulation_scale(scores: Tensor, min_rank: int = 2, mask: Tensor | None = None) -> Tensor:
    """Λ [...] of raw scores [..., Tk]: the largest ln k / Δ_k over ranks k ≥ `min_rank`, Δ_k the gap of the k-th best.

    The mask broadcasts to the scores (True: visible). A tie at the top gives ∞ (−0.0 and 0.0 tie), fewer than
    `min_rank` keys give 0, and a NaN among the visible scores gives NaN. A row's Λ is heavy-tailed through its first
    ranks; a `min_rank` of 8 or 16 tames it.

    >>> accumulation_scale(torch.tensor([[0.0, -1.0, -1.0, -1.0], [5.0, 5.0, 1.0, 0.0]]))
    tensor([1.3863,    inf])
    """
    return find_contact(scores, min_rank, mask).value


def accumulation_scales(scores: Tensor, min_ranks: Sequence[int], mask: Tensor | None = None) -> list[Tensor]:
    """`accumulation_scale` for each of several `min_ranks`, with one sort for all.

    >>> accumulation_scales(torch.tensor([0.0, -1.0, -4.0, -4.0]), (2, 3))
    [tensor(0.6931), tensor(0.3466)]
    """
    ordered = prepared(scores, mask).sort(dim=-1, descending=True).values
    nothing = ordered.new_zeros(ordered.shape[:-1])
    return [_slopes(ordered, rank).amax(-1) if rank <= scores.shape[-1] else nothing for rank in min_ranks]


def find_contact(scores: Tensor, min_rank: int = 2, mask: Tensor | None = None) -> Contact:
    """Λ with its point of contact, by sorting; `first` and `key` index the last axis."""
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
    """N(t) [..., thresholds] as int64: visible keys with s* − s ≤ t, the best one included.

    0 at every t in a row without visible keys, and in one with a NaN among them, which has no best key. Where the keys
    are some of those of a row, `best` [...] is the s* of all of them; counts of the parts then add up.

    >>> count_gaps(torch.tensor([3.0, 2.5, 0.0]), (0.0, 0.5, 10.0))
    tensor([1, 2, 3])
    """
    scores = prepared(scores, mask)
    if not scores.shape[-1]:
        return torch.zeros(*scores.shape[:-1], len(thresholds), dtype=torch.int64, device=scores.device)
    # An infinite threshold must not admit hidden keys, and in a row without any other no threshold may.
    edges = torch.tensor([min(t, FAR) for t in thresholds], dtype=scores.dtype, device=scores.device)
    top = scores.amax(-1, keepdim=True) if best is None else best[..., None]
    gaps, edges = top - scores, torch.where(top > -FAR, edges, -1.0)
    return torch.stack([(gaps <= edges[..., i, None]).sum(-1) for i in range(edges.shape[-1])], dim=-1)


class Spectrum(NamedTuple):
    """What a bracket of Λ needs of a row: its best scores, and a histogram of the gaps of all keys."""

    best: Tensor  # [..., ranks] in falling order, −∞ where there are no more
    counts: Tensor  # [..., bins + 2]: keys up to the gap t of the last of these, in each bin beyond, and beyond all


def bracket_accumulation(scores: Tensor, min_rank: int = 2, mask: Tensor | None = None) -> Accumulation:
    """Λ [...] between two bounds at most 6.25 % apart, from the best scores and a histogram: streaming, no sort.

    >>> bracket_accumulation(torch.tensor([[0.0, -1.0, -1.0, -1.0]])).upper
    tensor([1.3863])
    """
    min_rank = read_int("min_rank", min_rank, "an int >= 2", least=2)
    return bracket(take_spectrum(prepared(scores, mask).clone(), min_rank, scores.shape[-1]), min_rank)


def empty_spectrum(rows: Tensor, min_rank: int, longest: int) -> Spectrum:
    """Of rows [...] without keys, with enough bins for rows of `longest` keys."""
    best = rows.new_full((*rows.shape, max(TOP, min_rank)), -math.inf)
    return Spectrum(best, rows.new_zeros(*rows.shape, _bins(longest, min_rank) + 2))


def take_spectrum(scores: Tensor, min_rank: int, longest: int) -> Spectrum:
    """The best scores of each row [..., Tk], and a histogram of all; overwrites the scores."""
    best = largest(scores, max(TOP, min_rank))
    return spectrum_of(best, torch.sub(best[..., :1], scores, out=scores), min_rank, longest)


def spectrum_of(best: Tensor, gaps: Tensor, min_rank: int, longest: int) -> Spectrum:
    """From the best scores [..., ranks] and the gaps [..., Tk] between the first and every key; overwrites the gaps."""
    return Spectrum(best, _histogram(gaps.mul_(1 / _reach(best)[..., None]), _bins(longest, min_rank)))


def bracket(spectrum: Spectrum, min_rank: int) -> Accumulation:
    """Λ from the spectrum of each row.

    The first ranks, up to gap t, are exact. Behind them, gaps are binned by the leading bits of gap/t: with N(b) keys
    up to the end of a bin (a, b], a rank inside it has a slope of at most ln N(b)/a, and one of at least ln N(b)/b
    exists. An empty bin says no more than the one before it.
    """
    best = spectrum.best
    known = _slopes(best, min_rank).amax(-1)
    ln_counts = spectrum.counts[..., :-1].cumsum(-1).log_()  # of N up to the end of each bin; the last is out of reach
    slack = 8 * torch.finfo(best.dtype).eps  # of gap/t, and so of the edges
    edges = _edges(spectrum.counts.shape[-1] - 2, best)
    lower, upper = (
        (ln_counts / part).amax(-1) / _reach(best) for part in (edges[1:] * (1 + slack), edges[:-1] * (1 - slack))
    )
    open_ = (known > 0) & (known < math.inf) & (best[..., -1] > -FAR)
    lower = torch.where(open_, torch.maximum(known, lower), known)
    return Accumulation(lower, torch.where(open_, torch.maximum(lower, upper), known))


def largest(x: Tensor, ranks: int) -> Tensor:
    """The largest values [..., ranks] of each row [..., K], in falling order; −∞ where there are no more.

    With the row cut into four runs under each other, the largest are in the columns whose maxima are largest: a fast
    reduction and two short searches instead of one long search.
    """
    runs, keys = 4, x.shape[-1]
    width = keys // runs
    if width < 64 * ranks:
        found = x.topk(min(ranks, keys), dim=-1).values
        return found if keys >= ranks else pad(found, (0, ranks - keys), value=-math.inf)
    side_by_side = x[..., : runs * width].view(*x.shape[:-1], runs, width)
    columns = side_by_side.amax(-2).topk(ranks, dim=-1, sorted=False).indices
    found = side_by_side.gather(-1, columns[..., None, :].expand(*x.shape[:-1], runs, ranks)).flatten(-2)
    if keys > runs * width:
        found = torch.cat([found, x[..., runs * width :]], dim=-1)
    return found.topk(ranks, dim=-1).values


def _reach(best: Tensor) -> Tensor:
    """t: the gap of the last of the best scores, or 1 where there is none or it is a tie."""
    gap = best[..., 0] - best[..., -1]
    return torch.where((gap > 0) & (gap < FAR), gap, 1.0)


def _bins(longest: int, min_rank: int) -> int:
    """How many bins matter: Λ is at least ln(ranks)/t, which no row of n keys can better beyond t·ln n/ln(ranks)."""
    reach = max(1.0, math.log(max(longest, 1)) / math.log(max(TOP, min_rank)))
    octave = int(math.log2(reach))
    return STEPS_PER_OCTAVE * octave + int(STEPS_PER_OCTAVE * (reach / 2**octave - 1)) + 1


def _histogram(ratios: Tensor, bins: int) -> Tensor:
    """Counts [..., bins + 2] of ratios [..., Tk] below 1, in each sixteenth of an octave, and beyond; overwrites them.

    The leading bits of a floating number are its octave and the linear step within: no logarithm is needed.
    """
    rows, width = ratios.shape[:-1], bins + 2
    integer, mantissa = (torch.int32, 23) if ratios.dtype == torch.float32 else (torch.int64, 52)
    shift = mantissa - int(math.log2(STEPS_PER_OCTAVE))
    one = int(torch.ones((), dtype=ratios.dtype, device="cpu").view(integer)) >> shift
    index = ratios.view(integer).bitwise_right_shift_(shift).clamp_(one - 1, one + bins)  # a NaN is clamped too
    if ratios.device.type != "cpu":  # there, bincount would synchronise
        index = (index - (one - 1)).to(torch.int64)
        empty = torch.zeros(*rows, width, dtype=ratios.dtype, device=ratios.device)
        return empty.scatter_add_(-1, index, empty.new_ones(()).expand(index.shape))
    offset = torch.arange(rows.numel(), dtype=integer, device=ratios.device).view(*rows, 1) * width + (1 - one)
    counts = torch.bincount(index.add_(offset).flatten(), minlength=rows.numel() * width)
    return counts.view(*rows, width).to(ratios.dtype)


def _edges(bins: int, like: Tensor) -> Tensor:
    """The edges of all bins as multiples of t, beginning with 1 twice: the first bin holds all gaps up to t."""
    number = torch.arange(bins, dtype=like.dtype, device=like.device)
    octaves = number.div(STEPS_PER_OCTAVE, rounding_mode="floor")
    ends = 2**octaves * (1 + (number % STEPS_PER_OCTAVE + 1) / STEPS_PER_OCTAVE)
    return torch.cat([ends.new_ones(2), ends])


def prepared(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores detached, in fp32 at least, and −∞ where hidden."""
    check_scores(scores, mask)
    scores = scores.detach().to(torch.promote_types(scores.dtype, torch.float32))
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _slopes(ordered: Tensor, min_rank: int) -> Tensor:
    """ln k / Δ_k of scores in falling order, from `min_rank` on: ∞ for a tie, 0 for a hidden key, NaN beside a NaN."""
    ranks = torch.arange(min_rank, ordered.shape[-1] + 1, dtype=ordered.dtype, device=ordered.device)
    later = ordered[..., min_rank - 1 :]
    gaps = (ordered[..., :1] - later).abs()  # never negative, but −0.0 − 0.0 is −0.0 and would give −∞ for a tie
    return torch.where(later <= -FAR, 0.0, ranks.log() / gaps)
