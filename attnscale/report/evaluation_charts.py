"""The charts of an evaluation: metrics over length, the trade-off, accuracy against criticality, heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

from attnscale.diagnostics.views.display import COLOURS, short_names
from attnscale.lab.results import CONSTANT
from attnscale.lab.tasks import TASKS
from attnscale.report.chart import (
    Axis,
    Chart,
    Mark,
    Point,
    Series,
    Style,
    bits,
    lengths_axis,
    linear,
    logarithmic,
    percent,
    points,
    short,
    style,
)
from attnscale.report.evaluation_data import ARGMAX, NOTHING, PROSE, EvaluationData, HeadRow

# Column of statistics.csv → title of its chart, axis label with unit.
HEAD_QUANTITIES = {
    "w_max": ("Largest weight w_max", "attention weight, 0 to 1"),
    "entropy": ("Entropy of the weights", "nats"),
    "accumulation_8": ("Accumulation scale Λ, minimum rank 8", "Λ, per unit of logit"),
    "criticality": ("Criticality r = β/Λ", "r, dimensionless (log scale)"),
}
MAPS = {"w_max": "w_max", "criticality": "r", "accumulation_8": "Λ"}  # column of statistics.csv → label

SINK = 2 / 3  # heads that keep less than this share of r without the first four keys are taken for attention sinks
RETRIEVING = (
    "The retrieving head of a model is the head with the largest w_max among the rows that predict an answer, under "
    "constant, at the trained length or the nearest length below. Only models that answer more than "
    f"{NOTHING:.0%} of the questions there have one, and heads that lose a third of r without the first four keys "
    "(attention sinks) are excluded. It is the sharpest head, not proven to attend to the answer."
).replace("%", " %")

Curves = dict[str, list[Point]]  # by policy, in file order
Head = tuple[str, int]
Format = Callable[[float], str]


def texts(task: str) -> tuple[Format, Format]:
    """Return the formats of a task's metric and of its differences."""
    return (percent, points) if TASKS[task].metrics[0].higher_is_better else (bits, bits)


def curves(data: EvaluationData, task: str) -> Curves:
    """Return the metric of a task over length."""
    rows = data.whole(task).values()
    return _by_policy(data, ((row.policy, Point(row.length, row.value, row.low, row.high)) for row in rows))


def task_chart(data: EvaluationData, task: str) -> Chart:
    """Return the chart of a task's metric over length. Perplexity omits argmax, which would flatten the other lines."""
    found = curves(data, task)
    if task == PROSE:
        found.pop(ARGMAX, None)
    least, most = (0, 1) if task in data.retrieval_tasks else (None, None)
    axis = _linear(TASKS[task].metrics[0].axis, found, least, most)
    return _over_length(data, TASKS[task].title, found, axis, texts(task)[0])


def position_chart(data: EvaluationData) -> Chart | None:
    """Return the chart of bits per byte by position in the longest text; bins are placed at their geometric mean."""
    rows = [row for row in data.binned(PROSE) if row.policy != ARGMAX]
    longest = max((row.length for row in rows), default=0)
    placed = [(row, _middle(row.bin)) for row in rows if row.length == longest]
    found = _by_policy(data, ((row.policy, Point(x, row.value, row.low, row.high)) for row, x in placed if x))
    if not found:
        return None
    title = f"{TASKS[PROSE].title} by position, {longest} tokens"
    x = logarithmic("position in the text, tokens (log scale)", (point.x for own in found.values() for point in own))
    return _over_length(data, title, found, _linear(TASKS[PROSE].metrics[0].axis, found), bits, x=x)


def trades(data: EvaluationData, task: str) -> Curves:
    """Return gain in retrieval (percentage points) against cost in bits per byte, by length.

    Both are differences to `constant`. The bound argmax is omitted.
    """
    prose, found = data.whole(PROSE), []
    for (policy, length), row in sorted(data.whole(task).items(), key=lambda item: item[0][1]):
        other = prose.get((policy, length))
        if policy in (CONSTANT, ARGMAX) or other is None or row.difference is None or other.difference is None:
            continue
        low, high = (None if end is None else 100 * end for end in (row.difference_low, row.difference_high))
        tip = f"{policy} at {length} tokens\n{points(row.difference)} points"
        tip += _interval(row.difference_low, row.difference_high, points) + f"\n{bits(other.difference)} bits per byte"
        tip += _interval(other.difference_low, other.difference_high, bits)
        ends = other.difference_low, other.difference_high
        found.append((policy, Point(other.difference, 100 * row.difference, low, high, *ends, tip)))
    return _by_policy(data, found)


def trade_chart(data: EvaluationData, task: str) -> Chart | None:
    """Return the chart of percentage points gained against bits per byte lost; up and left is better."""
    found = trades(data, task)
    if not found:
        return None
    every = [point for own in found.values() for point in own]
    x = linear("bits per byte, difference to constant (lower is better)", [0.0, *(point.x for point in every)])
    y = linear("accuracy, percentage points gained", [0.0, *(point.y for point in every)])
    title = f"{task} against bits per byte, {data.lengths[0]} to {data.lengths[-1]} tokens"
    series = [Series(policy, _style(data, policy), own, shaded=False) for policy, own in found.items()]
    return Chart(title, series, x, y, [Mark("constant", y=0.0), Mark("", x=0.0)])


def statistics_task(data: EvaluationData) -> str | None:
    """Return the task whose statistics are shown: retrieval if it was measured."""
    measured = {row.task for row in data.statistics}
    return next((task for task in data.tasks if task in measured), None)


def retrieving_heads(data: EvaluationData, task: str) -> dict[str, Head]:
    """Return the retrieving head of each model that has one: the definition is `RETRIEVING`.

    Empty for tasks without retrieval: there, the largest w_max belongs to an attention sink.
    """
    if task not in data.retrieval_tasks:
        return {}
    found: dict[str, Head] = {}
    rows = [row for row in data.statistics if row.task == task and row.policy == CONSTANT and row.w_max is not None]
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        lengths = {row.length for row in own}
        trained = data.trained_length or min(lengths)
        place = max((length for length in lengths if length <= trained), default=min(lengths))
        answered = data.whole(task, model).get((CONSTANT, place))
        heads = [row for row in own if row.length == place and not is_sink(row)]
        if answered is not None and answered.value > NOTHING and heads:
            best = max(heads, key=lambda row: row.w_max or 0.0)
            found[model] = (best.layer, best.head)
    return found


def is_sink(row: HeadRow) -> bool:
    """Whether a head attends to the first four keys: without them, its Λ is larger and its r = β/Λ smaller."""
    whole, rest = row.accumulation_8, row.accumulation_8_without_first
    return whole is not None and rest is not None and whole < SINK * rest


def head_curves(data: EvaluationData, task: str, quantity: str, heads: dict[str, Head] | None = None) -> Curves:
    """Return a statistic over length: the given head of each model, or the median over its heads; median over models.

    With several models, low and high are their minimum and maximum.
    """
    found = []
    for policy in data.policies:
        for length in data.lengths:
            values = list(_per_model(data, task, quantity, policy, length, heads).values())
            if values:
                ends = (min(values), max(values)) if len(values) > 1 else (None, None)
                found.append((policy, Point(length, median(values), *ends)))
    return _by_policy(data, found)


def head_chart(data: EvaluationData, task: str, quantity: str, heads: dict[str, Head] | None) -> Chart:
    found = head_curves(data, task, quantity, heads)
    title, unit = HEAD_QUANTITIES[quantity]
    if quantity == "criticality":
        axis = logarithmic(unit, (1.0, *(point.y for own in found.values() for point in own)))
        return _over_length(data, title, found, axis, short, marks=[Mark("r = 1", y=1.0)])
    return _over_length(data, title, found, _linear(unit, found, 0, 1 if quantity == "w_max" else None), short)


class CriticalPoint(NamedTuple):
    """Accuracy and criticality of one model with one policy at one length."""

    model: str
    policy: str
    length: int
    criticality: float
    recall: float


def critical_points(data: EvaluationData, task: str) -> tuple[list[CriticalPoint], bool]:
    """Return accuracy and r of the retrieving head, and whether accuracy is relative to the policy `argmax`."""
    heads = retrieving_heads(data, task)
    relative = any(row.policy == ARGMAX and row.task == task for row in data.results)
    found = []
    for model in data.models:
        accuracy = data.whole(task, model)
        for (policy, length), row in accuracy.items():
            bound = accuracy.get((ARGMAX, length))
            if relative and (policy == ARGMAX or bound is None or bound.value <= 0):
                continue
            r = _per_model(data, task, "criticality", policy, length, heads).get(model)
            if r is not None and r > 0:
                recall = row.value / bound.value if relative and bound is not None else row.value
                found.append(CriticalPoint(model, policy, length, r, recall))
    return found, relative


def criticality_chart(data: EvaluationData, task: str) -> Chart | None:
    """Return the chart of accuracy against criticality, with one point per model, policy and length."""
    found, relative = critical_points(data, task)
    if not found:
        return None
    placed = []
    for one in found:
        tip = f"{one.policy} at {one.length} tokens, {one.model}\nr {short(one.criticality)}, {percent(one.recall)}"
        placed.append((one.policy, Point(one.criticality, one.recall, tip=tip)))
    own = _by_policy(data, placed)
    series = [Series(policy, _style(data, policy), some, joined=False, shaded=False) for policy, some in own.items()]
    x = logarithmic("criticality r = β/Λ of the retrieving head (log scale)", (1.0, *(p.criticality for p in found)))
    recalls = [point.recall for point in found]
    label = "accuracy / accuracy of argmax" if relative else "accuracy, 0 to 1"
    y = linear(label, recalls, least=0, most=1 if max(recalls) <= 1 else None)
    rho = rank_correlation([(point.criticality, point.recall) for point in found])
    spearman = "" if rho is None else f": Spearman's rank correlation {rho:.2f} over {len(found)} points"
    return Chart(f"Accuracy against criticality, {task}{spearman}", series, x, y, [Mark("r = 1", x=1.0)])


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation, with mean ranks for ties; None if a variable is constant.

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


def head_maps(data: EvaluationData) -> dict[str, Any]:
    """Return the data of the heat maps: for each model its layers, retrieving head, and values of all heads."""
    task = statistics_task(data)
    heads = {} if task is None else retrieving_heads(data, task)
    rows = [row for row in data.statistics if row.task == task]
    models = []
    for name in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == name]
        layers: dict[str, int] = {}
        for row in own:
            layers[row.layer] = max(layers.get(row.layer, 0), row.head + 1)
        places = {layer: index for index, layer in enumerate(layers)}
        cells: dict[str, dict[str, list[list[float | None]]]] = {}
        for row in own:
            known = cells.setdefault(f"{row.policy} {row.length}", {})
            for quantity in MAPS:
                plane = known.setdefault(quantity, [[None] * count for count in layers.values()])
                plane[places[row.layer]][row.head] = getattr(row, quantity)
        layer, head = heads.get(name, (own[0].layer, 0))
        names = list(layers)
        best = [places[layer], head]
        models.append({"name": name, "layers": names, "short": short_names(names), "cells": cells, "best": best})
    return {
        "colours": COLOURS,
        "quantities": [{"name": name, "share": name == "w_max"} for name in MAPS],
        "labels": MAPS,
        "policies": [policy for policy in data.policies if any(row.policy == policy for row in rows)],
        "lengths": sorted({row.length for row in rows}),
        "models": models,
    }


def _per_model(
    data: EvaluationData, task: str, quantity: str, policy: str, length: int, heads: dict[str, Head] | None
) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in data.heads_at.get((task, policy, length), ()):
        value = getattr(row, quantity)
        if value is not None and (heads is None or heads.get(row.model) == (row.layer, row.head)):
            values.setdefault(row.model, []).append(value)
    return {model: median(own) for model, own in values.items()}


def _by_policy(data: EvaluationData, found: Iterable[tuple[str, Point]]) -> Curves:
    """Group points by policy, in file order; policies without points are omitted."""
    every: Curves = {policy: [] for policy in data.policies}
    for policy, point in found:
        every[policy].append(point)
    return {policy: own for policy, own in every.items() if own}


def _over_length(
    data: EvaluationData,
    title: str,
    found: Curves,
    y: Axis,
    text: Format,
    x: Axis | None = None,
    marks: Sequence[Mark] = (),
) -> Chart:
    series = []
    for policy, own in found.items():
        tips = [f"{policy} at {short(p.x, 7)} tokens\n{text(p.y)}{_interval(p.low, p.high, text)}" for p in own]
        tipped = sorted((p._replace(tip=tip) for p, tip in zip(own, tips, strict=True)), key=lambda point: point.x)
        series.append(Series(policy, _style(data, policy), tipped))
    trained = [] if data.trained_length is None else [Mark("trained length", x=float(data.trained_length))]
    x = x or lengths_axis("context length, tokens (log scale)", data.lengths)
    return Chart(title, series, x, y, [*trained, *marks])


def _linear(label: str, found: Curves, least: float | None = None, most: float | None = None) -> Axis:
    known = [end for own in found.values() for p in own for end in (p.y, p.low, p.high) if end is not None]
    return linear(label, known, least=least, most=most)


def _style(data: EvaluationData, policy: str) -> Style:
    """Return the style of a policy, by its index in the folder: the same in all charts."""
    return style(data.policies.index(policy))


def _interval(low: float | None, high: float | None, text: Format) -> str:
    return "" if low is None or high is None else f" ({text(low)} to {text(high)})"


def _middle(text: str) -> float | None:
    """Return the geometric mean of a bin such as "64-128"; half of the end if the bin starts at 0."""
    start, _, stop = text.partition("-")
    try:
        low, high = float(start), float(stop)
    except ValueError:
        return None
    if high <= 0:
        return None
    return (low * high) ** 0.5 if low > 0 else high / 2
