"""Our kernels as providers, and which providers are compared with which.

Attention under a law, levels of statistics, the adaptive policy, decoding.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscale.attention import attention_with_stats, scaled_dot_product_attention
from attnscale.bench.gpu.machine import DTYPES, Profile
from attnscale.bench.gpu.problem import Answer, Attention, Inputs, Problem, Provider, by_law
from attnscale.bench.gpu.rivals import EAGER, EAGER_STATISTICS, FLASH_ATTN, FLEX, SDPA
from attnscale.policies.adaptive import GapAdaptive
from attnscale.statistics import RowStats, StatsRequest

# What the level of a name asks for; lse and maximum are by-products of every forward pass.
LEVELS = {
    "lse+max": StatsRequest(w_max=False, entropy=False),
    "entropy": StatsRequest(w_max=False),
}

POLICY = GapAdaptive()

# The widest bracket of Λ that fifteen bins of gaps leave: upper over lower end.
BRACKET = 1.25

EXACT = StatsRequest(w_max=False, entropy=False, lse=False, max_logit=False, accumulation="exact")

# What a user would have instead; the slow ones are measured and are nobody's yardstick.
RIVALS = tuple(provider.name for provider in (*SDPA, *FLASH_ATTN, FLEX) if provider.name != "sdpa_math")


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
    scale, ratio = _scale_and_ratio(stats)
    beta = torch.where(scale == 0, POLICY.floor, ratio * scale)
    return torch.where(torch.isinf(scale), POLICY.ceiling, beta)


def _scale_and_ratio(stats: RowStats) -> tuple[Tensor, Tensor]:
    """Λ and β/Λ, which `EXACT` asks for."""
    if stats.accumulation is None or stats.criticality is None:
        raise TypeError("Λ was asked for and is missing")
    return stats.accumulation.lower, stats.criticality


def bounds(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """r·Λ with the exact Λ, and as much more as a bracket may be wide; both [B, H, Tq]."""
    query, key, value = (x.detach().double() for x in inputs.leaves)
    rule: dict[str, Any] = {"is_causal": problem.causal, "enable_gqa": True}
    stats = attention_with_stats(query, key, value, request=EXACT, backend="reference", **rule).stats
    scale = POLICY.r * _scale_and_ratio(stats)[0]
    return scale.clamp(POLICY.floor, POLICY.ceiling), (BRACKET * scale).clamp(POLICY.floor, POLICY.ceiling)


ADAPTIVE = (
    Provider("gap_adaptive", fused, fused_temperature, bounds, ours=True),
    Provider("gap_adaptive_blockwise", blockwise, blockwise_temperature, bounds, ours=True),
)


def split(problem: Problem) -> Attention:
    """A cache in one piece."""
    from attnscale_kernels import Visibility
    from attnscale_kernels.decode.op import decode_attention

    beta = problem.temperature()[None, None]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        return Answer(decode_attention(query, key, value, beta, Visibility(), scale=problem.dim**-0.5).out)

    return attend


DECODING = (Provider("attnscale_split", split, by_law, ours=True),)


class Suite(NamedTuple):
    """Providers of one question; times are also given over those of the fastest of `baselines` at each length."""

    providers: tuple[Provider, ...]
    modes: tuple[str, ...]
    baselines: tuple[str, ...]


SUITES = {
    "attention": Suite((ATTNSCALE, *SDPA, *FLASH_ATTN, FLEX, EAGER), ("forward", "forward+backward"), RIVALS),
    "statistics": Suite((*STATISTICS, EAGER_STATISTICS), ("forward",), ("none",)),
    "adaptive": Suite((ATTNSCALE, *ADAPTIVE), ("forward",), ("attnscale",)),
    "decode": Suite((ATTNSCALE, *DECODING, *SDPA, *FLASH_ATTN, FLEX, EAGER), ("forward",), RIVALS),
}


class Group(NamedTuple):
    """One suite in one mode, dtype and head dimension, at all its lengths."""

    suite: str
    mode: str
    dtype: torch.dtype
    dim: int

    def problems(self, profile: Profile, device: torch.device) -> list[Problem]:
        """What is measured, the shortest first."""
        decode = self.suite == "decode"
        tokens = profile.decode_tokens if decode else profile.tokens
        return [
            Problem(
                batch=max(1, tokens // keys),
                heads=profile.heads,
                kv_heads=profile.decode_kv_heads if decode else profile.kv_heads,
                queries=1 if decode else keys,
                keys=keys,
                dim=self.dim,
                dtype=self.dtype,
                device=device,
                law=profile.law,
            )
            for keys in sorted(profile.decode_lengths if decode else profile.lengths)
        ]


def groups(profile: Profile) -> Iterator[Group]:
    """Everything a profile measures, in order."""
    for suite in profile.suites:
        for dtype in profile.dtypes:
            for dim in profile.head_dims:
                for mode in SUITES[suite].modes:
                    yield Group(suite, mode, DTYPES[dtype], dim)
