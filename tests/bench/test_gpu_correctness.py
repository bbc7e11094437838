"""`attnscale bench gpu` times only correct providers and reports the reasons for the others."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attnscale.bench.gpu import providers
from attnscale.bench.gpu.command import Session
from attnscale.bench.gpu.machine import HostClock, Machine, Profile, Telemetry
from attnscale.bench.gpu.problem import Answer, Attention, Problem, Provider, by_law, check_a_few_rows, verify
from attnscale.bench.gpu.providers import ADAPTIVE, BRACKET, POLICY, Group, Suite
from attnscale.bench.gpu.results import lines
from attnscale.cli import main
from attnscale.errors import BackendError

CPU = torch.device("cpu")
SMALL = Problem(2, 2, 1, 17, 17, 8, torch.float32, CPU, "log")
TINY = replace(Profile().tiny(), suites=("attention",), lengths=(8, 16), head_dims=(8,), check_length=9)
HERE = Machine(CPU, "interpreter", HostClock(), None, "torch")


def changed(change: Callable[[Answer, Problem], Answer], **options: object) -> Provider:
    """The eager provider with statistics, its scores not rounded, and something done to its answer."""

    def prepare(problem: Problem) -> Attention:
        attend = providers.eager(True, problem)

        def unrounded(*inputs: Tensor) -> Answer:
            answer = attend(*(x.float() for x in inputs))
            return change(answer._replace(output=answer.output.to(problem.dtype)), problem)

        return unrounded

    return Provider("changed", prepare, by_law, **options)  # type: ignore[arg-type]


def off_by(amount: float) -> Callable[[Answer, Problem], Answer]:
    return lambda answer, problem: answer._replace(output=answer.output + amount)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return 1.001 * gradient


def wrong_gradient(answer: Answer, problem: Problem) -> Answer:
    return answer._replace(output=_WrongGradient.apply(answer.output))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_who_computes_attention_is_right(dtype: torch.dtype, backward: bool) -> None:
    verdict = verify(providers.EAGER_STATISTICS, replace(SMALL, dtype=dtype), backward=backward)
    assert verdict.right
    assert 0 < verdict.share <= 1


@pytest.mark.parametrize(
    ("amount", "dtype", "right"),
    [
        (0.0, torch.float32, True),
        (1e-5, torch.float32, False),
        (1e-5, torch.float16, True),
        (0.1, torch.float16, False),
    ],
)
def test_what_may_be_wrong_is_measured_by_torchs_own_error_in_the_dtype(
    amount: float, dtype: torch.dtype, right: bool
) -> None:
    assert verify(changed(off_by(amount)), replace(SMALL, dtype=dtype), backward=False).right == right


def test_a_law_is_checked_as_such() -> None:
    # Standard attention is no attention under a law, nor the reverse.
    standard = providers.sdpa(torch.nn.attention.SDPBackend.MATH, SMALL)
    assert verify(Provider("sdpa", lambda _: standard), SMALL, backward=False).right
    assert not verify(Provider("sdpa", lambda _: standard, by_law), SMALL, backward=False).right
    assert not verify(replace(providers.EAGER, temperature=providers.SDPA[0].temperature), SMALL, backward=False).right


def test_a_wrong_gradient_shows_in_backward_only() -> None:
    assert verify(changed(wrong_gradient), SMALL, backward=False).right
    verdict = verify(changed(wrong_gradient), SMALL, backward=True)
    assert not verdict.right
    assert verdict.quantity in ("dq", "dk", "dv")


@pytest.mark.parametrize("name", ["lse", "max_logit", "entropy"])
def test_a_wrong_statistic_is_named(name: str) -> None:
    def spoil(answer: Answer, problem: Problem) -> Answer:
        return answer._replace(statistics={**answer.statistics, name: answer.statistics[name] + 0.01})

    verdict = verify(changed(spoil), SMALL, backward=False)
    assert (verdict.right, verdict.quantity) == (False, name)
    assert verdict.error == pytest.approx(0.01, rel=1e-2)


def test_what_is_no_number_is_not_right() -> None:
    verdict = verify(changed(off_by(float("nan"))), SMALL, backward=False)
    assert not verdict.right
    assert verdict.quantity == "output"


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.05, True), (0.98, False), (1.1 * BRACKET, False)])
def test_an_adaptive_temperature_must_lie_where_exact_gaps_put_it(factor: float, right: bool) -> None:
    low, _ = ADAPTIVE[1].bounds(SMALL, SMALL.inputs(backward=False))  # type: ignore[misc]
    beta = torch.where(low <= POLICY.floor, low, (factor * low).clamp(max=POLICY.ceiling)).float()

    def prepare(problem: Problem) -> Attention:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
            sharp = query * beta[..., None]
            return Answer(F.scaled_dot_product_attention(sharp, key, value, is_causal=True, enable_gqa=True))

        return attend

    provider = Provider("guess", prepare, lambda *_: beta, ADAPTIVE[1].bounds)
    verdict = verify(provider, SMALL, backward=False)
    assert verdict.right == right
    assert right or verdict.quantity == "β"


def test_a_gross_mistake_at_full_size_is_seen_in_the_last_rows() -> None:
    problem = replace(SMALL, queries=300, keys=300)
    inputs = problem.inputs(backward=False)
    output = providers.EAGER.prepare(problem)(*inputs.leaves).output
    assert check_a_few_rows(providers.EAGER, problem, inputs, output).right
    for broken in (0.0, float("nan")):
        spoiled = output.clone()
        spoiled[-1, -1, -1] = broken
        assert not check_a_few_rows(providers.EAGER, problem, inputs, spoiled).right
    adaptive = replace(providers.EAGER, bounds=ADAPTIVE[0].bounds)
    assert check_a_few_rows(adaptive, problem, inputs, output).right
    assert not check_a_few_rows(adaptive, problem, inputs, spoiled).right


def failing(error: Exception, *, at: int = 0) -> Callable[[Problem], Attention]:
    def prepare(problem: Problem) -> Attention:
        if problem.keys >= at:
            raise error
        return providers.eager(False, problem)

    return prepare


def provider(name: str, prepare: Callable[[Problem], Attention] | None = None, *, ours: bool = False) -> Provider:
    return Provider(name, prepare or (lambda problem: providers.eager(False, problem)), by_law, ours=ours)


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts other providers into the suite of attention."""

    def put(*chosen: Provider) -> None:
        names = tuple(provider.name for provider in chosen)
        monkeypatch.setitem(providers.SUITES, "attention", Suite(chosen, ("forward",), names))

    return put


GROUP = Group("attention", "forward", torch.float32, 8)


def test_a_provider_that_is_wrong_gets_no_speed(suite: Callable[..., None]) -> None:
    suite(provider("good"), replace(changed(off_by(0.01)), name="bad"), provider("also good"))
    rows, notes = Session(GROUP, TINY, HERE).measure()
    assert {row.provider for row in rows} == {"good", "also good"}
    assert {row.x for row in rows} == {8, 16}
    (note,) = notes
    assert (note.refused, note.provider) == (True, "bad")
    assert re.search(r"1\.0\de-02 of output .* \d\.\d\de-0\d \(9 keys", note.reason)


def test_a_provider_that_is_wrong_only_at_length_gets_no_speed_there(suite: Callable[..., None]) -> None:
    def cut(answer: Answer, problem: Problem) -> Answer:
        return answer if problem.keys < 16 else answer._replace(output=torch.zeros_like(answer.output))

    suite(provider("good"), replace(changed(cut), name="cut"))
    rows, notes = Session(GROUP, TINY, HERE).measure()
    assert {(row.provider, row.x) for row in rows} == {("good", 8), ("good", 16), ("cut", 8)}
    assert [(note.refused, note.provider) for note in notes] == [(True, "cut")]


@pytest.mark.parametrize("at", [0, 16])
def test_what_fails_is_left_out_but_ours_is_refused(at: int, suite: Callable[..., None]) -> None:
    broken = failing(RuntimeError("no such kernel\nat length"), at=at)
    suite(provider("good"), provider("theirs", broken), provider("ours", broken, ours=True))
    rows, notes = Session(GROUP, TINY, HERE).measure()
    assert [(note.refused, note.provider) for note in notes] == [(False, "theirs"), (True, "ours")]
    assert {note.reason for note in notes} == {"RuntimeError: no such kernel"}
    assert {row.x for row in rows if row.provider == "ours"} == ({8} if at else set())


def test_out_of_memory_is_left_out_whoever_it_is(suite: Callable[..., None]) -> None:
    suite(provider("good"), provider("large", failing(torch.OutOfMemoryError("much"), at=16), ours=True))
    _, notes = Session(GROUP, TINY, HERE).measure()
    assert [(note.refused, note.reason) for note in notes] == [(False, "out of memory at 16 keys")]


def test_gradients_are_checked_where_backward_is_measured(suite: Callable[..., None]) -> None:
    suite(provider("good"), replace(changed(wrong_gradient), name="bad"))
    for mode, right in (("forward", {"good", "bad"}), ("forward+backward", {"good"})):
        rows, _ = Session(GROUP._replace(mode=mode), TINY, HERE).measure()
        assert {row.provider for row in rows} == right


def test_the_command_refuses_loudly_and_exits_with_one(
    suite: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Profile, "tiny", lambda self: TINY)
    arguments = ["bench", "gpu", "--dry-run", "--output", str(tmp_path / "gpu.csv")]
    suite(provider("good"))
    assert main(arguments) == 0
    suite(provider("good"), replace(changed(off_by(0.01)), name="bad"))
    assert main(arguments) == 1
    printed = capsys.readouterr().out
    assert "incorrect  bad (attention forward): error 1.0" in printed
    with (tmp_path / "gpu.csv").open(newline="") as file:
        assert {row["provider"] for row in csv.DictReader(file)} == {"good"}


def test_the_state_of_the_card_stands_beside_every_length(
    suite: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    suite(provider("good"))
    monkeypatch.setattr(HostClock, "telemetry", lambda self: Telemetry(mhz=1980.0, watts=650.5))
    rows, _ = Session(GROUP, TINY, HERE).measure()
    assert [(row.x, row.metric, row.y) for row in rows if row.provider == "card"] == [
        (length, metric, value) for length in TINY.lengths for metric, value in (("mhz", 1980.0), ("watts", 650.5))
    ]
    assert {line[4] for line in lines(rows, dry_run=True)} == {"good"}


def test_what_cannot_be_timed_is_left_out(suite: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: HostClock, function: Callable[[], object]) -> float:
        raise BackendError("the host waits")

    suite(provider("good"))
    monkeypatch.setattr(HostClock, "seconds", refuse)
    rows, notes = Session(GROUP, replace(TINY, warm_up=1), HERE).measure()
    assert [row for row in rows if row.provider == "good"] == []
    assert [note.reason for note in notes] == ["BackendError: the host waits"]
