"""A whole calibration of the embedded model: files, verdict, resuming, and mistakes."""

from __future__ import annotations

import csv
import json
import shutil

import pytest
import torch
from small_calibration import small

import attnscale.hf
from attnscale import ArgumentError
from attnscale._util.files import read_yaml
from attnscale.lab.calibration import Calibration, calibrate
from attnscale.lab.calibration.held_out import judge_plan
from attnscale.lab.calibration.reading import Needles, prompt
from attnscale.lab.inputs import ModelFolder, Text

LAYER = "model.layers.1.self_attn"
TABLES = ("heads.csv", "scales.csv", "held_out.csv", "calibration.json", "policy.yaml", "fitted.yaml", "table.yaml")


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return calibrate(small(tmp_path_factory.mktemp("runs") / "embedded", fit=True))


@pytest.fixture(scope="module")
def about(output):
    return json.loads((output / "calibration.json").read_text())


def rows(output, **wanted):
    with (output / "held_out.csv").open() as file:
        return [row for row in csv.DictReader(file) if all(row[key] == value for key, value in wanted.items())]


def test_every_file_is_written(output) -> None:
    assert all((output / name).is_file() for name in TABLES)


def test_both_heads_of_the_second_layer_retrieve_and_have_a_bracket_of_the_length_where_they_fail(about) -> None:
    assert {(head["layer"], head["head"]) for head in about["retrieving"]} == {(LAYER, 0), (LAYER, 1)}
    for head in about["retrieving"]:
        low, high = head["lost_between"]
        assert 128 < low < (high or float("inf"))
        assert [point["length"] for point in head["curve"]] == [128, 256, 512]


def test_the_verdict_compares_the_plans_with_the_laws_on_the_same_sequences(output, about) -> None:
    policies = {row["policy"] for row in rows(output)}
    assert policies == {"constant", "log", "log_squared", "yarn:factor=4", "calibrated", "fitted"}
    assert {row["samples"] for row in rows(output)} == {"3"}
    assert about["helped"] is (about["verdict"]["fitted"]["outcome"] == "helped")
    assert about["policy"] == "fitted"


def test_up_to_the_trained_length_a_plan_changes_nothing(output) -> None:
    inside = rows(output, bin="64-128", policy="fitted")
    assert inside
    assert {row["difference"] for row in inside} == {"0"}
    assert {row["difference"] for row in rows(output, bin="64-128", policy="yarn:factor=4")} != {"0"}


def test_policies_that_act_on_the_last_rows_change_nothing_before(tmp_path) -> None:
    found = calibrate(small(tmp_path / "tail", tests=2, policies=("log_squared",), acting_rows=256))
    changed = {row["bin"]: row["difference"] != "0" for row in rows(found, policy="log_squared", task="text")}
    assert changed == {"": True, "0-64": False, "64-128": False, "128-256": False, "256-512": True}


def test_the_plan_can_be_applied(output, model) -> None:
    with attnscale.hf.apply(model, output / "policy.yaml") as handle:
        beta = handle.policies[LAYER](torch.tensor([[[128, 512]]])).flatten(0, -2)
    assert beta[:, 0].tolist() == [1.0, 1.0]
    assert (beta[:, 1] > 1.05).all()
    assert read_yaml(output / "policy.yaml") == read_yaml(output / "fitted.yaml")


def test_an_interrupted_run_continues_and_writes_the_same_bytes(output, tmp_path) -> None:
    again = tmp_path / "again"
    shutil.copytree(output / "cells", again / "cells")
    removed = sorted((again / "cells").iterdir())[::3]
    for cell in removed:
        cell.unlink()
    said: list[str] = []
    calibrate(small(again, fit=True), lambda done, total, text: said.append(text))
    assert said
    for name in TABLES:
        if name != "calibration.json":  # it holds the path of the output
            assert (again / name).read_bytes() == (output / name).read_bytes(), name


def test_without_needles_no_head_retrieves_and_no_plan_is_written(tmp_path) -> None:
    found = calibrate(small(tmp_path / "text", tasks=("perplexity",), tests=2, policies=("log",)))
    about = json.loads((found / "calibration.json").read_text())
    assert about["retrieving"] == []
    assert about["policy"] is None
    assert about["helped"] is False
    assert not (found / "policy.yaml").exists()


def test_a_fit_that_does_not_help_writes_no_fitted_plan(tmp_path) -> None:
    # Text alone: sharper attention costs bits, and a huge step is far from any optimum.
    found = calibrate(
        small(tmp_path / "harm", tasks=("perplexity",), fit=True, learning_rate=8.0, fit_steps=1, tests=2)
    )
    about = json.loads((found / "calibration.json").read_text())
    assert about["validation"][1] >= about["validation"][0]
    assert about["plans"] == {}
    assert not (found / "fitted.yaml").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"to": 128}, "to=128 is not accepted: expected a length > 128, the trained length"),
        ({"to": 150, "lengths": ()}, "to=150 is not accepted: expected a length >= 256"),
        ({"tasks": ("recall",)}, "tasks='recall' is not accepted: expected perplexity, multi_needle"),
        ({"tasks": ()}, "tasks=\\(\\) is not accepted"),
        ({"samples": 1}, "samples=1 is not accepted: expected an int >= 2"),
        ({"tests": 1}, "tests=1 is not accepted"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 is not accepted: expected a number > 0"),
        ({"strength": -1.0}, "strength=-1.0 is not accepted"),
        ({"needle_growth": float("nan")}, "needle_growth=nan is not accepted"),
        ({"lengths": (128, 256)}, "lengths=\\(128, 256\\) is not accepted: expected three or more"),
        ({"policies": ("logs",)}, "policies='logs' is not accepted"),
        ({"acting_rows": 0}, "acting_rows=0 is not accepted"),
        ({"test_windows": -1}, "test_windows=-1 is not accepted"),
        ({"test_windows": 0, "tasks": ("perplexity",)}, "test_windows=0 is not accepted"),
        ({"model": "nowhere"}, "model='nowhere' is not accepted"),
        ({"text": "nowhere.txt"}, "text='nowhere.txt' is not accepted"),
        ({"to": 60_000}, "text=.* is not accepted: expected at least"),
        ({"needles": 100}, "length=128 is not accepted: expected at least"),
        ({"fit": True, "fit_length": 50_000}, "text=.* is not accepted"),
    ],
    ids=str,
)
def test_a_mistake_is_refused_before_any_work(tmp_path, changes, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        calibrate(small(**({"output": tmp_path / "out"} | changes)))
    assert not (tmp_path / "out" / "cells").exists()


def test_an_output_that_cannot_be_written_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=r"output=.* cannot be written"):
        calibrate(small(tmp_path / "file" / "out"))


def held_out(metric: str, value: float, low: float, high: float, task: str = "needles") -> dict[str, object]:
    row = {"task": task, "metric": metric, "policy": "plan", "bin": "", "samples": 8, "value": value}
    return row | {"difference": (low + high) / 2, "difference_low": low, "difference_high": high}


@pytest.mark.parametrize(
    ("accuracy", "bits", "outcome"),
    [
        ((0.1, 0.2), (0.01, 0.02), "helped"),  # answers count more than bits
        ((-0.1, 0.1), (-0.02, -0.01), "helped"),
        ((-0.1, 0.1), (-0.01, 0.01), "did not help"),
        ((-0.1, 0.1), (0.01, 0.02), "harmed"),
        ((-0.2, -0.1), (-0.02, -0.01), "harmed"),
    ],
)
def test_a_plan_helped_only_if_an_interval_excludes_zero(accuracy, bits, outcome) -> None:
    rows = [held_out("accuracy", 0.5, *accuracy), held_out("bits_per_byte", 1.0, *bits, task="text")]
    verdict = judge_plan(rows, "plan")
    assert verdict.outcome == outcome
    assert verdict.sentences[0] == f"plan {outcome}."
    assert "8 sequences" in verdict.sentences[1]


def test_the_default_needles_fit_into_the_trained_length_of_the_embedded_model(tmp_path) -> None:
    options = Calibration(model="embedded", to=512, output=str(tmp_path))
    needles = Needles(options.style, options.needles, options.needle_growth, options.asked)
    text = Text.read(None, ModelFolder.at("embedded", "float32").tokenizer())
    assert len(prompt(text, needles, 128, 128, 0, "measure", 128, 0).tokens) == 128
