"""What is read from a folder, what is taken from it, and which folders are refused."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from evaluation_folder import BEST, HEADS, LENGTHS, accumulation, recall, write_folder

from attnscale.errors import ArgumentError
from attnscale.report import build_evaluation_page, read_evaluation, write_report
from attnscale.report.evaluation_charts import (
    critical_points,
    curves,
    head_curves,
    rank_correlation,
    retrieving_heads,
    trades,
)
from attnscale.report.write import write_pictures


def test_curves_have_the_numbers_of_the_file(tmp_path: Path) -> None:
    data = read_evaluation(write_folder(tmp_path))
    found = curves(data, "multi_needle")
    assert list(found) == ["constant", "sqrt_log", "log", "log_squared"]
    assert [point.x for point in found["log"]] == list(LENGTHS)
    assert found["log"][-1].y == pytest.approx(recall("log", 16384, 1.0, "all"), rel=1e-5)
    assert found["log"][-1].high == pytest.approx(found["log"][-1].y + 0.03, rel=1e-5)


def test_the_retrieving_head_is_found_in_each_model_and_followed(tmp_path: Path) -> None:
    data = read_evaluation(write_folder(tmp_path))
    heads = retrieving_heads(data, "multi_needle")
    assert heads == {"seed0": BEST, "seed1": BEST}
    own = head_curves(data, "multi_needle", "accumulation_8", heads)["constant"]
    assert [point.y for point in own] == pytest.approx([accumulation(length) for length in LENGTHS], rel=1e-5)
    every = head_curves(data, "multi_needle", "accumulation_8")["constant"]
    assert all(other.y > 1.5 * point.y for other, point in zip(every, own, strict=True))


def test_recall_is_relative_to_argmax_where_there_is_one(tmp_path: Path) -> None:
    absolute, plain = critical_points(read_evaluation(write_folder(tmp_path / "plain")), "multi_needle")
    relative, bound = critical_points(read_evaluation(write_folder(tmp_path / "bound", argmax=True)), "multi_needle")
    assert (plain, bound) == (False, True)
    assert len(absolute) == len(relative) == 2 * 4 * len(LENGTHS)
    assert {point.policy for point in relative} == {"constant", "sqrt_log", "log", "log_squared"}
    first, same = absolute[0], relative[0]
    assert same.recall == pytest.approx(first.recall / recall("argmax", same.length, 1.0, same.model), rel=1e-4)


def test_trades_pair_what_is_gained_with_what_is_lost_at_the_same_length(tmp_path: Path) -> None:
    found = trades(read_evaluation(write_folder(tmp_path, cost=0.1)), "multi_needle")
    last = found["log_squared"][-1]
    assert last.tip.startswith("log_squared at 16384 tokens")
    assert last.y == pytest.approx(67.5, abs=0.5)
    assert last.x == pytest.approx(0.3, abs=0.001)
    assert "constant" not in found


def test_ranks_with_ties_give_the_known_correlation() -> None:
    # By hand: ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4 have the covariance 4.5 and the variances 4.5 and 5.
    assert rank_correlation([(1, 1), (2, 3), (2, 2), (9, 4)]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


def test_a_number_that_is_missing_or_not_finite_is_left_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tasks=("perplexity",), policies=("constant",), models=("m",))
    lines = (folder / "results.csv").read_text().splitlines()
    row = "perplexity,bits_per_byte,all,log,64,,{},nan,inf,,,,8"
    (folder / "results.csv").write_text("\n".join([*lines, row.format(""), row.format("1.5")]) + "\n")
    (own,) = curves(read_evaluation(folder), "perplexity")["log"]
    assert (own.y, own.low, own.high) == (1.5, None, None)


HEADER = "task,metric,model,policy,length,bin,value,low,high,difference,difference_low,difference_high,samples\n"
ROW = "recall,accuracy,m,constant,64,,0.5,0.4,0.6,,,,8\n"
BAD = {
    "path=.*results.csv": {},
    "at least one row with a value": {"results.csv": HEADER},
    "a folder whose results.csv": {"results.csv": ""},
    "expected the column 'bin'": {"results.csv": HEADER.replace("bin,", "place,") + ROW},
    "line 3 of .*value='much', expected a number": {"results.csv": HEADER + ROW + ROW.replace("0.5", "much")},
    "line 2 of .*length='six', expected an integer": {"results.csv": HEADER + ROW.replace("64", "six")},
    "line 2 of .*number of fields": {"results.csv": HEADER + "recall,accuracy\n"},
    "line 2 of .*statistics.csv": {"results.csv": HEADER + ROW, "statistics.csv": f"{HEADS}\nx,y,z\n"},
    "expected the columns .*'beta'": {"results.csv": HEADER + ROW, "statistics.csv": "task,model\nx,y\n"},
    "run.json='{' is not accepted: expected a JSON object": {"results.csv": HEADER + ROW, "run.json": "{"},
    r"run.json='\[\]' is not accepted: expected a JSON object": {"results.csv": HEADER + ROW, "run.json": "[]"},
}


@pytest.mark.parametrize(("message", "files"), BAD.items(), ids=BAD)
def test_a_bad_folder_is_refused_and_left_as_it_was(message: str, files: dict[str, str], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    for act in (write_report, write_pictures):
        with pytest.raises(ArgumentError, match=message):
            act(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(files)


def test_a_folder_with_results_alone_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text(HEADER + ROW)
    assert "Only the policy constant was measured." in write_report(tmp_path).read_text(encoding="utf-8")


def change_statistics(folder: Path, **fields: str) -> None:
    """Overwrite fields of the sharpest head in statistics.csv."""
    with (folder / "statistics.csv").open(newline="") as file:
        rows = [row | fields if (row["layer"], int(row["head"])) == BEST else row for row in csv.DictReader(file)]
    with (folder / "statistics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def test_an_attention_sink_is_not_the_retrieving_head(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    assert set(retrieving_heads(read_evaluation(folder), "multi_needle").values()) == {BEST}
    change_statistics(folder, accumulation_8="1.0", accumulation_8_without_first="1.4")
    assert set(retrieving_heads(read_evaluation(folder), "multi_needle").values()) == {BEST}
    change_statistics(folder, accumulation_8="1.0", accumulation_8_without_first="1.6")
    assert BEST not in retrieving_heads(read_evaluation(folder), "multi_needle").values()


def test_no_head_of_a_model_that_answers_nothing_retrieves(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    with (folder / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["model"] == "seed1" and row["length"] == "128" and row["policy"] == "constant":
            row["value"] = "0.01"
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    data = read_evaluation(folder)
    assert retrieving_heads(data, "multi_needle") == {"seed0": BEST}
    assert "model.layers.1.self_attn head 2 of seed0." in build_evaluation_page(data)
