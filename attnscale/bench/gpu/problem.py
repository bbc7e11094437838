"""One attention problem of the benchmark: interface of providers, work, and the check against fp64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from attnscale.attention import attention_with_stats
from attnscale.policies import build_policy
from attnscale.statistics import StatsRequest

BACKWARD = 2.5  # the backward pass has five matrix products, the forward pass two

STATISTIC = 1e-3  # allowed error of a statistic, in nats
OUTSIDE = 1e-3  # allowed relative deviation of β from its bounds

# At the measured size, a few rows are checked for gross errors only: overflowing offsets, skipped tiles. The limit is
# relative to the largest output.
GROSS, ROWS = 0.05, 16


class Inputs(NamedTuple):
    """Inputs of a provider, and the gradient of its output for the backward pass."""

    query: Tensor  # [B, H, Tq, D]
    key: Tensor  # [B, Hkv, Tk, D]
    value: Tensor  # [B, Hkv, Tk, D]
    gradient: Tensor  # [B, H, Tq, D]

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors that require gradients."""
        return self.query, self.key, self.value


@dataclass(frozen=True)
class Problem:
    """Causal self-attention, or one query over a whole KV cache; `law` is the policy of providers that support one."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    law: str

    @property
    def causal(self) -> bool:
        """Whether row i sees i + 1 keys instead of all."""
        return self.queries == self.keys

    @property
    def rule(self) -> dict[str, Any]:
        """The arguments of attention for this problem."""
        return {"is_causal": self.causal, "enable_gqa": True}

    @property
    def label(self) -> str:
        """The configuration of a row."""
        dtype = str(self.dtype).removeprefix("torch.")
        rule = "causal" if self.causal else "all keys"
        return f"B={self.batch} H={self.heads} Hkv={self.kv_heads} D={self.dim} {dtype} {rule} law={self.law}"

    def shrunk(self, keys: int) -> Problem:
        """Return the problem at another length, for verification; decoding gets a larger batch."""
        return replace(self, batch=2 if self.causal else 4, queries=keys if self.causal else self.queries, keys=keys)

    def inputs(self, *, backward: bool) -> Inputs:
        """Return random tensors from a fixed seed."""
        generator = torch.Generator(self.device).manual_seed(self.keys)
        rows, slots = (self.batch, self.heads, self.queries, self.dim), (self.batch, self.kv_heads, self.keys, self.dim)
        options: dict[str, Any] = {"generator": generator, "device": self.device, "dtype": self.dtype}
        inputs = Inputs(*(torch.randn(shape, **options) for shape in (rows, slots, slots, rows)))
        for leaf in inputs.leaves:
            leaf.requires_grad_(backward)
        return inputs

    def temperature(self) -> Tensor:
        """Return β [Tq] of the law, in fp32."""
        last = torch.arange(1, self.queries + 1, device=self.device)
        beta: Tensor = build_policy(self.law)(last if self.causal else torch.full_like(last, self.keys))
        return beta


class Work(NamedTuple):
    """Floating-point operations, and minimum memory traffic in bytes."""

    flops: float
    bytes: int


class Card(NamedTuple):
    """Peaks of a device: dense half-precision TFLOP/s and GB/s."""

    tflops: float
    bandwidth: float

    def attainable(self, work: Work) -> float:
        """Return the roofline: TFLOP/s limited by arithmetic or memory bandwidth.

        >>> Card(tflops=1000, bandwidth=2000).attainable(Work(flops=1e9, bytes=10**7))
        200.0
        """
        return min(self.tflops, self.bandwidth * work.flops / work.bytes / 1000)


def work_of(problem: Problem, mode: str, row_numbers: int = 0) -> Work:
    """Return operations and memory traffic of a mode: "forward", "backward" or "forward+backward".

    Every input is read once and every result written once. Forward: q, k, v and the output. Backward: these and the
    gradient of the output are read, dq, dk and dv are written. `row_numbers` fp32 statistics are written per row; the
    backward pass reads one number per row. A head has two products of 2·Tq·Tk·D operations, half of them masked in
    causal attention.
    """
    rows, slots = problem.batch * problem.heads * problem.queries, problem.batch * problem.kv_heads * problem.keys
    flops = 4.0 * rows * problem.keys * problem.dim / (2 if problem.causal else 1)
    operand = (rows + slots) * problem.dim * problem.dtype.itemsize  # q and k: as large as out and v, dq and dk
    forward = Work(flops, 2 * operand + 4 * row_numbers * rows)
    backward = Work(BACKWARD * flops, 4 * operand + 4 * rows)
    both = Work(forward.flops + backward.flops, forward.bytes + backward.bytes)
    return {"forward": forward, "backward": backward, "forward+backward": both}[mode]


class Answer(NamedTuple):
    """Result of a provider; `statistics` uses the names of `RowStats`."""

    output: Tensor
    statistics: Mapping[str, Tensor] = MappingProxyType({})


class Attention(Protocol):
    """A function that is timed."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Answer: ...


def standard(problem: Problem, inputs: Inputs) -> Tensor:
    """β = 1, for providers without a temperature."""
    return torch.ones(problem.queries, device=problem.device)


def by_law(problem: Problem, inputs: Inputs) -> Tensor:
    """β of the problem's law."""
    return problem.temperature()


@dataclass(frozen=True)
class Provider:
    """An attention implementation.

    Attributes:
        name: name in tables.
        prepare: returns the function to time.
        temperature: returns β, broadcastable to [B, H, Tq].
        bounds: returns lower and upper bound of an adaptive β.
        ours: implemented by attnscale. Other providers may be missing or fail, and are then skipped.
        row_numbers: number of statistics written per row.
        rounds_scores: rounds scores to the dtype; verified in fp32 instead.
        why_not: returns the reason to skip a problem, or None.
    """

    name: str
    prepare: Callable[[Problem], Attention]
    temperature: Callable[[Problem, Inputs], Tensor] = standard
    bounds: Callable[[Problem, Inputs], tuple[Tensor, Tensor]] | None = None
    ours: bool = False
    row_numbers: int = 0
    rounds_scores: bool = False
    why_not: Callable[[Problem, bool], str | None] = lambda problem, backward: None


class Check(NamedTuple):
    """The quantity with the largest error relative to the allowed error."""

    quantity: str
    error: float
    allowed: float

    @property
    def right(self) -> bool:
        """Whether the error is allowed; False for NaN."""
        return self.error <= self.allowed

    @property
    def share(self) -> float:
        """Error divided by the allowed error; infinite for NaN."""
        return math.inf if math.isnan(self.error) else self.error / self.allowed


def verify(provider: Provider, problem: Problem, *, backward: bool) -> Check:
    """Compare output, statistics and gradients with fp64 on a small problem.

    The allowed error is twice that of torch's SDPA on equally sharp logits in the same dtype, plus one rounding.
    Providers that round their scores are verified in fp32.
    """
    if provider.rounds_scores:
        problem = replace(problem, dtype=torch.float32)
    inputs = problem.inputs(backward=backward)
    attend = provider.prepare(problem)
    answer, gradients = _run(attend, inputs, backward)
    beta = provider.temperature(problem, inputs).expand(problem.batch, problem.heads, -1)
    exact = _exact(problem, inputs, beta, backward)
    yardstick = _yardstick(problem, inputs, beta, backward)
    verdicts = []
    for name, value in {"output": answer.output, **gradients}.items():
        rounding = exact[name].abs().max().item() * torch.finfo(value.dtype).eps / 2
        verdicts.append(Check(name, _distance(value, exact[name]), 2 * yardstick[name] + rounding))
    for name, value in answer.statistics.items():
        verdicts.append(Check(name, _distance(value, exact[name]), STATISTIC))
    if provider.bounds is not None:
        low, high = provider.bounds(problem, inputs)
        outside = torch.maximum((low - beta) / low, (beta - high) / high).max().item()
        verdicts.append(Check("β", max(0.0, outside), OUTSIDE))
    return max(verdicts, key=lambda verdict: verdict.share)


def check_a_few_rows(provider: Provider, problem: Problem, inputs: Inputs, output: Tensor) -> Check:
    """Compare a few rows of the last head and sequence, where offsets are largest, at the measured size."""
    # An exact adaptive β would take too long, and large scores in half precision have large errors.
    rounded = provider.rounds_scores and problem.dtype.itemsize < 4
    if provider.bounds is not None or rounded:
        finite = bool(torch.isfinite(output).all())
        return Check("output", 0.0 if finite else math.nan, GROSS)
    rows = torch.linspace(0, problem.queries - 1, min(ROWS, problem.queries), device=problem.device).long()
    beta = provider.temperature(problem, inputs)[rows].double()
    query, key, value = (x.detach()[-1, -1].double() for x in inputs.leaves)  # [T, D]
    logits = (query[rows] * beta[:, None]) @ key.mT * problem.dim**-0.5
    if problem.causal:
        hidden = torch.arange(problem.keys, device=problem.device) > rows[:, None]
        logits = logits.masked_fill(hidden, -torch.inf)
    exact = logits.softmax(-1) @ value
    return Check("output", _distance(output[-1, -1, rows], exact) / exact.abs().max().item(), GROSS)


def _run(attend: Attention, inputs: Inputs, backward: bool) -> tuple[Answer, dict[str, Tensor]]:
    """Return the result of a function, and gradients by name."""
    with torch.set_grad_enabled(backward):
        answer = attend(*inputs.leaves)
    if not backward:
        return answer, {}
    found = torch.autograd.grad(answer.output, inputs.leaves, inputs.gradient)
    return answer, dict(zip(("dq", "dk", "dv"), found, strict=True))


def _exact(problem: Problem, inputs: Inputs, beta: Tensor, backward: bool) -> dict[str, Tensor]:
    """Compute all quantities in fp64; β [B, H, Tq] is a constant factor of q and not rounded."""
    wide = Inputs(*(x.detach().double() for x in inputs))
    for leaf in wide.leaves:
        leaf.requires_grad_(backward)
    options: dict[str, Any] = {**problem.rule, "backend": "reference", "request": StatsRequest(w_max=False)}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        output, stats = attention_with_stats(query * beta.double()[..., None], key, value, **options)
        return Answer(output, {name: getattr(stats, name) for name in ("lse", "max_logit", "entropy")})

    answer, gradients = _run(attend, wide, backward)
    return {"output": answer.output, **answer.statistics, **gradients}


def _yardstick(problem: Problem, inputs: Inputs, beta: Tensor, backward: bool) -> dict[str, float]:
    """Return the errors of torch's SDPA with β·q as query; the rounding of this product is not counted."""
    sharp = (inputs.query.detach() * beta[..., None]).to(problem.dtype).requires_grad_(backward)
    sharp_inputs = inputs._replace(query=sharp)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        return Answer(F.scaled_dot_product_attention(query, key, value, **problem.rule))

    answer, gradients = _run(attend, sharp_inputs, backward)
    exact = _exact(problem, sharp_inputs, torch.ones_like(beta), backward)
    tensors = {"output": answer.output, **gradients}
    if backward:  # dq is β times the gradient of β·q
        tensors["dq"], exact["dq"] = (x * beta[..., None] for x in (tensors["dq"], exact["dq"]))
    return {name: _distance(value, exact[name]) for name, value in tensors.items()}


def _distance(value: Tensor, exact: Tensor) -> float:
    """Return the largest error; NaN if any."""
    return float((value.detach().double() - exact.detach()).abs().max().item())
