"""`attnscale run` and `attnscale evaluate`: files, overrides and options become one dataclass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_experiment import Small

import attnscale.report
from attnscale.cli import main
from attnscale.cli.evaluate import EXPERIMENTS, read_experiment
from attnscale.errors import ArgumentError
from attnscale.lab.evaluation import Evaluation, demo_evaluation

ROOT = Path(__file__).parents[2]
MINIMAL = "experiment: small\nmodels: [m]\noutput: out\n"


@pytest.fixture(autouse=True)
def _a_small_experiment_is_registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("small", "evaluation"):
        monkeypatch.setitem(EXPERIMENTS, name, ("small_experiment", "Small", "run"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Small]:
    """The experiments that ran, in place of the work."""
    import small_experiment

    done: list[Small] = []
    work: Callable[..., Path] = small_experiment.run

    def run(experiment: Small, progress: Any) -> Path:
        done.append(experiment)
        return work(experiment, progress)

    monkeypatch.setattr(small_experiment, "run", run)
    return done


def read(text: str, *overrides: str) -> Any:
    Path("experiment.yaml").write_text(text)
    return read_experiment(Path("experiment.yaml"), list(overrides), EXPERIMENTS)[0]


def test_a_file_fills_the_dataclass_and_leaves_the_other_defaults() -> None:
    assert read(MINIMAL + "windows: 3\ntext: null\n") == Small(models=("m",), output="out", windows=3)


def test_overrides_win_over_the_file_and_are_typed() -> None:
    overrides = ("windows=5", "rate=1e-3", "shuffled=true", "lengths=[4,8]", "text=a=b", "trained_length=null")
    built = read(MINIMAL + "windows: 3\ntrained_length: 7\n", *overrides)
    assert built == Small(("m",), "out", windows=5, rate=1e-3, shuffled=True, lengths=(4, 8), text="a=b")


@pytest.mark.parametrize("lengths", ["[16, 32]", '"16,32"', '"16:32"'])
@pytest.mark.parametrize("policies", ["[constant, log]", "constant,log", '"constant, log"'])
def test_texts_with_commas_are_the_lists_of_yaml(lengths: str, policies: str) -> None:
    built = read(MINIMAL + f"lengths: {lengths}\npolicies: {policies}\n")
    assert built == read(MINIMAL, "lengths=16:32", "policies=constant,log")
    assert (built.lengths, built.policies) == ((16, 32), ("constant", "log"))


def test_a_range_that_yaml_took_for_minutes_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"lengths=992 is not accepted.*quoted"):
        read(MINIMAL + "lengths: 16:32\n")


BAD = {
    "key 'windwos' (value 3) is not accepted: did you mean 'windows'?": "windwos: 3",
    "key 'xyzzy' (value 3) is not accepted: expected models, output": "xyzzy: 3",
    "windows='many' is not accepted: expected an int": "windows: many",
    "windows=2.5 is not accepted": "windows: 2.5",
    "windows=True is not accepted": "windows: true",
    "windows=None is not accepted": "windows: null",
    "windows=0 is not accepted: expected an int >= 1": "windows: 0",
    "shuffled=1 is not accepted: expected true or false": "shuffled: 1",
    "lengths=[16, 'long'] is not accepted": "lengths: [16, long]",
    "policies=[1] is not accepted: expected comma-separated names": "policies: [1]",
    "policies=3 is not accepted: expected comma-separated names": "policies: 3",
    "dtype='half' is not accepted: expected float32 or bfloat16": "dtype: half",
    "experiment='other' is not accepted: expected evaluation, calibration, small": "experiment: other",
    "experiment=['small'] is not accepted": "experiment: [small]",
}


@pytest.mark.parametrize(("message", "line"), BAD.items(), ids=list(BAD))
def test_a_bad_key_or_value_gets_one_line_and_nothing_runs(
    message: str, line: str, ran: list[Small], capsys: pytest.CaptureFixture[str]
) -> None:
    key = line.partition(":")[0]
    kept = [other for other in MINIMAL.splitlines() if not other.startswith(key)]
    Path("experiment.yaml").write_text("\n".join([*kept, line]))
    with pytest.raises(SystemExit) as exit_:
        main(["run", "experiment.yaml"])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"attnscale run: {message}")
    assert error.count("\n") == 1
    assert ran == []
    assert [path.name for path in Path().iterdir()] == ["experiment.yaml"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("experiment: small\noutput: o\n", "key 'models' is missing"), ("output: o\n", "key 'experiment' is missing")],
)
def test_a_missing_key_is_named(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        read(text)


def test_an_override_without_a_value_and_one_of_an_unknown_key_are_refused() -> None:
    with pytest.raises(ArgumentError, match="override='windows' is not accepted: expected key=value"):
        read(MINIMAL, "windows")
    with pytest.raises(ArgumentError, match=r"key 'window' .*did you mean 'windows'"):
        read(MINIMAL, "window=3")


@pytest.mark.parametrize("name", ["training", "max_retrieval"])
@pytest.mark.parametrize("folder", ["experiment", f"{ROOT}/configs/experiment"])
def test_an_experiment_that_left_the_package_says_where_it_went(
    name: str, folder: str, ran: list[Small], capsys: pytest.CaptureFixture[str]
) -> None:
    file = f"{folder}/{name}" + (".yaml" if folder.startswith("/") else "")
    with pytest.raises(SystemExit) as exit_:
        main(["run", file, "output=elsewhere"])
    assert exit_.value.code == 2
    assert f"run `python -m scripts.training {file}` in a clone of the repository" in capsys.readouterr().err
    assert ran == []


def test_evaluate_gives_options_and_files_the_same_experiment(
    ran: list[Small], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attnscale.report, "write_report", lambda _, output: output)
    options = ["--policies", "constant,log_squared", "--lengths", "64:256", "--trained-length", "64", "--shuffled"]
    assert main(["evaluate", "a", "b", *options, "--output", "out"]) == 0
    Path("evaluation.yaml").write_text(
        "experiment: evaluation\nmodels: [a, b]\noutput: out\npolicies: [constant, log_squared]\n"
        "lengths: [64, 128, 256]\ntrained_length: 64\nshuffled: true\n"
    )
    printed = capsys.readouterr().out
    assert main(["run", "evaluation.yaml"]) == 0
    assert ran[0] == ran[1]
    assert ran[0] == Small(("a", "b"), "out", ("constant", "log_squared"), (64, 128, 256), None, 64, shuffled=True)
    assert printed == capsys.readouterr().out
    assert printed.endswith("\nwrote out/report.html\n")


def test_evaluate_writes_into_a_folder_named_after_the_model_and_no_page_if_not_asked(
    ran: list[Small], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attnscale.report, "write_report", lambda *_: pytest.fail("no page was asked for"))
    assert main(["evaluate", "some/where/tiny", "--no-report"]) == 0
    assert ran[0].output == "evaluation/tiny"
    assert capsys.readouterr().out.endswith("\nwrote evaluation/tiny\n")


@pytest.mark.parametrize(("options", "expected"), [([], ("demo", False)), (["--quick", "--output", "d"], ("d", True))])
def test_demo_runs_the_embedded_evaluation_and_shows_its_table(
    options: list[str],
    expected: tuple[str, bool],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from small_experiment import write_folder

    asked = []

    def run(evaluation: Evaluation, progress: Callable[[int, int, str], None]) -> Path:
        asked.append(evaluation)
        progress(1, 1, "done")
        return write_folder(Path(evaluation.output), ("constant", "log"), (128,))

    monkeypatch.setattr("attnscale.lab.evaluation.evaluate", run)
    monkeypatch.setattr(attnscale.report, "write_report", lambda _, output: output)
    assert main(["demo", *options]) == 0
    assert asked == [demo_evaluation(*expected)]
    printed = capsys.readouterr().out
    assert "0.500 ±0.010" in printed
    assert printed.endswith(f"\nwrote {expected[0]}/report.html\n")


def test_report_passes_on_what_was_asked_and_says_what_was_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(attnscale.report, "write_report", lambda *given: calls.append(given) or Path("page.html"))
    assert main(["report", "folder"]) == main(["report", "folder", "--output", "other.html"]) == 0
    assert calls == [(Path("folder"), None), (Path("folder"), Path("other.html"))]
    assert capsys.readouterr().out == "wrote page.html\n" * 2
