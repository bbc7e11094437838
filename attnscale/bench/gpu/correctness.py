"""Whether a provider is right, before anybody asks how fast it is: against fp64, on a small problem."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attnscale.attention import attention_with_stats
from attnscale.bench.gpu.problem import Answer, Inputs, Problem, Provider
from attnscale.statistics import StatsRequest

# How far a statistic may be from the exact one, in nats (Σ w²: in itself).
STATISTIC = 1e-3

# How far a β may be outside of its bounds, relative to them.
OUTSIDE = 1e-3

# At the size that is measured, a few rows are checked for gross mistakes only: offsets that overflow, tiles that are
# left out. The largest error over the largest output.
GROSS, ROWS = 0.05, 16


class Verdict(NamedTuple):
    """The quantity whose error takes the largest share of what is allowed."""

    quantity: str
    error: float
    allowed: float

    @property
    def right(self) -> bool:
        """False also where the error is no number."""
        return self.error <= self.allowed

    @property
    def share(self) -> float:
        """The error over the allowed error; infinite where the error is NaN."""
        return math.inf if math.isnan(self.error) else self.error / self.allowed


def verify(provider: Provider, problem: Problem, *, backward: bool) -> Verdict:
    """Compare output, statistics and gradients with fp64.

    An error may be twice that of torch's own attention on logits as sharp, in the same dtype, and one rounding. A
    provider that rounds its scores is asked for as much in fp32.
    """
    if provider.rounds_scores:
        problem = replace(problem, dtype=torch.float32)
    inputs = problem.inputs(backward=backward)
    attend = provider.prepare(problem)
    answer, gradients = _run(attend, inputs, backward)
    beta = provider.temperature(problem, inputs).expand(problem.batch, problem.heads, -1)
    exact = _exact(problem, inputs, beta, backward)
    yardstick = _yardstick(problem, inputs, beta, backward)
    tensors = {"output": answer.output, **gradients}
    verdicts = [_compare(name, tensors[name], exact[name], yardstick[name]) for name in tensors]
    for name, value in answer.statistics.items():
        verdicts.append(Verdict(name, _distance(value, exact[name]), STATISTIC))
    if provider.bounds is not None:
        low, high = provider.bounds(problem, inputs)
        outside = torch.maximum((low - beta) / low, (beta - high) / high).max().item()
        verdicts.append(Verdict("β", max(0.0, outside), OUTSIDE))
    return max(verdicts, key=lambda verdict: verdict.share)


def check_a_few_rows(provider: Provider, problem: Problem, inputs: Inputs, output: Tensor) -> Verdict:
    """Compare a few rows of the last head of the last sequence, where offsets are largest, at the size measured."""
    # Finding β exactly would take longer than everything else, and large scores in half precision are far off.
    rounded = provider.rounds_scores and problem.dtype.itemsize < 4
    if provider.bounds is not None or rounded:
        finite = bool(torch.isfinite(output).all())
        return Verdict("output", 0.0 if finite else math.nan, GROSS)
    rows = torch.linspace(0, problem.queries - 1, min(ROWS, problem.queries), device=problem.device).long()
    beta = provider.temperature(problem, inputs)[rows].double()
    query, key, value = (x.detach()[-1, -1].double() for x in inputs.leaves)  # [T, D]
    logits = (query[rows] * beta[:, None]) @ key.mT * problem.dim**-0.5
    if problem.causal:
        hidden = torch.arange(problem.keys, device=problem.device) > rows[:, None]
        logits = logits.masked_fill(hidden, -torch.inf)
    exact = logits.softmax(-1) @ value
    error = _distance(output[-1, -1, rows], exact)
    return Verdict("output", error / exact.abs().max().item(), GROSS)


def _run(
    attend: Callable[[Tensor, Tensor, Tensor], Answer], inputs: Inputs, backward: bool
) -> tuple[Answer, dict[str, Tensor]]:
    """What a function gives, and gradients by name."""
    with torch.set_grad_enabled(backward):
        answer = attend(*inputs.leaves)
    if not backward:
        return answer, {}
    found = torch.autograd.grad(answer.output, inputs.leaves, inputs.gradient)
    return answer, dict(zip(("dq", "dk", "dv"), found, strict=True))


def _exact(problem: Problem, inputs: Inputs, beta: Tensor, backward: bool) -> dict[str, Tensor]:
    """Everything in fp64; β [B, H, Tq] is a constant factor of q there, and not rounded."""
    wide = Inputs(*(x.detach().double() for x in inputs))
    for leaf in wide.leaves:
        leaf.requires_grad_(backward)
    rule: dict[str, Any] = {"is_causal": problem.causal, "enable_gqa": True}
    request = StatsRequest(w_max=False)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        sharp = query * beta.double()[..., None]
        output, stats = attention_with_stats(sharp, key, value, backend="reference", request=request, **rule)
        return Answer(output, {name: getattr(stats, name) for name in ("lse", "max_logit", "entropy")})

    answer, gradients = _run(attend, wide, backward)
    return {"output": answer.output, **answer.statistics, **gradients}


def _yardstick(problem: Problem, inputs: Inputs, beta: Tensor, backward: bool) -> dict[str, float]:
    """Errors of torch's attention, given β·q as its query: so the rounding of that product is not counted."""
    sharp = (inputs.query.detach() * beta[..., None]).to(problem.dtype).requires_grad_(backward)
    sharp_inputs = inputs._replace(query=sharp)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        return Answer(F.scaled_dot_product_attention(query, key, value, is_causal=problem.causal, enable_gqa=True))

    answer, gradients = _run(attend, sharp_inputs, backward)
    exact = _exact(problem, sharp_inputs, torch.ones_like(beta), backward)
    tensors = {"output": answer.output, **gradients}
    if backward:  # dq is β times the gradient of β·q
        tensors["dq"], exact["dq"] = (x * beta[..., None] for x in (tensors["dq"], exact["dq"]))
    return {name: _distance(value, exact[name]) for name, value in tensors.items()}


def _compare(name: str, value: Tensor, exact: Tensor, yardstick: float) -> Verdict:
    rounding = exact.abs().max().item() * torch.finfo(value.dtype).eps / 2
    return Verdict(name, _distance(value, exact), 2 * yardstick + rounding)


def _distance(value: Tensor, exact: Tensor) -> float:
    """The largest error; NaN where there is one."""
    return float((value.detach().double() - exact.detach()).abs().max().item())
