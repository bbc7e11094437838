"""Definition of every row statistic: sums over tiles of scores, and the statistics that follow from these sums.

Used for score matrices and for the rows of a call. The keys of a row may be split over several tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscale._util.tracing import autocast_off, without_autocast
from attnscale.call.attention_call import FLAT_CALL, AttentionCall, FlatCall
from attnscale.call.context import Context, first_slots
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
from attnscale.statistics.rows.tiles import LOG2E, whole_row_scores

# (purpose, shape) → scratch tensor of the size of a tile; see `CallRows.room`.
Room = Callable[[str, tuple[int, ...]], Tensor]


class RowMeasures(NamedTuple):
    """Measures of rows, each [...]; 0 if not requested."""

    max_logit: Tensor
    lse: Tensor
    w_max: Tensor
    entropy: Tensor
    lower: Tensor  # bound of Λ
    upper: Tensor  # bound of Λ
    prominence: Tensor
    winner: Tensor  # int64
    gap_counts: Tensor  # [..., thresholds], int64

    @property
    def accumulation(self) -> Accumulation:
        """Bounds of Λ."""
        return Accumulation(self.lower, self.upper)

    def packed(self) -> tuple[Tensor, Tensor]:
        """Pack into two tensors [..., C]: one floating, one integer."""
        integers = torch.cat([self.winner[..., None], self.gap_counts], dim=-1)
        return torch.stack(self[:FLOATS], dim=-1), integers

    @classmethod
    def unpacked(cls, floats: Tensor, integers: Tensor) -> RowMeasures:
        """Inverse of `packed`, as views."""
        return cls._make([*floats.unbind(-1), integers[..., 0], integers[..., 1:]])

    def to_stats(self, request: StatsRequest, known: RowStats, beta: Tensor) -> RowStats:
        """Add the requested statistics to those already known. β [...] is per row."""
        asked: dict[str, Any] = {name: getattr(self, name) for name in request.of_softmax}
        if request.gap_thresholds is not None:
            asked["gap_counts"] = self.gap_counts
        if request.accumulation is not None:
            asked |= {"accumulation": self.accumulation, "criticality": criticality(beta, self.accumulation)}
        return known._replace(**asked)

    def renumbered(self, renumber: Callable[[Tensor], Tensor]) -> RowMeasures:
        """Map every slot [...] with `renumber`."""
        return self._replace(winner=renumber(self.winner))


FLOATS = RowMeasures._fields.index("winner")


class RowSums(NamedTuple):
    """Sums over some keys of rows, each [..., r, 1]. Logits ℓ are in units of ln 2. None if not requested."""

    top: Tensor  # m = max ℓ
    total: Tensor  # Σ 2^(ℓ − m)
    moment: Tensor | None  # Σ 2^(ℓ − m)·(ℓ − m)
    mixed: Tensor | None  # Σ 2^(ℓ − m)·v, [..., r, Dv]
    winner: Tensor | None  # the slot of m


def add_keys(
    seen: RowSums | None,
    logits: Tensor,
    request: StatsRequest,
    *,
    room: Room | None = None,
    values: Tensor | None = None,
    kept: Tensor | None = None,
    left: int = 0,
) -> RowSums:
    """Add the keys of a tile [..., r, K], whose first slot is `left`, to the sums of its rows.

    Overwrites `seen` and the logits. `room` provides scratch memory. `kept` is the scaled dropout mask, applied before
    the product with the values.
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
    powers = torch.exp2(centred, out=room and room("powers", logits.shape))  # half the cost of exp
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
    """Measures of raw scores, each [...]; 0 if not requested."""

    counts: Tensor  # N(t) [..., thresholds], int64
    lower: Tensor  # bound of Λ
    upper: Tensor  # bound of Λ
    prominence: Tensor


class GapSums(NamedTuple):
    """Sums over some keys of rows [...], relative to the best score over all keys. Additive over tiles."""

    counts: Tensor  # N(t) [..., thresholds], int64
    bins: Tensor  # [..., BINS], or empty
    moments: Tensor  # number of keys, Σ s and Σ s²: [..., 3], or empty

    def plus(self, other: GapSums) -> GapSums:
        """Sums over the keys of both."""
        return GapSums(*(a + b for a, b in zip(self, other, strict=True)))


def best_scores(seen: Tensor | None, scores: Tensor, request: StatsRequest) -> Tensor:
    """The best raw scores [..., ranks] of rows, over the keys of a tile [..., K] and of earlier tiles (`seen`)."""
    best = largest(scores, request.min_rank if request.accumulation == "bracket" else 1)
    return best if seen is None else largest(torch.cat([seen, best], dim=-1), best.shape[-1])


def gap_sums(
    scores: Tensor, best: Tensor, request: StatsRequest, *, prominence: bool = False, room: Room | None = None
) -> GapSums:
    """Gap sums of raw scores [..., K]; hidden scores are at most `HIDDEN`. `room` provides scratch memory."""
    nothing = scores[..., :0]
    moments = _moments(scores, room) if prominence else nothing
    gaps = torch.sub(best[..., :1], scores, out=room and room("gaps", scores.shape))
    counts = count_within(gaps, best[..., :1], request.gap_thresholds or (), room and room("powers", scores.shape))
    return GapSums(counts, count_bins(best, gaps) if request.accumulation == "bracket" else nothing, moments)


def measure_gaps(
    tiles: Sequence[Callable[[], Tensor]],
    best: Tensor,
    request: StatsRequest,
    *,
    prominence: bool = False,
    room: Room | None = None,
) -> GapMeasures:
    """Gap measures from tiles of raw scores, which together hold all keys of the rows, and from the best scores."""
    each = (gap_sums(make(), best, request, prominence=prominence, room=room) for make in tiles)
    return gap_measures(best, reduce(GapSums.plus, each), request, tiles)


def gap_measures(
    best: Tensor, sums: GapSums, request: StatsRequest, tiles: Sequence[Callable[[], Tensor]] = ()
) -> GapMeasures:
    """Gap measures from the sums of rows. An exact Λ needs all scores (`tiles`)."""
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


def _moments(scores: Tensor, room: Room | None) -> Tensor:
    out = room and room("powers", scores.shape)
    seen = torch.gt(scores, HIDDEN / 2, out=out)
    number = seen.sum(-1, dtype=scores.dtype)
    raw = torch.mul(seen, scores, out=out)  # hidden scores are finite
    return torch.stack([number, raw.sum(-1), torch.linalg.vector_norm(raw, dim=-1).square_()], dim=-1)


def _prominence(best: Tensor, moments: Tensor) -> Tensor:
    """(best − mean) / (σ·√(2 ln n)): the lead of the best raw score, relative to the maximum of n Gaussian draws.

    At most 1: the winner may be noise. NaN for fewer than three keys, or if all scores are equal.
    """
    visible, total, squares = moments.unbind(-1)
    mean = total / visible
    deviation = (squares / visible - mean.square()).clamp(min=0.0).sqrt()
    reach = deviation * (2 * visible.clamp(min=2).log()).sqrt()
    return torch.where((visible > 2) & (reach > 0), (best[..., 0] - mean) / reach, math.nan)


def row_measures(sums: RowSums, gaps: GapMeasures, sinks: Tensor | None) -> RowMeasures:
    """All measures, from the sums of rows [...]. `sinks` are logits that broadcast to the rows."""
    top, moment = sums.top, sums.moment
    unseen = top <= HIDDEN / 2
    total = sums.total.masked_fill(unseen, 1.0)
    max_logit = (top / LOG2E).masked_fill(unseen, -math.inf)
    log_total, w_max = total.log(), total.reciprocal()  # more accurate than e^(m − lse) for large m and lse
    lse = max_logit + log_total
    entropy = torch.zeros_like(total) if moment is None else (log_total - moment / (LOG2E * total)).clamp(min=0.0)
    if sinks is not None:
        sinks = sinks.to(lse.dtype).expand_as(lse)
        log_total, keys_alone = torch.logaddexp(log_total, sinks - max_logit), log_total
        lse = torch.where(unseen, sinks, max_logit + log_total)
        share = torch.exp(keys_alone - log_total)  # total weight of the keys
        w_max = w_max * share
        if moment is not None:
            entropy = share * entropy + torch.special.entr(share) + torch.special.entr(1 - share)
    winner = torch.zeros_like(top, dtype=torch.int64) if sums.winner is None else sums.winner
    winner = winner.masked_fill(unseen | top.isnan(), -1)
    w_max, entropy = w_max.masked_fill(unseen, 0.0), entropy.masked_fill(unseen, 0.0)
    return RowMeasures(max_logit, lse, w_max, entropy, gaps.lower, gaps.upper, gaps.prominence, winner, gaps.counts)


def add_shares(
    stats: RowStats, request: StatsRequest, context: Context, weigh: Callable[[Tensor, Tensor], Tensor]
) -> RowStats:
    """Add the requested weights of selected keys. `stats` must contain the lse.

    `weigh` sums the weights of the visible keys among slots [B|1, H|1, Tq|1, S] to [B, H, Tq].
    """
    if request.first_share is None:
        return stats
    share = weigh(*first_slots(context, request.first_share)) if context.keys else torch.zeros_like(stats.lse)
    return stats._replace(first_share=share.clamp(max=1.0))


def weight_at(call: AttentionCall, slots: Tensor, seen: Tensor, lse: Tensor) -> Tensor:
    """Total weight [B, H, Tq] of the visible keys among slots [B|1, H|1, Tq|1, S]."""
    seen = seen.expand(*call.query.shape[:3], slots.shape[-1])
    logits = scores_at(call, slots, seen) * call.row_beta()[..., None]
    return torch.where(seen, torch.exp(logits - lse[..., None]), 0.0).sum(-1)


def scores_at(call: AttentionCall, slots: Tensor, usable: Tensor) -> Tensor:
    """Raw scores [B, H, Tq, S] of each row with the keys in slots [B|1, H|1, Tq|1, S].

    Entries that are not `usable` [B, H, Tq, S] may be 0 or non-finite, because a hidden key may hold any value. With
    slots per row, the scores carry gradients, and unusable keys do not contribute to them.
    """
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    query, (batch, heads, rows, dim), count = call.query.to(dtype), call.query.shape, slots.shape[-1]
    if slots.shape[1:3] == (1, 1):
        index = slots.view(-1, 1, count, 1).expand(batch, call.key.shape[1], count, dim)
        keys = call.key.gather(2, index).to(dtype).repeat_interleave(call.group, dim=1)  # [B, H, S, D]
        with autocast_off(query.device):
            score = query @ keys.mT * call.scale
    else:
        index = slots.expand(batch, heads, rows, count)
        # In the precision of the scores where gradients of several rows are added to a key.
        by_head = (call.key.to(dtype) if call.key.requires_grad else call.key).repeat_interleave(call.group, dim=1)
        found = []
        for place, use in zip(index.unbind(-1), usable.unbind(-1), strict=True):
            keys = _keys_at(by_head, place).masked_fill(~use[..., None], 0.0)
            found.append((query * keys.to(dtype)).sum(-1))
        score = torch.stack(found, dim=-1) * call.scale
    if call.softcap is not None:
        score = call.softcap * torch.tanh(score / call.softcap)
    if call.bias is not None:
        index = slots.expand(batch, heads, rows, count)
        score = score + call.bias.expand(batch, heads, rows, -1).gather(-1, index).to(dtype)
    return score


def _keys_at(keys: Tensor, slots: Tensor) -> Tensor:
    """The keys [B, H, Tk, D] in slots [B, H, Tq], one per row."""
    if keys.device.type == "cpu":
        return keys.gather(2, slots[..., None].expand(-1, -1, -1, keys.shape[-1]))
    # The backward pass of indexing sorts the slots; that of gather would use atomics.
    batch, head = (torch.arange(size, device=keys.device) for size in keys.shape[:2])
    return keys[batch[:, None, None], head[None, :, None], slots]


@torch.library.custom_op(
    "attnscale::contacts", mutates_args=(), schema=f"({FLAT_CALL}, SymInt min_rank) -> (Tensor, Tensor)"
)
@without_autocast
def contacts(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Λ [B, H, Tq], and [B, H, Tq, 3]: its rank k* and the slots of the keys of rank 1 and k*."""
    flat, (min_rank,) = FlatCall.split(arguments)
    shape, dtype = flat.query.shape[:3], torch.promote_types(flat.query.dtype, torch.float32)
    value = torch.zeros(shape, dtype=dtype, device=flat.query.device)
    places = torch.zeros(*shape, 3, dtype=torch.int64, device=flat.query.device)
    for rows, block, scores in whole_row_scores(flat.to_call()):
        found = find_contact(scores, min_rank)
        rows.store(value, block, found.value)
        slots = found.first + block.left, found.key + block.left
        rows.store(places, block, torch.stack([found.rank, *slots], dim=-1))
    return value, places


@contacts.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    query = arguments[0]
    value = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    return value, query.new_empty(*query.shape[:3], 3, dtype=torch.int64)


def differentiable_accumulation(call: AttentionCall, min_rank: int) -> Tensor:
    """Λ = ln k* / (s_(1) − s_(k*)), differentiable in these two scores. No gradient if Λ is 0 or ∞."""
    value, places = contacts(*FlatCall.of(call.detached()), min_rank)
    usable = (value > 0) & torch.isfinite(value)
    first, other = scores_at(call, places[..., 1:], usable[..., None].expand(*usable.shape, 2)).unbind(-1)
    gap = torch.where(usable, first - other, 1.0)
    return torch.where(usable, places[..., 0].to(gap.dtype).log() / gap, value)
