"""The verdict reports gains and costs, and whether they are significant."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from evaluation_folder import write_folder

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
