"""Thresholds, and the alerts of the heads that cross them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from attnscale._util.checks import check_flag, read_int, read_number
from attnscale._util.yaml_files import read_yaml
from attnscale.diagnostics.records.record import Alert, Record
from attnscale.diagnostics.views.display import ALERTS, QUANTITIES
from attnscale.errors import ArgumentError, reject, reject_type

FEW_KEYS = 8  # so few, or fewer, are often weighed evenly by chance


@dataclass(frozen=True)
class Thresholds:
    """Limits per head; None switches an alert off. In parentheses: what is compared with the limit.

    diffuse: attention spreads over all keys (mean of entropy/ln n, above), where half of the rows see more than a few.
    collapsed: one key has all the weight (median of w_max, above).
    noise: one key has most of the weight (median w_max above ½), though its score is no higher than the largest of n
        draws of noise (median prominence, below). Only the mean and deviation of the scores are used, so many equal
        keys look like noise: a head that copies repeated tokens, once more than 1/(1 + 2·ln n) of the keys match its
        query. Switch it off there.
    exploding: the largest logit of the sampled rows (above). A row that was not sampled is not seen; with
        `Monitor(rows=None)` all are.
    vanishing: gain of the gradient through the block, ‖(dQ, dK, dV)‖/‖dO‖ (below).
    mismatch: statistics of the same rows in backward and forward (largest difference, above).
    broken: NaN or infinity in the output, or in the statistics of a row.
    after_step: first step for diffuse, noise and vanishing, which are normal in an untrained model.
    """

    diffuse: float | None = 0.98
    collapsed: float | None = 0.99
    noise: float | None = 1.0
    exploding: float | None = 100.0
    vanishing: float | None = 1e-4
    mismatch: float | None = 1e-2
    broken: bool = True
    after_step: int = 100

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "broken":
                check_flag(name, value)
            elif name == "after_step":
                object.__setattr__(self, name, read_int(name, value, "an int >= 0", least=0))
            elif value is not None:
                if isinstance(value, bool):
                    reject_type(name, value, "a number >= 0 or None")
                limit = read_number(name, value, "a number >= 0 or None")
                if not limit >= 0:
                    reject(name, value, "a number >= 0 or None")
                object.__setattr__(self, name, limit)

    @classmethod
    def read(cls, path: str | Path) -> Thresholds:
        """From a YAML file; what it does not name keeps its default."""
        content = read_yaml(Path(path))
        known = [field.name for field in fields(cls)]
        for key in content:
            if key not in known:
                raise ArgumentError(f"key {key!r} in {path} is not accepted: expected {', '.join(known)}")
        return cls(**content)


class Rule(NamedTuple):
    """How a quantity of `ALERTS` is compared with its limit."""

    statistic: str  # over the rows of a head; not used for a single number
    above: bool  # whether values above the limit raise the alert, or below
    message: str


RULES = {
    "diffuse": Rule("mean", True, "entropy is {:.3f} of ln n: no key stands out"),
    "collapsed": Rule("p50", True, "half of the rows give {:.3f} to one key"),
    "noise": Rule("p50", False, "half of the weight is on one key whose score is {:.2f} of what noise would reach"),
    "exploding": Rule("max", True, "a logit has reached {:.1f}"),
    "vanishing": Rule("mean", False, "only {:.1e} of the gradient passes"),
    "mismatch": Rule("mean", True, "backward saw statistics that differ from forward's by {:.1e}"),
}


def find_alerts(records: Sequence[Record], limits: Thresholds) -> list[Alert]:
    """The alerts of all heads that cross a limit."""
    return [alert for record in records for alert in _alerts_of(record, limits)]


def _alerts_of(record: Record, limits: Thresholds) -> Iterator[Alert]:
    place = record.step, record.layer, record.head
    if limits.broken and record.scalars.get("broken_row", -1.0) >= 0:
        row = int(record.scalars["broken_row"])
        yield Alert("broken", *place, math.nan, 0.0, f"the output holds NaN or infinity, first in row {row}", row)
    visible, w_max = (QUANTITIES[name].of(record, "p50") or 0.0 for name in ("visible", "w_max"))
    trained = record.step >= limits.after_step
    applies = {
        "diffuse": trained and visible > FEW_KEYS,
        "collapsed": visible > 1,
        "noise": trained and visible > 1 and w_max > 0.5,
        "vanishing": trained,
    }
    for kind, rule in RULES.items():
        limit, value = getattr(limits, kind), QUANTITIES[ALERTS[kind].quantities[0]].of(record, rule.statistic)
        if limit is None or value is None or not applies.get(kind, True):
            continue
        if value > limit if rule.above else value < limit:
            yield Alert(kind, *place, value, limit, rule.message.format(value))
