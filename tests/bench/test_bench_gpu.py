"""`attnscale bench gpu`: the command line. Not run on a GPU."""

from __future__ import annotations

import csv
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attnscale
import attnscale_kernels
from attnscale.bench.rows import Row
from attnscale.cli import main

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_gpu_it_says_what_to_do_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "gpu"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("BackendError: ")
    assert "--dry-run" in message
    assert list(tmp_path.iterdir()) == []


def test_the_script_is_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "scripts" / "bench_gpu.py"), run_name="__main__")
    assert stopped.value.code == 2
    assert "a CSV file, not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "script"),
    [
        ([], "python -m scripts.cost"),
        (["cpu", "--config", "plan.yaml"], "python -m scripts.cost"),
        (["gpu", "--static"], "python -m scripts.static --print"),
        (["--static"], "python -m scripts.static --print"),
    ],
)
def test_what_left_the_package_says_where_it_went(
    words: list[str], script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ArgumentError: `attnscale bench ")
    assert f"run `{script}` in a clone of the repository" in error
    assert (ROOT / script.split()[2].replace(".", "/") / "__main__.py").is_file()


def test_plots_into_a_file_are_refused_before_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", "gpu", "--dry-run", "--plots", str(tmp_path / "file")]) == 2
    assert "plots=" in capsys.readouterr().err


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python -m attnscale` in a shell that knows nothing of triton's interpreter."""
    environment = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "TRITON_INTERPRET")}
    roots = [str(Path(package.__file__).parents[1]) for package in (attnscale, attnscale_kernels)]
    environment |= {"NO_COLOR": "1", "COLUMNS": "150", "PYTHONIOENCODING": "utf-8"}
    environment["PYTHONPATH"] = os.pathsep.join([*roots, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "attnscale", *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, cwd=cwd, timeout=600)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("dry")
    return run("bench", "gpu", "--dry-run", "--output", "new/gpu.csv", "--plots", "plots", cwd=folder), folder


ON_CPU = {
    "attention forward": ["attnscale", "sdpa_flash", "sdpa_math", "flex", "eager"],
    "attention forward+backward": ["attnscale", "sdpa_flash", "sdpa_math", "eager"],
    "statistics forward": ["none", "lse+max", "entropy", "eager"],
    "adaptive forward": ["attnscale", "gap_adaptive", "gap_adaptive_blockwise"],
    "decode forward": ["attnscale", "attnscale_split", "sdpa_flash", "sdpa_math", "flex", "eager"],
}


def test_a_dry_run_checks_every_provider_that_runs_here(
    dry_run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    finished, folder = dry_run
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stderr == ""
    rows = read(folder / "new" / "gpu.csv")
    assert list(rows[0]) == list(Row.__dataclass_fields__)
    found: dict[str, list[str]] = {}
    for row in rows:
        names = found.setdefault(f"{row['kernel']} {row['mode']}", [])
        names += [row["provider"]] * (row["provider"] not in names)
    assert found == ON_CPU
    shares = [float(row["y"]) for row in rows if row["metric"] == "error_share"]
    assert len(shares) == 2 * sum(map(len, ON_CPU.values()))  # two lengths
    assert 0 < max(shares) <= 1
    assert all(float(row["low"]) <= float(row["y"]) <= float(row["high"]) for row in rows)


def test_a_dry_run_never_speaks_of_a_gpus_speed(dry_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    finished, folder = dry_run
    assert {row["device"] for row in read(folder / "new" / "gpu.csv")} == {"interpreter"}
    assert "dry run in triton's interpreter" in finished.stdout
    assert "meaningless" in finished.stdout
    for speed in ("TFLOP", "GB/s", "roofline"):
        assert speed not in finished.stdout
    for version in (2, 3):
        where = "(attention forward, attention forward+backward, decode forward)"
        assert f"skipped  flash_attn_{version} {where}: " in finished.stdout


def test_a_dry_run_draws_a_picture_for_every_suite(dry_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    folder = dry_run[1]
    assert {path.name for path in folder.iterdir()} == {"new", "plots"}
    pictures = sorted((folder / "plots").iterdir())
    assert [path.name for path in pictures] == ["adaptive.png", "attention.png", "decode.png", "statistics.png"]
    for path in pictures:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(content) > 10_000
