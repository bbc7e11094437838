"""What the measurements say about each head: whether it retrieves, how its Λ grows, and where it will lose its keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnscale.errors import ArgumentError
from attnscale.lab.attention_rows import RANKS
from attnscale.lab.calibration.growth import FORMS, Growth, fit_growth, with_interval
from attnscale.lab.calibration.measuring import Measured, Place, scale_name
from attnscale.policies.record import split_number

# A head retrieves if its mean weight on the needle that holds the answer is at least this, over the rows that predict
# an answer in prompts of the shortest measured length. A head without a preference gives the needle its share of the
# tokens, a few per cent at most.
RETRIEVES = 0.1

# Λ is reported with this minimum rank and without the first keys, where attention sinks are.
RANK = 8

# A head below this criticality loses its keys: the weights of the best keys are then no longer separated.
LOST = 1.0

COLUMNS = (
    *("layer", "head", "rows_of", "retrieves", "weight", "criticality", "criticality_with_first"),
    *(f"accumulation_{rank}_at_{end}" for rank in RANKS for end in ("first", "last")),
    *("first_length", "last_length", "power", "power_low", "power_high", "log", "log_low", "log_high"),
    *("power_share", "decided", "predicted_low", "predicted_high"),
    *(f"lost_at_{form}{end}" for form in FORMS for end in ("", "_low", "_high")),
)


@dataclass(frozen=True)
class Head:
    """The findings on one head.

    Attributes:
        place: its layer and number.
        rows_of: "prompts" if Λ is that of rows that predict an answer, "text" otherwise.
        weight: mean weight on the answer at the shortest measured length; NaN without prompts.
        growth: growth of Λ; None if Λ is 0 or infinite in half of the rows.
        measured: all measurements of these rows.
    """

    place: Place
    rows_of: str
    weight: float
    growth: Growth | None
    measured: Measured

    @property
    def retrieves(self) -> bool:
        return self.weight >= RETRIEVES

    @property
    def layer(self) -> int:
        """Index of the layer."""
        return split_number(self.place.layer)[1] or 0

    def criticality(self, first_keys: bool = False) -> float:
        """Return r = 1/Λ under β = 1 at the shortest measured length."""
        by_length = self.measured.scales[scale_name(RANK, first_keys)]
        scale = torch.cat(by_length[min(by_length)]).median().item()
        return math.inf if scale <= 0 else 1 / scale

    def row(self, target: int) -> dict[str, Any]:
        """Return the row of heads.csv; predictions are for the target length."""
        row: dict[str, Any] = {"layer": self.place.layer, "head": self.place.head, "rows_of": self.rows_of}
        row |= {"retrieves": int(self.retrieves), "weight": self.weight}
        row |= {"criticality": self.criticality(), "criticality_with_first": self.criticality(True)}
        for rank in RANKS:
            by_length = self.measured.scales[scale_name(rank, False)]
            for end, length in (("first", min(by_length)), ("last", max(by_length))):
                row[f"accumulation_{rank}_at_{end}"] = torch.cat(by_length[length]).median().item()
        if self.growth is None:
            return row
        growth = self.growth
        row |= {"first_length": growth.lengths[0], "last_length": growth.lengths[-1]}
        for form in FORMS:
            row |= dict(zip((form, f"{form}_low", f"{form}_high"), growth.exponent(form), strict=True))
            names = (f"lost_at_{form}", f"lost_at_{form}_low", f"lost_at_{form}_high")
            row |= dict(zip(names, growth.lost_at(LOST)[form], strict=True))
        low, high = growth.predict(target)
        return row | {
            "power_share": growth.power_share,
            "decided": growth.decided or "",
            "predicted_low": low,
            "predicted_high": high,
        }

    def lost_between(self) -> tuple[float, float]:
        """Return the bracket of the length at which this head loses its keys under β = 1; ∞ if it does not."""
        if self.growth is None:
            return math.inf, math.inf
        ends = [end[1:] for end in self.growth.lost_at(LOST).values()]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def exponent(self) -> float:
        """Return the exponent of the power of n; 0 if its interval contains 0."""
        if self.growth is None:
            return 0.0
        value, low, high = with_interval(self.growth.forms["power"].exponent)
        return 0.0 if low <= 0 <= high else value


def judge(text: Mapping[Place, Measured], prompts: Mapping[Place, Measured], seed: int = 0) -> list[Head]:
    """Return the findings on every measured head.

    For heads that retrieve, the rows that predict an answer determine Λ, for other heads the rows of the text.
    """
    heads = []
    for place in text or prompts:
        weight = math.nan
        if place in prompts:
            weights = prompts[place].weights
            weight = torch.cat(weights[min(weights)]).mean().item()
        rows_of = "prompts" if place in prompts and (weight >= RETRIEVES or place not in text) else "text"
        measured = prompts[place] if rows_of == "prompts" else text[place]
        heads.append(Head(place, rows_of, weight, _growth(measured, seed), measured))
    return heads


def _growth(measured: Measured, seed: int) -> Growth | None:
    try:
        return fit_growth(measured.scales[scale_name(RANK, False)], seed=seed)
    except ArgumentError:
        return None  # for example a window of four keys, in which no row has eight
