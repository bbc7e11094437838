"""Statistics of rows: the fields, their meaning, and how those of disjoint keys are merged.

All in nats, over visible keys only, detached, and after temperature; but gap counts and Λ are of raw scores s (after
softcap and bias, before β).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from attnscale._util.tracing import is_watched
from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import Context, count_visible
from attnscale.errors import ArgumentError
from attnscale.statistics.gaps import Accumulation
from attnscale.statistics.request import SOFTMAX, StatsRequest

# A largest weight below this is that of keys beside a far larger sink, and its reciprocal may not be finite.
LEAST_WEIGHT = 1e-30


class RowStats(NamedTuple):
    """Statistics per row, each [B, H, Tq] (or [..., R] for R sampled rows); None where not asked for.

    An attention sink is an outcome of the softmax but not a key: `lse` contains it, `entropy` is that of keys and sink
    together (so up to ln(n + 1)), `max_logit` and `w_max` look at keys only (so `w_max` may be below 1/n), and it has
    no part in `visible`, gaps or Λ. A row that sees nothing has lse = max_logit = −∞ and zero elsewhere. A row that
    sees a NaN has NaN everywhere but in `visible`, where that key counts, and in `gap_counts`, which are 0.
    """

    # Typed as tensors are the four that are there unless a request leaves them out.
    visible: Tensor
    lse: Tensor = None  # type: ignore[assignment]
    max_logit: Tensor = None  # type: ignore[assignment]
    w_max: Tensor = None  # type: ignore[assignment]
    entropy: Tensor = None  # type: ignore[assignment]
    gap_counts: Tensor | None = None  # [B, H, Tq, thresholds]
    accumulation: Accumulation | None = None
    criticality: Tensor | None = None  # β/Λ, with the middle of the bracket
    winner: Tensor | None = None  # int64: the slot of the key with the largest weight, −1 in a row without one
    first_share: Tensor | None = None  # weight of the first keys that the row sees, where attention sinks lie
    at_ceiling: Tensor | None = None  # bool: an adaptive β was cut off there, and has lost its certificate
    rows: Tensor | None = None  # [R], which rows were sampled
    with_sink: bool = False  # whether lse, w_max and entropy contain an attention sink
    visible_given: bool = False  # whether `visible` is the n that the caller stated, of all keys wherever they are
    places: RowPlaces | None = None  # where the rows and keys lie in the sequence, as far as the call knew
    heads: Span | None = None  # their numbers in the whole layer, where `HeadParallel` has spread it over processes

    @classmethod
    def counted(cls, call: AttentionCall, *, with_sink: bool = False) -> RowStats:
        """n of every row [B, H, Tq] of a call, and no other statistic yet."""
        visible = count_visible(call.context).expand(call.query.shape[:3])
        with_sink = with_sink and call.sinks is not None
        return cls(visible, with_sink=with_sink, visible_given=call.context.visible is not None)

    def only(self, request: StatsRequest) -> RowStats:
        """The same without those statistics of the softmax that are not asked for."""
        unasked: dict[str, Any] = {name: None for name in SOFTMAX if not getattr(request, name)}
        return self._replace(**unasked)

    def merge(self, other: RowStats, *, common_maximum: bool = False) -> RowStats:
        """Statistics of the same rows over the keys of both, which must be disjoint.

        Refused where `rows`, `places` or `heads` tell that rows differ, or that both sides have seen the same keys. A
        sink is one outcome for all keys together: compute one part with `sinks` and the others without, and merge them
        in any order. `visible` adds up, unless both sides were given it with `visible=`: that is the n of all keys
        already. Gap counts add up only if both sides counted from the maximum over all keys: say so with
        `common_maximum`. `winner` is that of the side with the larger logit, or the first of two equal ones: both sides
        must number their keys alike. Λ and `first_share` cannot be merged.

        >>> from attnscale import row_statistics
        >>> scores = torch.randn(3, 10)
        >>> parts = row_statistics(scores[:, :4]), row_statistics(scores[:, 4:])
        >>> torch.testing.assert_close(parts[0].merge(parts[1]).entropy, row_statistics(scores).entropy)
        """
        check_mergeable(self, other, common_maximum)
        places = join_places(self._known_places(), other._known_places())
        merged: dict[str, Any] = {}  # both sides have the same statistics
        shares = self._shares_beside(other)
        if shares is not None:
            merged |= {"lse": shares.lse, "w_max": shares.w_max}
            if self.entropy is not None:
                merged["entropy"] = _merge_entropy((shares.first, self.entropy), (shares.second, other.entropy))
        if self.max_logit is not None:
            merged["max_logit"] = torch.maximum(self.max_logit, other.max_logit)
            if self.winner is not None and other.winner is not None:
                # The first of equal keys, and −1 beside a NaN, which has neither a larger nor a smaller logit.
                first = torch.minimum(self.winner, other.winner)
                first = torch.where(self.max_logit > other.max_logit, self.winner, first)
                merged["winner"] = torch.where(self.max_logit < other.max_logit, other.winner, first)
        if common_maximum and self.gap_counts is not None and other.gap_counts is not None:
            merged["gap_counts"] = self.gap_counts + other.gap_counts
        return RowStats(
            visible=self.visible if self.visible_given else self.visible + other.visible,
            **merged,
            rows=self.rows,
            with_sink=self.with_sink or other.with_sink,
            visible_given=self.visible_given,
            places=places,
            heads=other.heads if self.heads is None else self.heads,
        )

    def _shares_beside(self, other: RowStats) -> Shares | None:
        """The shares of the softmax over the keys of both; None without lse."""
        if self.lse is None or other.lse is None:
            return None
        first = SoftmaxPart(self.lse, self.max_logit, self.w_max)
        return join_parts(first, SoftmaxPart(other.lse, other.max_logit, other.w_max))

    def restored(self, restore: Callable[[Tensor], Tensor]) -> RowStats:
        """The same with every statistic [B, H, Tq, ...] in the shape that `restore` gives it."""
        found: RowStats = tree_map_only(Tensor, restore, self._replace(rows=None, places=None))
        return found._replace(rows=self.rows, places=self.places)

    def select(self, rows: Tensor) -> RowStats:
        """Statistics [B, H, Tq, ...] of some rows [R]."""
        return self.restored(lambda x: x.index_select(2, rows))._replace(rows=rows)

    def _known_places(self) -> RowPlaces | None:
        """The places, unless statistics of some of the rows were cut out since."""
        if self.places is None or self.rows is not None:
            return self.places
        rows = self.places.rows
        extent = rows.shape[-1] if isinstance(rows, Tensor) else rows.stop - rows.start
        return self.places if extent == self.visible.shape[-1] else None


class AttentionOutput(NamedTuple):
    """What `attention_with_stats` returns."""

    output: Tensor
    stats: RowStats

    def merge(self, other: AttentionOutput) -> AttentionOutput:
        """Output and statistics of the same rows over the keys of both, which must be disjoint; see `RowStats.merge`.

        Each output is weighted by its share of the softmax, so both need `lse`.

        >>> from attnscale import attention_with_stats
        >>> q, k = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 10, 8)
        >>> parts = [attention_with_stats(q, keys, keys) for keys in (k[:, :, :4], k[:, :, 4:])]
        >>> torch.testing.assert_close(parts[0].merge(parts[1]).output, attention_with_stats(q, k, k).output)
        """
        stats, shares = self.stats.merge(other.stats), self.stats._shares_beside(other.stats)
        if shares is None:
            raise ArgumentError("outputs without lse are not accepted: expected StatsRequest(lse=True), to weigh them")
        output = self.output * shares.first[..., None].to(self.output.dtype)
        return AttentionOutput(output + other.output * shares.second[..., None].to(other.output.dtype), stats)


def largest_weight(max_logit: Tensor, lse: Tensor) -> Tensor:
    """e^(m − lse), zero for a row without keys."""
    return torch.where(max_logit == -math.inf, 0.0, torch.exp(max_logit - finite(lse)))


def criticality(beta: Tensor | float, accumulation: Accumulation) -> Tensor:
    """r = β/Λ: below 1 the top scores are not separated, above 1 the entropy collapses; 0 where Λ = ∞, ∞ where 0."""
    return beta / accumulation.middle


def finite(x: Tensor) -> Tensor:
    """x with −∞ replaced by 0, so that a row without keys can be subtracted from."""
    return x.masked_fill(x == -math.inf, 0.0)


def check_mergeable(a: RowStats, b: RowStats, common_maximum: bool) -> None:
    """Refuse two sets of statistics that do not belong to the same rows, or that contain the same thing twice."""
    names = ["lse", "max_logit", "entropy", "winner", *(["gap_counts"] if common_maximum else [])]
    for name in names:
        if (getattr(a, name) is None) != (getattr(b, name) is None):
            raise ArgumentError(f"{name} is not accepted on one side only: expected the same statistics on both")
    if a.winner is not None and a.max_logit is None:
        raise ArgumentError("winner without max_logit is not accepted: expected both, to compare the two sides")
    if a.entropy is not None and a.lse is None:
        raise ArgumentError("entropy without lse is not accepted: expected both, to weigh the two sides")
    for name in ("visible", *names):
        shapes = [list(x.shape) for x in (getattr(a, name), getattr(b, name)) if x is not None]
        if len(shapes) == 2 and shapes[0] != shapes[1]:
            raise ArgumentError(
                f"{name} of shapes {shapes[0]} and {shapes[1]} is not accepted: expected statistics of the same rows "
                "over different keys"
            )
    if not _same_rows(a.rows, b.rows):
        first, second = ("all rows" if x is None else f"rows {x.tolist()}" for x in (a.rows, b.rows))
        raise ArgumentError(
            f"statistics of {first} and of {second} are not accepted: expected those of the same rows (for sampled "
            "ones, the same StatsRequest.rows and seed, of as many queries)"
        )
    if a.heads is not None and b.heads is not None and a.heads != b.heads:
        first, second = (f"{heads.start} … {heads.stop - 1}" for heads in (a.heads, b.heads))
        raise ArgumentError(
            f"statistics of the heads {first} and of {second} of a layer are not accepted: expected those of the same "
            "heads over different keys"
        )
    if a.with_sink and b.with_sink:
        raise ArgumentError(
            "statistics that both contain an attention sink are not accepted, as it would count twice: expected it on "
            "one side at most, so compute all parts but one without `sinks`"
        )
    if a.visible_given != b.visible_given:
        raise ArgumentError(
            "visible is not accepted as given (`visible=`) on one side and counted on the other: expected the n of all "
            "keys on both, or on neither"
        )


def _same_rows(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two samples are of the same rows. A graph and the meta device have no values to compare."""
    if a is None or b is None or a is b:
        return a is b
    return a.shape == b.shape and (is_watched() or a.is_meta or torch.equal(a, b.to(a.device)))


def _merge_entropy(*sides: tuple[Tensor, Tensor]) -> Tensor:
    """H of the union: each side's share a of the weight brings a·H_side − a·ln a."""
    total = torch.zeros_like(sides[0][1])
    for share, entropy in sides:
        total = total + share * entropy + torch.special.entr(share)
    return total.clamp(min=0.0)  # a share of 1 plus a rounding would bring less than nothing


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


class Span(NamedTuple):
    """The places start … stop − 1 of a sequence, or the heads of a layer."""

    start: int
    stop: int


class RowPlaces(NamedTuple):
    """The places of the rows of a call in their sequence, and of the keys that they were measured against.

    `rows` is a span where all sequences have the same neighbouring rows, else [B|1, Tq]; of a sample, those of all rows
    it was drawn from. `keys` is empty where their places are not known.
    """

    rows: Span | Tensor
    keys: tuple[Span, ...] = ()


def find_places(context: Context) -> RowPlaces | None:
    """The places that a call knows of; None where it says nothing that would tell its rows from others.

    `positions` tell rows apart. Slots do where rows see by them, unless the n of all keys was given: the keys of this
    call are then some of the sequence, and slots count from the first of them.
    """
    by_slot = context.causal or context.window != (None, None) or isinstance(context.slot, Tensor) or context.slot != 0
    slots_are_places = by_slot and context.visible is None and (context.positions is None or _is_slot(context))
    keys = (Span(0, context.keys),) if slots_are_places and context.first is None else ()
    if context.positions is not None:
        return RowPlaces(context.positions, keys)
    if not slots_are_places:
        return None
    slot = context.slot
    return RowPlaces(slot if isinstance(slot, Tensor) else Span(slot, slot + context.queries), keys)


def join_places(a: RowPlaces | None, b: RowPlaces | None) -> RowPlaces | None:
    """The places of statistics that are merged; refuses other rows, and keys that both sides have seen."""
    if a is None or b is None:
        known = b if a is None else a
        return None if known is None else RowPlaces(known.rows)
    if not _same(a.rows, b.rows):
        raise ArgumentError(
            f"statistics of the rows at {_text(a.rows)} and of those at {_text(b.rows)} are not accepted: expected "
            "those of the same rows (where cache_offset counts the keys of one part only, give every part the same "
            "positions= and visible=)"
        )
    for one in a.keys:
        for other in b.keys:
            if one.start < other.stop and other.start < one.stop:
                raise ArgumentError(
                    f"statistics over the keys {_text(one)} and over {_text(other)} are not accepted, as some would "
                    "count twice: expected keys that no other part has"
                )
    return RowPlaces(a.rows, tuple(sorted((*a.keys, *b.keys))) if a.keys and b.keys else ())


def _is_slot(context: Context) -> bool:
    """Whether the slots of the rows were taken from their positions."""
    return context.slot is context.positions


def _same(a: Span | Tensor, b: Span | Tensor) -> bool:
    """Whether rows are at the same places. A graph and the meta device have no values to compare."""
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return a == b
    if is_watched() or any(isinstance(x, Tensor) and x.is_meta for x in (a, b)):
        return True
    first, second = (x if isinstance(x, Tensor) else torch.arange(*x, device="cpu")[None] for x in (a, b))
    return first is second or bool((first == second.to(first.device)).all())


def _text(places: Span | Tensor) -> str:
    return str(places.tolist()) if isinstance(places, Tensor) else f"{places.start} … {places.stop - 1}"
