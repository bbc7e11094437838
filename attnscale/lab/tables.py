"""The tables of an evaluation: results.csv, statistics.csv and cost.csv, made of its cells alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from attnscale._util.csv_files import write_table
from attnscale.lab.attention_rows import QUANTITIES
from attnscale.lab.cells import Key
from attnscale.lab.harness_json import write_harness_json
from attnscale.lab.summary import Samples, summarise

_TO_CONSTANT = ("difference", "difference_low", "difference_high", "ratio", "ratio_low", "ratio_high")
RESULTS = ("task", "metric", "model", "policy", "length", "bin", "value", "low", "high", *_TO_CONSTANT, "samples")
STATISTICS = ("task", "model", "policy", "length", "layer", "head", "rows", *QUANTITIES)
COST = ("task", "model", "policy", "length", "seconds", "peak_mb")

DEPTHS = 5  # bins of the depth of a needle

Cell = tuple[str, str, Key, dict[str, Any]]  # model, policy, key, what was stored
Group = tuple[str, str, int, str]  # task, metric, length, bin


def write_tables(output: Path, cells: Sequence[Cell]) -> None:
    """Write the three tables; the first two are the same, byte for byte, however often the run was interrupted.

    The results are also written as JSON, in the conventions of lm-evaluation-harness.
    """
    results = summarise(_samples(cells))
    write_table(output / "results.csv", RESULTS, results)
    write_harness_json(output, results)
    write_table(output / "statistics.csv", STATISTICS, _statistics(cells))
    costs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for model, policy, key, stored in cells:
        costs.setdefault((key["task"], model, policy, key["length"]), []).append(stored)
    rows = [
        dict(zip(COST, (*place, *(_middle(stored, name) for name in COST[4:])), strict=True))
        for place, stored in costs.items()
    ]
    write_table(output / "cost.csv", COST, rows)


def _middle(stored: list[dict[str, Any]], name: str) -> float:
    """The median of what cells cost; NaN where this machine could not tell."""
    known = [cell[name] for cell in stored if cell.get(name) is not None]
    return float(statistics.median(known)) if known else math.nan


def _samples(cells: Sequence[Cell]) -> dict[Group, dict[str, Samples]]:
    """(task, metric, length, bin) → policy → model → numerators and denominators of the samples."""
    pairs: dict[Group, dict[str, dict[str, list[tuple[float, float]]]]] = {}
    for model, policy, key, stored in cells:
        numbers = _losses(key, stored["result"]) if key["task"] == "perplexity" else _answers(key, stored["result"])
        for group, pair in numbers:
            pairs.setdefault(group, {}).setdefault(policy, {}).setdefault(model, []).append(pair)
    return {
        group: {
            policy: {model: _tensors(some) for model, some in models.items()} for policy, models in policies.items()
        }
        for group, policies in pairs.items()
    }


def _tensors(pairs: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    tops, bottoms = torch.tensor(pairs, dtype=torch.float64, device="cpu").unbind(1)
    return tops, bottoms


def _losses(key: Key, result: dict[str, Any]) -> Iterable[tuple[Group, tuple[float, float]]]:
    """Bits per byte and nats per token: of the second half of each length, and between all edges."""
    bins = result["bins"]
    parts = [(length, "", length // 2, length) for length in key["lengths"]]
    parts += [(key["length"], f"{b['start']}-{b['stop']}", b["start"], b["stop"]) for b in bins]
    for length, name, start, stop in parts:
        inside = [b for b in bins if start <= b["start"] and b["stop"] <= stop]
        nats = sum(b["nats"] for b in inside)
        yield ("perplexity", "bits_per_byte", length, name), (nats / math.log(2), sum(b["bytes"] for b in inside))
        yield ("perplexity", "nats_per_token", length, name), (nats, stop - start)


def _answers(key: Key, result: dict[str, Any]) -> Iterable[tuple[Group, tuple[float, float]]]:
    """Right answers and questions: all of them, and by the depth of their needles."""
    correct, depths = result["correct"], result["depths"]
    yield (key["task"], "accuracy", key["length"], ""), (sum(correct), len(correct))
    for number in range(DEPTHS):
        inside = [right for right, depth in zip(correct, depths, strict=True) if int(depth * DEPTHS) == number]
        part = f"{number / DEPTHS:.1f}-{(number + 1) / DEPTHS:.1f}"
        yield (key["task"], "accuracy", key["length"], part), (sum(inside), len(inside))


def _statistics(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Medians over samples of the medians over rows, by task, model, policy, length, layer and head."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for model, policy, key, stored in cells:
        tables = stored["result"]["statistics"]
        by_length = tables.items() if isinstance(tables, dict) else [(key["length"], tables)]
        for length, entries in by_length:
            for entry in entries:
                place = (key["task"], model, policy, int(length), entry["layer"], entry["head"])
                found.setdefault(place, []).append(entry)
    return [
        dict(zip(STATISTICS, place, strict=False))
        | {"rows": sum(entry["rows"] for entry in entries)}
        | {name: float(statistics.median(entry[name] for entry in entries)) for name in QUANTITIES}
        for place, entries in found.items()
    ]
