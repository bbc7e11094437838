"""Every way to be parallel, every kind of policy, causal and packed: the same numbers as in one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from parallel_model import Run
from ranks import on_ranks
from same_records import assert_same

from attnscale.diagnostics import Record

CONTEXT_PARALLEL = ("cp-gather", "cp-ulysses", "cp-ring")
POLICIES = ("constant", "log", "ssmax", "gap_adaptive")
MODES = ("ddp", "fsdp2", "tp", *CONTEXT_PARALLEL)
# As attnscale/distributed/README.md writes it down.
TWO = list(itertools.product(MODES, POLICIES, (False, True)))
FOUR = list(itertools.product(CONTEXT_PARALLEL, ("log", "gap_adaptive"), (True,)))
SCALARS = ("query_gradient", "key_gradient", "value_gradient", "output_gradient", "gain")


def train(cases: list[tuple[str, str, bool]]) -> dict[tuple[str, str, bool], dict[str, Any]]:
    return {case: Run(*case).train() for case in cases}


def train_on_two(rank: int) -> dict:
    return train(TWO)


def train_on_four(rank: int) -> dict:
    return train(FOUR)


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, bool], dict[str, Any]]:
    return {(policy, packed): Run("alone", policy, packed).train() for policy in POLICIES for packed in (False, True)}


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict]:
    return on_ranks(train_on_two, tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> list[dict]:
    return on_ranks(train_on_four, tmp_path_factory.mktemp("four"), 4)


def assert_equal(found: dict[str, Any], expected: dict[str, Any], mode: str, policy: str) -> None:
    # β is fp32, and so are the sums over sequences of its gradient, on which the parameters of ssmax hang.
    tolerance = 1e-7 if policy == "ssmax" else 1e-10
    for part in ("gradients", "state"):
        assert found[part].keys() == expected[part].keys()
        for name, value in expected[part].items():
            torch.testing.assert_close(
                found[part][name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
    torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=10 * tolerance)
    records = [[Record.from_dict(record) for record in run["records"]] for run in (found, expected)]
    if policy == "ssmax":  # at the last step, the largest Λ is the reciprocal of a gap that differs by a rounding
        records = [[record for record in run if record.step == 0] for run in records]
    assert [record.step for record in records[0]] == [record.step for record in records[1]]
    # The angle ratio is that of pairs of rows in one process.
    angles = () if mode.startswith("cp") else ("angle_ratio",)
    assert_same(*records, scalars=(*SCALARS, *angles), tolerance=1e-5)


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_processes_train_as_one_does(case, alone, two):
    mode, policy, packed = case
    for rank in two:
        assert_equal(rank[case], alone[policy, packed], mode, policy)


@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_processes_train_as_one_does(case, alone, four):
    mode, policy, packed = case
    for rank in four:
        assert_equal(rank[case], alone[policy, packed], mode, policy)
