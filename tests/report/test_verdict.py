"""The verdict reports gains and costs, and whether they are significant."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from evaluation_folder import write_folder

import attnscale
from attnscale.lab.evaluation import Evaluation, evaluate
from attnscale.lab.inputs import ModelFolder
from attnscale.report import read_evaluation
from attnscale.report.verdict import verdict


def said(path: Path) -> list[str]:
    return verdict(read_evaluation(path)).sentences


def line(path: Path) -> str | None:
    return verdict(read_evaluation(path)).line


def change(path: Path, of: str, **fields: str) -> None:
    """Overwrite fields of a policy's rows in results.csv."""
    with (path / "results.csv").open(newline="") as file:
        rows = [row | fields if row["policy"] == of else row for row in csv.DictReader(file)]
    with (path / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def test_a_law_that_helps_is_named_with_its_gain_and_its_price(tmp_path: Path) -> None:
    assert said(write_folder(tmp_path, cost=0.1)) == [
        "At 16384 tokens, 128 times the trained length, log_squared, the best of 3 policies, answers 95 % of the "
        "questions, compared with 28 % for β = 1 (3.4×, +67 points, 95 % interval 64 to 70).",
        "log_squared costs 0.30 bits per byte of text at this length (95 % interval 0.27 to 0.33), and none up to the "
        "trained length.",
    ]


def test_laws_within_the_noise_are_not_called_better(tmp_path: Path) -> None:
    first, second = said(write_folder(tmp_path, gain=0.01, cost=0.0))
    assert "no policy differs significantly from constant: log_squared" in first
    assert "95 % interval −0.6 to 5" in first
    assert second == "log_squared costs no bits per byte of text at this length, and none up to the trained length."


def test_laws_that_hurt_are_said_to_hurt(tmp_path: Path) -> None:
    first, second = said(write_folder(tmp_path, gain=-0.3, cost=-0.1))
    assert "no policy helps: sqrt_log, the best of 3 policies, answers 18 %" in first
    assert "(−9 points, 95 % interval −12 to −6)" in first
    assert "by −0.006, which is not significant" in second


def test_a_gain_that_ends_before_the_longest_length_is_placed_where_it_ends(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    with (folder / "results.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    for row in rows:
        if row[0] == "multi_needle" and row[4] == "16384" and row[9]:
            row[10], row[11] = "-0.9", "0.9"
    with (folder / "results.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    assert "8192 tokens: log_squared 95 %, constant 38 %." in said(folder)[0]


@pytest.mark.parametrize(
    ("tasks", "sentence"),
    [
        (("recall",), "Bits per byte were not measured."),
        (("perplexity",), "Retrieval was not measured."),
    ],
)
def test_a_task_that_was_not_measured_is_named(tmp_path: Path, tasks: tuple[str, ...], sentence: str) -> None:
    assert said(write_folder(tmp_path, tasks=tasks))[1] == sentence


def test_prose_alone_is_compared_in_bits(tmp_path: Path) -> None:
    better = said(write_folder(tmp_path / "better", tasks=("perplexity",), cost=-0.2))[0]
    assert "log_squared needs 1.82 bits per byte of text, compared with 2.42 for β = 1 (difference −0.60" in better
    small = said(write_folder(tmp_path / "small", tasks=("perplexity",), cost=-0.02, width=0.001))[0]
    assert "(difference −0.060, 95 % interval −0.06" in small
    worse = said(write_folder(tmp_path / "worse", tasks=("perplexity",), cost=0.2))[0]
    assert "no policy is significantly better than constant" in worse


def test_without_intervals_nothing_is_called_a_gain(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, policies=("constant", "log"))
    change(folder, "log", difference_low="", difference_high="")
    first, second = said(folder)
    assert "too few samples for an interval" in first
    assert "too few samples for an interval" in second


def test_argmax_is_a_bound_and_wins_nothing(tmp_path: Path) -> None:
    first, _ = said(write_folder(tmp_path, policies=("constant", "sqrt_log"), argmax=True))
    assert "sqrt_log answers 59 %" in first
    assert "argmax" not in first


def test_without_constant_there_is_nothing_to_compare(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, policies=("constant", "log"))
    change(folder, "constant", policy="other")
    assert said(folder) == ["The policy constant was not measured, so there is no baseline to compare with."]


def answers(path: Path, accuracy: dict[int, float], policies: tuple[str, ...] = ("constant", "log")) -> Path:
    """A folder in which all policies have the same accuracy at each length."""
    folder = write_folder(path, policies=policies)
    with (folder / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["metric"] == "accuracy":
            row["value"] = row["low"] = row["high"] = str(accuracy.get(int(row["length"]), 0.0))
            if row["difference"]:
                row["difference"] = row["difference_low"] = row["difference_high"] = "0.001"
    write_rows(folder, rows)
    return folder


def write_rows(folder: Path, rows: list[dict[str, str]]) -> None:
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def up_to(folder: Path, length: int) -> Path:
    """The folder without longer sequences."""
    with (folder / "results.csv").open(newline="") as file:
        write_rows(folder, [row for row in csv.DictReader(file) if int(row["length"]) <= length])
    return folder


def test_in_a_task_beyond_the_model_no_law_is_best(tmp_path: Path) -> None:
    first, second = said(answers(tmp_path, {64: 0.02, 128: 0.01}))
    assert first.startswith("multi_needle is beyond this model: no policy answers more than 2 % of the questions")
    assert "best" not in first + second
    assert "bits per byte" in second
    assert line(tmp_path) is None
    assert "no policy answers any question" in said(answers(tmp_path / "none", {}))[0]


def test_lengths_at_which_nothing_is_answered_do_not_decide(tmp_path: Path) -> None:
    first, _, last = said(answers(tmp_path, dict.fromkeys((64, 128, 256, 512), 0.5)))
    assert first.startswith("At 512 tokens, 4 times the trained length, log answers 50 %")
    assert last == "Beyond 512 tokens, no policy answers more than 2 % of the questions."


def test_laws_with_a_floor_cannot_differ_up_to_the_trained_length(tmp_path: Path) -> None:
    folder = up_to(write_folder(tmp_path / "inside"), 128)
    (only,) = said(folder)
    assert "Nothing longer than 128 tokens was measured" in only
    assert "reference length of sqrt_log, log, log_squared: with a floor, β = 1 in every row" in only
    assert line(folder) is None
    beyond = up_to(write_folder(tmp_path / "beyond"), 256)
    assert "Nothing longer" not in " ".join(said(beyond))


def test_laws_that_can_differ_are_compared_beside_those_that_cannot(tmp_path: Path) -> None:
    folder = up_to(write_folder(tmp_path, policies=("constant", "log", "log_squared"), gain=0.0), 128)
    run = json.loads((folder / "run.json").read_text())
    run["policies"]["log"]["floor"] = False
    (folder / "run.json").write_text(json.dumps(run))
    first, *_, last = said(folder)
    assert "log answers" in first
    assert "log_squared answers" not in first
    assert "reference length of log_squared: with a floor" in last


def test_a_law_that_helps_ends_with_the_line_that_applies_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, cost=0.1)
    assert line(folder) == 'attnscale.hf.apply(model, "log_squared", reference_length=128, floor=True)'
    assert str(verdict(read_evaluation(folder))).splitlines() == [*said(folder), line(folder)]
    run = json.loads((folder / "run.json").read_text())
    run["spec"] |= {"layers": "full", "on_existing": "replace"}
    run["policies"]["log_squared"] |= {"rope": "yarn:4"}
    (folder / "run.json").write_text(json.dumps(run))
    assert (line(folder) or "").startswith(
        'attnscale.hf.apply(model, "log_squared", reference_length=128, floor=True, layers="full", '
        'on_existing="replace")  # on the embedding stretched by yarn:4'
    )
    plan = {"default": "constant", "layers": {"1": {"name": "log", "reference_length": 128}}}
    run["policies"]["log_squared"], run["spec"] = plan, {}
    (folder / "run.json").write_text(json.dumps(run))
    assert line(folder) == (
        'attnscale.hf.apply(model, {"default": "constant", "layers": {"1": {"name": "log", "reference_length": 128}}})'
    )


def test_laws_that_do_not_help_have_no_line(tmp_path: Path) -> None:
    assert line(write_folder(tmp_path / "noise", gain=0.01, cost=0.0)) is None
    assert line(write_folder(tmp_path / "harm", gain=-0.3)) is None
    assert line(write_folder(tmp_path / "prose", tasks=("perplexity",), cost=0.2)) is None
    better = line(write_folder(tmp_path / "better", tasks=("perplexity",), cost=-0.2))
    assert better == 'attnscale.hf.apply(model, "log_squared", reference_length=128, floor=True)'


def test_the_line_of_a_measured_model_runs_on_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    evaluation = Evaluation(
        ("embedded",), str(tmp_path / "run"), ("constant", "log"), (128, 4096), ("multi_needle",), needles_every=32
    )
    output = evaluate(evaluation)
    model = ModelFolder.at("embedded", "float32").load()
    exec(line(output) or "", {"attnscale": attnscale, "model": model})
    (law,) = model.config.attnscale["modules"].values()
    assert (law["name"], law["reference_length"], law["floor"]) == ("log", 128, True)
