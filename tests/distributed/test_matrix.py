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

Vectors = dict[str, torch.Tensor]
CONTEXT_PARALLEL = ("cp-gather", "cp-ulysses", "cp-ring")
POLICIES = ("constant", "log", "ssmax", "gap_adaptive")
MODES = ("ddp", "fsdp2", "tp", *CONTEXT_PARALLEL)
# As attnscale/distributed/README.md writes it down.
TWO = list(itertools.product(MODES, POLICIES, (False, True)))
FOUR = list(itertools.product(CONTEXT_PARALLEL, ("log", "gap_adaptive"), (False, True)))
# Besides, in bf16 and for a few steps: what needs no style of ours.
HALF = list(itertools.product(("ddp", "fsdp2"), ("ssmax", "gap_adaptive")))
HALF_STEPS = 5
SCALARS = ("query_gradient", "key_gradient", "value_gradient", "output_gradient", "gain")


def run(mode: str, policy: str, packed: bool) -> dict[str, Any]:
    """Twenty steps in fp64, and again in fp32 without a monitor."""
    narrow = Run(mode, policy, packed, torch.float32).train(monitored=False)
    return Run(mode, policy, packed).train() | {"fp32": rounded(narrow)}


def numbers(trained: dict[str, Any]) -> Vectors:
    """Every number of a run by name."""
    return {"logits": trained["logits"]} | trained["first"] | trained["state"]


def rounded(trained: dict[str, Any]) -> Vectors:
    """Output and gradients of the first step, and all that is learned after the last, each as one vector.

    The error of one run in fp32 measures that of another where it is the mean of many roundings that are made
    independently: over all numbers of a kind, not over a tensor, of which one with four numbers may be right by chance.
    So it is after twenty steps, too, as long as a step does not amplify the errors of those before: the learning rate
    is one with which they stay a few roundings of the parameters, which `assert_equal` checks. Where training amplifies
    them, they all point in one direction, and their size is a single draw.
    """
    gradients = [x.flatten() for name, x in trained["first"].items() if name != "output"]
    learned = [x.flatten().double() for x in trained["state"].values()]  # running estimates are fp64
    return {"output": trained["first"]["output"], "gradients": torch.cat(gradients), "learned": torch.cat(learned)}


def train(cases: list[tuple[str, str, bool]]) -> dict[tuple[str, str, bool], dict[str, Any]]:
    return {case: run(*case) for case in cases}


def train_on_two(rank: int) -> dict:
    return train(TWO) | {case: train_in_bf16(*case) for case in HALF}


def train_in_bf16(mode: str, policy: str) -> dict[str, Any]:
    trained = Run(mode, policy, packed=False, dtype=torch.bfloat16).train(HALF_STEPS)
    kept = {name: x.dtype for name, x in trained["state"].items() if "policy" in name}
    return {"rounded": rounded(trained), "records": trained["records"], "kept": kept}


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
    true, values = numbers(expected), numbers(found)
    assert values.keys() == true.keys()
    for name, value in values.items():
        assert (value - true[name]).abs().max() <= 1e-10, name
    records = [[Record.from_dict(record) for record in run["records"]] for run in (found, expected)]
    assert [record.step for record in records[0]] == [record.step for record in records[1]]
    # The angle ratio is that of pairs of rows in one process.
    angles = () if mode in ("cp-gather", "cp-ring") else ("angle_ratio",)
    assert_same(*records, scalars=(*SCALARS, *angles), tolerance=1e-5)
    true, eps = rounded(expected), torch.finfo(torch.float32).eps
    assert size(expected["fp32"]["learned"] - true["learned"]) <= 4 * eps * size(true["learned"])
    assert_rounded_alike(found["fp32"], expected["fp32"], true, eps)


def assert_rounded_alike(found: Vectors, alone: Vectors, true: Vectors, eps: float) -> None:
    """Errors are at most twice those of one process in the same dtype, plus one rounding."""
    for name, value in true.items():
        error, own = (size(vectors[name] - value) for vectors in (found, alone))
        assert error <= 2 * own + eps * size(value), (name, error, own)


def size(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


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


@pytest.mark.parametrize("case", HALF, ids=str)
def test_policies_estimates_and_monitors_work_unchanged_in_bf16(case, two):
    _, policy = case
    alone = train_in_bf16("alone", policy)
    true = rounded(Run("alone", policy, packed=False).train(HALF_STEPS, monitored=False))
    for rank in two:
        found = rank[case]
        assert_rounded_alike(found["rounded"], alone["rounded"], true, torch.finfo(torch.bfloat16).eps)
        # A learned policy is cast with its model; differences of running means would not survive it.
        assert found["kept"] == alone["kept"]
        assert set(found["kept"].values()) == {torch.float64 if policy == "gap_adaptive" else torch.bfloat16}
        for one, other in zip(found["records"], alone["records"], strict=True):
            assert (one["layer"], one["head"], one["step"]) == (other["layer"], other["head"], other["step"])
            assert one["forward"]["visible"] == other["forward"]["visible"]
