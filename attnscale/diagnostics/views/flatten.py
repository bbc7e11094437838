"""Flattens records into a dictionary of names and numbers, for trackers, Trainer logs and data frames."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from attnscale.diagnostics.records.record import STATISTICS, Record
from attnscale.diagnostics.records.report import Report
from attnscale.diagnostics.views.display import MAIN
from attnscale.errors import reject

PREFIX = "attn"
MAIN_NAMES = tuple(f"{q.phase}/{q.name}" if q.phase else q.name for q in MAIN)
SPREAD = ("mean", "p10", "p50", "p90")


def flatten(
    records: Sequence[Record],
    *,
    names: Collection[str] | None = None,
    marks: Collection[str] = STATISTICS,
    heads: bool = True,
) -> dict[str, float]:
    """Flatten records to `attn/<layer>/h<head>/<phase>/<quantity>/<mark>`; scalars have no phase and mark.

    `names` selects quantities, as `w_max` for both phases or `forward/w_max` (None: all). With `heads=False`, each
    quantity is reduced over the heads of a layer: the extreme for min and max, otherwise the mean.

    >>> from attnscale.diagnostics import Summary
    >>> w_max = Summary(mean=0.5, p10=0.1, p50=0.4, p90=0.9, min=0.0, max=1.0, rows=64)
    >>> record = Record(0, "layers.0", 3, forward={"w_max": w_max}, scalars={"angle_ratio": 0.8})
    >>> flatten([record], marks=("mean",))
    {'attn/layers.0/h3/forward/w_max/mean': 0.5, 'attn/layers.0/h3/angle_ratio': 0.8}
    """
    for mark in marks:
        if mark not in STATISTICS:
            reject("marks", mark, ", ".join(STATISTICS))
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        place = f"{PREFIX}/{record.layer}/h{record.head}" if heads else f"{PREFIX}/{record.layer}"
        for name, value in numbers_of(record, names, marks):
            values[f"{place}/{name}"].append(value)
    return {name: _join(name.rpartition("/")[2], of_heads) for name, of_heads in values.items()}


def compact(records: Sequence[Record], *, heads: bool = True) -> dict[str, float]:
    """Flatten the main quantities: mean and percentiles per layer and, with `heads`, the mean per head.

    The largest logit is the maximum over all rows.
    """
    largest = "forward/max_logit"
    others = [name for name in MAIN_NAMES if name != largest]
    found = flatten(records, names=others, marks=SPREAD, heads=False)
    found |= flatten(records, names=[largest], marks=["max"], heads=False)
    if heads:
        found |= flatten(records, names=others, marks=["mean"]) | flatten(records, names=[largest], marks=["max"])
    return found


def numbers_of(
    record: Record, names: Collection[str] | None = None, marks: Collection[str] = STATISTICS
) -> Iterator[tuple[str, float]]:
    """Iterate over names and numbers as in `flatten`, without layer and head."""
    for phase, name, summary in record.summaries():
        if names is None or name in names or f"{phase}/{name}" in names:
            yield from ((f"{phase}/{name}/{mark}", float(getattr(summary, mark))) for mark in marks)
    yield from ((name, float(value)) for name, value in record.scalars.items() if names is None or name in names)


class Extreme(NamedTuple):
    """The largest or smallest value over all heads, and the head."""

    value: float
    layer: str
    head: int


class Overview(NamedTuple):
    """A few numbers of a whole model; None if not recorded."""

    max_logit: Extreme | None
    entropy_share: float | None  # mean of entropy / ln n
    min_gain: Extreme | None


def overview(report: Report) -> Overview:
    """Reduce a report to the largest logit, the mean share of the entropy, and the smallest gain. NaN is ignored."""
    planes = (
        report.plane("forward", "max_logit", "max"),
        report.plane("forward", "relative_entropy"),
        report.plane("", "gain"),
    )
    logits, entropies, gains = ([] if plane is None else _known(plane, report) for plane in planes)
    return Overview(
        max(logits, key=lambda one: one.value) if logits else None,
        sum(one.value for one in entropies) / len(entropies) if entropies else None,
        min(gains, key=lambda one: one.value) if gains else None,
    )


def _known(plane: Tensor, report: Report) -> list[Extreme]:
    both = zip(plane.tolist(), report.places, strict=True)
    return [Extreme(value, *place) for value, place in both if not math.isnan(value)]


def _join(mark: str, values: list[float]) -> float:
    if len(values) == 1:
        return values[0]
    if any(math.isnan(x) for x in values):
        return math.nan
    if mark in ("min", "max"):
        return min(values) if mark == "min" else max(values)
    return sum(values) / len(values)
