"""Requests for row statistics, and the choice of sampled rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from attnscale._util import state
from attnscale._util.checks import check_flag, read_int, read_number
from attnscale._util.schema import operator_schema
from attnscale.errors import reject, reject_type

# Statistics of the softmax weights, computed in the forward pass.
SOFTMAX = ("lse", "max_logit", "w_max", "entropy", "winner")
# Those that can carry gradients.
DIFFERENTIABLE = SOFTMAX[:-1]


@dataclass(frozen=True)
class StatsRequest:
    """The row statistics to compute. Statistics that are not requested cost nothing.

    Args:
        w_max: the largest weight.
        entropy: the entropy of the weights, in nats.
        lse: the log-sum-exp of the logits.
        max_logit: the largest logit.
        gap_thresholds: thresholds t ≥ 0 for the gap counts N(t), in units of raw scores.
        accumulation: Λ from rank `min_rank` on. "exact" sorts each row. "bracket" streams and returns bounds at most
            `statistics.gaps.BRACKET_WIDTH` apart (relative width).
        min_rank: the first rank of Λ, at least 2.
        rows: number of sampled rows, spread over the positions; None for all rows.
        seed: seed of the sample.
        winner: the slot of the key with the largest weight.
        first_share: s for the total weight of the first s visible keys.
        differentiable: `w_max`, `entropy`, `lse` and `max_logit` carry gradients to query, key, β, sinks and an
            additive mask; all other statistics stay detached. Request only the statistics of the loss: the gradient of
            `lse` is free, that of `entropy` takes one multiply-add per score, and `max_logit` and `w_max` need the slot
            of the winner.

    Raises:
        ArgumentError: a value is not accepted.
        ArgumentTypeError: a type is not accepted.

    Example:
        >>> StatsRequest(gap_thresholds=(0.5, 1.0), accumulation="bracket", rows=64).gap_thresholds
        (0.5, 1.0)
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
    winner: bool = False
    first_share: int | None = None
    differentiable: bool = False

    def __post_init__(self) -> None:
        for name in (*SOFTMAX, "differentiable"):
            check_flag(name, getattr(self, name))
        if self.first_share is not None:
            first_share = read_int("first_share", self.first_share, "an int >= 1 or None", least=1)
            object.__setattr__(self, "first_share", first_share)
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
        object.__setattr__(self, "min_rank", read_int("min_rank", self.min_rank, "an int >= 2", least=2))
        if self.rows is not None:
            rows = read_int("rows", self.rows, "an int >= 1 or None for all rows", least=1)
            object.__setattr__(self, "rows", rows)
        seed = read_int("seed", self.seed, "an int of 64 bits", least=-(2**63), most=2**64 - 1)
        object.__setattr__(self, "seed", seed)

    @property
    def of_softmax(self) -> tuple[str, ...]:
        """Names of the requested softmax statistics."""
        return tuple(name for name in SOFTMAX if getattr(self, name))

    @property
    def softmax(self) -> bool:
        """Whether the request needs a pass over all logits."""
        return bool(self.of_softmax) or self.first_share is not None

    @property
    def gaps(self) -> bool:
        """Whether the request needs the gaps of raw scores."""
        return self.gap_thresholds is not None or self.accumulation is not None

    @property
    def with_gradients(self) -> tuple[str, ...]:
        """Names of the requested statistics that carry gradients."""
        return tuple(name for name in DIFFERENTIABLE if getattr(self, name)) if self.differentiable else ()

    def with_lse(self) -> StatsRequest:
        """The request for one pass over all logits. It includes the lse, which `first_share` needs.

        The gradient of the largest logit needs its slot.
        """
        winner = self.winner or not {"max_logit", "w_max"}.isdisjoint(self.with_gradients)
        return replace(self, lse=self.softmax, winner=winner, first_share=None)

    def gaps_alone(self) -> StatsRequest:
        """The request without softmax statistics."""
        nothing = dict.fromkeys((*SOFTMAX, "differentiable"), False)
        return replace(self, **nothing, first_share=None)  # type: ignore[arg-type]

    def flat(self) -> tuple[Any, ...]:
        """Operator arguments for all rows of a call; `StatsRequest(*flat)` is the inverse."""
        return astuple(replace(self, rows=None, seed=0))


FLAT_REQUEST = operator_schema(StatsRequest)


def checked_request(request: object) -> StatsRequest:
    """Check the type of a request.

    Args:
        request: a `StatsRequest`, or None for the default request.

    Returns:
        The request.

    Raises:
        ArgumentTypeError: `request` is neither a `StatsRequest` nor None.

    Example:
        >>> checked_request(None).w_max
        True
    """
    if request is None:
        return StatsRequest()
    if not isinstance(request, StatsRequest):
        reject_type("request", request, "a StatsRequest or None")
    return request


def sample_rows(queries: int, rows: int, seed: int, device: torch.device) -> Tensor:
    """Stratified sample of row numbers: one row from each of `rows` strata of equal size.

    All rows are equally likely. The last stratum may wrap around to the first row. Samples are cached: do not modify
    the returned tensor.

    Args:
        queries: number of rows to sample from.
        rows: size of the sample; at most `queries` are returned.
        seed: seed of the sample. The same seed gives the same rows on every device.
        device: device of the result.

    Returns:
        Increasing row numbers [R] in 0 … queries − 1, as int64.

    Example:
        >>> first, second = (sample_rows(1000, 4, 0, torch.device("cpu")) for _ in range(2))
        >>> first.tolist() == second.tolist()
        True
    """
    rows = min(rows, queries)
    if torch.compiler.is_compiling():
        drawn: Tensor = draw_rows(queries, rows, str(seed), device)
        return drawn
    found: Tensor = state.SAMPLED_ROWS.recall(
        (queries, rows, seed), device, lambda: _draw_rows(queries, rows, seed, device)
    )
    return found


def _draw_rows(queries: int, rows: int, seed: int, device: torch.device) -> Tensor:
    # Always on the host: a seed must draw the same rows on every device.
    edges = torch.arange(rows + 1, dtype=torch.int64, device="cpu") * queries // max(rows, 1)
    width = edges[1:] - edges[:-1]
    generator = torch.Generator("cpu").manual_seed(seed)
    draw = torch.rand(rows, generator=generator, dtype=torch.float64, device="cpu")
    # Stratum widths may differ by one row, which makes rows of narrow strata more likely. A random rotation makes all
    # rows equally likely.
    turn = torch.randint(max(queries, 1), (1,), generator=generator, device="cpu")
    chosen = (edges[:-1] + (draw * width).to(torch.int64) + turn) % max(queries, 1)
    return chosen.sort().values.to(device)


# torch.compile cannot trace a generator. The seed is a string, because it may exceed 63 bits.
draw_rows = torch.library.custom_op(
    "attnscale::draw_rows",
    lambda queries, rows, seed, device: _draw_rows(queries, rows, int(seed), device),
    mutates_args=(),
    schema="(SymInt queries, SymInt rows, str seed, Device device) -> Tensor",
)


@draw_rows.register_fake
def _(queries: int, rows: int, seed: str, device: torch.device) -> Tensor:
    return torch.empty(rows, dtype=torch.int64, device=device)
