"""What evaluation.js draws the heat maps of layer × head from."""

from __future__ import annotations

from typing import Any

from attnscale.diagnostics.views.display import COLOURS, short_names
from attnscale.report.comparisons import retrieving_heads, statistics_task
from attnscale.report.evaluation_data import EvaluationData

MAPS = {"w_max": "w_max", "criticality": "r", "accumulation_8": "Λ"}  # of statistics.csv, with their names


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
