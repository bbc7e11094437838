"""What the rules of events see: the numbers of a report, and the history of each head."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from attnscale.diagnostics.events.thresholds import Thresholds
from attnscale.diagnostics.records.record import Record

Place = tuple[str, int]  # layer and head

KEPT = 20  # reports in the history of a head
FIRST_REPORTS = 4  # reports before a head is compared with its own history
CALM = 0.2  # smallest scale of ln(max logit) changes between reports
BROAD = 0.9  # entropy share; heads below are focused
WIDE = 0.25  # share of the heads of a model with the same problem that makes it the model's problem


class Signals(NamedTuple):
    """The numbers of a record that the rules read. NaN if not recorded."""

    logit: float  # largest logit
    share: float  # entropy / ln n
    peak: float  # median of the largest weight
    first: float  # weight on the first keys
    beta: float
    visible: float
    value: float  # RMS of the values
    arriving: float  # ‖dO‖
    score_gain: float  # ‖(dQ, dK)‖ / ‖dO‖
    token_angle: float
    mismatch: float

    @classmethod
    def of(cls, record: Record) -> Signals:
        """Read the signals of a head."""
        rows = ("max_logit/max", "relative_entropy/mean", "w_max/p50", "first_share/mean", "beta/p50", "visible/p50")
        scalars = ("value_size", "output_gradient", "score_gain", "token_angle", "mismatch")
        values = [record.value("forward", *row.split("/")) for row in rows]
        values += [record.scalars.get(name) for name in scalars]
        return cls(*(math.nan if value is None else value for value in values))


class Symptom(NamedTuple):
    """A rule holds for a head: the value that shows it, and the usual value or the limit."""

    value: float
    usual: float


@dataclass
class Head:
    """History of a head: signals of the last reports without a problem, and extremes of the whole run."""

    past: deque[Signals] = field(default_factory=lambda: deque(maxlen=KEPT))
    first_logit: float = math.nan
    focus: float = 0.0  # largest median of 1 − entropy / ln n over five reports
    reports: int = 0

    def add(self, now: Signals) -> None:
        """Append a report."""
        self.past.append(now)
        self.reports += 1
        if self.reports >= FIRST_REPORTS:
            self.focus = max(self.focus, 1 - self.usual("share"))
        if math.isnan(self.first_logit):
            self.first_logit = now.logit

    def usual(self, name: str) -> float:
        """Median of a signal over the last five reports, NaN if unknown."""
        return median(getattr(signals, name) for signals in list(self.past)[-5:])

    def jump(self, now: Signals) -> float:
        """Rise of ln(max logit) over the last reports, in units of its usual change between two reports."""
        if len(self.past) < FIRST_REPORTS:
            return 0.0
        logits = [abs(signals.logit) for signals in self.past]
        logs = [math.log(max(logit, 0.05)) for logit in logits[-6:]]
        changes = [abs(after - before) for before, after in itertools.pairwise(logs)]
        rise = math.log(max(now.logit, 1.0) / max(1.0, *logits[-3:]))  # smaller logits are alike
        return rise / max(CALM, 1.5 * statistics.median(changes))


@dataclass
class Report:
    """What the rules see: the signals of all heads at a step, their histories, and the faults of the step."""

    step: int
    now: Mapping[Place, Signals]
    heads: Mapping[Place, Head]
    limits: Thresholds
    open: Mapping[str, frozenset[Place]]  # heads with an open event, by cause
    faults: Mapping[Place, tuple[int, int, int, int]]  # step, number of the pass, bits of ORIGINS, row
    interval: int = 1  # steps since the last report

    @property
    def growth(self) -> float:
        """Ratio of logits between two reports that learning alone does not reach."""
        return min(3.0 * (1 + self.interval / 15), 15.0)

    def where(self, rule: Callable[[Signals, Head], Symptom | None]) -> dict[Place, Symptom]:
        """Return the heads for which a rule holds."""
        found = ((place, rule(now, self.heads[place])) for place, now in self.now.items())
        return {place: symptom for place, symptom in found if symptom is not None}

    def by_layer(self, name: str) -> dict[str, float]:
        """Return the median of a signal over the heads of each layer that has it."""
        values: dict[str, list[float]] = defaultdict(list)
        for (layer, _), now in self.now.items():
            if not math.isnan(getattr(now, name)):
                values[layer].append(getattr(now, name))
        return {layer: statistics.median(of_heads) for layer, of_heads in values.items()}

    def wide(self, symptoms: dict[Place, Symptom], share: float = WIDE) -> dict[Place, Symptom]:
        """Return the symptoms if they concern a large share of the heads of the model, at least two."""
        return symptoms if len(symptoms) >= max(2, share * len(self.now)) else {}


def median(values: Iterable[float]) -> float:
    """Median of the known values, NaN if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan
