"""Max retrieval: the task, the pairing of policies, resuming, and the committed results."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnscale._util.files import read_yaml
from attnscale.attention import scaled_dot_product_attention
from attnscale.errors import ArgumentError, ArgumentTypeError, MissingDependencyError
from attnscale.policies import Policy
from scripts.training import max_retrieval
from scripts.training.max_retrieval import (
    CLASSES,
    POLICIES,
    MaxFinder,
    MaxRetrieval,
    Projected,
    draw_items,
    measure,
    run,
    train,
)

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "experiment" / "max_retrieval.yaml"
TINY = MaxRetrieval(seeds=(0, 1), steps=100, width=16, lengths=(8, 16, 200), samples=50)


def tiny(output: Path, **changes: Any) -> MaxRetrieval:
    return replace(TINY, output=output, **changes)


@pytest.fixture(scope="module")
def model() -> MaxFinder:
    """A trained model, so that its answers depend on the temperature."""
    return train(0, replace(TINY, steps=300, width=32))


@pytest.fixture
def trained_seeds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the seeds that a run trains."""
    seeds: list[int] = []

    def listening(seed: int, config: MaxRetrieval) -> MaxFinder:
        seeds.append(seed)
        return train(seed, config)

    monkeypatch.setattr(max_retrieval, "train", listening)
    return seeds


def test_a_run_writes_a_row_for_each_seed_policy_and_length_and_a_picture(tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    path = run(tiny(tmp_path / "out"), lambda done, total, _: heard.append((done, total)))
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert path == tmp_path / "out" / "max_retrieval.csv"
    expected = [(str(s), p, str(n)) for s in TINY.seeds for p in POLICIES for n in TINY.lengths]
    assert [(row["seed"], row["policy"], row["length"]) for row in rows] == expected
    assert {row["samples"] for row in rows} == {"50"}
    expected_accuracies = [
        f"{row.accuracy:.6f}" for seed in TINY.seeds for row in measure(train(seed, TINY), seed, TINY)
    ]
    assert [row["accuracy"] for row in rows] == expected_accuracies
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert heard == [(0, 2), (1, 2), (2, 2)]


KILLED = """
import os, signal, sys
from scripts.training.max_retrieval import MaxRetrieval, run
config = MaxRetrieval(seeds=(0, 1), steps=100, width=16, lengths=(8, 16, 200), samples=50, output=sys.argv[1])
run(config, lambda done, total, _: os.kill(os.getpid(), signal.SIGKILL) if done == 1 else None)
"""


def test_a_killed_run_continues_and_gives_the_same_bytes(tmp_path: Path, trained_seeds: list[int]) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "killed")], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "killed").rglob("*.*")] == ["seed_0.json"]
    resumed = run(tiny(tmp_path / "killed"))
    assert trained_seeds == [1]
    assert resumed.read_bytes() == run(tiny(tmp_path / "whole")).read_bytes()
    assert trained_seeds == [1, 0, 1]


def test_a_lost_cell_is_measured_again_alone(tmp_path: Path, trained_seeds: list[int]) -> None:
    first = run(tiny(tmp_path)).read_bytes()
    (tmp_path / "cells" / "seed_1.json").unlink()
    (tmp_path / "max_retrieval.csv").unlink()
    assert run(tiny(tmp_path)).read_bytes() == first
    assert trained_seeds == [0, 1, 1]


@pytest.mark.parametrize(
    "change",
    [{"steps": 101}, {"samples": 51}, {"lengths": (8,)}, {"policies": tuple(reversed(TINY.policies))}],
    ids=str,
)
def test_a_cell_of_another_configuration_is_not_used(
    change: dict[str, Any], tmp_path: Path, trained_seeds: list[int]
) -> None:
    run(tiny(tmp_path, seeds=(0,)))
    changed = run(tiny(tmp_path, seeds=(0,), **change)).read_bytes()
    assert trained_seeds == [0, 0]
    assert changed == run(tiny(tmp_path / "fresh", seeds=(0,), **change)).read_bytes()


def test_more_seeds_reuse_the_cells_of_fewer(tmp_path: Path, trained_seeds: list[int]) -> None:
    run(tiny(tmp_path, seeds=(1,)))
    run(tiny(tmp_path, seeds=(0, 1)))
    assert trained_seeds == [1, 0]


def test_the_answer_is_the_class_of_the_largest_priority() -> None:
    items, answers = draw_items(64, 7, torch.Generator().manual_seed(0))
    assert items.shape == (64, 7, 1 + CLASSES)
    for row, answer in zip(items.tolist(), answers.tolist(), strict=True):
        largest = max(row, key=lambda item: item[0])
        assert largest[1 + answer] == 1.0
        assert sum(largest[1:]) == 1.0


def test_training_learns_the_task(model: MaxFinder) -> None:
    (row,) = measure(model, 0, replace(TINY, lengths=(16,), samples=512, policies=("constant",)))
    assert row.accuracy > 0.6


def test_the_generator_of_the_caller_stays_as_it_is() -> None:
    before = torch.get_rng_state()
    measure(train(0, TINY), 0, TINY)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_gives_one_model_and_another_seed_another() -> None:
    first, again, other = (train(seed, TINY).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["query"], other["query"])


def test_all_policies_answer_the_same_questions(model: MaxFinder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, list[Projected]] = {}
    answer = MaxFinder.answer

    def listening(self: MaxFinder, projected: Projected, policy: Policy) -> torch.Tensor:
        asked.setdefault(id(policy), []).append(projected)
        return answer(self, projected, policy)

    monkeypatch.setattr(MaxFinder, "answer", listening)
    monkeypatch.setattr(max_retrieval, "ITEMS", 400)
    measure(model, 0, TINY)
    first, *others = asked.values()
    assert len(others) == len(POLICIES) - 1
    assert [projected.key.shape[2] for projected in first] == [8, 16, 16, *25 * [200]]
    for other in others:
        assert all(mine is theirs for mine, theirs in zip(first, other, strict=True))


def test_floored_laws_are_constant_up_to_the_trained_length_and_not_beyond(model: MaxFinder) -> None:
    config = replace(TINY, policies=("constant", "sqrt_log", "log", "log_squared", "power"), samples=999)
    rows = measure(model, 0, config)
    by_length = {n: [row.accuracy for row in rows if row.length == n] for n in config.lengths}
    assert len(set(by_length[8])) == len(set(by_length[16])) == 1
    assert by_length[8] != by_length[16]
    assert len(set(by_length[200])) > 1


def test_lengths_and_policies_measured_beside_a_number_do_not_change_it(model: MaxFinder) -> None:
    (alone,) = measure(model, 0, replace(TINY, lengths=(200,), policies=("log",)))
    assert alone in measure(model, 0, TINY)


def test_each_seed_has_questions_of_its_own(model: MaxFinder) -> None:
    config = replace(TINY, policies=("constant",), samples=999)
    first, second = ([row.accuracy for row in measure(model, seed, config)] for seed in (0, 1))
    assert first != second


@pytest.mark.parametrize(
    ("name", "at_8", "at_16384"),
    [("constant", 1, 1), ("sqrt_log", 1, 1.870829), ("log", 1, 3.5), ("log_squared", 1, 12.25), ("power", 1, 32)],
)
def test_laws_are_anchored_at_16_with_a_floor(name: str, at_8: float, at_16384: float) -> None:
    policy: Any = MaxRetrieval().policy(name)
    assert policy(8).item() == pytest.approx(at_8)
    assert policy(16).item() == 1.0
    assert policy(16384).item() == pytest.approx(at_16384)


@pytest.mark.parametrize("length", [2, 16, 4096])
def test_the_argmax_policy_takes_the_value_of_the_largest_score(model: MaxFinder, length: int) -> None:
    with torch.no_grad():
        query, key, value = model.project(draw_items(32, length, torch.Generator().manual_seed(length))[0])
        scores = (query.double() @ key.double().mT)[:, 0, 0]  # [32, length]
        gaps = scores.topk(2).values.diff().abs()[:, 0] / scores.abs().amax(-1)
        clear = gaps > 32 * torch.finfo(torch.float32).eps  # fp32 does not resolve closer scores
        found = scaled_dot_product_attention(query, key, value, policy=MaxRetrieval().policy("argmax"))[:, 0, 0]
        expected = value[torch.arange(32), 0, scores.argmax(-1)]
    assert clear.sum() > 16
    torch.testing.assert_close(found[clear], expected[clear])
    soft = scaled_dot_product_attention(query, key, value)[:, 0, 0]
    assert not torch.allclose(soft[clear], expected[clear])


def test_batches_are_small_enough_for_the_memory(model: MaxFinder, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, int]] = []

    def listening(batch: int, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        drawn.append((batch, length))
        return draw_items(batch, length, generator)

    monkeypatch.setattr(max_retrieval, "draw_items", listening)
    monkeypatch.setattr(max_retrieval, "ITEMS", 256)
    measure(model, 0, replace(TINY, lengths=(8, 300), samples=50))
    assert drawn == [(32, 8), (18, 8), *50 * [(1, 300)]]


@pytest.mark.parametrize(
    ("field", "value", "kind", "quoted"),
    [
        ("policies", ["constant", "logs"], ArgumentError, "policies='logs' is not accepted: expected some of constant"),
        ("policies", [], ArgumentError, r"policies=\[\] is not accepted"),
        ("policies", "log", ArgumentTypeError, r"policies='log' \(str\) is not accepted: expected a list"),
        ("policies", [["log"]], ArgumentError, r"policies=\['log'\] is not accepted: expected some of"),
        ("lengths", [16, 1], ArgumentError, "lengths=1 is not accepted: expected an int from 2 to 1048576"),
        ("lengths", [16.0], ArgumentTypeError, r"lengths=16\.0 \(float\) is not accepted: expected an int"),
        ("lengths", [16, 16], ArgumentError, r"lengths=\[16, 16\] is not accepted"),
        ("seeds", [], ArgumentError, r"seeds=\[\] is not accepted"),
        ("seeds", 0, ArgumentTypeError, r"seeds=0 \(int\) is not accepted: expected a list"),
        ("seeds", [-1], ArgumentError, "seeds=-1 is not accepted: expected an int from 0 to 4093"),
        ("seeds", [True], ArgumentTypeError, r"seeds=True \(bool\) is not accepted"),
        ("steps", 0, ArgumentError, "steps=0 is not accepted: expected an int from 1"),
        ("width", "64", ArgumentTypeError, r"width='64' \(str\) is not accepted: expected an int from 1"),
        ("train_length", 1, ArgumentError, "train_length=1 is not accepted: expected an int from 2"),
        ("samples", 0, ArgumentError, "samples=0 is not accepted: expected an int from 1"),
    ],
)
def test_bad_values_are_quoted_with_what_is_accepted(
    field: str, value: object, kind: type[Exception], quoted: str
) -> None:
    with pytest.raises(kind, match=quoted):
        MaxRetrieval(**{field: value})  # type: ignore[arg-type]


def test_without_matplotlib_the_run_says_so_before_it_trains(
    tmp_path: Path, trained_seeds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"pip install matplotlib pandas"):
        run(tiny(tmp_path / "out"))
    assert trained_seeds == []
    assert not (tmp_path / "out").exists()


def test_the_number_of_threads_is_that_of_before(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run(tiny(tmp_path, seeds=(0,)))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_the_configuration_is_the_default_and_opens_with_three_comment_lines() -> None:
    lines = CONFIG.read_text(encoding="utf-8").splitlines()
    assert all(line.startswith("# ") and len(line) <= 120 for line in lines[:3])
    assert lines[1] == "# python -m scripts.training configs/experiment/max_retrieval.yaml"
    assert lines[2].startswith(lines[1] + " ")
    content = read_yaml(CONFIG)
    assert content.pop("experiment") == "max_retrieval"
    assert MaxRetrieval(**content) == MaxRetrieval()
    override, _, value = lines[2].removeprefix(lines[1] + " ").partition("=")
    assert MaxRetrieval(**content | {override: json.loads(value)}) != MaxRetrieval()


def test_the_committed_table_is_complete_and_its_models_solve_the_task_they_were_trained_on() -> None:
    config = MaxRetrieval()
    with (ROOT / ".github" / "assets" / "max_retrieval.csv").open(newline="", encoding="utf-8") as file:
        rows = {(int(r["seed"]), r["policy"], int(r["length"])): float(r["accuracy"]) for r in csv.DictReader(file)}
    assert set(rows) == {(s, p, n) for s in config.seeds for p in config.policies for n in config.lengths}
    assert all(rows[seed, "constant", config.train_length] >= 0.95 for seed in config.seeds)
