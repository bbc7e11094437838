"""Policies that read scores: β from the gaps or the entropy of a row, or from a running estimate per head."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from attnscale._util import state
from attnscale._util.processes import RowGroup, local, sum_over_rows
from attnscale.errors import ArgumentError, reject, reject_type
from attnscale.policies.base import ScorePolicy, ln
from attnscale.policies.fields import flag, length, not_negative, number, positive, read_between, read_length
from attnscale.statistics import RowStats, StatsRequest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# Maximum contribution of a call to the running estimate of `GapAdaptive(scope="head")`, relative to the expected 1/Λ.
LARGEST_STEP = 4.0

# What `GapAdaptive.table` accepts.
TABLE = "a mapping of two or more lengths to numbers > 0, or to lists with one number > 0 per head"


@dataclass(eq=False, repr=False, kw_only=True)
class EntropyAdaptive(ScorePolicy):
    """Adaptive temperature (arXiv:2410.01104): max(1, P(H)) for entropy H > 0.5 nats at β = 1, else 1.

    P is the published polynomial −0.037·H⁴ + 0.481·H³ − 2.3·H² + 4.917·H − 1.791. β is [B, H, Tq]. Measuring H requires
    a second pass over the keys.

    Args:
        threshold: The entropy, ≥ 0, up to which β is 1.

    Example:
        >>> import attnscale
        >>> q = k = v = torch.randn(1, 2, 16, 8)
        >>> attnscale.scaled_dot_product_attention(q, k, v, policy="entropy_adaptive").shape
        torch.Size([1, 2, 16, 8])
    """

    name = "entropy_adaptive"
    threshold: float = not_negative(0.5)
    coefficients: ClassVar[tuple[float, ...]] = (-0.037, 0.481, -2.3, 4.917, -1.791)

    @property
    def request(self) -> StatsRequest:
        return StatsRequest(w_max=False, lse=False, max_logit=False)

    def from_stats(self, stats: RowStats, accumulation: Tensor | None = None) -> Tensor:
        if stats.entropy is None:
            raise ArgumentError("stats without entropy are not accepted: expected the statistics of `request`")
        entropy = stats.entropy.to(torch.float32)
        polynomial = torch.zeros_like(entropy)
        for coefficient in self.coefficients:
            polynomial = polynomial * entropy + coefficient
        return torch.where(entropy > self.threshold, polynomial.clamp(min=1.0), 1.0)


@dataclass(eq=False, repr=False, kw_only=True)
class GapAdaptive(ScorePolicy):
    """β = r·Λ, with Λ the accumulation scale of the row's own gaps, clamped to [floor, ceiling].

    r > 1 guarantees w_max ≥ 1/ζ(r), 0.6079 for the default r = 2. Λ is the upper end of its bracket, which preserves
    the guarantee and is too large by at most `statistics.gaps.BRACKET_WIDTH`. A tie at the top has Λ = ∞ and gets the
    ceiling, without the guarantee; `RowStats.at_ceiling` marks such rows. β is [B, H, Tq].

    With `scope="head"`, β comes from a running estimate per head: 1/Λ = a + b/ln n, fitted to the rows of every
    training call with exponential forgetting. Averaging 1/Λ is robust against the heavy tail of Λ. The contribution of
    a call is bounded, so a single step with extreme logits hardly changes the estimate, and NaN rows are skipped. In
    eval mode the estimate is frozen and no scores are read, so prefill and decode agree. In a distributed run the rows
    of all processes enter the estimate, or those selected by `attnscale.distributed.share_rows`.

    With `anchor="trained"`, β(n) = Λ̂(n)/Λ̂(L) from a table of Λ̂ that was measured before: each head keeps the
    criticality it had at the trained length L. No scores are read. ln Λ̂ is interpolated in ln n, constant below the
    first length, and continued with its last slope; a table that starts at L therefore has β = 1 up to L.

    Args:
        r: The target criticality β/Λ, > 0.
        target_w_max: The guaranteed largest weight in (0, 1), instead of `r`; requires `min_rank=2`.
        min_rank: The lowest rank k ≥ 2 in Λ = max ln k/Δ_k.
        floor: The smallest β.
        ceiling: The largest β.
        scope: "row" for β per row, "head" for a running estimate per head.
        exact: Compute Λ by sorting instead of a bracket.
        num_heads: The number of heads, required with `scope="head"`.
        momentum: Forgetting factor in [0, 1) of the running estimate.
        gradient: "detach" treats β as a constant in the backward pass, "through" differentiates Λ (`scope="row"` only).
        anchor: "trained" for β from `table`, None for β from scores.
        table: length → Λ̂, a number or a list with one number per head; at least two lengths. With `anchor` only.
        reference_length: The trained length L. With `anchor` only.

    Example:
        >>> import attnscale
        >>> table = {128: 0.4, 512: 0.6}
        >>> attnscale.build_policy("gap_adaptive", anchor="trained", reference_length=128, table=table)(512)
        tensor(1.5000)
        >>> q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
        >>> policy = attnscale.build_policy("gap_adaptive", target_w_max=0.6)
        >>> _, stats = attnscale.attention_with_stats(q, k, v, policy=policy)
        >>> bool(((stats.w_max >= 0.6) | stats.at_ceiling).all())
        True
    """

    name = "gap_adaptive"
    r: float = positive(2.0)
    target_w_max: float | None = number("a number in (0, 1)", None, above=0.0, below=1.0)
    min_rank: int = length(2)
    floor: float = positive(2.0**-20)
    ceiling: float = positive(64.0)
    scope: Literal["row", "head"] = "row"
    exact: bool = flag(False)
    num_heads: int | None = length(None, least=1)
    momentum: float = number("a number in [0, 1)", 0.99, above=-math.ulp(0.0), below=1.0)
    gradient: Literal["detach", "through"] = "detach"  # type: ignore[misc]
    anchor: Literal["trained"] | None = None
    table: Mapping[int, Any] | None = None
    reference_length: int | None = length(None)

    _rows: RowGroup | None = field(init=False, default=None)  # set by `share`
    _number: int = field(init=False, default=0)  # rank among all policies in the order of their first reduction
    sums: Tensor = field(init=False)  # [H, 5] running means of 1, x, y, x², x·y with x = 1/ln n and y = 1/Λ

    def validate(self) -> None:
        if self.target_w_max is not None:
            if self.r != 2.0:
                reject("r", self.r, "the default 2.0 together with target_w_max, which determines r")
            if self.min_rank != 2:
                reject("min_rank", self.min_rank, "2 together with target_w_max, whose guarantee needs every rank")
        if self.ceiling <= self.floor:
            reject("ceiling", self.ceiling, f"a number > floor={self.floor}")
        if self.scope not in ("row", "head"):
            reject("scope", self.scope, "'row' or 'head'")
        if self.gradient not in ("detach", "through"):
            reject("gradient", self.gradient, "'detach' or 'through'")
        if self.scope == "head":
            read_length("num_heads", self.num_heads, least=1)
            if self.gradient == "through":
                reject("gradient", self.gradient, "'detach' with scope='head': a running estimate has no gradient")
            self.register_buffer("sums", torch.zeros(self.num_heads or 0, 5, dtype=torch.float64))
        self._check_anchor()
        self._r = self.r if self.target_w_max is None else inverse_zeta(1 / self.target_w_max)

    def _check_anchor(self) -> None:
        if self.anchor not in (None, "trained"):
            reject("anchor", self.anchor, "'trained' or None")
        if self.table is not None and not isinstance(self.table, Mapping):
            reject_type("table", self.table, TABLE)
        for name in ("table", "reference_length"):
            if (getattr(self, name) is None) is not (self.anchor is None):
                reject(name, getattr(self, name), "a value with anchor='trained', and None without")
        if self.anchor is None:
            return
        if self.scope != "row" or self.target_w_max is not None or self.r != 2.0:
            given = {"scope": self.scope, "target_w_max": self.target_w_max, "r": self.r}
            reject("anchor", self.anchor, f"the defaults of scope, target_w_max and r, instead of {given}")
        self.table = _read_table(self.table or {}, self.num_heads)

    @property
    def needs_scores(self) -> bool:  # type: ignore[override]
        return self.anchor is None and (self.scope == "row" or self.training)

    @property
    def request(self) -> StatsRequest:
        kind: Literal["exact", "bracket"] = "exact" if self.exact else "bracket"
        return StatsRequest(
            w_max=False, entropy=False, lse=False, max_logit=False, accumulation=kind, min_rank=self.min_rank
        )

    def from_stats(self, stats: RowStats, accumulation: Tensor | None = None) -> Tensor:
        if stats.accumulation is None:
            raise ArgumentError("stats without accumulation are not accepted: expected the statistics of `request`")
        scale = stats.accumulation.upper if accumulation is None else accumulation
        if self.scope == "row":
            return self._bounded(self._r * scale)
        # Activation checkpointing repeats the forward pass during backward, which must not update the estimate twice.
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            self._learn(stats.visible, scale)
        # Heads without a usable row so far, for example with NaN scores only, have β = 1.
        return torch.where(local(self.sums)[:, :1] > 0, self._estimate(stats.visible), 1.0)

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        if self.anchor is not None:
            return self._anchored(n)
        if self.scope == "row":
            return super().formula(n, position)
        count = local(self.sums)[:, 0]
        if not torch.compiler.is_compiling() and not count.is_meta and not bool((count > 0).all()):
            raise ArgumentError("gap_adaptive with scope='head' has seen no rows: train it first, or use scope='row'")
        return self._estimate(n)

    def _anchored(self, n: Tensor) -> Tensor:
        """Return β = Λ̂(n)/Λ̂(L), [...] for one table or [..., H, Tq] for one per head."""
        reference = torch.tensor(self.reference_length, device=n.device)
        beta = self._bounded((self._log_scale(n) - self._log_scale(reference)).exp())
        per_head = isinstance(next(iter((self.table or {}).values())), list)
        return self.own_heads.of(beta) if per_head and self.own_heads is not None else beta

    def _log_scale(self, n: Tensor) -> Tensor:
        table = self.table or {}
        x = ln(n)
        places = [math.log(length) for length in table]
        values = torch.tensor(list(table.values()), dtype=x.dtype, device=x.device).log()  # [K] or [K, H]
        values = values[..., None] if values.dim() > 1 else values
        found = values[0]
        pairs = list(itertools.pairwise(places))
        for index, (left, right) in enumerate(pairs):
            last = index == len(pairs) - 1
            share = ((x - left) / (right - left)).clamp(min=0.0, max=None if last else 1.0)
            found = found + share * (values[index + 1] - values[index])
        return found

    def _estimate(self, n: Tensor) -> Tensor:
        """Return β = r·Λ of each head, [..., H, Tq], from the running estimate."""
        return self._bounded(self._r / self._inverse(1 / ln(n)))

    def _inverse(self, x: Tensor) -> Tensor:
        """Return 1/Λ = a + b·x of each head, [..., H, Tq], for x = 1/ln n [..., 1|H, Tq]."""
        count, mean, y, xx, xy = local(self.sums).unbind(-1)
        spread = (count * xx - mean * mean).clamp(min=1e-12)
        slope = (count * xy - mean * y) / spread
        level = (y - slope * mean) / count
        return (level[:, None] + slope[:, None] * x).clamp(min=self._r / self.ceiling)

    def longest_beta(self) -> float:
        return self.ceiling

    def _bounded(self, beta: Tensor) -> Tensor:
        return beta.to(torch.float32).clamp(self.floor, self.ceiling)

    @torch.no_grad()
    def _learn(self, visible: Tensor, scale: Tensor) -> None:
        usable = (visible >= self.min_rank) & (scale > 0)
        x = torch.where(usable, 1 / ln(visible), 0.0)
        y = torch.where(usable, 1 / scale.double(), 0.0)  # 1/∞ = 0: ties enter like other rows
        moments = torch.stack([usable.double(), x, y, x * x, x * y], dim=-1).sum((0, 2))  # [H, 5]
        if moments.shape[0] != local(self.sums).shape[0]:
            raise ArgumentError(
                f"scores of {moments.shape[0]} heads are not accepted: expected {local(self.sums).shape[0]}, the "
                "num_heads of gap_adaptive (heads distributed over processes require "
                "attnscale.distributed.HeadParallel() in the plan of parallelize_module)"
            )
        moments = sum_over_rows(moments, self._rows, self._order)
        ones, x, y, xx, xy = (moments / moments[:, :1].clamp(min=1)).unbind(-1)
        sums = local(self.sums)
        first = sums[:, 0] == 0
        # A call with extreme logits would outweigh hundreds of others. A 1/Λ that is too small cannot.
        most = LARGEST_STEP * self._inverse(x[:, None])[:, 0]
        kept = torch.where(first, 1.0, (most / y).clamp(max=1.0))
        share = torch.stack([ones, x, kept * y, xx, kept * xy], dim=-1)
        mixed = torch.where(first[:, None], share, self.momentum * sums + (1 - self.momentum) * share)
        sums.copy_(torch.where(moments[:, :1] > 0, mixed, sums))

    def _order(self) -> int:
        """Return an id of this estimate among those of all layers, equal on all processes while they are in step."""
        if not self._number and not torch.compiler.is_compiling():
            self._number = next(state.ESTIMATE_NUMBERS)
        return self._number

    def share(self, group: ProcessGroup | None) -> None:
        """Reduce the running estimate over a process group instead of all processes; None disables the reduction."""
        self._rows = RowGroup(group)


def _read_table(table: Mapping[Any, Any], heads: int | None) -> dict[int, float | list[float]]:
    """Return length → Λ̂ in the order of lengths, as plain numbers."""
    read: dict[int, float | list[float]] = {}
    for key, value in table.items():
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        numbers = [read_between("table", one, TABLE, above=0.0) for one in (value if listed else [value])]
        if listed and heads is not None and len(numbers) != heads:
            reject("table", value, f"lists of {heads} numbers, one per head")
        read[read_length("table", int(key) if isinstance(key, str) and key.isdecimal() else key)] = (
            numbers if listed else numbers[0]
        )
    kinds = {len(value) if isinstance(value, list) else 0 for value in read.values()}
    if len(read) < 2 or len(kinds) > 1:
        reject("table", table, TABLE)
    return dict(sorted(read.items()))


@contextmanager
def assumed_estimates(module: nn.Module) -> Iterator[None]:
    """Context: set unused running estimates in a module to Λ = 1, for a forward pass in eval mode."""
    policies = [part for part in module.modules() if isinstance(part, GapAdaptive) and part.scope == "head"]
    empty = [sums for part in policies if not bool((sums := local(part.sums)).any())]
    try:
        for sums in empty:
            sums.fill_(1.0)
        yield
    finally:
        for sums in empty:
            sums.zero_()


def inverse_zeta(value: float) -> float:
    """Return the r > 1 with ζ(r) = value > 1, by bisection.

    >>> round(inverse_zeta(math.pi**2 / 6), 9)
    2.0
    """
    low, high = 1.0, 64.0
    for _ in range(80):
        middle = (low + high) / 2
        # On the CPU regardless of the default device: a policy may be built under torch.device("meta").
        zeta = float(torch.special.zeta(torch.tensor(middle, dtype=torch.float64, device="cpu"), 1.0))
        low, high = (middle, high) if zeta > value else (low, middle)
    return high
