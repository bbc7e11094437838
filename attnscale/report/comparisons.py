"""What the page and the pictures show of an evaluation: curves over length, the trade-off, recall against r."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from attnscale.report.evaluation_data import ARGMAX, BITS, CONSTANT, PERPLEXITY, EvaluationData


class Interval(NamedTuple):
    """A number at a place of an axis, with its 95 % interval or its range over models, if there is one."""

    place: float
    value: float
    low: float | None = None
    high: float | None = None


class Trade(NamedTuple):
    """What a policy gains and loses at a length, against `constant`: accuracy as a share, prose in bits per byte."""

    policy: str
    length: int
    gained: Interval
    lost: Interval


class CriticalPoint(NamedTuple):
    """Recall and criticality of one model under one policy at one length."""

    model: str
    policy: str
    length: int
    criticality: float
    recall: float


Curves = dict[str, list[Interval]]  # by policy, in the order of the folder
Head = tuple[str, int]


def curves(data: EvaluationData, task: str, metric: str) -> Curves:
    """A metric over length."""
    found = data.whole(task, metric)
    return _filled(data, ((row.policy, Interval(row.length, row.value, row.low, row.high)) for row in found.values()))


def by_position(data: EvaluationData) -> tuple[int, Curves] | None:
    """The longest length with bits per byte by position, and its curves; a bin stands at its geometric mean."""
    rows = data.binned(PERPLEXITY, BITS)
    if not rows:
        return None
    longest = max(row.length for row in rows)
    placed = [(row, _middle(row.bin)) for row in rows if row.length == longest]
    points = [(row.policy, Interval(at, row.value, row.low, row.high)) for row, at in placed if at is not None]
    return (longest, _filled(data, points)) if points else None


def trades(data: EvaluationData, task: str) -> list[Trade]:
    """Policies and lengths where retrieval and perplexity were both compared; argmax is a bound, and left out."""
    prose, found = data.whole(PERPLEXITY, BITS), []
    for (policy, length), row in sorted(data.whole(task, "accuracy").items(), key=lambda item: item[0][1]):
        other = prose.get((policy, length))
        if policy in (CONSTANT, ARGMAX) or other is None or row.difference is None or other.difference is None:
            continue
        gained = Interval(length, row.difference, row.difference_low, row.difference_high)
        lost = Interval(length, other.difference, other.difference_low, other.difference_high)
        found.append(Trade(policy, length, gained, lost))
    return found


def statistics_task(data: EvaluationData) -> str | None:
    """The task whose rows the statistics are shown of: retrieval if it has some."""
    measured = dict.fromkeys(row.task for row in data.statistics)
    return next((task for task in (*data.retrieval_tasks, *measured) if task in measured), None)


def retrieving_heads(data: EvaluationData, task: str) -> dict[str, Head]:
    """For each model the head with the largest w_max under `constant`, at the trained length or nearest to it.

    None where nothing was to be retrieved: in prose such a head looks at the first key.
    """
    if task == PERPLEXITY:
        return {}
    rows = [row for row in data.statistics if row.task == task and row.policy == CONSTANT and "w_max" in row.values]
    found: dict[str, Head] = {}
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        lengths = {row.length for row in own}
        trained = data.trained_length or min(lengths)
        place = max((length for length in lengths if length <= trained), default=min(lengths))
        best = max((row for row in own if row.length == place), key=lambda row: row.values["w_max"])
        found[model] = (best.layer, best.head)
    return found


def head_curves(data: EvaluationData, task: str, quantity: str, heads: dict[str, Head] | None = None) -> Curves:
    """A statistic over length: per model of the given head, or the median over all; then the median over models.

    Where there are several models, low and high are the least and the largest of them.
    """
    found = []
    for policy in data.policies:
        for length in data.lengths:
            values = list(_per_model(data, task, quantity, policy, length, heads).values())
            if values:
                ends = (min(values), max(values)) if len(values) > 1 else (None, None)
                found.append((policy, Interval(length, median(values), *ends)))
    return _filled(data, found)


def critical_points(data: EvaluationData, task: str) -> tuple[list[CriticalPoint], bool]:
    """Recall against r of the retrieving head, and whether recall is relative to that of the policy `argmax`."""
    heads = retrieving_heads(data, task)
    relative = any(row.policy == ARGMAX and row.task == task for row in data.results)
    found = []
    for model in data.models:
        accuracy = data.whole(task, "accuracy", model)
        for (policy, length), row in accuracy.items():
            bound = accuracy.get((ARGMAX, length))
            if relative and (policy == ARGMAX or bound is None or bound.value <= 0):
                continue
            r = _per_model(data, task, "criticality", policy, length, heads).get(model)
            if r is not None and r > 0:
                recall = row.value / bound.value if relative and bound is not None else row.value
                found.append(CriticalPoint(model, policy, length, r, recall))
    return found, relative


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's: of the ranks of both, equal values sharing their mean rank; None where one does not vary.

    >>> rank_correlation([(1, 10), (2, 100), (3, 1000), (4, 1001)])
    1.0
    >>> rank_correlation([(1, 5), (2, 5), (3, 5)]) is None
    True
    """
    if len(pairs) < 3:
        return None
    first, second = _ranks([one for one, _ in pairs]), _ranks([other for _, other in pairs])
    centre = (len(pairs) - 1) / 2
    product = sum((one - centre) * (other - centre) for one, other in zip(first, second, strict=True))
    size = sum((one - centre) ** 2 for one in first) * sum((other - centre) ** 2 for other in second)
    return product / size**0.5 if size > 0 else None


def _ranks(values: list[float]) -> list[float]:
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in ordered}
    return [first[value] + (ordered.count(value) - 1) / 2 for value in values]


def _per_model(
    data: EvaluationData, task: str, quantity: str, policy: str, length: int, heads: dict[str, Head] | None
) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in data.heads_at.get((task, policy, length), ()):
        if quantity in row.values and (heads is None or heads.get(row.model) == (row.layer, row.head)):
            values.setdefault(row.model, []).append(row.values[quantity])
    return {model: median(own) for model, own in values.items()}


def _filled(data: EvaluationData, points: Iterable[tuple[str, Interval]]) -> Curves:
    """Points by policy, in the order of the folder and of the axis; policies without a point are left out."""
    found: Curves = {policy: [] for policy in data.policies}
    for policy, point in points:
        found[policy].append(point)
    return {policy: sorted(own, key=lambda point: point.place) for policy, own in found.items() if own}


def _middle(text: str) -> float | None:
    """The geometric mean of the ends of a bin such as "64-128"; where the first end is 0, half of the second."""
    start, _, stop = text.partition("-")
    try:
        low, high = float(start), float(stop)
    except ValueError:
        return None
    if high <= 0:
        return None
    return (low * high) ** 0.5 if low > 0 else high / 2
