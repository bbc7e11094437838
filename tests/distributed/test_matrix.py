"""Every way to be parallel, every kind of policy, causal and packed: the same numbers as in one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from oracle import assert_within_budget
from parallel_model import BATCH, Run
from ranks import on_ranks
from same_records import assert_same

from attnscale.diagnostics import Record

CONTEXT_PARALLEL = ("cp-gather", "cp-ulysses", "cp-ring")
POLICIES = ("constant", "log", "ssmax", "gap_adaptive")
MODES = ("ddp", "fsdp2", "tp", *CONTEXT_PARALLEL)
# As attnscale/distributed/README.md writes it down.
TWO = list(itertools.product(MODES, POLICIES, (False, True)))
FOUR = list(itertools.product(CONTEXT_PARALLEL, ("log", "gap_adaptive"), (False, True)))
SCALARS = ("query_gradient", "key_gradient", "value_gradient", "output_gradient", "gain")


def run(mode: str, policy: str, packed: bool) -> dict[str, Any]:
    """Twenty steps in fp64, and again in fp32 without a monitor; alone, with sequences in every order of turn.

    After so many steps an error in fp32 is one of a wide distribution, of which one run would be a single draw.
    """
    turns = range(BATCH if mode == "alone" else 1)
    narrow = [Run(mode, policy, packed, torch.float32, first).train(monitored=False) for first in turns]
    return Run(mode, policy, packed).train() | {"fp32": [numbers(one) for one in narrow]}


def numbers(trained: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Logits, gradients of the first step and the state after the last, by name."""
    found = {"logits": trained["logits"]}
    return found | {f"{part} {name}": x for part in ("gradients", "state") for name, x in trained[part].items()}


def train(cases: list[tuple[str, str, bool]]) -> dict[tuple[str, str, bool], dict[str, Any]]:
    return {case: run(*case) for case in cases}


def train_on_two(rank: int) -> dict:
    return train(TWO)


def train_on_four(rank: int) -> dict:
    return train(FOUR)


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, bool], dict[str, Any]]:
    return {(policy, packed): run("alone", policy, packed) for policy in POLICIES for packed in (False, True)}


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict]:
    return on_ranks(train_on_two, tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> list[dict]:
    return on_ranks(train_on_four, tmp_path_factory.mktemp("four"), 4)


def assert_equal(found: dict[str, Any], expected: dict[str, Any], mode: str) -> None:
    true = numbers(expected)
    for name, value in numbers(found).items():
        torch.testing.assert_close(value, true[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    records = [[Record.from_dict(record) for record in run["records"]] for run in (found, expected)]
    assert [record.step for record in records[0]] == [record.step for record in records[1]]
    # The angle ratio is that of pairs of rows in one process.
    angles = () if mode in ("cp-gather", "cp-ring") else ("angle_ratio",)
    assert_same(*records, scalars=(*SCALARS, *angles), tolerance=1e-5)
    # In fp32 errors are at most twice those of one process. Running estimates are fp64 sums of fp32 numbers.
    (parts,) = found["fp32"]
    own = {name: max(error(one[name], x) for one in expected["fp32"]) for name, x in true.items()}
    assert_within_budget({name: x.float() for name, x in parts.items()}, true, own, times=2)


def error(x: torch.Tensor, true: torch.Tensor) -> float:
    return (x.double() - true).square().mean().sqrt().item()


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_processes_train_as_one_does(case, alone, two):
    mode, policy, packed = case
    for rank in two:
        assert_equal(rank[case], alone[policy, packed], mode)


@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_processes_train_as_one_does(case, alone, four):
    mode, policy, packed = case
    for rank in four:
        assert_equal(rank[case], alone[policy, packed], mode)
