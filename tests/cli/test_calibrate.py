"""`attnscale calibrate`: exit code, printed verdict, and page."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnscale.cli import main
from attnscale.cli.evaluate import EXPERIMENTS, read_experiment
from attnscale.lab.calibration import calibrate
from attnscale.report.calibration_page import lost

pytest.importorskip("transformers", reason="transformers is not installed")

QUICK = [
    "--lengths",
    "128,180,256",
    "--samples",
    "4",
    "--windows",
    "2",
    "--asked",
    "8",
    "--needles",
    "4",
    "--tests",
    "3",
]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("runs") / "embedded"


def test_a_calibration_that_helps_exits_with_zero_and_prints_the_line_to_paste(output, capsys) -> None:
    code = main(["calibrate", "embedded", "--to", "1024", *QUICK, "--chunk", "256", "--output", str(output)])
    printed = capsys.readouterr().out
    assert code == 0
    assert "calibrated helped." in printed
    assert f'attnscale.hf.apply(model, "{output / "policy.yaml"}")' in printed
    assert (output / "report.html").is_file()


def test_the_page_shows_the_verdict_the_growth_and_every_policy(output, capsys) -> None:
    assert main(["report", str(output)]) == 0
    page = (output / "report.html").read_text(encoding="utf-8")
    assert "Calibration embedded" in page
    for text in (
        "calibrated helped.",
        "loses its keys",
        "model.layers.1.self_attn head 0",
        "log_squared",
        "yarn:factor=8",
    ):
        assert text in page
    assert page.count("<svg") >= 4  # Λ and r of both heads


def test_a_calibration_without_a_plan_exits_with_one(tmp_path, capsys) -> None:
    options = ["--tasks", "perplexity", "--policies", "log", "--chunk", "256", "--output", str(tmp_path / "out")]
    assert main(["calibrate", "embedded", "--to", "512", *QUICK, *options]) == 1
    assert "No head retrieves" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["embedded"], "key 'to' is missing"),
        (["embedded", "--to", "much"], "to='much' is not accepted: expected an int"),
        (["embedded", "--to", "1024", "--samples", "0"], "samples=0 is not accepted"),
    ],
)
def test_a_wrong_option_is_one_line(words, message, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main(["calibrate", *words])
    assert left.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("factor", [2, 4])
def test_the_files_of_the_real_model_are_calibrations(factor) -> None:
    file = Path(__file__).parents[2] / f"configs/experiment/calibrate_smollm2_{factor}x.yaml"
    options, function = read_experiment(file, ["tests=16"], EXPERIMENTS)
    assert (options.to, options.rope, options.tests) == (8192 * factor, f"yarn:{factor}", 16)
    assert f"yarn:factor={factor}" in options.policies
    assert function is calibrate


def test_a_short_target_is_refused_without_a_traceback(capsys) -> None:
    assert main(["calibrate", "embedded", "--to", "100"]) == 2
    assert "to=100 is not accepted: expected a length > 128" in capsys.readouterr().err


def test_a_folder_with_a_broken_description_is_refused(tmp_path, capsys) -> None:
    (tmp_path / "calibration.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 2
    assert "expected the output folder of attnscale calibrate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ends", "decided", "words"),
    [
        ([200.0, 900.0], "power", "between 200 and 900 tokens under β = 1; Λ grows as a power of n"),
        ([200.0, None], "log", "at 200 tokens or later, if at all, under β = 1; Λ grows as a power of ln n"),
        ([None, None], None, "does not lose its keys under β = 1; the data do not decide"),
    ],
)
def test_the_length_of_failure_in_words(ends, decided, words) -> None:
    assert words in lost({"lost_between": ends, "decided": decided})
