"""What can be asked for of the rows of an attention call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from attnscale._util.checks import check_flag, read_int, read_number
from attnscale.errors import reject, reject_type


@dataclass(frozen=True)
class StatsRequest:
    """Which statistics to compute; what is not asked for costs nothing.

    `gap_thresholds` are the t at which N(t) is counted. `accumulation` asks for Λ, "exact" by sorting each row or as a
    "bracket" at most 6.25 % wide (25 % from the Triton kernels), from rank `min_rank` on. `rows` samples that
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
            check_flag(name, getattr(self, name))
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
