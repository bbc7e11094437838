"""What can be asked for of the rows of an attention call, and which of them are sampled."""

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

# The statistics of weights that a forward pass gives.
SOFTMAX = ("lse", "max_logit", "w_max", "entropy", "winner")


@dataclass(frozen=True)
class StatsRequest:
    """Which statistics to compute; what is not asked for costs nothing.

    `winner` is the slot of the key with the largest weight, `first_share=s` the weight of the first s keys that a row
    sees. `gap_thresholds` are the t at which N(t) is counted. `accumulation` asks for Λ from rank `min_rank` on,
    "exact" by sorting each row, or as a "bracket" of relative width `statistics.gaps.BRACKET_WIDTH` at most. `rows`
    samples that many rows, spread over the positions and chosen by `seed`; None is all of them.
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

    def __post_init__(self) -> None:
        for name in SOFTMAX:
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
        """The names of what is asked for and needs a pass over all logits."""
        return tuple(name for name in SOFTMAX if getattr(self, name))

    @property
    def softmax(self) -> bool:
        """Whether a pass over all logits is needed."""
        return bool(self.of_softmax) or self.first_share is not None

    @property
    def gaps(self) -> bool:
        """Whether anything is asked for that needs the gaps of raw scores."""
        return self.gap_thresholds is not None or self.accumulation is not None

    def gaps_alone(self) -> StatsRequest:
        """The same without what needs a pass over all logits."""
        return replace(self, w_max=False, entropy=False, lse=False, max_logit=False, winner=False, first_share=None)

    def flat(self) -> tuple[Any, ...]:
        """What an operator is given for all rows of a call; `StatsRequest(*flat)` is the inverse."""
        return astuple(replace(self, rows=None, seed=0))


FLAT_REQUEST = operator_schema(StatsRequest)


def checked_request(request: object) -> StatsRequest:
    """The request itself, or the default one for None; anything else is refused."""
    if request is None:
        return StatsRequest()
    if not isinstance(request, StatsRequest):
        reject_type("request", request, "a StatsRequest or None")
    return request


def sample_rows(queries: int, rows: int, seed: int, device: torch.device) -> Tensor:
    """`rows` of the row numbers 0 … queries−1, increasing, one from each of as many equal strata; not to be changed.

    Every row is as likely as any other, and the last stratum may continue at the first row.

    >>> sample_rows(1000, 4, 0, torch.device("cpu")).tolist() == sample_rows(1000, 4, 0, torch.device("cpu")).tolist()
    True
    """
    rows = min(rows, queries)
    found: Tensor = state.SAMPLED_ROWS.recall(
        (queries, rows, seed), device, lambda: _draw_rows(queries, rows, seed, device)
    )
    return found


def _draw_rows(queries: int, rows: int, seed: int, device: torch.device) -> Tensor:
    # On the host whatever the default device, so that a seed draws the same rows everywhere.
    edges = torch.arange(rows + 1, dtype=torch.int64, device="cpu") * queries // max(rows, 1)
    width = edges[1:] - edges[:-1]
    generator = torch.Generator("cpu").manual_seed(seed)
    draw = torch.rand(rows, generator=generator, dtype=torch.float64, device="cpu")
    # Strata differ in width by one row where they do not divide the queries, and a narrow one is more likely to give
    # each of its rows. Rotated by a random number of rows, all rows are equally likely.
    turn = torch.randint(max(queries, 1), (1,), generator=generator, device="cpu")
    chosen = (edges[:-1] + (draw * width).to(torch.int64) + turn) % max(queries, 1)
    return chosen.sort().values.to(device)
