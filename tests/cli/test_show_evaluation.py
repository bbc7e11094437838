"""The table that `evaluate` and `demo` print."""

from __future__ import annotations

import io
from html import escape
from pathlib import Path

import evaluation_folder
import pytest
from rich.console import Console
from small_experiment import write_folder

from attnscale.cli.show import Line, read_lines, show_evaluation
from attnscale.errors import ArgumentError
from attnscale.report import build_evaluation_page, read_evaluation
from attnscale.report.verdict import verdict

LAWS = ("constant", "sqrt_log", "log", "log_squared", "gap_adaptive")


def printed(folder: Path, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    assert show_evaluation(console, folder, report=False) == 0
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_numbers_are_those_of_all_models_and_the_median_of_heads(tmp_path: Path) -> None:
    write_folder(tmp_path, ("constant",), (128,))
    results = tmp_path / "results.csv"
    results.write_text(results.read_text().replace("accuracy,a,constant,128,,0.5", "accuracy,a,constant,128,,0.9"))
    ((task, (line,)),) = read_lines(tmp_path).items()
    assert task == "multi_needle"
    assert line.error == pytest.approx(0.01)  # 95 % is 1.96 standard errors to either side
    assert line.quantities == pytest.approx((0.3, 3.5, 0.8, 1.25))
    assert line[:3] == (128, "constant", 0.5)
    assert line.bits_per_byte == 2.25


def test_lengths_go_upwards_and_constant_stands_first(tmp_path: Path) -> None:
    lines = read_lines(write_folder(tmp_path, ("log", "constant"), (1024, 128)))["multi_needle"]
    assert [(line.length, line.policy) for line in lines] == [
        (128, "constant"),
        (128, "log"),
        (1024, "constant"),
        (1024, "log"),
    ]


def test_each_way_of_retrieval_has_a_table_and_perplexity_alone_has_one(tmp_path: Path) -> None:
    assert list(read_lines(write_folder(tmp_path, LAWS, (128,), ("needle", "recall")))) == ["needle", "recall"]
    (task, (line,)) = next(iter(read_lines(write_folder(tmp_path, ("log",), (128,), ("perplexity",))).items()))
    assert (task, line) == ("perplexity", Line(128, "log", None, None, 2.25, line.quantities))


def test_the_title_of_a_retrieval_task_names_the_task_of_bits_per_byte(tmp_path: Path) -> None:
    def title(name: str, tasks: tuple[str, ...]) -> str:
        (tmp_path / name).mkdir()
        return next(filter(str.strip, printed(write_folder(tmp_path / name, LAWS, (128,), tasks), 80))).strip()

    assert title("both", ("multi_needle", "perplexity")) == "multi_needle (bits/byte: perplexity)"
    assert title("answers", ("multi_needle",)) == "multi_needle"
    assert title("prose", ("perplexity",)) == "perplexity"


@pytest.mark.parametrize("width", [80, 120])
def test_all_names_and_numbers_are_whole_in_a_line_each(width: int, tmp_path: Path) -> None:
    lines = printed(write_folder(tmp_path, LAWS, (128, 32768)), width)
    assert max(map(len, lines[:-1])) <= width
    header = next(line for line in lines if "policy" in line)
    assert header.split() == ["n", "policy", "accuracy", "bits/byte", "w_max", "entropy", "Λ", "β/Λ"]
    rows = [line.split() for line in lines if "±" in line and "0." in line]
    numbers = ["0.500", "±0.010", "2.250", "0.300", "3.500", "0.800", "1.250"]
    lengths = [["128"], *[[]] * 4, ["32768"], *[[]] * 4]
    assert rows == [[*length, law, *numbers] for length, law in zip(lengths, LAWS * 2, strict=True)]


def test_a_name_longer_than_the_line_goes_on_in_the_next_one(tmp_path: Path) -> None:
    name = "a_label_that_is_far_too_long_for_one_row_[red]_of_80"
    lines = printed(write_folder(tmp_path, ("constant", name), (128,)), 80)
    place = next(line.index("policy") for line in lines if "policy" in line)
    column = "".join(line[place:].split(" ")[0] for line in lines[4:] if line[:place].strip() in ("", "128"))
    assert name in column
    assert "…" not in "".join(lines)


def test_numbers_that_are_not_there_are_left_empty(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, ("log",), (128,), ("multi_needle",))
    (folder / "statistics.csv").write_text((folder / "statistics.csv").read_text().replace(",1.25", ","))
    (line,) = read_lines(folder)["multi_needle"]
    assert line.bits_per_byte is None
    assert line.quantities == (pytest.approx(0.3), 3.5, 0.8, None)
    assert next(text for text in printed(folder, 80) if "0.500" in text).split()[-1] == "0.800"


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"path=.*`attnscale evaluate`, with results\.csv"):
        read_lines(tmp_path)


def test_the_verdict_of_the_page_follows_the_tables(tmp_path: Path) -> None:
    folder = evaluation_folder.write_folder(tmp_path, cost=0.1)
    found = verdict(read_evaluation(folder))
    text = " ".join(" ".join(printed(folder, 120)).split())
    assert f"{' '.join(found.sentences)} {found.line}" in text
    page = build_evaluation_page(read_evaluation(folder))
    assert all(escape(part) in page for part in (*found.sentences, found.line or ""))
