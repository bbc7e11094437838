"""A selection of the cases on each target, executed instruction by instruction; `make compiled` runs all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launch_tensors import outputs_of

from compiled.cases import CASES
from compiled.execution import NAN, examine, executor_of, run_launches
from compiled.known import KNOWN, are_known
from compiled.launching import Kernel, compile_cases
from compiled.memory import Finding
from compiled.mutations import examine_mutants
from compiled.reasons import UNKNOWN
from scripts.static.targets import TARGETS as DEVICES

LIBRARIES = {
    "sm_80": "compiled.ptx.execute.library",
    "sm_90": "compiled.ptx.execute.library",
    "gfx942": "compiled.amd.core.library",
}
SELECTION = (
    "forward bf16 D64 causal",
    "forward bf16 D128 causal",
    "forward fp32 D32 left padding",
    "forward bf16 D64 padding, NaN in hidden keys",
    "forward bf16 D128 mask",
    "forward bf16 D64 listed mask",
    "forward bf16 D64 bias, softcap, sinks, dropout",
    "forward fp16 D64 winner, mask",
    "backward fp16 D64 causal",
    "backward bf16 D128 mask",
    "decode bf16 D64 padding, sinks, winner, 3 splits",
    "decode fp16 D64 NaN in hidden keys, 3 splits",
    "gaps fp16 D64 causal",
    "softmax bf16 n = 1024, mask, bias, counts",
    "softmax fp32 n = 129",
    "stock row softmax",
    "stock matrix product bf16",
)
# Products of both kinds of factors, bulk copies with one and two barrier objects, moved registers, and what is known.
SELECTIONS = {
    "sm_80": SELECTION,
    "sm_90": (
        "forward bf16 D64 causal",
        "forward bf16 D64 padding, NaN in hidden keys",
        "forward bf16 D64 bias",
        "forward bf16 D64 listed mask",
        "backward fp16 D64 causal",
        "backward bf16 D128 mask",
        "gaps fp16 D64 causal",
        "stock matrix product tf32",
        "stock matrix product bf16",
    ),
    "gfx942": SELECTION,
}


Compiled = Callable[[str], dict[str, list[Kernel]]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Compiled:
    """The kernels of the selection of a target; Triton's cache is kept in pytest's."""
    kept = getattr(pytestconfig, "cache", None)  # missing with -p no:cacheprovider
    cache = tmp_path_factory.mktemp("triton") if kept is None else Path(kept.mkdir("triton"))
    return functools.cache(lambda target: compile_cases(SELECTIONS[target], target, cache))


@pytest.mark.parametrize(("target", "name"), [(target, name) for target, names in SELECTIONS.items() for name in names])
def test_a_compiled_case_is_right_and_nothing_is_reported(compiled: Compiled, target: str, name: str) -> None:
    report = examine(name, target, compiled(target)[name])
    assert report.right, str(report)


@pytest.mark.parametrize(
    ("target", "name"), [(x, name) for x, names in SELECTIONS.items() for name in names if "NaN" in name]
)
def test_a_repair_of_finite_numbers_is_reported(
    compiled: Compiled, target: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compiled.calls._is_finite", lambda x: True)  # the NaN that are planted make a repair run
    report = examine(name, target, compiled(target)[name])
    assert {problem.finding.kind for problem in report.problems} == {"REPAIRED"}


@pytest.mark.parametrize("target", SELECTIONS)
def test_mutants_are_caught_or_explained(compiled: Compiled, target: str) -> None:
    name = "stock matrix product bf16"
    outcomes = list(examine_mutants(name, target, 1, compiled(target)[name]))
    assert any(outcome.found for outcome in outcomes)
    for outcome in outcomes:
        assert outcome.caught or (outcome.reason and outcome.reason.words != UNKNOWN), outcome.mutant.change


def test_masks_exchange_little_more_than_a_causal_rule(compiled: Compiled) -> None:
    target = "sm_80"  # shuffles are an instruction of CUDA
    kernels = compiled(target)
    # Products of a warp per step over keys: 16 rows of 64 keys at D = 64 and of 32 keys at D = 128, for both matrices.
    for name, most in (
        ("forward bf16 D64 causal", 8),
        ("forward bf16 D128 mask", 24),
        ("forward bf16 D64 listed mask", 32),
        ("forward fp16 D64 winner, mask", 40),
    ):
        counts = examine(name, target, kernels[name]).counts["flash_forward_kernel"]
        steps = sum(count for opcode, count in counts.items() if opcode.startswith("mma.")) / 64
        shuffles = sum(count for opcode, count in counts.items() if opcode.startswith("shfl."))
        assert shuffles / steps <= most, f"{name}: {shuffles / steps:.1f} shuffles per warp and step"
        assert counts["bar.sync"] / steps <= 6, f"{name}: {counts['bar.sync'] / steps:.1f} barriers per warp and step"


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("sm_80", "stock row softmax"),
        ("sm_80", "softmax fp32 n = 129"),
        ("sm_90", "stock matrix product bf16"),
        ("gfx942", "stock row softmax"),
        ("gfx942", "softmax fp32 n = 129"),
    ],
)
def test_numpy_gives_the_same_bits_as_c(
    compiled: Compiled, target: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = compiled(target)
    results = []
    for in_c in (True, False):
        if not in_c:
            monkeypatch.setattr(LIBRARIES[target], lambda: None)
        call = CASES[name].call(DEVICES[target].resources)
        executions, found = run_launches(call, kernels[name], executor_of(target), NAN, [])
        assert found == 0
        outputs = [x.contiguous().view(torch.uint8) for launch in call.launches for x in outputs_of(launch)]
        results.append((outputs, [execution.counts for execution in executions]))
    (in_c, counts), (in_numpy, others) = results
    assert all(torch.equal(one, other) for one, other in zip(in_c, in_numpy, strict=True))
    assert counts == others


def test_known_findings_are_exactly_the_reported_ones() -> None:
    (target, name), known = next(iter(KNOWN.items()))
    finding = Finding(known.kind, 0, 0, 0, 0, 0)
    problems = [(known.kernel, finding, "line 1: cp.async.bulk.tensor.4d")] * known.count
    assert are_known(target, name, problems, known.count) is True
    assert are_known(target, "another case", problems, known.count) is None
    assert are_known(target, name, [], 0) is False
    assert are_known(target, name, problems, known.count + 1) is False
    other = [*problems[1:], (known.kernel, finding._replace(kind="RACE"), problems[0][2])]
    assert are_known(target, name, other, known.count) is False
    elsewhere = [*problems[1:], (known.kernel, finding, "line 2: st.shared.b32")]
    assert are_known(target, name, elsewhere, known.count) is False
