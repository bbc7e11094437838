"""`python -m attnscale`, as a user meets it."""

from __future__ import annotations

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
from attnscale.cli import main
from attnscale.policies import POLICIES

ROOTS = [str(Path(package.__file__).parents[1]) for package in (attnscale, attnscale_kernels)]


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


def test_square_brackets_in_a_message_are_text_and_not_markup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    hint = "triton is not installed [red]"
    monkeypatch.setattr(importlib.import_module("attnscale.doctor"), "why_unavailable", lambda: hint)
    assert main(["doctor"]) == 0
    assert hint in capsys.readouterr().out
    assert main(["bench", "gpu", "--dry-run", "--bundle", str(tmp_path / "plan[red]")]) == 2
    assert "plan[red]" in capsys.readouterr().err
