"""`python -m attnscale`, as a user meets it."""

from __future__ import annotations

import csv
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attnscale
import attnscale_kernels
from attnscale.bench.rows import Row
from attnscale.cli import main
from attnscale.policies import POLICIES

COLUMNS = ["kernel", "provider", "mode", "metric", "x", "y", "low", "high", "config", "device", "version"]
ROOTS = [str(Path(package.__file__).parents[1]) for package in (attnscale, attnscale_kernels)]
TINY = "lengths: [16]\npolicies: [constant, log]\nheads: 2\nhead_dim: 8\nrounds: [2]\nimports: 2\n"
TINY += (
    "rival_lengths: []\n"
    "statistics_lengths: [16]\nstatistics_rounds: [2]\nvariant_lengths: []\neager_lengths: [16]\nmemory_lengths: [16]\n"
    "monitor_lengths: []\n"
    "model_lengths: []\n"
)


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
    environment |= {"NO_COLOR": "1", "COLUMNS": "120", "PYTHONIOENCODING": "utf-8"}
    environment["PYTHONPATH"] = os.pathsep.join([*ROOTS, os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "attnscale", *arguments],
        capture_output=True,
        encoding="utf-8",
        env=environment,
        cwd=cwd,
        timeout=120,
    )


def cells(table: str) -> list[list[str]]:
    """The rows of a printed table."""
    lines = [line for line in table.splitlines() if line.startswith(("│", "┃"))]
    return [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines]


def test_doctor_shows_versions_devices_and_backends() -> None:
    finished = run("doctor")
    assert finished.returncode == 0, finished.stderr
    rows = (re.split(" {2,}", line, maxsplit=2) for line in finished.stdout.splitlines())
    found = {(topic, subject): value for topic, subject, value in rows}
    assert {topic for topic, _ in found} == {"version", "device", "backend"}
    assert found["version", "torch"] == torch.__version__
    assert found["version", "python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"attnscale", "einops", "triton", "transformers"} <= {
        subject for topic, subject in found if topic == "version"
    }
    assert "threads" in found["device", "cpu"]
    for backend, place in (("sdpa", "on cpu"), ("reference", "on cpu"), ("triton", "in triton's interpreter")):
        error = re.fullmatch(rf"works {place}, error (\S+) in fp32", found["backend", backend])
        assert error is not None
        assert 0 < float(error[1]) < 1e-5


def test_policies_lists_every_policy_with_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split()[0]: parameters.strip() for line, parameters in zip(lines[::2], lines[1::2], strict=True)}
    assert list(listed) == list(POLICIES)
    assert listed["constant"] == "beta=1.0"
    assert listed["ssmax"].startswith("num_heads, reference_length=2048")


@pytest.mark.parametrize("arguments", [["nonsense"], ["doctor", "--nonsense"]], ids=["unknown", "option"])
def test_a_command_that_does_not_exist_exits_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert re.fullmatch(r"attnscale( doctor)?: .+ \(help: attnscale( doctor)? --help\)\n", capsys.readouterr().err)


def test_an_unknown_command_exits_with_two_from_a_shell() -> None:
    finished = run("nonsense")
    assert finished.returncode == 2
    assert "invalid choice: 'nonsense'" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_bench_writes_the_csv_and_prints_the_table(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(TINY)
    finished = run("bench", "--config", "plan.yaml", "--output", "results/tiny.csv", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    with (tmp_path / "results" / "tiny.csv").open(newline="") as file:
        header, *rows = list(csv.reader(file))
    assert header == COLUMNS == list(Row.__dataclass_fields__)
    assert [row[:5] for row in rows] == [
        *(
            ["attention", policy, mode, metric, "16"]
            for policy in ("constant", "log", "log_bf16")
            for mode in ("forward", "forward+backward")
            for metric in ("time_ratio", "extra_query_copies")
        ),
        *(
            ["statistics", provider, mode, metric, "16"]
            for provider, mode, metric in (
                ("stats_all_rows", "forward", "time_ratio"),
                ("stats_64_rows", "forward", "time_ratio"),
                ("gap_adaptive", "forward", "time_ratio"),
                ("stats_all_rows", "forward+backward", "time_ratio"),
                ("eager_matrix", "forward", "times_slower"),
                ("stats_all_rows", "forward", "extra_mb"),
            )
        ),
        ["import", "attnscale", "fresh process", "added_ms", "0"],
    ]
    assert all(float(low) <= float(y) <= float(high) for y, low, high in (row[5:8] for row in rows))
    assert all(float(row[5]) > 0 for row in rows if not row[3].startswith("extra"))
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["tiny.csv"]
    printed = cells(finished.stdout)
    assert printed[0] == ["metric", "n", "mode", "policy", "ratio", "half of runs", "target"]
    assert [(line[0], line[2], line[3]) for line in printed[1:]] == [(row[3], row[2], row[1]) for row in rows]


BAD_PLANS = {
    "key 'lenghts'": "lenghts: [16]\n",
    "policy='lgo'": TINY.replace("log", "lgo"),
    "policy 'ssmax' needs num_heads": TINY.replace("log", "ssmax"),
    "policies=": TINY.replace("[constant, log]", "log"),
    "lengths=16": TINY.replace("[16]", "16"),
    "lengths=0": TINY.replace("[16]", "[0]"),
    "lengths='long'": TINY.replace("[16]", "[long]"),
    "rounds=": TINY.replace("[2]", "[2, 2]"),
    "rounds=1": TINY.replace("[2]", "[1]"),
    "imports=1": TINY.replace("imports: 2", "imports: 1"),
    "heads=2.5": TINY.replace("heads: 2", "heads: 2.5"),
    "head_dim=0": TINY.replace("head_dim: 8", "head_dim: 0"),
    "well-formed YAML": "lengths: [16\n",
    "a YAML mapping": "- 16\n",
}


@pytest.mark.parametrize(("message", "plan"), BAD_PLANS.items(), ids=list(BAD_PLANS))
def test_a_bad_plan_exits_with_two_says_why_and_leaves_no_csv(
    message: str, plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnscale.bench.cost.interleaved_ratio", lambda *_: pytest.fail("nothing should be measured"))
    (tmp_path / "plan.yaml").write_text(plan)
    assert main(["bench", "--config", str(tmp_path / "plan.yaml"), "--output", str(tmp_path / "out.csv")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_bad_plan_exits_with_two_from_a_shell_and_keeps_an_earlier_csv(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(TINY.replace("log", "lgo"))
    (tmp_path / "bench.csv").write_text("earlier\n")
    finished = run("bench", "--config", "plan.yaml", cwd=tmp_path)
    assert finished.returncode == 2
    assert "ArgumentError: policy='lgo' is not accepted" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"plan.yaml", "bench.csv"}
    assert (tmp_path / "bench.csv").read_text() == "earlier\n"


@pytest.mark.parametrize(
    ("option", "message"), [("--config", "an existing YAML file"), ("--output", "a CSV file, not a directory")]
)
def test_a_path_that_cannot_serve_exits_with_two_before_measuring(
    option: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnscale.bench.cost.interleaved_ratio", lambda *_: pytest.fail("nothing should be measured"))
    assert main(["bench", option, str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_square_brackets_in_a_message_are_text_and_not_markup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    hint = "triton is not installed [red]"
    monkeypatch.setattr(importlib.import_module("attnscale.doctor"), "why_unavailable", lambda: hint)
    assert main(["doctor"]) == 0
    assert hint in capsys.readouterr().out
    assert main(["bench", "--config", str(tmp_path / "plan[red].yaml")]) == 2
    assert "plan[red].yaml" in capsys.readouterr().err
