"""Providers: the kernels of attnscale, other attention implementations, and the suites that compare them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnscale.attention import attention_with_stats, scaled_dot_product_attention
from attnscale.bench.gpu.machine import DTYPES, Profile
from attnscale.bench.gpu.problem import Answer, Attention, Inputs, Problem, Provider, by_law
from attnscale.policies.adaptive import GapAdaptive
from attnscale.statistics import StatsRequest
from attnscale.statistics.gaps import BRACKET_WIDTH

STATISTICS = ("lse", "max_logit", "entropy")
EXACT = StatsRequest(w_max=False, entropy=False, lse=False, max_logit=False, accumulation="exact")

POLICY = GapAdaptive()

BRACKET = 1 + BRACKET_WIDTH  # maximum ratio of upper to lower end of a bracket of Λ

# Maximum share of device memory for one score matrix: the backward pass holds several.
MATRIX_SHARE = 1 / 8


def ours(problem: Problem, request: StatsRequest | None = None, **options: Any) -> Attention:
    """Attention of attnscale; by default the Triton kernels with the problem's law, without statistics."""
    options = {"policy": problem.law, "backend": "triton", **problem.rule, **options}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        if request is None:
            return Answer(scaled_dot_product_attention(query, key, value, **options))
        output, stats = attention_with_stats(query, key, value, request=request, **options)
        return Answer(output, {name: getattr(stats, name) for name in STATISTICS if getattr(request, name)})

    return attend


def fused_adaptive(problem: Problem) -> Attention:
    """The gap-counting kernel, followed by attention."""
    return lambda query, key, value: Answer(_fused(problem, query, key, value)[0])


def fused_temperature(problem: Problem, inputs: Inputs) -> Tensor:
    """Return β [B, H, Tq] of the kernels."""
    return _fused(problem, *(x.detach() for x in inputs.leaves))[1]


def _fused(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    from attnscale_kernels import Visibility
    from attnscale_kernels.gaps.op import adaptive_attention

    visibility = Visibility(right=0) if problem.causal else Visibility()
    law: dict[str, Any] = {"r": POLICY.r, "floor": POLICY.floor, "ceiling": POLICY.ceiling}
    found, beta = adaptive_attention(query, key, value, visibility, scale=problem.dim**-0.5, **law)
    return found.out, beta


def blockwise_temperature(problem: Problem, inputs: Inputs) -> Tensor:
    """Return β [B, H, Tq] of the policy in plain torch, from the statistics β/Λ and Λ."""
    scale, ratio = _scale_and_ratio(problem, inputs, policy=POLICY, backend="blockwise")
    beta = torch.where(scale == 0, POLICY.floor, ratio * scale)
    return torch.where(torch.isinf(scale), POLICY.ceiling, beta)


def bounds(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return r·Λ with the exact Λ, and r·Λ times the width of a bracket; both [B, H, Tq]."""
    wide = Inputs(*(x.double() for x in inputs))
    scale = POLICY.r * _scale_and_ratio(problem, wide, backend="reference")[0]
    return scale.clamp(POLICY.floor, POLICY.ceiling), (BRACKET * scale).clamp(POLICY.floor, POLICY.ceiling)


def _scale_and_ratio(problem: Problem, inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the exact Λ and β/Λ, each [B, H, Tq]."""
    query, key, value = (x.detach() for x in inputs.leaves)
    stats = attention_with_stats(query, key, value, request=EXACT, **problem.rule, **options).stats
    if stats.accumulation is None or stats.criticality is None:
        raise TypeError("Λ was requested and is missing")
    return stats.accumulation.lower, stats.criticality


def split(problem: Problem) -> Attention:
    """Split-KV decoding with a contiguous KV cache."""
    from attnscale_kernels import Visibility
    from attnscale_kernels.decode.op import decode_attention

    beta = problem.temperature()[None, None]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        return Answer(decode_attention(query, key, value, beta, Visibility(), scale=problem.dim**-0.5).out)

    return attend


def sdpa(backend: SDPBackend, problem: Problem) -> Attention:
    """One of the SDPA kernels of torch, without fallback."""
    grouped = problem.heads != problem.kv_heads

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=problem.causal, enable_gqa=grouped)
        return Answer(out)

    return attend


def why_not_sdpa(backend: SDPBackend, problem: Problem, backward: bool) -> str | None:
    """Return the reason to skip a GPU-only kernel of torch on the CPU, or None."""
    everywhere = backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    return "torch does not have this kernel on the CPU" if problem.device.type == "cpu" and not everywhere else None


def flex(problem: Problem) -> Attention:
    """FlexAttention with the law as `score_mod`; compiled on a GPU, eager on the CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    beta, sizes, device = problem.temperature(), (problem.queries, problem.keys), problem.device.type
    mask = None
    if problem.causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, *sizes, device=device)
    if device == "cuda":
        # Every problem has another shape: after several recompilations torch falls back to eager, with n × n scores.
        torch.compiler.reset()
    attention = torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention
    grouped = problem.heads != problem.kv_heads

    def sharpen(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score * beta[i]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            return Answer(attention(query, key, value, score_mod=sharpen, block_mask=mask, enable_gqa=grouped))

    return attend


def why_not_flex(problem: Problem, backward: bool) -> str | None:
    """Return the reason to skip the backward pass on the CPU, which FlexAttention does not support, or None."""
    return "FlexAttention has no backward on the CPU" if backward and problem.device.type == "cpu" else None


def flash_attn(module: str, problem: Problem) -> Attention:
    """flash-attn 2 or 3, by module; decoding uses `flash_attn_with_kvcache`, which splits the keys."""
    package = importlib.import_module(module)
    function = package.flash_attn_func if problem.causal else package.flash_attn_with_kvcache

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        found = function(*(x.transpose(1, 2) for x in (query, key, value)), causal=problem.causal)
        out: Tensor = found[0] if isinstance(found, tuple) else found  # some releases of 3 also return the log-sum-exp
        return Answer(out.transpose(1, 2))

    return attend


def why_not_flash_attn(module: str, problem: Problem, backward: bool) -> str | None:
    """Return the reason to skip flash-attn if it is not installed or there is no GPU, or None."""
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    return f"{module} requires a GPU" if problem.device.type != "cuda" else None


def eager(statistics: bool, problem: Problem) -> Attention:
    """Eager attention: full weight matrix, scores in the dtype of the inputs, softmax in fp32."""
    beta = problem.temperature()[:, None]
    hidden = None
    if problem.causal:
        hidden = torch.ones(problem.queries, problem.keys, dtype=torch.bool, device=problem.device).triu(1)
    group = problem.heads // problem.kv_heads

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        key, value = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (key, value))
        logits = query @ key.mT * (beta * problem.dim**-0.5).to(query.dtype)
        if hidden is not None:
            logits = logits.masked_fill(hidden, -torch.inf)
        weights = logits.softmax(-1, dtype=torch.float32)
        out = weights.to(value.dtype) @ value
        if not statistics:
            return Answer(out)
        found = {"lse": logits.detach().float().logsumexp(-1), "max_logit": logits.detach().amax(-1)}
        return Answer(out, found | {"entropy": torch.special.entr(weights.detach()).sum(-1)})

    return attend


def why_not_eager(problem: Problem, backward: bool) -> str | None:
    """Return the reason to skip a problem whose score matrix does not fit into device memory, or None."""
    if problem.device.type != "cuda":
        return None
    matrix = 4 * problem.batch * problem.heads * problem.queries * problem.keys
    room = MATRIX_SHARE * torch.cuda.get_device_properties(problem.device).total_memory
    return f"the score matrix needs {matrix / 2**30:.0f} GiB" if matrix > room else None


def _ours(name: str, row_numbers: int = 0, **options: Any) -> Provider:
    return Provider(name, functools.partial(ours, **options), by_law, ours=True, row_numbers=row_numbers)


ATTNSCALE = _ours("attnscale")
# lse and maximum are by-products of every forward pass.
LEVELS = (
    _ours("none"),
    _ours("lse+max", 2, request=StatsRequest(w_max=False, entropy=False)),
    _ours("entropy", 3, request=StatsRequest(w_max=False)),
)
ADAPTIVE = (
    Provider("gap_adaptive", fused_adaptive, fused_temperature, bounds, ours=True),
    replace(
        _ours("gap_adaptive_blockwise", policy=POLICY, backend="blockwise"),
        temperature=blockwise_temperature,
        bounds=bounds,
    ),
)
SPLIT = Provider("attnscale_split", split, by_law, ours=True)
SDPA = tuple(
    Provider(f"sdpa_{name}", functools.partial(sdpa, backend), why_not=functools.partial(why_not_sdpa, backend))
    for name, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION),
        ("math", SDPBackend.MATH),
    )
)
FLEX = Provider("flex", flex, by_law, why_not=why_not_flex)
FLASH_ATTN = tuple(
    Provider(name, functools.partial(flash_attn, module), why_not=functools.partial(why_not_flash_attn, module))
    for name, module in (("flash_attn_2", "flash_attn"), ("flash_attn_3", "flash_attn_interface"))
)
EAGER = Provider("eager", functools.partial(eager, False), by_law, rounds_scores=True, why_not=why_not_eager)
EAGER_STATISTICS = replace(EAGER, prepare=functools.partial(eager, True), row_numbers=3)
OTHERS = (*SDPA, *FLASH_ATTN, FLEX, EAGER)

# Implementations used as baselines; the slow ones are measured but are not baselines.
RIVALS = tuple(provider.name for provider in OTHERS if provider.name not in ("sdpa_math", "eager"))


class Suite(NamedTuple):
    """Providers of one comparison; times are also reported relative to the fastest of `baselines` at each length."""

    providers: tuple[Provider, ...]
    modes: tuple[str, ...]
    baselines: tuple[str, ...]


SUITES = {
    "attention": Suite((ATTNSCALE, *OTHERS), ("forward", "forward+backward"), RIVALS),
    "statistics": Suite((*LEVELS, EAGER_STATISTICS), ("forward",), ("none",)),
    "adaptive": Suite((ATTNSCALE, *ADAPTIVE), ("forward",), ("attnscale",)),
    "decode": Suite((ATTNSCALE, SPLIT, *OTHERS), ("forward",), RIVALS),
}


class Group(NamedTuple):
    """One suite in one mode, dtype and head dimension, at all its lengths."""

    suite: str
    mode: str
    dtype: torch.dtype
    dim: int

    def problems(self, profile: Profile, device: torch.device) -> list[Problem]:
        """Return the problems, shortest first."""
        lengths, tokens, kv_heads = profile.lengths, profile.tokens, profile.kv_heads
        if self.suite == "decode":
            lengths, tokens, kv_heads = profile.decode_lengths, profile.decode_tokens, profile.decode_kv_heads
        return [
            Problem(
                batch=max(1, tokens // keys),
                heads=profile.heads,
                kv_heads=kv_heads,
                queries=1 if self.suite == "decode" else keys,
                keys=keys,
                dim=self.dim,
                dtype=self.dtype,
                device=device,
                law=profile.law,
            )
            for keys in sorted(lengths)
        ]


def groups(profile: Profile) -> Iterator[Group]:
    """Yield the groups of a profile, in order."""
    for suite in profile.suites:
        for dtype in profile.dtypes:
            for dim in profile.head_dims:
                for mode in SUITES[suite].modes:
                    yield Group(suite, mode, DTYPES[dtype], dim)
