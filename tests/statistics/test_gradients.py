"""`StatsRequest(differentiable=True)`: gradients of row statistics, against fp64 autograd of the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from oracle import worst_row
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import attnscale
from attnscale import BackendError, StatsRequest, attention_with_stats, row_statistics
from attnscale.statistics.request import DIFFERENTIABLE

# torch's own, when its rules of forward mode are first imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
BATCH, HEADS, KV_HEADS, KEYS, DIM = 2, 4, 2, 12, 8
ALL = StatsRequest(differentiable=True)
ONE_EACH = {
    name: StatsRequest(**{other: other == name for other in DIFFERENTIABLE}, differentiable=True)
    for name in DIFFERENTIABLE
}
CAUSAL = torch.ones(KEYS, KEYS).tril().bool()
PADDING = torch.arange(KEYS) < torch.tensor([[4], [0]])  # of a causal call: rows 0 … 3 of sequence 0 see nothing
RULES: dict[str, tuple[dict[str, Any], Tensor]] = {
    "full": ({}, torch.ones(KEYS, KEYS).bool()),
    "causal": ({"is_causal": True}, CAUSAL),
    "window": ({"is_causal": True, "window": 4}, CAUSAL & ~CAUSAL.tril(-4)),
    "rows without keys": ({"is_causal": True, "key_padding": PADDING}, CAUSAL & ~PADDING[:, None, None]),
}


class Problem(NamedTuple):
    """Inputs of an attention call. Without `sinks` or `bias` the call has none."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: Tensor  # [H], of the policy: β = scale·ln n
    sinks: Tensor | None
    bias: Tensor | None

    @classmethod
    def random(cls, dtype: torch.dtype, *, sinks: bool = False, bias: bool = False) -> Problem:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

        rest = draw(HEADS) if sinks else None, draw(HEADS, KEYS, KEYS) if bias else None
        kv = BATCH, KV_HEADS, KEYS, DIM
        of_policy = draw(HEADS).abs().to(torch.promote_types(dtype, torch.float32)) + 0.3
        return cls(draw(BATCH, HEADS, KEYS, DIM), draw(*kv), draw(*kv), of_policy, *rest)

    def to(self, dtype: torch.dtype) -> Problem:
        return Problem._make(None if x is None else x.to(dtype) for x in self)

    def leaves(self) -> Problem:
        return Problem._make(None if x is None else nn.Parameter(x.detach().clone()) for x in self)

    def attend(self, request: StatsRequest, backend: str, rule: str, **options: Any) -> attnscale.AttentionOutput:
        given = {"sinks": self.sinks, "attn_mask": self.bias, "request": request, "backend": backend}
        qkv = self.query, self.key, self.value
        return attention_with_stats(*qkv, enable_gqa=True, policy=self.policy(), **RULES[rule][0], **given, **options)

    def policy(self) -> attnscale.Policy:
        policy = attnscale.build_policy("ssmax", num_heads=HEADS)
        policy.s = self.scale
        return policy


def written_out(problem: Problem, rule: str, softcap: float | None = None) -> dict[str, Tensor]:
    """Output and statistics in plain torch. A sink is one more key without a value.

    Scores and statistics are fp32 at least. Weights and output are rounded to the dtype, as in torch's attention.
    """
    wide = torch.promote_types(problem.query.dtype, torch.float32)
    query, key, value = (x.to(wide) for x in problem[:3])
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
    scores = query @ key.mT * DIM**-0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if problem.bias is None else scores + problem.bias.to(wide)
    seen = RULES[rule][1].expand(scores.shape)
    n = seen.sum(-1)
    place = torch.arange(KEYS) if rule == "window" else None  # elsewhere n gives the position
    logits = (scores * problem.policy()(n[:, :1], positions=place)[..., None]).masked_fill(~seen, -1e30)
    top = torch.where(n > 0, logits.amax(-1), -math.inf)
    if problem.sinks is not None:
        sink = problem.sinks.to(wide)[:, None, None].expand(*logits.shape[:3], 1)
        logits, value = torch.cat([logits, sink], -1), torch.nn.functional.pad(value, (0, 0, 0, 1))
    empty = (n == 0) if problem.sinks is None else torch.zeros_like(n, dtype=torch.bool)
    weights = logits.softmax(-1).masked_fill(empty[..., None], 0.0)
    lse = logits.logsumexp(-1)
    entropy = (lse - (weights * logits).sum(-1)).masked_fill(n == 0, 0.0)
    out = (weights.to(problem.query.dtype) @ value.to(problem.query.dtype)).to(problem.query.dtype)
    found = {"out": out, "lse": lse.masked_fill(empty, -math.inf), "max_logit": top, "entropy": entropy}
    return found | {"w_max": torch.where(n > 0, (top - lse).exp(), 0.0)}


def gradients(make: Callable[[Problem], dict[str, Tensor]], problem: Problem) -> dict[str, Tensor]:
    """Gradients of a loss of output and statistics, in which every row counts. Rows without keys do not."""
    leaves = problem.leaves()
    found, generator = make(leaves), torch.Generator().manual_seed(4)
    loss = torch.zeros((), dtype=torch.float64)
    for name in ("out", *DIFFERENTIABLE):
        weight = torch.randn(BATCH, HEADS, KEYS, generator=generator, dtype=torch.float64)
        if name in found:
            value = found[name].double()
            terms = value * (weight[..., None] if name == "out" else weight)
            loss = loss + torch.where(value.isfinite(), terms, 0.0).sum()
    named = {name: x for name, x in leaves._asdict().items() if x is not None}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()), allow_unused=True), strict=True))


def of_backend(backend: str, request: StatsRequest, rule: str, **options: Any) -> Callable[[Problem], dict]:
    def make(problem: Problem) -> dict[str, Tensor]:
        out, stats = problem.attend(request, backend, rule, **options)
        return {"out": out} | {name: x for name in DIFFERENTIABLE if (x := getattr(stats, name)) is not None}

    return make


def written(request: StatsRequest, rule: str, **options: Any) -> Callable[[Problem], dict[str, Tensor]]:
    def make(problem: Problem) -> dict[str, Tensor]:
        found = written_out(problem, rule, **options)
        return {name: x for name, x in found.items() if name == "out" or name in request.with_gradients}

    return make


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize("extras", ["", "sinks", "bias softcap", "sinks bias softcap"])
@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_those_of_the_formula(backend, extras, rule):
    problem = Problem.random(torch.float64, sinks="sinks" in extras, bias="bias" in extras)
    softcap = 2.0 if "softcap" in extras else None
    for request in (ALL, *ONE_EACH.values()):
        found = gradients(of_backend(backend, request, rule, softcap=softcap), problem)
        expected = gradients(written(request, rule, softcap=softcap), problem)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


CASES = [("blockwise", torch.float32), ("blockwise", torch.bfloat16), ("blockwise", torch.float16)]
CASES += [("triton", torch.float32), ("triton", torch.float16)]


@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("name", ["all", *ONE_EACH])
def test_errors_are_within_twice_those_of_the_formula_in_the_same_dtype(backend, dtype, name):
    request = ALL if name == "all" else ONE_EACH[name]
    problem = Problem.random(dtype, sinks=True)
    found = gradients(of_backend(backend, request, "causal", softcap=2.0), problem)
    own = gradients(written(request, "causal", softcap=2.0), problem)
    exact = gradients(written(request, "causal", softcap=2.0), problem.to(torch.float64))
    for key, true in exact.items():
        error, budget = (worst_row(x[key].double() - true) for x in (found, own))
        assert error <= 2 * budget + torch.finfo(found[key].dtype).eps * worst_row(true), key


def test_gradients_pass_gradcheck_and_those_of_the_reference_gradgradcheck():
    problem = Problem.random(torch.float64, sinks=True)
    qkv = [x[:1, :, :4].clone().requires_grad_() for x in problem[:3]]
    inputs = *qkv, problem.sinks.requires_grad_()

    def attend(backend: str) -> Callable[..., tuple[Tensor, ...]]:
        def made(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
            rules = {"is_causal": True, "enable_gqa": True, "policy": "log", "sinks": sinks, "request": ALL}
            out, stats = attention_with_stats(q, k, v, backend=backend, **rules)
            return out, *(getattr(stats, name) for name in DIFFERENTIABLE)

        return made

    for backend in ("blockwise", "reference"):
        assert torch.autograd.gradcheck(attend(backend), inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(attend("reference"), inputs, fast_mode=True)


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
@pytest.mark.parametrize("rows", [None, 5])
def test_second_derivatives_are_refused_with_a_reason(backend, rows):
    leaves = Problem.random(torch.float32).leaves()
    stats = leaves.attend(StatsRequest(rows=rows, differentiable=True), backend, "causal").stats
    (first,) = torch.autograd.grad(stats.entropy.sum(), leaves.query, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative"):
        torch.autograd.grad(first.square().sum(), leaves.query)


def test_forward_mode_of_sampled_rows_is_refused_and_that_of_all_rows_right():
    q, k, v, *_ = Problem.random(torch.float64)

    def entropy(request: StatsRequest) -> Callable[[Tensor], Tensor]:
        return lambda q: attention_with_stats(q, k, v, enable_gqa=True, request=request).stats.entropy

    with pytest.raises(BackendError, match=r"StatsRequest\(rows=5, differentiable=True\).*torch.func.jvp"):
        torch.func.jvp(entropy(StatsRequest(rows=5, differentiable=True)), (q,), (q,))
    tangent = torch.func.jvp(entropy(ALL), (q,), (q,))[1]
    step = 1e-6
    difference = (entropy(ALL)((1 + step) * q) - entropy(ALL)((1 - step) * q)) / (2 * step)
    torch.testing.assert_close(tangent, difference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", ["reference", "blockwise", "triton"])
def test_by_default_statistics_are_detached_and_a_request_changes_no_value(backend):
    leaves = Problem.random(torch.float32, sinks=True).leaves()
    request = {"gap_thresholds": (0.5,), "accumulation": "bracket", "first_share": 2, "winner": True}
    plain = leaves.attend(StatsRequest(**request), backend, "causal").stats
    carried = leaves.attend(StatsRequest(**request, differentiable=True), backend, "causal").stats
    others = ("visible", "gap_counts", "criticality", "first_share", "winner")
    for name in (*DIFFERENTIABLE, *others):
        before, after = getattr(plain, name), getattr(carried, name)
        assert not before.requires_grad
        assert after.requires_grad == (name in DIFFERENTIABLE), name
        if backend == "reference":
            torch.testing.assert_close(after, before)  # the plain formula, for all derivatives
        else:
            assert torch.equal(after, before), name
    assert not any(bound.requires_grad for bound in carried.accumulation)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_sampled_rows_have_the_gradients_of_these_rows(backend):
    sampled = StatsRequest(rows=5, differentiable=True)
    leaves = Problem.random(torch.float64, sinks=True, bias=True).leaves()
    named = [x for x in leaves if x is not None and x is not leaves.value]

    def of(request: StatsRequest, rows: Tensor | None = None) -> list[Tensor]:
        stats = leaves.attend(request, backend, "causal").stats
        values = (getattr(stats, name) for name in DIFFERENTIABLE)
        loss = sum((x if rows is None else x[..., rows]).square().sum() for x in values)
        return [stats.rows, *torch.autograd.grad(loss, named)]

    rows, *found = of(sampled)
    _, *expected = of(ALL, rows)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def loss_of(q: Tensor, k: Tensor, v: Tensor, request: StatsRequest = ALL, backend: str = "auto") -> Tensor:
    out, stats = attention_with_stats(q, k, v, is_causal=True, policy="log", request=request, backend=backend)
    terms = [getattr(stats, name) for name in request.with_gradients]
    return out.float().square().mean() + torch.stack(terms).square().mean()


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
@pytest.mark.parametrize("rows", [None, 5])
def test_compiled_checkpointed_and_eager_calls_have_the_same_gradients(backend, rows):
    qkv = [x.requires_grad_() for x in torch.randn(3, 1, 2, 16, 8, generator=torch.Generator().manual_seed(0))]
    request = StatsRequest(rows=rows, differentiable=True)

    def loss(*qkv: Tensor) -> Tensor:
        return loss_of(*qkv, request, backend)

    eager = torch.autograd.grad(loss(*qkv), qkv)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for got in (compiled(*qkv), checkpoint(loss, *qkv, use_reentrant=False)):
        torch.testing.assert_close(torch.autograd.grad(got, qkv), eager, rtol=1e-5, atol=1e-7)


def test_under_autocast_gradients_are_those_of_the_rounded_inputs():
    qkv = [x.requires_grad_() for x in torch.randn(3, 1, 2, 16, 8, generator=torch.Generator().manual_seed(0))]
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(loss_of(*qkv), qkv)
    rounded = [x.detach().bfloat16().requires_grad_() for x in qkv]
    expected = torch.autograd.grad(loss_of(*rounded), rounded)
    assert all(x.dtype == torch.float32 for x in found)
    assert all(torch.equal(x, y.float()) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", ["reference", "blockwise", "triton"])
def test_rows_without_keys_and_hidden_nan_leave_gradients_finite(backend):
    problem = Problem.random(torch.float32)
    problem.key[0, :, :4] = torch.nan  # padding, and the only keys of its first rows
    leaves = problem.leaves()
    stats = leaves.attend(ALL, backend, "rows without keys").stats
    assert (stats.lse[0, :, :4] == -math.inf).all()
    values = [getattr(stats, name) for name in DIFFERENTIABLE]
    loss = sum(x.masked_fill(x == -math.inf, 0.0).square().sum() for x in values)
    for gradient in torch.autograd.grad(loss, (leaves.query, leaves.key)):
        assert torch.isfinite(gradient).all()
        assert (gradient[0, :, :4] == 0).all()
        assert (gradient[1] != 0).any()


def test_a_tie_at_the_top_has_the_gradient_of_the_first_key():
    q, k = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 5, 4, requires_grad=True)
    for backend in ("reference", "blockwise", "triton"):
        stats = attention_with_stats(q, k, k.detach(), request=ALL, backend=backend).stats
        (gradient,) = torch.autograd.grad(stats.max_logit.sum(), k)
        torch.testing.assert_close(gradient, torch.nn.functional.pad(torch.ones(1, 1, 1, 4), (0, 0, 0, 4)))


def test_merged_parts_have_the_gradient_of_the_whole():
    q, k, v, *_ = (nn.Parameter(x) for x in Problem.random(torch.float64)[:3])
    seen = torch.ones(KEYS, KEYS, dtype=torch.bool)
    seen[0], seen[1, :7], seen[2, 7:] = False, False, False  # rows without keys: at all, or on one side

    def attend(keys: slice) -> attnscale.AttentionOutput:
        rules = {"enable_gqa": True, "request": ALL, "backend": "blockwise", "attn_mask": seen[:, keys]}
        return attention_with_stats(q, k[:, :, keys], v[:, :, keys], **rules)

    def of(found: attnscale.AttentionOutput) -> tuple[Tensor, ...]:
        values = [found.output, *(getattr(found.stats, name) for name in DIFFERENTIABLE)]
        loss = sum(x.masked_fill(x == -math.inf, 0.0).square().sum() for x in values)
        return torch.autograd.grad(loss, (q, k, v))

    torch.testing.assert_close(of(attend(slice(7)).merge(attend(slice(7, None)))), of(attend(slice(None))))


def test_statistics_of_a_score_matrix_carry_gradients_to_scores_and_beta():
    scores = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    beta = torch.rand(3, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(7) < torch.tensor([[7], [3], [0]])

    def made(scores: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        stats = row_statistics(scores, beta, mask, ALL)
        return tuple(getattr(stats, name)[:2] for name in DIFFERENTIABLE)

    assert torch.autograd.gradcheck(made, (scores, beta))
    plain = row_statistics(scores, beta, mask)
    torch.testing.assert_close(made(scores, beta), tuple(getattr(plain, name)[:2] for name in DIFFERENTIABLE))
    _, stats = attnscale.softmax(scores, beta, mask=mask, request=ALL)
    assert stats.entropy.requires_grad


def test_the_softmax_kernel_refuses_gradients_of_statistics():
    with pytest.raises(BackendError, match="the statistics of the softmax kernel carry no gradients"):
        attnscale.softmax(torch.randn(2, 5), request=ALL, backend="triton")


def test_memory_stays_linear_in_length():
    def peak(length: int) -> int:
        q = torch.randn(1, 1, length, 8, requires_grad=True)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            loss_of(q, q, q, backend="blockwise").backward()
        live = most = 0
        for event in found.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                most = max(most, live)
        return most

    peak(256)  # scratch memory is kept
    assert peak(2048) < 2048**2 * 4


def test_only_a_flag_is_accepted():
    with pytest.raises(attnscale.ArgumentTypeError, match="differentiable='yes'"):
        StatsRequest(differentiable="yes")
