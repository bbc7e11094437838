"""Cost of attention with statistics and with `gap_adaptive`, and of compiled FlexAttention as the alternative."""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from attnscale.attention import attention_with_stats, scaled_dot_product_attention
from attnscale.bench.rows import Row
from attnscale.policies import build_policy
from attnscale.statistics import StatsRequest
from attnscale.statistics.request import DIFFERENTIABLE
from scripts.cost.measuring import causal_step, interleaved_ratio, label, peak_bytes

PROVIDERS = ("stats_all_rows", "stats_64_rows", "gap_adaptive")

LAW = "log"
TOLERANCE = 1e-4  # for outputs of order one in fp32


def provider(name: str) -> Callable[..., Tensor]:
    """Return the function measured under a name."""
    if name == "gap_adaptive":
        return functools.partial(scaled_dot_product_attention, policy=build_policy("gap_adaptive"))
    request = StatsRequest(rows=64 if name == "stats_64_rows" else None)
    return lambda *qkv, **kwargs: attention_with_stats(*qkv, request=request, **kwargs).output


def with_statistic(name: str, *, differentiable: bool) -> Callable[..., Tensor]:
    """Return attention whose output has a row statistic added to it, with or without its gradient."""
    asked: dict[str, Any] = {other: other == name for other in DIFFERENTIABLE}
    request = StatsRequest(**asked, differentiable=differentiable)

    def attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        output, stats = attention_with_stats(query, key, value, is_causal=is_causal, request=request)
        statistic: Tensor = getattr(stats, name)
        return output + statistic[..., None]

    return attend


def eager_matrix(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    """The same statistics from a materialised weight matrix."""
    logits = query @ key.mT * query.shape[-1] ** -0.5
    if is_causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool, device="cpu").triu(1), -torch.inf)
    weights = logits.softmax(-1)
    weights.detach().amax(-1), torch.special.entr(weights.detach()).sum(-1), logits.detach().logsumexp(-1)
    out: Tensor = weights @ value
    return out


@dataclass(frozen=True)
class TimeRatio:
    """Time of one function relative to another, at one length, on the same causal step."""

    kernel: str
    name: str
    metric: str
    candidate: Callable[..., Tensor]
    baseline: Callable[..., Tensor]
    heads: int
    head_dim: int
    length: int
    mode: str
    rounds: int

    def measure(self) -> list[Row]:
        step = functools.partial(
            causal_step, heads=self.heads, length=self.length, head_dim=self.head_dim, backward=self.mode != "forward"
        )
        ratio = interleaved_ratio(step(self.candidate), step(self.baseline), self.rounds)
        labels = label(self.heads, self.head_dim)
        return [Row(self.kernel, self.name, self.mode, self.metric, self.length, *ratio, *labels)]


@dataclass(frozen=True)
class StatisticsMemory:
    """Additional peak memory of all-row statistics over torch's SDPA, in megabytes."""

    heads: int
    head_dim: int
    length: int

    def measure(self) -> list[Row]:
        step = functools.partial(
            causal_step, heads=self.heads, length=self.length, head_dim=self.head_dim, backward=False
        )
        peaks = [peak_bytes(step(attention)) for attention in (provider("stats_all_rows"), torch_attention)]
        extra = (peaks[0] - peaks[1]) / 2**20
        labels = label(self.heads, self.head_dim)
        return [Row("statistics", "stats_all_rows", "forward", "extra_mb", self.length, extra, extra, extra, *labels)]


@dataclass(frozen=True)
class FlexAttentionCost:
    """Causal FlexAttention with β = ln n relative to torch's SDPA. Forward only: it has no backward pass on CPU."""

    heads: int
    head_dim: int
    length: int
    rounds: int

    def measure(self) -> list[Row]:
        """Return one row; none, with a logged reason, if compilation fails or the output is wrong."""
        reason = why_not_compiled()
        if reason is None:
            attend = flex_attention(self.length)
            try:
                error = largest_error(attend, self.heads, self.length, self.head_dim)
                reason = None if error <= TOLERANCE else f"its error is {error:.1e}, more than {TOLERANCE:.0e}"
            except RuntimeError as failure:  # base class of torch.compile and inductor errors
                reason = f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"
        if reason is not None:
            logging.getLogger(__name__).warning("FlexAttention was not measured at %d keys: %s", self.length, reason)
            return []
        shape = self.heads, self.head_dim, self.length, "forward", self.rounds
        baseline = F.scaled_dot_product_attention
        return TimeRatio("attention", "flex_attention", "time_ratio", attend, baseline, *shape).measure()


def why_not_compiled() -> str | None:
    """Return the reason why inductor, which generates C++, cannot compile for this CPU; None if it can."""
    compiler = os.environ.get("CXX", "g++")
    return None if shutil.which(compiler) else f"no C++ compiler {compiler!r} found"


def flex_attention(length: int) -> Callable[..., Tensor]:
    """Return FlexAttention for this length, compiled on its first call."""
    from torch.nn.attention import flex_attention as flex  # imports inductor, which takes seconds

    beta = build_policy(LAW)(torch.arange(1, length + 1, device="cpu"))  # [Tq]
    causal = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cpu")
    torch.compiler.reset()  # otherwise a second length triggers slower dynamic-shape code
    compiled = torch.compile(flex.flex_attention, dynamic=False)

    def sharpen(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score * beta[i]

    def attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = True) -> Tensor:
        out: Tensor = compiled(query, key, value, score_mod=sharpen, block_mask=causal if is_causal else None)
        return out

    return attend


@torch.no_grad()
def largest_error(attend: Callable[..., Tensor], heads: int, length: int, head_dim: int) -> float:
    """Return the largest deviation from the fp64 reference, computed per head to limit its memory."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, head_dim, generator=generator, device=generator.device) for _ in range(3))
    out = attend(q, k, v)
    largest = 0.0
    for head in range(heads):
        query, key, value = (x[:, head : head + 1].double() for x in (q, k, v))
        exact = scaled_dot_product_attention(query, key, value, is_causal=True, policy=LAW, backend="reference")
        largest = max(largest, (out[:, head : head + 1] - exact).abs().max().item())
    return largest
