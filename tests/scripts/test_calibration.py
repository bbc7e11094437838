"""The prediction experiment: crossings, errors, and hits."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from small_calibration import small

from attnscale.lab.calibration import calibrate
from scripts.calibration import prediction_tables as tables
from scripts.calibration import smollm2
from scripts.calibration.prediction import GROWTHS, RECIPES, SEEDS, Case, cases


def test_every_case_uses_a_seed_of_its_own_experiment() -> None:
    assert not {1, 2, 10, 11, 12, 13, 14} & set(SEEDS)
    assert len(SEEDS) >= 5
    assert len(list(cases())) == len(SEEDS) * len(RECIPES) * len(GROWTHS)


@pytest.mark.parametrize(
    ("shares", "length"),
    [((1.0, 0.9, 0.5), 259.4), ((1.0, 0.9, 0.8), math.inf), ((0.5, 0.4, 0.3), 70.7), ((1.0, 0.75, 0.7), 200.0)],
)
def test_the_length_of_failure_is_where_the_share_falls_below(shares, length) -> None:
    assert tables.crossing((100, 200, 400), shares, 0.75) == pytest.approx(length, rel=0.01)


def prediction(seed: int, observed: float, power: float = 2.0, quantity: str = "Λ at 4096") -> tables.Prediction:
    return tables.Prediction(Case("decay", seed, 1.0), quantity, observed, power, 1.0, 1.0, 3.0)


def test_the_baseline_is_the_mean_of_the_other_seeds_only() -> None:
    every = [prediction(20, 100.0), prediction(21, 1.0), prediction(22, 4.0)]
    row = tables._row(every[0], every)
    assert row["baseline"] == pytest.approx(2.0)
    assert (row["error_power"], row["error_baseline"]) == (pytest.approx(50.0), pytest.approx(50.0))
    assert row["in_bracket"] == 0
    assert tables._row(every[1], every)["in_bracket"] == 1


def test_errors_are_ratios_in_either_direction() -> None:
    low, high = (tables._row(one, [one]) for one in (prediction(20, 1.0), prediction(20, 4.0)))
    assert low["error_power"] == high["error_power"] == 2.0


def test_the_mildest_law_with_enough_criticality_is_predicted() -> None:
    # At 16384 tokens β is 1, 1.41, 2 and 4; enough is r = 1.75.
    assert [tables.ORDER[tables._mildest(scale)] for scale in (0.5, 0.75, 1.1, 2.0, 9.0)] == [
        "constant",
        "sqrt_log",
        "log",
        "log_squared",
        "log_squared",
    ]


def test_a_law_is_a_hit_or_a_miss() -> None:
    every = [tables.Prediction(Case("decay", seed, 1.0), "mildest law", 2, 2, 3) for seed in (20, 21, 22)]
    row = tables._row(every[0], every)
    assert (row["observed"], row["power"], row["log"], row["baseline"]) == ("log", "log", "log_squared", "log")
    assert (row["error_power"], row["error_log"], row["error_baseline"]) == (0, 1, 0)


def test_the_tables_of_the_real_model_hold_every_head_and_policy(tmp_path, monkeypatch) -> None:
    folder = calibrate(small(tmp_path / "run", policies=("log",), tests=2))
    monkeypatch.setattr(smollm2, "RUNS", {2: folder, 4: tmp_path / "missing"})
    heads, results, verdict, figure = smollm2.write(tmp_path / "out")
    assert len(heads.read_text().splitlines()) == len((folder / "heads.csv").read_text().splitlines())
    assert results.read_text().splitlines()[1].startswith("2,")
    assert '"2x"' in verdict.read_text()
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_without_a_finished_run_there_is_no_table(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(smollm2, "RUNS", {2: tmp_path})
    with pytest.raises(SystemExit, match="make demo-llm"):
        smollm2.write(tmp_path)
