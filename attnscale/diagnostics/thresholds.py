"""When attention goes wrong: thresholds, and what crosses them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from attnscale._util.yaml_files import read_yaml
from attnscale.diagnostics.records.record import Alert, Record, Summary
from attnscale.errors import ArgumentError, reject

# As many keys, or fewer, are spread over evenly by chance.
FEW = 8


@dataclass(frozen=True)
class Thresholds:
    """Limits per head; None switches an alert off. What they are compared with is in parentheses.

    diffuse: attention spreads over all keys (mean of entropy/ln n, from above), where half of the rows see more than
        a few: two keys are spread over by any row.
    collapsed: one key takes all (median of w_max, from above), and the entropy is gone with it.
    noise: one key has most of the weight (median w_max above ½) though its score is no higher than the largest of so
        many draws of noise would be (median prominence, from below): condensation on noise. It knows scores only by
        their mean and deviation, so it cannot tell noise from a key that is one of many equals: a head that copies
        repeated tokens looks the same once more than 1/(1 + 2·ln n) of the keys match its query. Switch it off there.
    exploding: the largest logit of any row (from above).
    vanishing: gain of the gradient through the block, ‖(dQ, dK, dV)‖/‖dO‖ (from below).
    mismatch: statistics of the same rows in backward and forward (largest difference, from above).
    broken: NaN or infinity in the output, or in the statistics of a row.
    after_step: diffuse, noise and vanishing say what training has made of a head, and a fresh one is often all of it:
        they are not raised before this step.
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
            value = getattr(self, field.name)
            if field.name == "broken":
                if not isinstance(value, bool):
                    reject(field.name, value, "True or False")
            elif field.name == "after_step":
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    reject(field.name, value, "an int >= 0")
            elif value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0):
                reject(field.name, value, "a number >= 0 or None")

    @classmethod
    def read(cls, path: str | Path) -> Thresholds:
        """Those in a YAML file; what it does not name keeps its default."""
        content = read_yaml(Path(path))
        known = [field.name for field in fields(cls)]
        for key in content:
            if key not in known:
                raise ArgumentError(f"key {key!r} in {path} is not accepted: expected {', '.join(known)}")
        return cls(**content)


def find_alerts(records: Sequence[Record], limits: Thresholds) -> list[Alert]:
    """What in a report crosses its limit."""
    return [alert for record in records for alert in _of_one(record, limits)]


def _of_one(record: Record, limits: Thresholds) -> Iterator[Alert]:
    def alert(kind: str, value: float, limit: float, message: str, row: int | None = None) -> Alert:
        return Alert(kind, record.step, record.layer, record.head, value, limit, message, row)

    broken_row = record.scalars.get("broken_row", -1.0)
    if limits.broken and broken_row >= 0:
        row = int(broken_row)
        yield alert("broken", math.nan, 0.0, f"the output holds NaN or infinity, first in row {row}", row)
    relative, w_max = record.forward.get("relative_entropy"), record.forward.get("w_max")
    trained = record.step >= limits.after_step
    if (
        limits.diffuse is not None
        and relative is not None
        and trained
        and _several(record, FEW)
        and relative.mean > limits.diffuse
    ):
        text = f"entropy is {relative.mean:.3f} of ln n: no key stands out"
        yield alert("diffuse", relative.mean, limits.diffuse, text)
    if limits.collapsed is not None and w_max is not None and _several(record) and w_max.p50 > limits.collapsed:
        yield alert("collapsed", w_max.p50, limits.collapsed, f"half of the rows give {w_max.p50:.3f} to one key")
    height = record.forward.get("prominence")
    condensed = trained and w_max is not None and _several(record) and w_max.p50 > 0.5
    if limits.noise is not None and height is not None and condensed and height.p50 < limits.noise:
        text = f"half of the weight is on one key whose score is {height.p50:.2f} of what noise would reach"
        yield alert("noise", height.p50, limits.noise, text)
    top = record.forward.get("max_logit")
    if limits.exploding is not None and top is not None and top.max > limits.exploding:
        yield alert("exploding", top.max, limits.exploding, f"a logit has reached {top.max:.1f}")
    gain = record.scalars.get("gain")
    if limits.vanishing is not None and trained and gain is not None and gain < limits.vanishing:
        yield alert("vanishing", gain, limits.vanishing, f"only {gain:.1e} of the gradient passes")
    difference = record.scalars.get("mismatch")
    if limits.mismatch is not None and difference is not None and difference > limits.mismatch:
        text = f"backward saw statistics that differ from forward's by {difference:.1e}"
        yield alert("mismatch", difference, limits.mismatch, text)


def _several(record: Record, few: int = 1) -> bool:
    """Whether half of the rows have more than a few keys to choose from."""
    visible: Summary | None = record.forward.get("visible")
    return visible is not None and visible.p50 > few
