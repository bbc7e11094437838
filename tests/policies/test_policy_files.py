"""Policies as YAML: reading, overriding, saving, and errors of unusable files."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
import yaml
from catalogue import ARGUMENTS, build, temperature

from attnscale.errors import ArgumentError, AttnScaleError, MissingDependencyError
from attnscale.policies import build_policy, build_policy_for

N = torch.tensor([1, 2, 1025, 8192, 200_000])

either_kind_of_path = pytest.mark.parametrize("kind", [str, Path])


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    path = tmp_path / "log.yaml"
    path.write_text("name: log\nreference_length: 2048\nfloor: true\n", encoding="utf-8")
    return path


@either_kind_of_path
def test_a_policy_is_built_from_a_yaml_file(log_file: Path, kind: type) -> None:
    policy = build_policy(kind(log_file))
    assert policy.to_dict() == {"name": "log", "gamma": 1.0, "reference_length": 2048, "floor": True}


@either_kind_of_path
def test_keywords_override_a_yaml_file(log_file: Path, kind: type) -> None:
    policy = build_policy(kind(log_file), reference_length=4096, floor=False)
    assert policy.to_dict() == {"name": "log", "gamma": 1.0, "reference_length": 4096, "floor": False}
    assert "2048" in log_file.read_text(encoding="utf-8")


def test_the_ending_yml_is_a_file_too(log_file: Path) -> None:
    assert build_policy(str(log_file.rename(log_file.with_suffix(".yml")))).reference_length == 2048


def test_a_policy_for_a_module_is_built_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ssmax.yaml"
    path.write_text("name: ssmax\nreference_length: 512\n", encoding="utf-8")
    policy = build_policy_for(path, num_heads=6, head_dim=32, bias=True)
    assert policy.to_dict() == {"name": "ssmax", "num_heads": 6, "reference_length": 512, "init": None, "bias": True}


@pytest.mark.parametrize("name", ARGUMENTS)
@either_kind_of_path
def test_a_policy_survives_a_yaml_file(name: str, kind: type, tmp_path: Path) -> None:
    policy = build(name)
    path = kind(tmp_path / f"{name}.yaml")
    policy.save(path)
    again = build_policy(path)
    assert again.to_dict() == policy.to_dict()
    assert torch.equal(temperature(again, N), temperature(policy, N))


def test_a_number_survives_a_yaml_file_to_the_last_bit(tmp_path: Path) -> None:
    path = tmp_path / "constant.yaml"
    for beta in (0.1 + 0.2, 1e-5, 1e16, math.pi, 3):
        build_policy("constant", beta=beta).save(path)
        assert build_policy(path).beta == beta


def test_save_replaces_an_earlier_file(log_file: Path) -> None:
    build("qwen").save(log_file)
    assert yaml.safe_load(log_file.read_text(encoding="utf-8")) == {"name": "qwen", "reference_length": 2048}
    assert list(log_file.parent.iterdir()) == [log_file]


@pytest.mark.parametrize("stage", ["pathlib.Path.write_bytes", "os.replace"])
def test_a_save_that_fails_leaves_the_earlier_file_and_nothing_else(
    log_file: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    before = log_file.read_bytes()

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stage, full_disk)
    with pytest.raises(OSError, match="No space left"):
        build("qwen").save(log_file)
    assert log_file.read_bytes() == before
    assert list(log_file.parent.iterdir()) == [log_file]


def test_a_save_of_what_yaml_cannot_hold_leaves_the_earlier_file(log_file: Path) -> None:
    before = log_file.read_bytes()
    policy = build("qwen")
    policy.__dict__["reference_length"] = object()  # fields are frozen; this bypasses the check
    with pytest.raises(yaml.YAMLError):
        policy.save(log_file)
    assert log_file.read_bytes() == before
    assert list(log_file.parent.iterdir()) == [log_file]


@either_kind_of_path
def test_a_file_that_is_not_there_is_named(kind: type, tmp_path: Path) -> None:
    path = tmp_path / "absent.yaml"
    with pytest.raises(ArgumentError, match=r"^path='.*absent\.yaml' is not accepted: expected an existing YAML file"):
        build_policy(kind(path))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name: [log", "well-formed YAML"),
        ("name: !!python/object/apply:os.getcwd []", "well-formed YAML"),
        ("- log", "a YAML mapping at the top level, not list"),
        ("log", "a YAML mapping at the top level, not str"),
        ("", "a YAML mapping at the top level, not NoneType"),
        ("reference_length: 2048", "the key 'name'"),
        ("name: lgo", "Did you mean 'log'"),
        ("name: log\ngama: 2.0", "gamma"),
        ("name: log\nreference_length: 2048.0", "an int >= 2"),
        ("name: log\nfloor: 'yes'", "True or False"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(AttnScaleError) as caught:
        build_policy(path)
    assert complaint in str(caught.value)


def test_without_pyyaml_a_file_asks_for_the_extra(log_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    for attempt in (lambda: build_policy(log_file), lambda: build("log").save(log_file)):
        with pytest.raises(MissingDependencyError, match=r"needs yaml: pip install rich pyyaml") as caught:
            attempt()
        assert isinstance(caught.value, ImportError)
    assert build_policy("log", reference_length=2048)(2048).item() == 1.0


def test_a_saved_policy_is_as_readable_as_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    build_policy("log").save(tmp_path / "log.yaml")
    assert (tmp_path / "log.yaml").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_number_of_numpys_is_saved_as_a_plain_one(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    build_policy("constant", beta=numpy.float64(2)).save(tmp_path / "constant.yaml")
    assert build_policy(tmp_path / "constant.yaml").uniform == 2.0


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    with pytest.raises(ArgumentError, match="well-formed YAML"):
        build_policy(tmp_path / "latin.yaml")
