"""The gap-adaptive policy as providers: β of each row from a pass over its scores, in kernels or in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnscale.attention import attention_with_stats, scaled_dot_product_attention
from attnscale.bench.gpu.problem import Inputs, Problem
from attnscale.bench.gpu.provider import Answer, Attention, Provider
from attnscale.policies.adaptive import GapAdaptive
from attnscale.statistics import StatsRequest

POLICY = GapAdaptive()

# The widest bracket of Λ that fifteen bins of gaps leave: upper over lower end.
BRACKET = 1.25

EXACT = StatsRequest(w_max=False, entropy=False, lse=False, max_logit=False, accumulation="exact")


def fused(problem: Problem) -> Attention:
    """The kernel that counts gaps, then attention."""
    return lambda query, key, value: Answer(_fused(problem, query, key, value)[0])


def fused_temperature(problem: Problem, inputs: Inputs) -> Tensor:
    """The β [B, H, Tq] that the kernels take."""
    return _fused(problem, *(x.detach() for x in inputs.leaves))[1]


def _fused(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    from attnscale_kernels import Visibility
    from attnscale_kernels.gaps.op import adaptive_attention

    visibility = Visibility(right=0) if problem.causal else Visibility()
    found, beta = adaptive_attention(
        query,
        key,
        value,
        visibility,
        r=POLICY.r,
        floor=POLICY.floor,
        ceiling=POLICY.ceiling,
        scale=problem.dim**-0.5,
    )
    return found.out, beta


def blockwise(problem: Problem) -> Attention:
    """The backend of plain torch, which counts gaps in blocks."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        return Answer(
            scaled_dot_product_attention(
                query, key, value, is_causal=problem.causal, enable_gqa=True, policy=POLICY, backend="blockwise"
            )
        )

    return attend


def blockwise_temperature(problem: Problem, inputs: Inputs) -> Tensor:
    """The β [B, H, Tq] that the policy takes there, from what is reported: β/Λ and Λ."""
    query, key, value = (x.detach() for x in inputs.leaves)
    rule: dict[str, Any] = {"is_causal": problem.causal, "enable_gqa": True}
    stats = attention_with_stats(query, key, value, request=EXACT, policy=POLICY, backend="blockwise", **rule).stats
    scale = stats.accumulation.lower
    beta = torch.where(scale == 0, POLICY.floor, stats.criticality * scale)
    return torch.where(torch.isinf(scale), POLICY.ceiling, beta)


def bounds(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """r·Λ with the exact Λ, and as much more as a bracket may be wide; both [B, H, Tq]."""
    query, key, value = (x.detach().double() for x in inputs.leaves)
    rule: dict[str, Any] = {"is_causal": problem.causal, "enable_gqa": True}
    stats = attention_with_stats(query, key, value, request=EXACT, backend="reference", **rule).stats
    scale = POLICY.r * stats.accumulation.lower
    return scale.clamp(POLICY.floor, POLICY.ceiling), (BRACKET * scale).clamp(POLICY.floor, POLICY.ceiling)


ADAPTIVE = (
    Provider("gap_adaptive", fused, fused_temperature, bounds, ours=True),
    Provider("gap_adaptive_blockwise", blockwise, blockwise_temperature, bounds, ours=True),
)
