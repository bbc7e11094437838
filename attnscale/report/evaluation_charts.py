"""The charts of an evaluation: curves over length, trade-offs, grids, and maps of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnscale.diagnostics.views.display import COLOURS, short_names
from attnscale.report.axes import Axis, Style, lengths_axis, linear, logarithmic, style
from attnscale.report.comparisons import (
    CriticalPoint,
    Curves,
    Interval,
    Trade,
    by_position,
    curves,
    head_curves,
    retrieving_heads,
    statistics_task,
)
from attnscale.report.evaluation_data import ARGMAX, BITS, PERPLEXITY, EvaluationData
from attnscale.report.svg import Mark, Point, Series, chart, grid
from attnscale.report.words import bits, percent, points, short

LENGTH = "context length, tokens (log scale)"
# Of statistics.csv: the heading, and the axis with its unit.
HEAD_QUANTITIES = {
    "w_max": ("Largest weight w_max", "share of the row's weight, 0 to 1"),
    "entropy": ("Entropy of the weights", "nats"),
    "accumulation_8": ("Accumulation scale Λ, from rank 8 on", "Λ, per unit of logit"),
    "criticality": ("Criticality r = β/Λ", "r, no unit (log scale)"),
}

MAPS = {"w_max": "w_max", "criticality": "r", "accumulation_8": "Λ"}  # of statistics.csv, with their names


def style_of(data: EvaluationData, policy: str) -> Style:
    """By the place of the policy in the folder, so that it looks the same in all charts."""
    return style(data.policies.index(policy))


def accuracy_chart(data: EvaluationData, task: str) -> str:
    found = curves(data, task, "accuracy")
    return _over_length(data, f"accuracy of {task}", found, _axis("share answered, 0 to 1", found, 0, 1), percent)


def bits_chart(data: EvaluationData) -> str:
    """Without argmax, a bound for retrieval under which prose would flatten all other lines."""
    found = curves(data, PERPLEXITY, BITS)
    found = {policy: own for policy, own in found.items() if policy != ARGMAX}
    return _over_length(data, "bits per byte", found, _axis("bits per byte, less is better", found), bits)


def head_chart(data: EvaluationData, task: str, quantity: str, heads: dict[str, tuple[str, int]] | None) -> str:
    found = head_curves(data, task, quantity, heads)
    title, unit = HEAD_QUANTITIES[quantity]
    if quantity == "criticality":
        axis = logarithmic(unit, (point.value for own in found.values() for point in own), also=1.0)
        return _over_length(data, title, found, axis, short, [Mark("r = 1", y=1.0)])
    axis = _axis(unit, found, 0, 1) if quantity == "w_max" else _axis(unit, found, 0)
    return _over_length(data, title, found, axis, short)


def position_chart(data: EvaluationData) -> tuple[int, str] | None:
    """Bits per byte by position in the longest text, and how long that is."""
    found = by_position(data)
    if found is None:
        return None
    length, lines = found
    lines = {policy: own for policy, own in lines.items() if policy != ARGMAX}
    across = "position in the text, tokens (log scale)"
    y = _axis("bits per byte, less is better", lines)
    return length, _over_length(data, "bits per byte by position", lines, y, bits, across=across)


def depth_grids(data: EvaluationData, task: str) -> dict[str, str]:
    """For each policy, accuracy by depth of the answer and length."""
    rows = data.binned(task, "accuracy")
    bins = sorted({row.bin for row in rows})
    lengths = sorted({row.length for row in rows})
    found = {}
    for policy in data.policies:
        values = {(row.bin, row.length): row.value for row in rows if row.policy == policy}
        if values:
            cells = [[values.get((depth, length)) for length in lengths] for depth in bins]
            found[policy] = grid(f"accuracy of {policy} by depth and length", bins, [str(n) for n in lengths], cells)
    return found


def trade_chart(data: EvaluationData, found: list[Trade]) -> str:
    """Points gained against bits per byte lost: better is up and to the left."""
    series = []
    for policy in dict.fromkeys(trade.policy for trade in found):
        own = [_trade_point(trade) for trade in found if trade.policy == policy]
        series.append(Series(policy, style_of(data, policy), own, bands=False))
    all_points = [point for one in series for point in one.points]
    x = linear("bits per byte lost against constant (less is better)", [0.0, *(point.x for point in all_points)])
    y = linear("percentage points gained", [0.0, *(point.y for point in all_points)])
    marks = [Mark("constant", y=0.0), Mark("", x=0.0)]
    return chart("retrieval gained against bits per byte lost", series, x, y, marks)


def criticality_chart(data: EvaluationData, found: list[CriticalPoint], relative: bool) -> str:
    """One point per model, policy and length."""
    series = []
    for policy in dict.fromkeys(point.policy for point in found):
        own = [
            Point(
                one.criticality,
                one.recall,
                f"{one.policy} at {one.length} tokens, {one.model}\nr {short(one.criticality)}, {percent(one.recall)}",
            )
            for one in found
            if one.policy == policy
        ]
        series.append(Series(policy, style_of(data, policy), own, joined=False, bands=False))
    x = logarithmic("criticality r of the retrieving head (log scale)", (one.criticality for one in found), also=1.0)
    recalls = [one.recall for one in found]
    label = "accuracy / accuracy of argmax" if relative else "share answered, 0 to 1"
    y = linear(label, recalls, least=0, most=1 if max(recalls) <= 1 else None)
    return chart("recall against criticality", series, x, y, [Mark("r = 1", x=1.0)])


def _trade_point(trade: Trade) -> Point:
    gained, lost = trade.gained, trade.lost
    tip = f"{trade.policy} at {trade.length} tokens\n{points(gained.value)} points{_ends(gained, points)}"
    tip += f"\n{bits(lost.value)} bits per byte{_ends(lost, bits)}"
    low, high = (None if end is None else 100 * end for end in gained[2:])
    return Point(lost.value, 100 * gained.value, tip, low, high, lost.low, lost.high)


def _over_length(
    data: EvaluationData,
    label: str,
    found: Curves,
    y: Axis,
    text: Callable[[float], str],
    marks: list[Mark] | None = None,
    across: str = LENGTH,
) -> str:
    series = []
    for policy, own in found.items():
        tips = [f"{policy} at {short(one.place, 7)} tokens\n{text(one.value)}{_ends(one, text)}" for one in own]
        places = [Point(one.place, one.value, tip, one.low, one.high) for one, tip in zip(own, tips, strict=True)]
        series.append(Series(policy, style_of(data, policy), places))
    if across == LENGTH:
        x = lengths_axis(across, data.lengths)
    else:
        x = logarithmic(across, [one.place for own in found.values() for one in own])
    trained = [] if data.trained_length is None else [Mark("trained length", x=float(data.trained_length))]
    return chart(label, series, x, y, [*trained, *(marks or [])])


def _axis(label: str, found: Curves, least: float | None = None, most: float | None = None) -> Axis:
    known = [end for own in found.values() for one in own for end in one[1:] if end is not None]
    return linear(label, known, least=least, most=most)


def _ends(one: Interval, text: Callable[[float], str]) -> str:
    return "" if one.low is None or one.high is None else f" ({text(one.low)} to {text(one.high)})"


def head_maps(data: EvaluationData) -> dict[str, Any]:
    """Per model its layers, the place of its retrieving head, and per policy and length a number per head, or None."""
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
                plane[places[row.layer]][row.head] = row.values.get(quantity)
        best = heads.get(name)
        models.append(
            {
                "name": name,
                "layers": list(layers),
                "short": short_names(list(layers)),
                "cells": cells,
                "best": [0, 0] if best is None else [places[best[0]], best[1]],
            }
        )
    return {
        "colours": COLOURS,
        "quantities": [{"name": name, "share": name == "w_max"} for name in MAPS],
        "labels": MAPS,
        "policies": [policy for policy in data.policies if any(row.policy == policy for row in rows)],
        "lengths": sorted({row.length for row in rows}),
        "models": models,
    }
