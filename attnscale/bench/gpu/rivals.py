"""What a user would use instead: torch's kernels, FlexAttention, flash-attn, and the n × n matrix."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnscale.bench.gpu.problem import Answer, Attention, Problem, Provider, always, by_law

# The largest share of the device's memory for one matrix of scores: backward holds several.
MATRIX_SHARE = 1 / 8


def sdpa(backend: SDPBackend, problem: Problem) -> Attention:
    """One of torch's kernels, without a fallback."""
    grouped = problem.heads != problem.kv_heads

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        with sdpa_kernel(backend):
            return Answer(
                F.scaled_dot_product_attention(query, key, value, is_causal=problem.causal, enable_gqa=grouped)
            )

    return attend


def why_not_on_cpu(problem: Problem, backward: bool) -> str | None:
    """For kernels that torch has on GPUs only."""
    return "torch has no such kernel for the CPU" if problem.device.type == "cpu" else None


def flex(problem: Problem) -> Attention:
    """FlexAttention with the law as a score modification; compiled on a GPU, written out on the CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    beta = problem.temperature()
    mask = None
    if problem.causal:
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, problem.queries, problem.keys, device=problem.device.type
        )
    compiled = problem.device.type == "cuda"
    if compiled:
        # Each problem has its own shape: after a few of them the compiler would fall back to the n × n matrix.
        torch.compiler.reset()
    attention = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
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
    matrix = 4 * problem.batch * problem.heads * problem.queries * problem.keys
    if problem.device.type != "cuda":
        return None
    room = MATRIX_SHARE * torch.cuda.get_device_properties(problem.device).total_memory
    return f"a matrix of scores takes {matrix / 2**30:.0f} GiB" if matrix > room else None


SDPA = tuple(
    Provider(f"sdpa_{name}", functools.partial(sdpa, backend), why_not=why_not)
    for name, backend, why_not in (
        ("flash", SDPBackend.FLASH_ATTENTION, always),
        ("cudnn", SDPBackend.CUDNN_ATTENTION, why_not_on_cpu),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION, why_not_on_cpu),
        ("math", SDPBackend.MATH, always),
    )
)
FLEX = Provider("flex", flex, temperature=by_law, why_not=why_not_flex)
FLASH_ATTN = tuple(
    Provider(name, functools.partial(flash_attn, module), why_not=functools.partial(why_not_flash_attn, module))
    for name, module in (("flash_attn_2", "flash_attn"), ("flash_attn_3", "flash_attn_interface"))
)
EAGER = Provider(
    "eager", functools.partial(eager, False), temperature=by_law, rounds_scores=True, why_not=why_not_eager
)
EAGER_STATISTICS = replace(EAGER, prepare=functools.partial(eager, True), row_numbers=3)
