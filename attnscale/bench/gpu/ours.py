"""attnscale's fused kernels as providers: attention under a law, and levels of statistics."""

from __future__ import annotations

import functools

from torch import Tensor

from attnscale.attention import attention_with_stats, scaled_dot_product_attention
from attnscale.bench.gpu.problem import Problem
from attnscale.bench.gpu.provider import Answer, Attention, Provider, by_law
from attnscale.statistics import StatsRequest

# What the level of a name asks for; lse and maximum are by-products of every forward pass.
LEVELS = {
    "lse+max": StatsRequest(w_max=False, entropy=False),
    "entropy": StatsRequest(w_max=False),
}


def law(problem: Problem) -> Attention:
    """Attention under the problem's law, nothing else asked for."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        return Answer(
            scaled_dot_product_attention(
                query, key, value, is_causal=problem.causal, enable_gqa=True, policy=problem.law, backend="triton"
            )
        )

    return attend


def level(name: str, problem: Problem) -> Attention:
    """Attention with statistics of all rows."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        output, stats = attention_with_stats(
            query,
            key,
            value,
            is_causal=problem.causal,
            enable_gqa=True,
            policy=problem.law,
            backend="triton",
            request=LEVELS[name],
        )
        found = {field: getattr(stats, field) for field in ("lse", "max_logit", "entropy")}
        return Answer(output, {field: value for field, value in found.items() if value is not None})

    return attend


ATTNSCALE = Provider("attnscale", law, by_law, ours=True)
STATISTICS = (
    Provider("none", law, by_law, ours=True),
    *(
        Provider(name, functools.partial(level, name), by_law, ours=True, row_numbers=numbers)
        for name, numbers in (("lse+max", 2), ("entropy", 3))
    ),
)
