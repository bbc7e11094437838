"""What is compared: our kernels, what a user would use instead, and the suites and groups that are measured."""

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

BRACKET = 1 + BRACKET_WIDTH  # upper over lower end of a bracket of Λ, at most

# The largest share of the device's memory for one matrix of scores: backward holds several.
MATRIX_SHARE = 1 / 8


def ours(problem: Problem, request: StatsRequest | None = None, **options: Any) -> Attention:
    """Attention of this package: by default under the problem's law, by the kernels, without statistics."""
    options = {"policy": problem.law, "backend": "triton", **problem.rule, **options}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        if request is None:
            return Answer(scaled_dot_product_attention(query, key, value, **options))
        output, stats = attention_with_stats(query, key, value, request=request, **options)
        return Answer(output, {name: getattr(stats, name) for name in STATISTICS if getattr(request, name)})

    return attend


def fused_adaptive(problem: Problem) -> Attention:
    """The kernel that counts gaps, then attention."""
    return lambda query, key, value: Answer(_fused(problem, query, key, value)[0])


def fused_temperature(problem: Problem, inputs: Inputs) -> Tensor:
    """The β [B, H, Tq] that the kernels take."""
    return _fused(problem, *(x.detach() for x in inputs.leaves))[1]


def _fused(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    from attnscale_kernels import Visibility
    from attnscale_kernels.gaps.op import adaptive_attention

    visibility = Visibility(right=0) if problem.causal else Visibility()
    law: dict[str, Any] = {"r": POLICY.r, "floor": POLICY.floor, "ceiling": POLICY.ceiling}
    found, beta = adaptive_attention(query, key, value, visibility, scale=problem.dim**-0.5, **law)
    return found.out, beta


def blockwise_temperature(problem: Problem, inputs: Inputs) -> Tensor:
    """The β [B, H, Tq] that the policy takes in plain torch, from what is reported: β/Λ and Λ."""
    scale, ratio = _scale_and_ratio(problem, inputs, policy=POLICY, backend="blockwise")
    beta = torch.where(scale == 0, POLICY.floor, ratio * scale)
    return torch.where(torch.isinf(scale), POLICY.ceiling, beta)


def bounds(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """r·Λ with the exact Λ, and as much more as a bracket may be wide; both [B, H, Tq]."""
    wide = Inputs(*(x.double() for x in inputs))
    scale = POLICY.r * _scale_and_ratio(problem, wide, backend="reference")[0]
    return scale.clamp(POLICY.floor, POLICY.ceiling), (BRACKET * scale).clamp(POLICY.floor, POLICY.ceiling)


def _scale_and_ratio(problem: Problem, inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    """The exact Λ and β/Λ, each [B, H, Tq]."""
    query, key, value = (x.detach() for x in inputs.leaves)
    stats = attention_with_stats(query, key, value, request=EXACT, **problem.rule, **options).stats
    if stats.accumulation is None or stats.criticality is None:
        raise TypeError("Λ was asked for and is missing")
    return stats.accumulation.lower, stats.criticality


def split(problem: Problem) -> Attention:
    """Decoding with a cache in one piece."""
    from attnscale_kernels import Visibility
    from attnscale_kernels.decode.op import decode_attention

    beta = problem.temperature()[None, None]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        return Answer(decode_attention(query, key, value, beta, Visibility(), scale=problem.dim**-0.5).out)

    return attend


def sdpa(backend: SDPBackend, problem: Problem) -> Attention:
    """One of torch's kernels, without a fallback."""
    grouped = problem.heads != problem.kv_heads

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=problem.causal, enable_gqa=grouped)
        return Answer(out)

    return attend


def why_not_sdpa(backend: SDPBackend, problem: Problem, backward: bool) -> str | None:
    """Some kernels of torch are for GPUs only."""
    everywhere = backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    return "torch has no such kernel for the CPU" if problem.device.type == "cpu" and not everywhere else None


def flex(problem: Problem) -> Attention:
    """FlexAttention with the law as a score modification; compiled on a GPU, written out on the CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    beta, sizes, device = problem.temperature(), (problem.queries, problem.keys), problem.device.type
    mask = None
    if problem.causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, *sizes, device=device)
    if device == "cuda":
        # Each problem has its own shape: after a few of them the compiler would fall back to the n × n matrix.
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
    """FlexAttention on a CPU refuses inputs that require gradients."""
    return "FlexAttention has no backward on the CPU" if backward and problem.device.type == "cpu" else None


def flash_attn(module: str, problem: Problem) -> Attention:
    """A version of flash-attn by its module; a single query goes to the function that splits the keys."""
    package = importlib.import_module(module)
    function = package.flash_attn_func if problem.causal else package.flash_attn_with_kvcache

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        found = function(*(x.transpose(1, 2) for x in (query, key, value)), causal=problem.causal)
        out: Tensor = found[0] if isinstance(found, tuple) else found  # some releases of 3 add the log-sum-exp
        return Answer(out.transpose(1, 2))

    return attend


def why_not_flash_attn(module: str, problem: Problem, backward: bool) -> str | None:
    """flash-attn is installed by the user, and needs a GPU."""
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    return f"{module} needs a GPU" if problem.device.type != "cuda" else None


def eager(statistics: bool, problem: Problem) -> Attention:
    """All weights in memory and scores in the dtype of the inputs, as one would write it; the softmax in fp32."""
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
    """A matrix of scores that does not fit into the device's memory."""
    if problem.device.type != "cuda":
        return None
    matrix = 4 * problem.batch * problem.heads * problem.queries * problem.keys
    room = MATRIX_SHARE * torch.cuda.get_device_properties(problem.device).total_memory
    return f"a matrix of scores takes {matrix / 2**30:.0f} GiB" if matrix > room else None


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

# What a user would have instead; the slow ones are measured and are nobody's yardstick.
RIVALS = tuple(provider.name for provider in OTHERS if provider.name not in ("sdpa_math", "eager"))


class Suite(NamedTuple):
    """Providers of one question; times are also given over those of the fastest of `baselines` at each length."""

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
        """What is measured, the shortest first."""
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
    """Everything a profile measures, in order."""
    for suite in profile.suites:
        for dtype in profile.dtypes:
            for dim in profile.head_dims:
                for mode in SUITES[suite].modes:
                    yield Group(suite, mode, DTYPES[dtype], dim)
