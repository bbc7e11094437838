"""Help and user errors on the command line: a one-line message, exit code 2, no heavy imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import small_experiment

import attnscale
from attnscale.cli import main
from attnscale.cli.evaluate import EXPERIMENTS
from attnscale.cli.parser import COMMANDS

# What `import attnscale` itself imports, torch above all, is left out by a bare module of that name in its place: the
# command line alone must not need it. `evaluate` and `calibrate` need the dataclass of an experiment; light ones stand
# in for them.
BARE = f"""
import sys, types
sys.path.insert(0, {str(Path(small_experiment.__file__).parent)!r})
bare = types.ModuleType("attnscale")
bare.__path__, bare.__version__ = {list(attnscale.__path__)!r}, "1.0"
sys.modules["attnscale"] = bare
from attnscale.cli import main
from attnscale.cli.evaluate import EXPERIMENTS
EXPERIMENTS["evaluation"] = ("small_experiment", "Small", "run")
EXPERIMENTS["calibration"] = ("small_experiment", "SmallCalibration", "run")
codes = []
for words in WORDS:
    try:
        codes.append(main(words))
    except SystemExit as exit_:
        codes.append(exit_.code)
heavy = {{"torch", "transformers", "numpy", "matplotlib", "pandas", "rich.table"}}
print("codes", *codes)
print("heavy", *sorted(heavy & set(sys.modules)))
"""


@pytest.fixture(autouse=True)
def _a_small_experiment_stands_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(EXPERIMENTS, "evaluation", ("small_experiment", "Small", "run"))
    monkeypatch.chdir(tmp_path)


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error that ended with exit code 2, before anything was printed or written."""
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    assert list(Path().iterdir()) == []
    return captured.err


def in_a_bare_process(words: list[list[str]]) -> tuple[list[str], list[str]]:
    finished = subprocess.run(
        [sys.executable, "-c", BARE.replace("WORDS", repr(words))], capture_output=True, text=True, timeout=60
    )
    assert finished.returncode == 0, finished.stderr
    *_, codes, heavy = finished.stdout.splitlines()
    return codes.split()[1:], heavy.split()[1:]


def test_no_help_imports_torch_or_draws_tables() -> None:
    words = [[], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
    assert in_a_bare_process(words) == (["0"] * len(words), [])


def test_no_mistake_imports_torch_or_draws_tables(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("experiment: evaluation\nmodels: m\noutput: o\nwindwos: 1\n")
    words = [["nonsense"], ["doctor", "--nonsense"], ["bench", "tpu"], ["run", str(tmp_path / "bad.yaml")]]
    assert in_a_bare_process(words) == (["2"] * len(words), [])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_ends_with_examples_of_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    _, examples = capsys.readouterr().out.split("\nexamples:\n")
    lines = examples.splitlines()
    assert 1 <= len(lines) <= 2
    assert all(f"{line} ".startswith(f"  attnscale {command} ") for line in lines)


def test_the_help_lists_every_command_and_ends_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    commands, examples = capsys.readouterr().out.split("\nexamples:\n")
    assert [name for name in COMMANDS if not re.search(rf"\n    {name}\s", commands)] == []
    assert examples.startswith("  attnscale doctor\n")


def test_no_words_are_a_question_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in ([], ["--help"]):
        with pytest.raises(SystemExit) as exit_:
            main(words)
        assert exit_.value.code == 0
        shown.append(capsys.readouterr())
    assert shown[0] == shown[1]
    assert shown[0].err == ""


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"attnscale {attnscale.__version__}\n"


def test_the_help_of_run_names_the_experiments_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown = capsys.readouterr().out
    experiments = (Path(__file__).parents[2] / "configs" / "experiment").glob("*.yaml")
    named = {file.stem for file in experiments if f"experiment/{file.stem}" in shown}
    evaluations = {"smollm2", "swapped_in", "trained_with_gap_adaptive", "trained_with_log", "trained_with_ssmax"}
    assert named == evaluations | {"calibrate_smollm2_2x", "calibrate_smollm2_4x"}


def test_the_options_of_evaluate_are_the_fields_with_their_documents_and_defaults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "MODEL Folders of models." in shown
    assert "--policies A,B Laws, of which 100% are run. (default: constant,log)" in shown
    assert "--lengths N,N|N:N Lengths of the contexts. (default: 128,256)" in shown
    assert "--trained-length N Length that the model was trained at." in shown
    assert "--rate X Of learning. (default: 0.5)" in shown
    assert "--output OUTPUT Folder to write. (default: evaluation/MODEL)" in shown
    assert "--report, --no-report" in shown


MISTAKES = {
    "attnscale: argument COMMAND: invalid choice: 'nonsense'": ["nonsense"],
    "attnscale doctor: unrecognized arguments: more": ["doctor", "more"],
    "attnscale watch: the following arguments are required: path": ["watch"],
    "attnscale bench: argument on: invalid choice: 'tpu'": ["bench", "tpu"],
    "attnscale evaluate: the following arguments are required: MODEL": ["evaluate"],
    "unrecognized arguments: --windwos 3; did you mean --windows?": ["evaluate", "m", "--windwos", "3"],
    "attnscale evaluate: windows='x' is not accepted: expected an int": ["evaluate", "m", "--windows", "x"],
    "windows='2.5' is not accepted: expected an int": ["evaluate", "m", "--windows", "2.5"],
    "windows=0 is not accepted: expected an int >= 1": ["evaluate", "m", "--windows", "0"],
    "dtype='half' is not accepted: expected float32 or bfloat16": ["evaluate", "m", "--dtype", "half"],
    "trained_length='x' is not accepted: expected an int or null": ["evaluate", "m", "--trained-length", "x"],
    "lengths='512:3000' is not accepted: expected 2048 or 4096": ["evaluate", "m", "--lengths", "512:3000"],
    "lengths='512:128' is not accepted: expected a range": ["evaluate", "m", "--lengths", "512:128"],
    "lengths='long' is not accepted: expected comma-separated ints": ["evaluate", "m", "--lengths", "long"],
    "policies='log,' is not accepted: expected comma-separated names": ["evaluate", "m", "--policies", "log,"],
    "path='no\\nfile.yaml' is not accepted: expected an existing YAML file": ["run", "no\nfile.yaml"],
}


@pytest.mark.parametrize(("message", "words"), MISTAKES.items(), ids=list(MISTAKES))
def test_a_mistake_gets_one_line_and_exit_code_two(
    message: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(words, capsys)
    assert message in line
    assert line.startswith("attnscale")
    assert line.endswith(" --help)\n")


@pytest.mark.parametrize(
    ("words", "more"), [(["demo"], "; run the same command again to continue"), (["bench", "gpu"], "")]
)
def test_an_interrupt_gets_one_line_and_says_whether_the_work_can_go_on(
    words: list[str], more: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnscale.lab.evaluation.evaluate", interrupted)
    monkeypatch.setattr("attnscale.bench.gpu.command.this_gpu", interrupted)
    assert main(words) == 130
    assert capsys.readouterr().err == f"interrupted{more}\n"


def test_without_the_library_of_the_options_the_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    assert main(["evaluate", "m"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("MissingDependencyError: this command needs jsonargparse: pip install rich pyyaml ")
    assert error.count("\n") == 1
