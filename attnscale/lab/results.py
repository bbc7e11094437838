"""Output of an evaluation: one file per finished cell, and CSV tables with bootstrap intervals.

The results are also written in the format of lm-evaluation-harness.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnscale import __version__
from attnscale._util.files import write_table, write_whole
from attnscale.errors import ArgumentError
from attnscale.lab.attention_rows import QUANTITIES
from attnscale.lab.tasks import TASKS, Key

RESAMPLES = 2000
CONSTANT = "constant"

# Per model: numerators and denominators [samples], e.g. correct answers and questions, or nats and bytes.
Samples = Mapping[str, tuple[Tensor, ...]]

INTERVAL = 2 * 1.96  # width of a 95 % interval in standard errors

_VALUES = (
    "value",
    "low",
    "high",
    "difference",
    "difference_low",
    "difference_high",
    "ratio",
    "ratio_low",
    "ratio_high",
)
RESULT_COLUMNS = ("task", "metric", "model", "policy", "length", "bin", *_VALUES, "samples")
STATISTIC_COLUMNS = ("task", "model", "policy", "length", "layer", "head", "rows", *QUANTITIES)
COST_COLUMNS = ("task", "model", "policy", "length", "seconds", "peak_mb")

Cell = tuple[str, str, Key, dict[str, Any]]  # model, policy, key, stored content
Group = tuple[str, str, int, str]  # task, metric, length, bin


class Cells:
    """The cells in a folder. The key of a cell contains everything that determines its result."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: Key) -> dict[str, Any] | None:
        """Return the stored cell, or None."""
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ArgumentError(f"{path} is not a cell of an evaluation ({error}): remove it and run again") from error
        return stored

    def write(self, key: Key, **content: Any) -> None:
        """Store a cell atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(key), json.dumps({"key": key, **content}, sort_keys=True))

    def _path(self, key: Key) -> Path:
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
        return self.folder / f"{key['task']}-{name}.json"


def interval(values: Tensor) -> tuple[float, float]:
    """Return the central 95 % interval of resampled values."""
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=values.dtype, device="cpu")).tolist()
    return low, high


def resample(samples: Samples, seed: int = 0) -> tuple[float, Tensor]:
    """Return the mean over models of Σ numerator / Σ denominator, and its bootstrap values [RESAMPLES].

    Models are resampled first, then the samples of each. Policies measured on the same samples get the same draws, so
    differences of their bootstrap values are paired.

    >>> value, drawn = resample({"a": (torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0]))})
    >>> value, drawn.shape
    (0.5, torch.Size([2000]))
    """
    generator = torch.Generator().manual_seed(seed)
    tops = torch.stack([top.double() for top, _ in samples.values()])  # [M, S]
    bottoms = torch.stack([bottom.double() for _, bottom in samples.values()])
    models, number = tops.shape
    value = (tops.sum(1) / bottoms.sum(1)).mean().item()
    chosen = torch.randint(models, (RESAMPLES, models), generator=generator, device=generator.device)
    index = torch.randint(number, (RESAMPLES, models, number), generator=generator, device=generator.device)
    drawn = [x[chosen].gather(2, index).sum(2) for x in (tops, bottoms)]
    return value, (drawn[0] / drawn[1]).mean(1)


def summarise(groups: Mapping[tuple[Any, ...], Mapping[str, Samples]]) -> list[dict[str, Any]]:
    """Return the rows of results.csv from (task, metric, length, bin) → policy → samples of each model."""
    rows = []
    for (task, metric, length, part), policies in groups.items():
        models = next(iter(policies.values())).keys()
        for model in (*models, *(["all"] if len(models) > 1 else [])):
            base: tuple[float, Tensor] | None = None
            for policy, samples in policies.items():
                chosen = samples if model == "all" else {model: samples[model]}
                value, drawn = resample(chosen)
                low, high = interval(drawn)
                row = {"task": task, "metric": metric, "model": model, "policy": policy, "length": length, "bin": part}
                row |= {"value": value, "low": low, "high": high}
                if policy == CONSTANT:
                    base = value, drawn
                elif base is not None:
                    ends = interval(drawn - base[1])
                    row |= {"difference": value - base[0], "difference_low": ends[0], "difference_high": ends[1]}
                    if base[1].min() > 0:
                        ends = interval(drawn / base[1])
                        row |= {"ratio": value / base[0], "ratio_low": ends[0], "ratio_high": ends[1]}
                rows.append(row | {"samples": sum(top.numel() for top, _ in chosen.values())})
    return rows


def write_harness_json(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `lm_eval/results_POLICY.json` from the rows of results.csv, with one task per length.

    As in lm-eval without filters, metrics are named "acc,none" and "acc_stderr,none". Several models are averaged.
    """
    whole = [row for row in rows if not row["bin"]]
    pooled = [row for row in whole if row["model"] == "all"] or whole
    for policy in dict.fromkeys(row["policy"] for row in pooled):
        results: dict[str, dict[str, Any]] = {}
        samples: dict[str, dict[str, int]] = {}
        higher: dict[str, dict[str, bool]] = {}
        for row in (row for row in pooled if row["policy"] == policy):
            task = f"{row['task']}_{row['length']}"
            metric = next(metric for metric in TASKS[row["task"]].metrics if metric.name == row["metric"])
            entry = results.setdefault(task, {"alias": task})
            entry[f"{metric.harness},none"] = row["value"]
            entry[f"{metric.harness}_stderr,none"] = (row["high"] - row["low"]) / INTERVAL
            higher.setdefault(task, {})[metric.harness] = metric.higher_is_better
            samples[task] = {"original": row["samples"], "effective": row["samples"]}
        content = {
            "results": results,
            "n-samples": samples,
            "versions": dict.fromkeys(results, __version__),
            "higher_is_better": higher,
            "config": {"model": "hf", "model_args": {"attnscale_policy": policy}},
        }
        target = folder / "lm_eval" / f"results_{re.sub(r'[^A-Za-z0-9_.=-]', '_', policy)}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, json.dumps(content, indent=2) + "\n")


def write_tables(output: Path, cells: Sequence[Cell]) -> None:
    """Write results.csv, statistics.csv and cost.csv, and the results as JSON in the format of lm-eval.

    The first two do not depend on interruptions of the run, byte for byte.
    """
    results = summarise(_samples(cells))
    write_table(output / "results.csv", RESULT_COLUMNS, results)
    write_harness_json(output, results)
    write_table(output / "statistics.csv", STATISTIC_COLUMNS, _statistics(cells))
    costs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for model, policy, key, stored in cells:
        costs.setdefault((key["task"], model, policy, key["length"]), []).append(stored)
    rows = [
        dict(zip(COST_COLUMNS, (*place, *(_middle(stored, name) for name in COST_COLUMNS[4:])), strict=True))
        for place, stored in costs.items()
    ]
    write_table(output / "cost.csv", COST_COLUMNS, rows)


def _middle(stored: list[dict[str, Any]], name: str) -> float:
    """Return the median cost of cells, or NaN if it was not measured."""
    known = [cell[name] for cell in stored if cell.get(name) is not None]
    return float(statistics.median(known)) if known else math.nan


def _samples(cells: Sequence[Cell]) -> dict[Group, dict[str, Samples]]:
    """Return (task, metric, length, bin) → policy → model → numerators and denominators of the samples."""
    pairs: dict[Group, dict[str, dict[str, list[tuple[float, float]]]]] = {}
    for model, policy, key, stored in cells:
        for score in TASKS[key["task"]].scores(key, stored["result"]):
            group = key["task"], score.metric.name, score.length, score.part
            pair = score.numerator, score.denominator
            pairs.setdefault(group, {}).setdefault(policy, {}).setdefault(model, []).append(pair)
    return {
        group: {
            policy: {
                model: torch.tensor(some, dtype=torch.float64, device="cpu").unbind(1) for model, some in models.items()
            }
            for policy, models in policies.items()
        }
        for group, policies in pairs.items()
    }


def _statistics(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return medians over samples of the medians over rows, by task, model, policy, length, layer and head."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for model, policy, key, stored in cells:
        tables = stored["result"]["statistics"]
        by_length = tables.items() if isinstance(tables, dict) else [(key["length"], tables)]
        for length, entries in by_length:
            for entry in entries:
                place = (key["task"], model, policy, int(length), entry["layer"], entry["head"])
                found.setdefault(place, []).append(entry)
    return [
        dict(zip(STATISTIC_COLUMNS, place, strict=False))
        | {"rows": sum(entry["rows"] for entry in entries)}
        | {name: float(statistics.median(entry[name] for entry in entries)) for name in QUANTITIES}
        for place, entries in found.items()
    ]
