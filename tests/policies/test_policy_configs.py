"""The files in configs/policy: one per policy, with correct comments."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from catalogue import temperature

from attnscale.policies import POLICIES, build_policy

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs" / "policy").glob("*.yaml"))
N = torch.tensor([1, 2, 1025, 8192, 200_000])

every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)


def test_every_policy_has_a_configuration_of_its_name() -> None:
    assert {path.stem for path in CONFIGS} == set(POLICIES)


@every_config
def test_a_configuration_builds_the_policy_of_its_name(config: Path) -> None:
    policy = build_policy(config)
    assert policy.name == config.stem
    assert temperature(policy, N).isfinite().all()


@every_config
def test_a_configuration_opens_with_three_comment_lines(config: Path) -> None:
    lines = config.read_text(encoding="utf-8").splitlines()
    assert all(line.startswith("# ") for line in lines[:3])
    assert lines[3] == f"name: {config.stem}"
    assert max(map(len, lines)) <= 120


@every_config
def test_the_command_in_a_configuration_runs(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    command = shlex.split(config.read_text(encoding="utf-8").splitlines()[1].removeprefix("# "))
    assert command[:2] == ["python", "-c"]
    assert f"configs/policy/{config.name}" in command[2]
    exec(command[2], {})
    assert capsys.readouterr().out


@every_config
def test_the_override_in_a_configuration_changes_the_policy(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    override = config.read_text(encoding="utf-8").splitlines()[2].removeprefix("# ")
    changed = eval(override, {"build_policy": build_policy})
    assert changed.name == config.stem
    assert changed.to_dict() != build_policy(config).to_dict()
