"""Bootstrap intervals: coverage, and narrower intervals for paired differences."""

from __future__ import annotations

import torch

from attnscale.lab.results import RESAMPLES, interval, resample, summarise


def samples(rate: float, seed: int, models: int = 5, number: int = 16, asked: int = 50):
    generator = torch.Generator().manual_seed(seed)
    counts = [torch.binomial(torch.full((number,), float(asked)), torch.full((number,), rate), generator=generator)]
    counts += [
        torch.binomial(torch.full((number,), float(asked)), torch.full((number,), rate), generator=generator)
        for _ in range(models - 1)
    ]
    return {f"seed{i}": (count, torch.full((number,), float(asked))) for i, count in enumerate(counts)}


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    covered = 0
    for seed in range(100):
        low, high = interval(resample(samples(0.3, seed, models=1, number=30))[1])
        covered += low <= 0.3 <= high
    assert 86 <= covered <= 100


def test_differences_are_taken_on_the_same_samples():
    generator = torch.Generator().manual_seed(0)
    hard = torch.rand(12, generator=generator) * 40  # windows differ far more than policies do
    base = {"one": (hard, torch.full((12,), 50.0))}
    better = {"one": (hard + 1, torch.full((12,), 50.0))}
    constant, law = summarise({("needle", "accuracy", 128, ""): {"constant": base, "log": better}})
    assert "difference" not in constant
    assert abs(law["difference"] - 0.02) < 1e-9
    assert law["difference_high"] - law["difference_low"] < 1e-9
    assert law["high"] - law["low"] > 0.1


def test_several_models_are_summed_up_as_all():
    found = summarise({("needle", "accuracy", 128, ""): {"constant": samples(0.2, 0), "log": samples(0.6, 1)}})
    every = [row for row in found if row["model"] == "all"]
    assert [row["policy"] for row in every] == ["constant", "log"]
    assert every[1]["difference_low"] > 0.3
    assert every[1]["ratio_low"] < every[1]["ratio"] == every[1]["value"] / every[0]["value"] < every[1]["ratio_high"]
    assert every[1]["ratio_low"] > 2


def test_there_is_no_ratio_where_constant_may_answer_nothing():
    found = summarise({("needle", "accuracy", 128, ""): {"constant": samples(0.0, 0), "log": samples(0.6, 1)}})
    assert all("difference" in row and "ratio" not in row for row in found if row["policy"] == "log")


def test_bootstrap_draws_every_sample_and_model():
    found = summarise({("a", "accuracy", 1, ""): {"constant": samples(0.2, 0)}})
    every = [row for row in found if row["model"] == "all"]
    assert every[0]["samples"] == 5 * 16
    assert resample(samples(0.2, 0))[1].shape == (RESAMPLES,)
