"""Gap counting: N(t), how many keys lie within t of the best, and Λ = sup ln N(t)/t, exact and bracketed."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.errors import reject

# For the bracket: ranks taken exactly, and the bins behind them, sixteen to the octave. A bin is at most 1/16 wide, so
# the upper end of a bracket is at most 6.25 % above the lower one; four octaves suffice up to n = 10⁹.
TOP = 4
STEPS_PER_OCTAVE = 16
BINS = 4 * STEPS_PER_OCTAVE

# A score at or below −FAR is that of a hidden key: −∞, or the finite number that tiles use in its place.
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

    The mask broadcasts to the scores (True: visible). A tie at the top gives ∞, fewer than `min_rank` keys give 0.
    A row's Λ is heavy-tailed through its first ranks; a `min_rank` of 8 or 16 tames it.

    >>> accumulation_scale(torch.tensor([[0.0, -1.0, -1.0, -1.0], [5.0, 5.0, 1.0, 0.0]]))
    tensor([1.3863,    inf])
    """
    return find_contact(scores, min_rank, mask).value


def find_contact(scores: Tensor, min_rank: int = 2, mask: Tensor | None = None) -> Contact:
    """Λ with its point of contact, by sorting; `first` and `key` index the last axis."""
    _check_rank(min_rank)
    scores = prepared(scores, mask)
    if scores.shape[-1] < min_rank:
        nothing = scores.new_zeros(scores.shape[:-1])
        zero = torch.zeros_like(nothing, dtype=torch.int64)
        return Contact(nothing, zero + 1, zero, zero)
    ordered, keys = scores.sort(dim=-1, descending=True, stable=True)
    value, at = _slopes(ordered, min_rank).max(-1)
    at = at + min_rank - 1
    return Contact(value, at + 1, keys[..., 0], keys.gather(-1, at[..., None])[..., 0])


def count_gaps(scores: Tensor, thresholds: tuple[float, ...], mask: Tensor | None = None) -> Tensor:
    """N(t) [..., thresholds] as int64: visible keys with s* − s ≤ t, the best one included.

    >>> count_gaps(torch.tensor([3.0, 2.5, 0.0]), (0.0, 0.5, 10.0))
    tensor([1, 2, 3])
    """
    scores = prepared(scores, mask)
    if not scores.shape[-1]:
        return torch.zeros(*scores.shape[:-1], len(thresholds), dtype=torch.int64, device=scores.device)
    # An infinite threshold must not admit hidden keys, and in a row without any other no threshold may.
    edges = torch.tensor([min(t, FAR) for t in thresholds], dtype=scores.dtype, device=scores.device)
    top = scores.amax(-1, keepdim=True)
    return count_within(top - scores, torch.where(top > -FAR, edges, -1.0))


def bracket_accumulation(
    scores: Tensor, min_rank: int = 2, mask: Tensor | None = None, *, overwrite: bool = False
) -> Accumulation:
    """Λ [...] between two bounds at most 6.25 % apart, from the best scores and a histogram: streaming, no sort.

    The first ranks, up to gap t, are exact; since Λ ≥ ln TOP/t and no rank exceeds n, only gaps up to 16·t can matter
    behind them. These are binned by the leading bits of gap/t. With N(b) keys up to the end of a bin (a, b], a rank
    inside it has a slope of at most ln N(b)/a, and one of at least ln N(b)/b exists. `overwrite` lends the memory of
    the scores.

    >>> bracket_accumulation(torch.tensor([[0.0, -1.0, -1.0, -1.0]])).upper
    tensor([1.3863])
    """
    _check_rank(min_rank)
    scores = prepared(scores, mask)
    keys = scores.shape[-1]
    if keys < min_rank:
        nothing = scores.new_zeros(scores.shape[:-1])
        return Accumulation(nothing, nothing)
    best = scores.topk(min(keys, max(TOP, min_rank)), dim=-1).values
    known = _slopes(best, min_rank).amax(-1)
    if best.shape[-1] == keys:
        return Accumulation(known, known)
    start = best[..., 0] - best[..., -1]
    open_ = (known > 0) & (known < math.inf) & (start < FAR)
    start = torch.where(open_, start, 1.0)[..., None]
    gaps = torch.sub(best[..., :1], scores, out=scores if overwrite else None)
    counts = _histogram(gaps.mul_(1 / start)).cumsum(-1)  # N up to the end of each bin
    slack = 8 * torch.finfo(scores.dtype).eps  # of gap/t, and so of the edges
    edges = start * _edges(scores)
    ln_counts = counts[..., :-1].to(scores.dtype).log()  # the last bin is out of reach
    lower = (ln_counts / (edges[..., 1:] * (1 + slack))).amax(-1)
    filled = torch.cat([torch.ones_like(open_)[..., None], counts[..., 1:-1] > counts[..., :-2]], dim=-1)
    upper = torch.where(filled, ln_counts / (edges[..., :-1] * (1 - slack)), 0.0).amax(-1)
    lower = torch.where(open_, torch.maximum(known, lower), known)
    return Accumulation(lower, torch.where(open_, torch.maximum(lower, upper), known))


def _histogram(ratios: Tensor) -> Tensor:
    """Counts [..., BINS + 2] of ratios [..., Tk] below 1, in each sixteenth of an octave, and beyond; overwrites them.

    The leading bits of a floating number are its octave and the linear step within: no logarithm is needed.
    """
    rows, width = ratios.shape[:-1], BINS + 2
    integer, mantissa = (torch.int32, 23) if ratios.dtype == torch.float32 else (torch.int64, 52)
    one = torch.ones((), dtype=ratios.dtype, device=ratios.device).view(integer)
    index = ratios.view(integer).sub_(one).bitwise_right_shift_(mantissa - int(math.log2(STEPS_PER_OCTAVE)))
    index = index.clamp_(-1, BINS).add_(1)
    offset = torch.arange(rows.numel(), device=ratios.device, dtype=integer).view(*rows, 1) * width
    return torch.bincount(index.add_(offset).flatten(), minlength=rows.numel() * width).view(*rows, width)


def _edges(like: Tensor) -> Tensor:
    """1, and the ends of all bins behind it, as multiples of t; the first bin, up to t, is (t, t] in name only."""
    octaves = torch.arange(BINS, dtype=like.dtype, device=like.device).div(STEPS_PER_OCTAVE, rounding_mode="floor")
    steps = torch.arange(BINS, dtype=like.dtype, device=like.device) % STEPS_PER_OCTAVE
    ends = 2**octaves * (1 + (steps + 1) / STEPS_PER_OCTAVE)
    return torch.cat([ends.new_ones(2), ends])


def count_within(gaps: Tensor, edges: Tensor) -> Tensor:
    """How many of the gaps [..., Tk] lie within each of a row's edges [..., E], as int64."""
    return torch.stack([(gaps <= edges[..., i, None]).sum(-1) for i in range(edges.shape[-1])], dim=-1)


def prepared(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores detached, in fp32 at least, and −∞ where hidden."""
    scores = scores.detach().to(torch.promote_types(scores.dtype, torch.float32))
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _slopes(ordered: Tensor, min_rank: int) -> Tensor:
    """ln k / Δ_k of scores in falling order, from `min_rank` on: ∞ for a tie, 0 for a hidden key."""
    ranks = torch.arange(min_rank, ordered.shape[-1] + 1, dtype=ordered.dtype, device=ordered.device)
    later = ordered[..., min_rank - 1 :]
    return torch.where(later > -FAR, ranks.log() / (ordered[..., :1] - later), 0.0)


def _check_rank(min_rank: object) -> None:
    if isinstance(min_rank, bool) or not isinstance(min_rank, int) or min_rank < 2:
        reject("min_rank", min_rank, "an int >= 2")
