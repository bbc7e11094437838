"""A run in little memory: per layer a few numbers over steps, and the alerts."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable

from attnscale.diagnostics.records.record import Alert, Record

Pick = Callable[[Record], float]
Join = Callable[[float, float], float]


def _mean_of(name: str) -> Pick:
    return lambda record: record.forward[name].mean if name in record.forward else math.nan


def _worse(choose: Join) -> Join:
    """The one of two that `choose` picks; NaN counts as nothing, so that it needs no company to be left out."""
    return lambda a, b: b if math.isnan(a) else a if math.isnan(b) else choose(a, b)


# A layer has a number per head: what is fine everywhere but in one head shows in the extreme, not in the mean.
MEANS: dict[str, Pick] = {"w_max": _mean_of("w_max"), "relative_entropy": _mean_of("relative_entropy")}
EXTREMES: dict[str, tuple[Pick, Join]] = {
    "gain": (lambda record: record.scalars.get("gain", math.nan), _worse(min)),
    "max_logit": (lambda r: r.forward["max_logit"].max if "max_logit" in r.forward else math.nan, _worse(max)),
}
QUANTITIES = (*MEANS, *EXTREMES)


class History:
    """Takes records and alerts as they come. Memory is bounded: of many steps every second, fourth, … is kept.

    `series(layer, quantity)` are the values at `steps`, the last of which is the latest report; w_max and
    relative_entropy are means over heads, gain is the least and max_logit the largest of all.
    """

    def __init__(self, most_steps: int = 512, most_alerts: int = 256) -> None:
        self.most_steps = most_steps
        self.alerts: deque[Alert] = deque(maxlen=most_alerts)
        self.alert_count = 0
        self.by_layer: Counter[str] = Counter()
        self.by_kind: Counter[str] = Counter()
        self.heads: dict[str, int] = {}
        self.alerting: set[str] = set()  # layers with an alert in the latest report
        self.reports = 0  # steps seen, the latest included
        self._stride = 1
        self._kept: list[tuple[int, dict[str, dict[str, float]]]] = []
        self._latest: tuple[int, dict[str, _Heads]] | None = None

    @property
    def layers(self) -> list[str]:
        """In the order they first appeared."""
        return list(self.heads)

    @property
    def steps(self) -> list[int]:
        """Those that are kept, and the latest."""
        kept = [step for step, _ in self._kept]
        return kept if self._latest is None else [*kept, self._latest[0]]

    def add(self, found: Iterable[Record | Alert]) -> None:
        """Take what has come."""
        for one in found:
            if isinstance(one, Alert):
                self.alerts.append(one)
                self.alert_count += 1
                self.by_layer[one.layer] += 1
                self.by_kind[one.kind] += 1
                if self._latest is not None and one.step == self._latest[0]:
                    self.alerting.add(one.layer)
            else:
                self._add(one)

    def series(self, layer: str, quantity: str) -> list[float]:
        """One value per step of `steps`; NaN where the layer was not heard."""
        values = [layers.get(layer, {}).get(quantity, math.nan) for _, layers in self._kept]
        return values if self._latest is None else [*values, self.latest(layer).get(quantity, math.nan)]

    def latest(self, layer: str) -> dict[str, float]:
        """The layer's numbers in the latest report; empty where it is not in it."""
        if self._latest is None or layer not in self._latest[1]:
            return {}
        return self._latest[1][layer].joined()

    def _add(self, record: Record) -> None:
        if self._latest is None or record.step != self._latest[0]:
            self._begin(record.step)
        if self._latest is not None:
            self._latest[1].setdefault(record.layer, _Heads()).add(record)
        self.heads[record.layer] = max(self.heads.get(record.layer, 0), record.head + 1)

    def _begin(self, step: int) -> None:
        """Store the latest report if it is one to keep, and start the next."""
        if self._latest is not None:
            before, layers = self._latest
            if (self.reports - 1) % self._stride == 0 and before < step:
                self._kept.append((before, {name: heads.joined() for name, heads in layers.items()}))
            if before > step:  # resumed from a checkpoint: what had come after it is done again
                self._kept = [kept for kept in self._kept if kept[0] < step]
        self._latest = (step, {})
        self.alerting.clear()
        self.reports += 1
        if len(self._kept) >= self.most_steps:
            del self._kept[1::2]
            self._stride *= 2


class _Heads:
    """The numbers of one layer in one report, summed up head by head."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(MEANS, 0.0)
        self._counts = dict.fromkeys(MEANS, 0)
        self._extremes = dict.fromkeys(EXTREMES, math.nan)

    def add(self, record: Record) -> None:
        for name, pick in MEANS.items():
            value = pick(record)
            if not math.isnan(value):
                self._sums[name] += value
                self._counts[name] += 1
        for name, (pick, join) in EXTREMES.items():
            self._extremes[name] = join(self._extremes[name], pick(record))

    def joined(self) -> dict[str, float]:
        means = {name: self._sums[name] / n if n else math.nan for name, n in self._counts.items()}
        return {**means, **self._extremes}
