"""Row statistics: definitions of the fields, and merging over disjoint keys.

Statistics are in nats and cover visible keys only. They are detached unless the request is differentiable. They are
taken after the temperature, except gap counts and Λ, which use raw scores s (after softcap and bias, before β).
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

# A largest weight below this occurs only next to a dominant sink. Its reciprocal may overflow.
LEAST_WEIGHT = 1e-30


class RowStats(NamedTuple):
    """Statistics per row, each [B, H, Tq], or [B, H, R] for R sampled rows. None if not requested.

    An attention sink takes part in the softmax, but is not a key. `lse` and `entropy` include the sink (entropy is at
    most ln(n + 1)). `max_logit` and `w_max` cover keys only, so `w_max` may be below 1/n. `visible`, gap counts and Λ
    exclude the sink. A row without visible keys has lse = max_logit = −∞ and zero elsewhere. A row with a visible NaN
    has NaN everywhere, except `visible`, which counts that key, and `gap_counts`, which are 0.

    Attributes:
        visible: n, the number of visible keys; int64.
        lse: log-sum-exp of the logits.
        max_logit: the largest logit.
        w_max: the largest weight.
        entropy: entropy of the weights.
        gap_counts: N(t), [B, H, Tq, thresholds], int64.
        accumulation: bounds of Λ.
        criticality: r = β/Λ, with the middle of the bounds.
        winner: slot of the key with the largest weight, int64; −1 if there is none.
        first_share: total weight of the first visible keys, the usual place of attention sinks.
        at_ceiling: bool, the adaptive β was clipped at its ceiling. The guarantee for w_max does not hold there.
        rows: [R], the sampled rows.
        with_sink: `lse`, `w_max` and `entropy` include an attention sink.
        visible_given: `visible` was passed by the caller and counts the keys of all processes.
        places: places of the rows and keys in the sequence, if known.
        heads: head numbers in the full layer, if `HeadParallel` has split the heads over processes.
    """

    # The four default statistics are typed as tensors for convenience: None only if a request excludes them.
    visible: Tensor
    lse: Tensor = None  # type: ignore[assignment]
    max_logit: Tensor = None  # type: ignore[assignment]
    w_max: Tensor = None  # type: ignore[assignment]
    entropy: Tensor = None  # type: ignore[assignment]
    gap_counts: Tensor | None = None
    accumulation: Accumulation | None = None
    criticality: Tensor | None = None
    winner: Tensor | None = None
    first_share: Tensor | None = None
    at_ceiling: Tensor | None = None
    rows: Tensor | None = None
    with_sink: bool = False
    visible_given: bool = False
    places: RowPlaces | None = None
    heads: Span | None = None

    @classmethod
    def counted(cls, call: AttentionCall, *, with_sink: bool = False) -> RowStats:
        """Statistics with n [B, H, Tq] of every row of a call, and nothing else."""
        visible = count_visible(call.context).expand(call.query.shape[:3])
        with_sink = with_sink and call.sinks is not None
        return cls(visible, with_sink=with_sink, visible_given=call.context.visible is not None)

    def only(self, request: StatsRequest) -> RowStats:
        """The statistics without softmax statistics that were not requested."""
        unasked: dict[str, Any] = {name: None for name in SOFTMAX if not getattr(request, name)}
        return self._replace(**unasked)

    def merge(self, other: RowStats, *, common_maximum: bool = False) -> RowStats:
        """Merge statistics of the same rows over disjoint sets of keys.

        Pass `sinks` to one part only: a sink counts once for all keys. `visible` is added, unless both sides received
        the total with `visible=`. `winner` comes from the side with the larger logit, or the lower slot in a tie; both
        sides must use the same slot numbers. Λ and `first_share` are dropped, because they cannot be merged.

        Args:
            other: statistics of the same rows over other keys.
            common_maximum: both sides counted gaps from the maximum over all keys. Only then are gap counts added.

        Returns:
            The statistics over the keys of both sides.

        Raises:
            ArgumentError: the rows, heads or statistics differ, or both sides contain the same keys or sink.

        Example:
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
                # The lower slot in a tie, and −1 next to a NaN, which compares neither larger nor smaller.
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
        """Shares of both sides in the joint softmax; None without lse."""
        if self.lse is None or other.lse is None:
            return None
        first = SoftmaxPart(self.lse, self.max_logit, self.w_max)
        return join_parts(first, SoftmaxPart(other.lse, other.max_logit, other.w_max))

    def restored(self, restore: Callable[[Tensor], Tensor]) -> RowStats:
        """Apply `restore` to every statistic [B, H, Tq, ...]."""
        found: RowStats = tree_map_only(Tensor, restore, self._replace(rows=None, places=None))
        return found._replace(rows=self.rows, places=self.places)

    def select(self, rows: Tensor) -> RowStats:
        """The statistics of some rows.

        Args:
            rows: row numbers [R].

        Returns:
            Statistics [B, H, R, ...], with `rows` set.
        """
        return self.restored(lambda x: x.index_select(2, rows))._replace(rows=rows)

    def _known_places(self) -> RowPlaces | None:
        """The places; None if rows were sliced out of the statistics afterwards."""
        if self.places is None or self.rows is not None:
            return self.places
        rows = self.places.rows
        extent = rows.shape[-1] if isinstance(rows, Tensor) else rows.stop - rows.start
        return self.places if extent == self.visible.shape[-1] else None


class AttentionOutput(NamedTuple):
    """Result of `attention_with_stats`.

    Attributes:
        output: [..., H, Tq, Dv]; differentiable.
        stats: `RowStats`; detached, except the four statistics of `StatsRequest(differentiable=True)`.

    Example:
        >>> import attnscale
        >>> q = k = v = torch.randn(1, 2, 4, 8)
        >>> output, stats = attnscale.attention_with_stats(q, k, v)
        >>> output.shape, stats.w_max.shape
        (torch.Size([1, 2, 4, 8]), torch.Size([1, 2, 4]))
    """

    output: Tensor
    stats: RowStats

    def merge(self, other: AttentionOutput) -> AttentionOutput:
        """Merge output and statistics of the same rows over disjoint sets of keys; see `RowStats.merge`.

        Outputs are weighted by their shares of the softmax, which needs `lse` on both sides. The gradient of the merged
        output is that of attention over all keys if the statistics of both sides are differentiable.

        Args:
            other: the result for the same rows over other keys.

        Returns:
            The result over the keys of both sides.

        Raises:
            ArgumentError: `lse` is missing, or the statistics cannot be merged.

        Example:
            >>> from attnscale import attention_with_stats
            >>> q, k = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 10, 8)
            >>> parts = [attention_with_stats(q, keys, keys) for keys in (k[:, :, :4], k[:, :, 4:])]
            >>> torch.testing.assert_close(parts[0].merge(parts[1]).output, attention_with_stats(q, k, k).output)
        """
        stats, shares = self.stats.merge(other.stats), self.stats._shares_beside(other.stats)
        if shares is None:
            raise ArgumentError("outputs without lse are not accepted: expected StatsRequest(lse=True) on both sides")
        output = self.output * shares.first[..., None].to(self.output.dtype)
        return AttentionOutput(output + other.output * shares.second[..., None].to(other.output.dtype), stats)


def largest_weight(max_logit: Tensor, lse: Tensor) -> Tensor:
    """The largest weight e^(max_logit − lse).

    Args:
        max_logit: the largest logit of each row, [...].
        lse: the log-sum-exp of each row, [...].

    Returns:
        The largest weight [...]; zero for a row without keys.

    Example:
        >>> largest_weight(torch.tensor([0.0]), torch.tensor([math.log(2)]))
        tensor([0.5000])
    """
    return torch.where(max_logit == -math.inf, 0.0, torch.exp(max_logit - finite(lse)))


def criticality(beta: Tensor | float, accumulation: Accumulation) -> Tensor:
    """r = β/Λ. Below 1 the top scores are not separated; above 1 the entropy collapses.

    Args:
        beta: the temperature, a number or a tensor that broadcasts to [...].
        accumulation: bounds of Λ, [...]. Their geometric mean is used.

    Returns:
        r [...]; 0 for Λ = ∞, ∞ for Λ = 0.

    Example:
        >>> criticality(1.0, Accumulation(torch.tensor([2.0]), torch.tensor([2.0])))
        tensor([0.5000])
    """
    return beta / accumulation.middle


def finite(x: Tensor) -> Tensor:
    """x with −∞ replaced by 0. Avoids −∞ − (−∞) in rows without keys."""
    return x.masked_fill(x == -math.inf, 0.0)


def check_mergeable(a: RowStats, b: RowStats, common_maximum: bool) -> None:
    """Reject statistics of different rows, or with the same keys or sink on both sides."""
    names = ["lse", "max_logit", "entropy", "winner", *(["gap_counts"] if common_maximum else [])]
    for name in names:
        if (getattr(a, name) is None) != (getattr(b, name) is None):
            raise ArgumentError(f"{name} is not accepted on one side only: expected the same statistics on both")
    if a.winner is not None and a.max_logit is None:
        raise ArgumentError("winner without max_logit is not accepted: merging winner needs max_logit on both sides")
    if a.entropy is not None and a.lse is None:
        raise ArgumentError("entropy without lse is not accepted: merging entropy needs lse on both sides")
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
            f"statistics of {first} and of {second} are not accepted: expected the same rows on both sides (for "
            "samples: the same StatsRequest.rows, seed and number of queries)"
        )
    if a.heads is not None and b.heads is not None and a.heads != b.heads:
        first, second = (f"{heads.start} … {heads.stop - 1}" for heads in (a.heads, b.heads))
        raise ArgumentError(
            f"statistics of the heads {first} and of {second} of a layer are not accepted: expected the same heads "
            "over different keys"
        )
    if a.with_sink and b.with_sink:
        raise ArgumentError(
            "statistics with an attention sink on both sides are not accepted, because the sink would count twice: "
            "expected `sinks` on one side only"
        )
    if a.visible_given != b.visible_given:
        raise ArgumentError(
            "`visible=` on one side only is not accepted: expected the number of all keys on both sides, or on neither"
        )


def _same_rows(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two samples have the same rows. Values are not compared while tracing or on the meta device."""
    if a is None or b is None or a is b:
        return a is b
    return a.shape == b.shape and (is_watched() or a.is_meta or torch.equal(a, b.to(a.device)))


def _merge_entropy(*sides: tuple[Tensor, Tensor]) -> Tensor:
    """Entropy of the union: a side with share a contributes a·H_side − a·ln a."""
    total = torch.zeros_like(sides[0][1])
    for share, entropy in sides:
        log_share = torch.where(share == 0, 1.0, share).log()  # finite, also in the backward pass
        total = total + share * (entropy - log_share)
    return total.clamp(min=0.0)  # rounding may push a share above 1 and the entropy below 0


class SoftmaxPart(NamedTuple):
    """Sum of e^logit over some keys: e^lse, or e^max_logit / w_max if both are known.

    The second form is more accurate: the exponential turns the rounding of a large lse into an error of the weights.
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
    """Softmax shares of two parts, and the joint lse and largest weight."""

    first: Tensor
    second: Tensor
    lse: Tensor
    w_max: Tensor | None


def join_parts(first: SoftmaxPart, second: SoftmaxPart) -> Shares:
    """Join two parts over disjoint keys. In a row without keys both shares are 0."""
    (a, of_a), (b, of_b) = first.scaled(), second.scaled()
    pivot = finite(torch.maximum(a, b).detach())
    of_a, of_b = of_a * torch.exp(a - pivot), of_b * torch.exp(b - pivot)
    total = of_a + of_b
    divisor = torch.where(total == 0, 1.0, total)
    w_max = None
    if first.max_logit is not None and second.max_logit is not None:
        w_max = torch.exp(torch.maximum(first.max_logit, second.max_logit) - pivot) / divisor
    lse = (pivot + divisor.log()).masked_fill(total == 0, -math.inf)
    return Shares(of_a / divisor, of_b / divisor, lse, w_max)


class Span(NamedTuple):
    """A half-open range start … stop − 1 of places in a sequence, or of heads in a layer.

    Attributes:
        start: the first.
        stop: one past the last.

    Example:
        >>> Span(4, 8)
        Span(start=4, stop=8)
    """

    start: int
    stop: int


class RowPlaces(NamedTuple):
    """Places of the rows and keys of a call in their sequence.

    Attributes:
        rows: a span if the rows are contiguous and the same in all sequences, else [B|1, Tq]. For a sample: the rows it
            was drawn from.
        keys: spans of the keys; empty if unknown.

    Example:
        >>> RowPlaces(Span(4, 8), (Span(0, 8),)).keys
        (Span(start=0, stop=8),)
    """

    rows: Span | Tensor
    keys: tuple[Span, ...] = ()


def find_places(context: Context) -> RowPlaces | None:
    """The places of a call's rows and keys in the sequence.

    `positions` identify rows. Slots identify rows if visibility depends on slots, unless `visible` is given: the call
    then has a part of the keys, and slots count from the first key of that part.

    Args:
        context: the visibility of the call.

    Returns:
        The places, or None if the call does not identify its rows.

    Example:
        >>> find_places(Context(4, 4, torch.device("cpu"), causal=True)).rows
        Span(start=0, stop=4)
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
    """Places of merged statistics. Rejects different rows, and keys that are on both sides."""
    if a is None or b is None:
        known = b if a is None else a
        return None if known is None else RowPlaces(known.rows)
    if not _same(a.rows, b.rows):
        raise ArgumentError(
            f"statistics of the rows at {_text(a.rows)} and of those at {_text(b.rows)} are not accepted: expected the "
            "same rows (if cache_offset counts the keys of one part only, pass the same positions= and visible= to all "
            "parts)"
        )
    for one in a.keys:
        for other in b.keys:
            if one.start < other.stop and other.start < one.stop:
                raise ArgumentError(
                    f"statistics over the keys {_text(one)} and over {_text(other)} are not accepted, because keys "
                    "would count twice: expected disjoint keys"
                )
    return RowPlaces(a.rows, tuple(sorted((*a.keys, *b.keys))) if a.keys and b.keys else ())


def _is_slot(context: Context) -> bool:
    """Whether the slots of the rows come from their positions."""
    return context.slot is context.positions


def _same(a: Span | Tensor, b: Span | Tensor) -> bool:
    """Whether rows have the same places. Values are not compared while tracing or on the meta device."""
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return a == b
    if is_watched() or any(isinstance(x, Tensor) and x.is_meta for x in (a, b)):
        return True
    first, second = (x if isinstance(x, Tensor) else torch.arange(*x, device="cpu")[None] for x in (a, b))
    return first is second or bool((first == second.to(first.device)).all())


def _text(places: Span | Tensor) -> str:
    return str(places.tolist()) if isinstance(places, Tensor) else f"{places.start} … {places.stop - 1}"
