"""The cost of statistics and of `gap_adaptive`, over torch's attention and over the n × n matrix."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from attnscale.attention import attention_with_stats, scaled_dot_product_attention
from attnscale.bench.memory import peak_bytes
from attnscale.bench.ratio import interleaved_ratio
from attnscale.bench.rows import Row
from attnscale.bench.steps import causal_step, label
from attnscale.policies import build_policy
from attnscale.statistics import StatsRequest

PROVIDERS = ("stats_all_rows", "stats_64_rows", "gap_adaptive")


def provider(name: str) -> Callable[..., Tensor]:
    """The function that is measured under a name."""
    if name == "gap_adaptive":
        return functools.partial(scaled_dot_product_attention, policy=build_policy("gap_adaptive"))
    request = StatsRequest(rows=64 if name == "stats_64_rows" else None)
    return lambda *qkv, **kwargs: attention_with_stats(*qkv, request=request, **kwargs).output


def eager_matrix(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    """The same statistics with all weights in memory."""
    logits = query @ key.mT * query.shape[-1] ** -0.5
    if is_causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool, device="cpu").triu(1), -torch.inf)
    weights = logits.softmax(-1)
    weights.detach().amax(-1), torch.special.entr(weights.detach()).sum(-1), logits.detach().logsumexp(-1)
    out: Tensor = weights @ value
    return out


@dataclass(frozen=True)
class TimeRatio:
    """The time of one function over that of another, at one length; both make the same causal step."""

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
    """What all-row statistics add to the peak of torch's SDPA, in megabytes."""

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
