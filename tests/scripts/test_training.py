"""`python -m scripts.training`: a file and its overrides define one experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnscale.cli.evaluate import read_experiment
from scripts.training import embedded
from scripts.training.__main__ import EXPERIMENTS, main

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "experiment"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_a_file_that_fills_it(name: str) -> None:
    experiment, function = read_experiment(CONFIGS / f"{name}.yaml", ["seeds=[7]"], EXPERIMENTS)
    assert experiment.seeds == (7,)
    assert callable(function)


def test_it_runs_what_the_file_says_and_says_what_was_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(embedded, "run", lambda experiment, progress: ran.append(experiment) or Path("out"))
    assert main([str(CONFIGS / "training.yaml"), "steps=3", "output=out"]) == 0
    assert [(experiment.steps, experiment.output) for experiment in ran] == [(3, "out")]
    assert capsys.readouterr().out == "wrote out\n"


@pytest.mark.parametrize(
    ("file", "override", "message"),
    [
        ("training", "stepz=3", "key 'stepz' (value '3') is not accepted: did you mean 'steps'?"),
        ("training", "steps=0", "steps, batch=(0, 64) is not accepted"),
        ("training", "weight_decay=-1", "weight_decay=-1.0 is not accepted: expected a number >= 0"),
        (
            "smollm2",
            "output=o",
            "experiment='evaluation' is not accepted: expected attention_loss, max_retrieval, training",
        ),
        ("nowhere", "output=o", "an existing YAML file"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_two(
    file: str, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(CONFIGS / f"{file}.yaml"), override]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
