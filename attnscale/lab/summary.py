"""From cells to tables: means with bootstrap intervals; differences and ratios to constant β on the same windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

RESAMPLES = 2000
CONSTANT = "constant"

# Per model the numbers [samples] whose ratio of sums is the value: right answers and questions, or nats and bytes.
Samples = Mapping[str, tuple[Tensor, Tensor]]


def interval(values: Tensor) -> tuple[float, float]:
    """The middle 95 % of resampled values."""
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=values.dtype, device="cpu")).tolist()
    return low, high


def resample(samples: Samples, seed: int = 0) -> tuple[float, Tensor]:
    """The mean over models of Σ numerator / Σ denominator, and its bootstrap values [RESAMPLES].

    Models are drawn first, then samples within each. Two policies measured on the same samples are drawn alike, so that
    the difference of their bootstrap values is that of pairs.

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
    """Rows of results.csv from (task, metric, length, bin) → policy → samples of each model."""
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
