"""Rules that recognise the causes of events, and what they see: the numbers of a report and the history of each head.

A rule compares a head with limits, with its own history, or with the rest of the model.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from attnscale.diagnostics.records.record import Record

Place = tuple[str, int]  # layer and head

KEPT = 20  # reports in the history of a head
FIRST_REPORTS = 4  # reports before a head is compared with its own history
CALM = 0.2  # smallest scale of ln(max logit) changes between reports
BROAD = 0.9  # entropy share; heads below are focused
FORWARD_ORIGINS = 0b1111  # of ORIGINS: query, key, value, scores
WIDE = 0.25  # share of the heads of a model with the same problem that makes it the model's problem
FEW_KEYS = 8.0  # rows with fewer visible keys are near uniform, or near one key, by chance
SMALL_LOGIT = 8.0  # logits below do not concentrate attention
SINK = 0.8  # weight on the first keys of an attention sink

# What `Signals` reads of a record: parts of the summaries of its rows, and scalars.
_ROWS = (
    ("max_logit", "max"),
    ("relative_entropy", "mean"),
    ("w_max", "p50"),
    ("first_share", "mean"),
    ("beta", "p50"),
    ("visible", "p50"),
)
_SCALARS = ("value_size", "output_gradient", "score_gain", "token_angle", "mismatch")


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
        values = [getattr(record.forward.get(name), part, math.nan) for name, part in _ROWS]
        return cls(*values, *(record.scalars.get(name, math.nan) for name in _SCALARS))


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
    open: Mapping[str, frozenset[Place]]  # heads with an open event, by cause
    faults: Mapping[Place, tuple[int, int, int, int]]  # step, number of the pass, bits of ORIGINS, row
    interval: int = 1  # steps since the last report
    weights_finite: bool = False  # known to be finite after the update

    @property
    def skipped_update(self) -> bool:
        """Whether NaN or infinity occurred in gradients only, and no weight was updated with them."""
        return self.weights_finite and all(bits & FORWARD_ORIGINS == 0 for _, _, bits, _ in self.faults.values())

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


def broken(report: Report, limit: float) -> dict[Place, Symptom]:
    """The heads in which NaN or infinity came first."""
    first = min((fault[:2] for fault in report.faults.values()), default=None)
    return {place: Symptom(math.nan, fault[3]) for place, fault in report.faults.items() if fault[:2] == first}


def _is_collapsed(now: Signals, limit: float) -> bool:
    sharp = now.peak > limit and now.share < 1 - limit + 0.05
    return sharp and now.visible > FEW_KEYS and not now.first > SINK


def wrong_temperature(report: Report, limit: float) -> dict[Place, Symptom]:
    """All heads are uniform under a very small β, or half of them are sharp only because of a large one."""
    flat = report.where(
        lambda now, _: (
            Symptom(now.beta, limit) if now.beta < limit and now.share > 0.99 and now.visible > FEW_KEYS else None
        )
    )
    lasting = "temperature" in report.open

    def is_steep(now: Signals) -> bool:
        # The raw scores, logit / β, are too small to concentrate attention.
        borrowed = now.logit < SMALL_LOGIT * now.beta and now.share < 0.75
        return now.beta > 8 and now.logit > SMALL_LOGIT and (lasting or borrowed)

    steep = report.where(lambda now, _: Symptom(now.beta, 1.0) if is_steep(now) else None)
    return report.wide(flat, 0.9) or report.wide(steep, 0.5)


def diverging(report: Report, limit: float) -> dict[Place, Symptom]:
    """Many heads lose their entropy while their logits and their values grow: all weights grow, not only some."""

    def rule(now: Signals, head: Head) -> Symptom | None:
        logit, value, share = (head.usual(name) for name in ("logit", "value", "share"))
        grown = now.logit > max(report.growth * logit, 50.0) and now.value > 2 * value
        return Symptom(now.share, share) if grown and now.share < 0.75 * share else None

    return report.wide(report.where(rule))


def collapsed(report: Report, limit: float) -> dict[Place, Symptom]:
    """A large share of the heads puts all weight on single keys, and did not before."""

    def rule(now: Signals, head: Head) -> Symptom | None:
        before = head.usual("share")
        new = math.isnan(before) or before > 0.3
        return Symptom(now.share, before) if new and _is_collapsed(now, limit) else None

    return report.wide(report.where(rule))


def jumped(report: Report, limit: float) -> dict[Place, Symptom]:
    """The largest logit of a head rose suddenly, compared with its own history."""
    lasting = report.open.get("logit_jump", frozenset())

    def rule(now: Signals, head: Head) -> Symptom | None:
        usual = max(abs(head.usual("logit")), 1.0)
        return Symptom(now.logit, head.usual("logit")) if now.logit > max(SMALL_LOGIT, 3 * usual) else None

    def is_sudden(place: Place) -> bool:
        now, head = report.now[place], report.heads[place]
        return now.logit > report.growth * max(abs(head.usual("logit")), 1.0) and head.jump(now) > limit

    high = report.where(rule)
    certain = {place for place in high if place in lasting or is_sudden(place)}
    # Where half of the heads of a layer or model jump, the others, whose history varies more, jump as well.
    if 2 * len(certain) >= len(report.now):
        return high
    layers, heads = Counter(layer for layer, _ in certain), Counter(layer for layer, _ in report.now)
    whole = {layer for layer, number in layers.items() if 2 * number >= heads[layer]}
    return {place: symptom for place, symptom in high.items() if place in certain or place[0] in whole}


def dropped(report: Report, limit: float) -> dict[Place, Symptom]:
    """All scores of a head are almost zero: 1 − entropy / ln n fell to less than a five-hundredth."""

    def rule(now: Signals, head: Head) -> Symptom | None:
        usual, logit = 1 - head.usual("share"), head.usual("logit")
        flat = usual > 1e-3 and 1 - now.share < usual / 500 and now.visible > FEW_KEYS
        return Symptom(now.logit, logit) if flat and abs(now.logit) < abs(logit) / 20 else None

    return report.where(rule)


def exploding(report: Report, limit: float) -> dict[Place, Symptom]:
    """The largest logit of a head is above the limit and has at least doubled since the start of the run."""
    return report.where(
        lambda now, head: Symptom(now.logit, limit) if now.logit > limit and now.logit > 2 * head.first_logit else None
    )


def dead_values(report: Report, limit: float) -> dict[Place, Symptom]:
    """The values of a head are zero, or tiny compared with their own history."""
    return _dead(report, "value", limit)


def dead_output(report: Report, limit: float) -> dict[Place, Symptom]:
    """No gradient arrives at the output of a head, or almost none compared with its history or other layers."""
    found = _dead(report, "arriving", limit)
    reached = False  # a layer before this one has a gradient
    for place, now in report.now.items():
        if math.isnan(now.arriving) and reached:
            found[place] = Symptom(0.0, report.heads[place].usual("arriving"))
        reached |= now.arriving > 0
    return found


def _dead(report: Report, name: str, limit: float) -> dict[Place, Symptom]:
    typical = median(getattr(now, name) for now in report.now.values())

    def rule(now: Signals, head: Head) -> Symptom | None:
        value, usual = getattr(now, name), head.usual(name)
        known = usual if len(head.past) >= FIRST_REPORTS else math.nan
        return Symptom(value, usual) if value < limit * known or value <= 1e-6 * typical else None

    return report.where(rule)


def rank_collapsed(report: Report, limit: float) -> dict[Place, Symptom]:
    """From some layer on, all tokens point into one direction, and almost no gradient gets back to the first layer.

    Early in training, tokens may be almost parallel for some time, because the model first learns their mean; then
    gradients still reach all layers.
    """
    angles, arriving = report.by_layer("token_angle"), report.by_layer("arriving")
    if len(angles) < 2:
        return {}
    first = next(iter(angles))
    differ = angles[first] > 10 * limit  # the tokens of the first layer
    cut_off = arriving.get(first, math.nan) < 1e-3 * max(arriving.values(), default=math.nan)
    flat = {layer for layer, angle in angles.items() if angle < 1e-3 * limit or (angle < limit and differ and cut_off)}
    return {place: Symptom(angles[place[0]], limit) for place in report.now if place[0] in flat}


def vanishing(report: Report, limit: float) -> dict[Place, Symptom]:
    """Almost no gradient passes from the output of a head to its queries and keys."""
    return report.where(lambda now, _: Symptom(now.score_gain, limit) if now.score_gain < limit else None)


def diffuse(report: Report, limit: float) -> dict[Place, Symptom]:
    """A head lost its focus, or stays uniform while three quarters of the others are focused."""
    others = sum(now.share < BROAD for now in report.now.values()) > 0.75 * len(report.now)

    def rule(now: Signals, head: Head) -> Symptom | None:
        if not (now.share > limit and now.visible > FEW_KEYS):
            return None
        lost = head.focus > 1 - BROAD and 1 - now.share < 0.05 * head.focus
        never = others and head.reports >= KEPT and head.focus < 1e-3
        return Symptom(now.share, 1 - head.focus) if lost or never else None

    return report.where(rule)


def mismatched(report: Report, limit: float) -> dict[Place, Symptom]:
    """Forward and backward statistics of a row differ."""
    return report.where(lambda now, _: Symptom(now.mismatch, limit) if now.mismatch > limit else None)
