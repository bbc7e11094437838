"""The supported versions are stated once, declared, tested, and named where another version is installed."""

from __future__ import annotations

import csv
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import attnscale
from attnscale._util.versions import PYTHON, TRANSFORMERS, release

ROOT = Path(attnscale.__file__).resolve().parents[1]
DECLARED = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("version", "covered"),
    [("4.57.6", False), ("5.0.0", True), ("5.9.0", True), ("5.23.4", True), ("5.24.0.dev0", False), ("6.0.0", False)],
)
def test_a_range_covers_every_patch_of_its_ends(version: str, covered: bool) -> None:
    assert TRANSFORMERS.covers(version) is covered


def test_the_package_declares_the_supported_versions() -> None:
    for extra in ("hf", "eval"):
        assert f'{extra} = ["transformers>={TRANSFORMERS.oldest}", ' in DECLARED
    assert f'requires-python = ">={PYTHON.oldest}"' in DECLARED
    listed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', DECLARED)
    assert (listed[0], listed[-1]) == PYTHON


def test_both_ends_of_the_range_passed_the_tests() -> None:
    rows = list(csv.DictReader((ROOT / ".github/assets/versions.csv").read_text(encoding="utf-8").splitlines()))
    tested = {release(row["transformers"]) for row in rows}
    assert (min(tested), max(tested)) == (release(TRANSFORMERS.oldest), release(TRANSFORMERS.newest))
    assert all(int(row["passed"]) > 400 and row["failed"] == "0" for row in rows)


@pytest.mark.parametrize(
    ("package", "version", "reported"),
    [
        ("transformers", "4.57.6", "4.57.6, outside the supported range 5.0 to 5.23"),
        ("transformers", "5.24.0", "5.24.0, outside the supported range 5.0 to 5.23"),
        ("transformers", "5.0.0", "5.0.0"),
        ("transformers", "not installed", "not installed"),
        ("python", "3.14.0", "3.14.0, outside the supported range 3.10 to 3.13"),
        ("einops", "0.1", "0.1"),
    ],
)
def test_doctor_reports_a_version_outside_the_range(
    package: str, version: str, reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor = importlib.import_module("attnscale.doctor")
    monkeypatch.setattr(doctor, "version_of", lambda name: version if name == package else "1.0")
    if package == "python":
        monkeypatch.setattr(doctor.platform, "python_version", lambda: version)
    found = {finding.subject: finding.value for finding in doctor.doctor().findings if finding.topic == "version"}
    assert found[package] == reported


def test_an_older_transformers_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text('__version__ = "4.57.6"\n')
    code = "import sys; sys.path.insert(0, sys.argv[1]); import attnscale.hf"
    finished = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert "MissingDependencyError: attnscale.hf needs transformers 5.0 or newer, and 4.57.6 is" in finished.stderr
