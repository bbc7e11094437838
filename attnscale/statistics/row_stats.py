"""Row statistics of attention: what can be asked for, what comes back, and its definition on a score matrix.

All of it in nats, over visible keys only, detached, and after temperature — but for gap counts and Λ, which are taken
from raw scores s (after softcap and bias, before β).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnscale._util.checks import check_broadcasts, check_scores, read_number
from attnscale._util.memory import Memory
from attnscale._util.tracing import is_watched
from attnscale.errors import ArgumentError, reject, reject_type
from attnscale.statistics.gaps import Accumulation, accumulation_scale, bracket_accumulation, count_gaps


@dataclass(frozen=True)
class StatsRequest:
    """Which statistics to compute; what is not asked for costs nothing.

    `gap_thresholds` are the t at which N(t) is counted. `accumulation` asks for Λ, "exact" by sorting each row or as a
    "bracket" of at most ten per cent (a quarter, from the fused kernels), from rank `min_rank` on. `rows` samples that
    many rows, spread over the positions and chosen by `seed`; None is all of them.
    """

    w_max: bool = True
    entropy: bool = True
    lse: bool = True
    max_logit: bool = True
    gap_thresholds: tuple[float, ...] | None = None
    accumulation: Literal["bracket", "exact"] | None = None
    min_rank: int = 2
    rows: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("w_max", "entropy", "lse", "max_logit"):
            if not isinstance(getattr(self, name), bool):
                reject_type(name, getattr(self, name), "True or False")
        if self.gap_thresholds is not None:
            given = self.gap_thresholds
            if isinstance(given, str) or not isinstance(given, Iterable):
                reject_type("gap_thresholds", given, "one or more numbers >= 0, as a tuple")
            thresholds = tuple(read_number("gap_thresholds", t, "one or more numbers >= 0") for t in given)
            if not thresholds or not all(t >= 0 for t in thresholds):
                reject("gap_thresholds", thresholds, "one or more numbers >= 0")
            object.__setattr__(self, "gap_thresholds", thresholds)
        if self.accumulation not in (None, "bracket", "exact"):
            reject("accumulation", self.accumulation, "None, 'bracket' or 'exact'")
        if isinstance(self.min_rank, bool) or not isinstance(self.min_rank, int) or self.min_rank < 2:
            reject("min_rank", self.min_rank, "an int >= 2")
        if self.rows is not None and (isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 1):
            reject("rows", self.rows, "an int >= 1 or None for all rows")

    @property
    def softmax(self) -> bool:
        """Whether anything is asked for that needs the weights."""
        return self.w_max or self.entropy or self.lse or self.max_logit

    @property
    def gaps(self) -> bool:
        """Whether anything is asked for that needs the gaps of raw scores."""
        return self.gap_thresholds is not None or self.accumulation is not None


def checked_request(request: object) -> StatsRequest:
    """The request itself, or the default one for None; anything else is refused."""
    if request is None:
        return StatsRequest()
    if not isinstance(request, StatsRequest):
        reject_type("request", request, "a StatsRequest or None")
    return request


class RowStats(NamedTuple):
    """Statistics per row, each [B, H, Tq] (or [..., R] for R sampled rows); None where not asked for.

    An attention sink is an outcome of the softmax but not a key: `lse` contains it, `entropy` is that of keys and sink
    together (so up to ln(n + 1)), `max_logit` and `w_max` look at keys only (so `w_max` may be below 1/n), and it has
    no part in `visible`, gaps or Λ. A row that sees nothing has lse = max_logit = −∞ and zero elsewhere. A row that
    sees a NaN has NaN everywhere but in `visible`, where that key counts, and in `gap_counts`, which are 0.
    """

    visible: Tensor
    lse: Tensor | None = None
    max_logit: Tensor | None = None
    w_max: Tensor | None = None
    entropy: Tensor | None = None
    gap_counts: Tensor | None = None  # [B, H, Tq, thresholds]
    accumulation: Accumulation | None = None
    criticality: Tensor | None = None  # β/Λ, with the middle of the bracket
    at_ceiling: Tensor | None = None  # bool: an adaptive β was cut off there, and has lost its certificate
    rows: Tensor | None = None  # [R], which rows were sampled
    with_sink: bool = False  # whether lse, w_max and entropy contain an attention sink
    visible_given: bool = False  # whether `visible` is the n that the caller stated, of all keys wherever they are

    def merge(self, other: RowStats, *, common_maximum: bool = False) -> RowStats:
        """Statistics of the same rows over the keys of both, which must be disjoint.

        A sink is one outcome for all keys together: compute one part with `sinks` and the others without, and merge
        them in any order. `visible` adds up, unless both sides were given it with `visible=`: that is the n of all
        keys already. Gap counts add up only if both sides counted from the maximum over all keys: say so with
        `common_maximum`. Λ cannot be merged.

        >>> scores = torch.randn(3, 10)
        >>> parts = row_statistics(scores[:, :4]), row_statistics(scores[:, 4:])
        >>> torch.testing.assert_close(parts[0].merge(parts[1]).entropy, row_statistics(scores).entropy)
        """
        check_mergeable(self, other, common_maximum)
        lse = entropy = max_logit = counts = None
        if self.lse is not None and other.lse is not None:
            lse = torch.logaddexp(self.lse, other.lse)
            if self.entropy is not None and other.entropy is not None:
                entropy = _merge_entropy(lse, (self.lse, self.entropy), (other.lse, other.entropy))
        if self.max_logit is not None and other.max_logit is not None:
            max_logit = torch.maximum(self.max_logit, other.max_logit)
        if common_maximum and self.gap_counts is not None and other.gap_counts is not None:
            counts = self.gap_counts + other.gap_counts
        return RowStats(
            visible=self.visible if self.visible_given else self.visible + other.visible,
            lse=lse,
            max_logit=max_logit,
            w_max=None if max_logit is None or lse is None else largest_weight(max_logit, lse),
            entropy=entropy,
            gap_counts=counts,
            rows=self.rows,
            with_sink=self.with_sink or other.with_sink,
            visible_given=self.visible_given,
        )


class AttentionOutput(NamedTuple):
    """What `attention_with_stats` returns."""

    output: Tensor
    stats: RowStats


def row_statistics(
    scores: Tensor,
    beta: Tensor | float = 1.0,
    mask: Tensor | None = None,
    request: StatsRequest | None = None,
    *,
    sinks: Tensor | None = None,
) -> RowStats:
    """The statistics of a matrix of raw scores [..., Tq, Tk] that somebody already has.

    β broadcasts to [..., Tq]; the mask to the scores (True: visible). This is the definition that every backend is
    held against. Sampling (`rows`) does not apply: choose the rows of the matrix.

    >>> row_statistics(torch.zeros(1, 4)).entropy
    tensor([1.3863])
    """
    request = checked_request(request)
    check_scores(scores, mask)
    scores = scores.detach().to(torch.promote_types(scores.dtype, torch.float32))
    beta = torch.as_tensor(beta, dtype=scores.dtype, device=scores.device).detach()
    check_broadcasts("beta", beta, scores.shape[:-1])
    beta = beta.expand(scores.shape[:-1])
    if mask is None:
        mask = torch.ones((), dtype=torch.bool, device=scores.device)
    mask = mask.expand(scores.shape)
    visible = mask.sum(-1)
    lse = top = entropy = None
    if request.softmax:
        logits = (scores * beta[..., None]).masked_fill(~mask, -math.inf)
        top = _amax(logits)
        extended = logits if sinks is None else torch.cat([logits, _column(sinks, logits)], dim=-1)
        lse = torch.logsumexp(extended, -1) if extended.shape[-1] else top
        if request.entropy:
            weights = torch.exp(extended - finite(lse)[..., None])
            # 0·(−∞) is 0 here: a hidden key, or one so far below that its weight is.
            surprise = torch.where(weights == 0, 0.0, weights * (lse[..., None] - extended))
            entropy = surprise.sum(-1)
    counts = accumulation = None
    if request.gap_thresholds is not None:
        counts = count_gaps(scores, request.gap_thresholds, mask)
    if request.accumulation == "exact":
        exact = accumulation_scale(scores, request.min_rank, mask)
        accumulation = Accumulation(exact, exact)
    elif request.accumulation == "bracket":
        accumulation = bracket_accumulation(scores, request.min_rank, mask)
    return RowStats(
        visible=visible,
        lse=lse if request.lse else None,
        max_logit=top if request.max_logit else None,
        w_max=largest_weight(top, lse) if request.w_max and top is not None and lse is not None else None,
        entropy=entropy,
        gap_counts=counts,
        accumulation=accumulation,
        criticality=None if accumulation is None else criticality(beta, accumulation),
        with_sink=sinks is not None and request.softmax,
    )


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
    names = ["lse", "max_logit", "entropy", *(["gap_counts"] if common_maximum else [])]
    for name in names:
        if (getattr(a, name) is None) != (getattr(b, name) is None):
            raise ArgumentError(f"{name} is not accepted on one side only: expected the same statistics on both")
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


def sample_rows(queries: int, rows: int, seed: int, device: torch.device) -> Tensor:
    """`rows` of the row numbers 0 … queries−1, increasing, one from each of as many equal strata; not to be changed.

    Every row is as likely as any other, and the last stratum may go on at the first row.

    >>> sample_rows(1000, 4, 0, torch.device("cpu")).tolist() == sample_rows(1000, 4, 0, torch.device("cpu")).tolist()
    True
    """
    rows = min(rows, queries)
    if torch.compiler.is_compiling():
        return _draw_rows(queries, rows, seed, device)
    return _SAMPLES.recall((queries, rows, seed), device, lambda: _draw_rows(queries, rows, seed, device))


_SAMPLES: Memory[Tensor] = Memory(most=64)


def _draw_rows(queries: int, rows: int, seed: int, device: torch.device) -> Tensor:
    # On the host whatever the default device, so that a seed draws the same rows everywhere.
    edges = torch.arange(rows + 1, dtype=torch.int64, device="cpu") * queries // max(rows, 1)
    width = edges[1:] - edges[:-1]
    generator = torch.Generator("cpu").manual_seed(seed)
    draw = torch.rand(rows, generator=generator, dtype=torch.float64, device="cpu")
    # Strata differ in width by one row where they do not divide the queries, and a narrow one is more likely to give
    # each of its rows. Turned around by a random number of rows, all rows are equally likely.
    turn = torch.randint(max(queries, 1), (1,), generator=generator, device="cpu")
    chosen = (edges[:-1] + (draw * width).to(torch.int64) + turn) % max(queries, 1)
    return chosen.sort().values.to(device)


def _merge_entropy(lse: Tensor, *sides: tuple[Tensor, Tensor]) -> Tensor:
    """H of the union: each side's share a of the weight brings a·H_side − a·ln a."""
    total = torch.zeros_like(lse)
    for side, entropy in sides:
        share = largest_weight(side, lse)
        total = total + share * entropy + torch.special.entr(share)
    return total.clamp(min=0.0)  # a share of 1 plus a rounding would bring less than nothing


def _amax(x: Tensor) -> Tensor:
    return x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -math.inf)


def _column(sinks: Tensor, like: Tensor) -> Tensor:
    return sinks.detach().to(like.dtype)[:, None, None].expand(*like.shape[:-1], 1)
