"""The programs in scripts/examples run at a small size and print their results."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import RANKS, group_threads, join, on_two_ranks
from torch import distributed

from attnscale._util import state
from attnscale.diagnostics import Record, read_jsonl

EXAMPLES = Path(__file__).resolve().parents[1] / "scripts" / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Run an example as a program in its own folder; returns its output."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        yield run


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_it_is_called(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    assert f"\npython scripts/examples/{path.name}" in text


def test_there_are_six() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "swap_into_a_model",
        "train_with_a_monitor",
        "extend_a_context",
        "policy_of_your_own",
        "score_family",
        "train_distributed",
    }


def test_a_model_is_swapped_measured_saved_and_put_back(run, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    printed = run("swap_into_a_model", "--reference-length", "8", "--contexts", "8", "32", "--output", "changed")
    assert "selected: β = " in printed
    (short,), (long,) = (
        [line.split() for line in printed.splitlines() if line.split()[:1] == [n]] for n in ("8", "32")
    )
    assert short[1:] == ["1.00", short[2], short[2]]  # no change up to the reference length
    assert long[1] == "1.67"
    assert "the model is stock again: True" in printed
    assert (tmp_path / "changed" / "config.json").is_file()


def test_a_training_is_watched(run, tmp_path: Path) -> None:
    printed = run("train_with_a_monitor", "--steps", "2", "--every", "1", "--output", "run.jsonl")
    assert "step    1  loss" in printed
    records = [found for found in read_jsonl(tmp_path / "run.jsonl") if isinstance(found, Record)]
    assert {record.step for record in records} == {0, 1}
    assert len({record.layer for record in records}) == 6


def test_a_model_is_trained_in_each_parallel_way() -> None:
    # In a separate process: process groups and the torchrun environment outlive a run.
    ways = [["--parallel", way] for way in ("ddp", "fsdp", "tp", "cp")]
    program = str(EXAMPLES / "train_distributed.py")
    code = (
        f"import runpy, sys\nfor way in {ways}:\n    sys.argv = ['train', '--steps', '2', *way]\n"
        f"    runpy.run_path({program!r}, run_name='__main__')"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for _, way in ways:
        assert f"{way}, 1 processes: loss 4.36" in printed


def test_two_processes_of_torchrun_have_the_loss_of_one_and_end() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(EXAMPLES / "train_distributed.py"), "--steps", "2", "--parallel", "cp", "--method", "ulysses"]
    printed = subprocess.run([*launch, *program], capture_output=True, text=True, check=True, timeout=120).stdout
    assert "cp, 2 processes: loss 4.36" in printed


WAYS = (
    ("ddp",),
    ("cp", "--method", "gather"),
    ("cp", "--method", "ulysses"),
    ("cp", "--method", "ring"),
    ("fsdp",),
    ("tp",),
)


def trained_in_each_way(rank: int) -> dict[tuple[str, ...], tuple[str, list[str]]]:
    """The output of the example in one of two processes, and the threads of its group after destruction."""
    destroy, found, left = distributed.destroy_process_group, {}, []
    distributed.barrier()  # both have joined
    destroy()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}

    def recorded() -> None:
        before = group_threads()
        destroy()
        left[:] = group_threads() if before else ["there were none"]

    distributed.destroy_process_group = recorded
    gc.freeze()  # the example collects only its own objects
    for way in WAYS:
        folder = Path(os.environ["RANKS_FOLDER"], "-".join(way))
        folder.mkdir(exist_ok=True)
        join(folder, rank, RANKS)
        sys.argv = ["train", "--steps", "2", "--parallel", *way]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(EXAMPLES / "train_distributed.py"), run_name="__main__")
        found[way] = printed.getvalue(), list(left)
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    return on_two_ranks(trained_in_each_way, tmp_path_factory.mktemp("pair"))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted on Linux")
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_in_each_parallel_way_two_processes_have_the_loss_of_one_and_end_their_group(
    way: tuple[str, ...], pair
) -> None:
    (printed, left), (_, left_in_other) = (one[way] for one in pair)
    assert f"{way[0]}, 2 processes: loss 4.36" in printed
    if way[0] in ("ddp", "cp"):  # torch keeps the meshes of DTensors
        assert left == left_in_other == []


def test_contexts_are_extended(run) -> None:
    sizes = ("--length", "8", "--contexts", "8", "64", "--steps", "30", "--samples", "64")
    lines = run("extend_a_context", *sizes).splitlines()
    table = {name: numbers for name, *numbers in (line.split() for line in lines[2:])}
    assert set(table) == {"constant", "sqrt_log", "log", "log_squared"}
    assert len({numbers[0] for numbers in table.values()}) == 1  # β = 1 for every law at the trained length
    assert all(0 <= int(number.rstrip("%")) <= 100 for numbers in table.values() for number in numbers)


def test_a_policy_of_ones_own_is_named_trained_saved_and_loaded(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "REGISTERED_POLICIES", {})
    printed = run("policy_of_your_own", "--steps", "2", "--length", "20", "--folder", "own")
    assert "same output: True" in printed
    assert (tmp_path / "own" / "slope_beyond.yaml").is_file()


def test_a_score_family_gets_its_law(run) -> None:
    assert "policy log." in run("score_family")
