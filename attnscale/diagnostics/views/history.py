"""A run in bounded memory: per layer a few numbers over steps, and the alerts."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from attnscale.diagnostics.records.record import Alert, Record
from attnscale.diagnostics.views.display import QUANTITIES


class Column(NamedTuple):
    """How heads become one number of a layer; a single bad head shows in an extreme, not in the mean."""

    statistic: str  # over the rows of a head
    over_heads: str  # "mean", "least" or "largest"


COLUMNS = {
    "w_max": Column("mean", "mean"),
    "relative_entropy": Column("mean", "mean"),
    "gain": Column("mean", "least"),
    "max_logit": Column("max", "largest"),
}


class History:
    """Takes records and alerts as they come. Memory is bounded: of many steps every second, fourth, … is kept.

    `series(layer, quantity)` are the values at `steps`, the last of which is the latest report, for each quantity of
    `COLUMNS`.
    """

    def __init__(self, most_steps: int = 512, most_alerts: int = 256) -> None:
        self.most_steps = most_steps
        self.alerts: deque[Alert] = deque(maxlen=most_alerts)
        self.by_layer: Counter[str] = Counter()
        self.by_kind: Counter[str] = Counter()
        self.heads: dict[str, int] = {}
        self.alerting: set[str] = set()  # layers with an alert in the latest report
        self.reports = 0  # steps seen, the latest included
        self._stride = 1
        self._kept: list[tuple[int, dict[str, dict[str, float]]]] = []
        self._latest: tuple[int, dict[str, list[Record]]] | None = None

    @property
    def layers(self) -> list[str]:
        """In the order they first appeared."""
        return list(self.heads)

    @property
    def steps(self) -> list[int]:
        """Those that are kept, and the latest."""
        kept = [step for step, _ in self._kept]
        return kept if self._latest is None else [*kept, self._latest[0]]

    def add(self, items: Iterable[Record | Alert]) -> None:
        """Take what has come."""
        for item in items:
            if isinstance(item, Alert):
                self.alerts.append(item)
                self.by_layer[item.layer] += 1
                self.by_kind[item.kind] += 1
                if self._latest is not None and item.step == self._latest[0]:
                    self.alerting.add(item.layer)
            else:
                if self._latest is None or item.step != self._latest[0]:
                    self._latest = self._begin(item.step)
                self._latest[1].setdefault(item.layer, []).append(item)
                self.heads[item.layer] = max(self.heads.get(item.layer, 0), item.head + 1)

    def series(self, layer: str, quantity: str) -> list[float]:
        """One value per step of `steps`; NaN where the layer has none."""
        values = [layers.get(layer, {}).get(quantity, math.nan) for _, layers in self._kept]
        return values if self._latest is None else [*values, self.latest(layer).get(quantity, math.nan)]

    def latest(self, layer: str) -> dict[str, float]:
        """The layer's numbers in the latest report; empty where it is not in it."""
        records = [] if self._latest is None else self._latest[1].get(layer, [])
        return {name: _join(records, name) for name in COLUMNS} if records else {}

    def _begin(self, step: int) -> tuple[int, dict[str, list[Record]]]:
        """Start a report, after keeping the latest one if it is one to keep."""
        if self._latest is not None:
            before, layers = self._latest
            if (self.reports - 1) % self._stride == 0 and before < step:
                self._kept.append((before, {layer: self.latest(layer) for layer in layers}))
            if before > step:  # resumed from a checkpoint: later steps are repeated
                self._kept = [kept for kept in self._kept if kept[0] < step]
        self.alerting.clear()
        self.reports += 1
        if len(self._kept) >= self.most_steps:
            del self._kept[1::2]
            self._stride *= 2
        return step, {}


def _join(records: Iterable[Record], name: str) -> float:
    """One number of a layer from those of its heads; NaN does not count."""
    column, quantity = COLUMNS[name], QUANTITIES[name]
    values = [x for r in records if (x := quantity.of(r, column.statistic)) is not None and not math.isnan(x)]
    if not values:
        return math.nan
    return {"mean": sum(values) / len(values), "least": min(values), "largest": max(values)}[column.over_heads]
