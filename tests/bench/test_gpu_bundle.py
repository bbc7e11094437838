"""Output of `attnscale bench gpu`: the bundle to attach to an issue, and the width of tables."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from attnscale.bench.gpu import providers
from attnscale.bench.gpu.machine import Profile
from attnscale.bench.gpu.problem import Provider, by_law
from attnscale.bench.gpu.providers import SUITES, Suite
from attnscale.bench.gpu.results import header, print_tables
from attnscale.cli import main

TINY = replace(Profile().tiny(), suites=("attention",), lengths=(8, 16), head_dims=(8,), check_length=9)


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a run with one provider."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(Profile, "tiny", lambda self: TINY)
    flex = Provider("flex", lambda problem: providers.eager(False, problem), by_law)
    monkeypatch.setitem(providers.SUITES, "attention", Suite((flex,), ("forward",), ("flex",)))
    path = tmp_path / "new" / "gpu.zip"
    assert main(["bench", "gpu", "--dry-run", "--output", str(tmp_path / "gpu.csv"), "--bundle", str(path)]) == 0
    return path


def test_one_command_makes_a_file_with_everything_a_reader_needs(bundle: Path) -> None:
    with zipfile.ZipFile(bundle) as archive:
        assert sorted(archive.namelist()) == [
            "doctor.txt", "environment.json", "gpu.csv", "plots/attention.png", "report.txt",
        ]  # fmt: skip
        texts = {name: archive.read(name).decode() for name in archive.namelist() if not name.endswith(".png")}
    assert texts["gpu.csv"] == (bundle.parents[1] / "gpu.csv").read_text()
    assert "attention · forward · D=8 float32" in texts["report.txt"]
    assert "backend" in texts["doctor.txt"]
    found = json.loads(texts["environment.json"])
    assert (found["device"], found["versions"]["torch"]) == ("interpreter", torch.__version__)
    assert found["profile"]["lengths"] == [8, 16]
    assert found["telemetry"] == {"mhz": None, "watts": None, "celsius": None}


def test_the_file_does_not_tell_whose_machine_it_is(bundle: Path) -> None:
    with zipfile.ZipFile(bundle) as archive:
        texts = [archive.read(name).decode() for name in archive.namelist() if not name.endswith(".png")]
    for private in (str(Path.home()), str(Path.cwd()), str(bundle.parent)):
        assert not [text for text in texts if private in text]


@pytest.mark.parametrize("path", ["results", "."])
def test_a_bundle_that_is_no_zip_is_refused_before_measuring(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", "--dry-run", "--bundle", path]) == 2
    assert f"bundle={path!r}" in capsys.readouterr().err


def printed(console_width: int, lines: list[tuple[str, ...]], columns: tuple[str, ...], heading: int) -> str:
    paper = io.StringIO()
    print_tables(Console(file=paper, width=console_width), "title", columns, lines, heading=heading)
    return paper.getvalue()


def test_the_report_of_a_gpu_fits_80_columns_with_every_name_whole() -> None:
    names = [provider.name for suite in SUITES.values() for provider in suite.providers]
    numbers = ("12345.6", "1234.5", "7999", "100%", "12345", "12.34", "0.55")
    lines = [("attention", "forward+backward", "D=128 bfloat16", "131072", name, *numbers) for name in names]
    text = printed(80, lines, header(dry_run=False), 3)
    assert all(name in text for name in names)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("attention · forward+backward · D=128 bfloat16") == 1
    assert text.count("131072") == 1


def test_a_table_wider_than_the_terminal_is_not_cut() -> None:
    cells = [("kernel", f"a name of many letters {index}", "x" * 60, "y" * 60) for index in range(2)]
    text = printed(40, cells, ("kernel", "variant", "first", "second"), 1)
    assert all(cell in text for line in cells for cell in line)
    assert "…" not in text
