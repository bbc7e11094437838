"""The quantities to look at first, and how a person reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from attnscale.diagnostics.records.record import Record, Summary, layers_of

# What a summary holds of a quantity, without the number of rows.
MARKS = Summary._fields[:-1]


class Quantity(NamedTuple):
    """Something records hold: per row in `forward` or `backward`, or one number per head where there is no phase."""

    phase: str
    name: str
    title: str
    low: float | None = None  # ends of the scale, where they are known beforehand
    high: float | None = None
    log: bool = False  # differences are in the powers of ten

    def of(self, record: Record, mark: str = "mean") -> float | None:
        """Its value in a record, None if it is not there."""
        if not self.phase:
            return record.scalars.get(self.name)
        summary = (record.forward if self.phase == "forward" else record.backward).get(self.name)
        return None if summary is None else float(getattr(summary, mark))


MAIN = (
    Quantity("forward", "w_max", "w_max", 0.0, 1.0),
    Quantity("forward", "relative_entropy", "H / ln n", 0.0, 1.0),
    Quantity("forward", "max_logit", "max logit"),
    Quantity("forward", "criticality", "criticality r", log=True),
    Quantity("", "angle_ratio", "angle ratio", 0.0),
    Quantity("backward", "score_gradient", "|dS|", log=True),
    Quantity("", "gain", "gain", log=True),
)


class Grid(NamedTuple):
    """One quantity over layers × heads; NaN where there is none."""

    quantity: Quantity
    layers: list[str]
    values: list[list[float]]

    def scale(self) -> tuple[float, float]:
        """What the ends of the colours stand for: given beforehand, or the least and largest that can be shown."""
        shown = [x for row in self.values for x in row if math.isfinite(x) and (x > 0 or not self.quantity.log)]
        low = self.quantity.low if self.quantity.low is not None else min(shown, default=0.0)
        high = self.quantity.high if self.quantity.high is not None else max(shown, default=low)
        return low, max(high, low)

    def shares(self) -> list[list[float]]:
        """The values as places on the scale, 0 to 1; NaN stays NaN."""
        low, high = self.scale()
        return [[self._share(x, low, high) for x in row] for row in self.values]

    def _share(self, x: float, low: float, high: float) -> float:
        if math.isnan(x):
            return math.nan
        if x <= low or x >= high:  # infinities, and what has no logarithm, lie at the ends
            return 0.5 if x == low == high else float(x > low)
        if self.quantity.log:
            return math.log(x / low) / math.log(high / low)
        return (x - low) / (high - low)


def grid_of(records: Sequence[Record], quantity: Quantity) -> Grid | None:
    """A quantity over layers × heads, rows filled up to the layer with most heads; None if no record has it."""
    layers = layers_of(records)
    found = {(r.layer, r.head): x for r in records if (x := quantity.of(r)) is not None}
    if not found:
        return None
    heads = 1 + max(record.head for record in records)
    values = [[found.get((layer, head), math.nan) for head in range(heads)] for layer in layers]
    return Grid(quantity, layers, values)
