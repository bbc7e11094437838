"""Keyword arguments for building every policy, for tests over all policies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnscale.policies import Policy, build_policy
from attnscale.statistics import RowStats
from attnscale.statistics.gaps import Accumulation

ARGUMENTS: dict[str, dict[str, Any]] = {
    "constant": {},
    "sqrt_log": {},
    "log": {},
    "log_squared": {},
    "power": {"exponent": 0.5},
    "yarn": {"factor": 4},
    "qwen": {},
    "ssmax": {"num_heads": 4},
    "swan": {"a": 1000},
    "llama4": {},
    "mistral": {},
    "grok2": {},
    "inkling": {},
    "hypenet": {},
    "deepseek": {},
    "gpt_oss": {},
    "longrope": {"factor": 32, "original_length": 4096},
    "drope": {"factor": 4},
    "beam": {},
    "dual_chunk": {"original_length": 4096},
    "pippo": {},
    "su_entropy": {},
    "infoscale": {"head_dim": 64, "reference_length": 2048},
    "lumina": {"reference_length": 2048},
    "head_scale": {"num_heads": 4},
    "asentmax": {"num_heads": 4, "head_dim": 16},
    "selective": {"num_heads": 4, "head_dim": 16},
    "moondream": {"num_heads": 4, "head_dim": 16},
    "qassmax": {"num_heads": 4, "head_dim": 16},
    "window_schedule": {"window": 384},
    "rem": {},
    "simplex": {"rho": 0.5},
    "sphere": {"head_dim": 64},
    "gap_adaptive": {},
    "entropy_adaptive": {},
    "per_head": {"num_heads": 4, "heads": {"1-2": "log"}},
}

BY_QUERY = ("asentmax", "selective", "moondream", "qassmax")
LEARNED = ("ssmax", "head_scale", *BY_QUERY)
ADAPTIVE = ("gap_adaptive", "entropy_adaptive")
MIXED = ("per_head",)
SCHEDULED = ("window_schedule",)
FIXED = tuple(name for name in ARGUMENTS if name not in LEARNED + ADAPTIVE + MIXED + SCHEDULED)
BY_LENGTH = FIXED + LEARNED + MIXED + SCHEDULED


def build(name: str) -> Policy:
    """Build a policy by name with the arguments of the catalogue."""
    return build_policy(name, **ARGUMENTS[name])


def started(name: str) -> Policy:
    """A policy of the catalogue whose parameters are not at zero, where some gradients vanish."""
    policy = build(name)
    for index, parameter in enumerate(policy.parameters()):
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(index))
    return policy


def temperature(policy: Policy, n: int | Tensor) -> Tensor:
    """β, with queries of ones for policies that read queries, and H = Λ = ln n for those that read scores."""
    if policy.name in ADAPTIVE:
        visible = torch.as_tensor(n).clamp(min=2)
        scale = visible.log()
        return policy.from_stats(RowStats(visible, entropy=scale, accumulation=Accumulation(scale, scale)))
    if not policy.needs_query:
        return policy(n)
    rows = n.shape[-1] if isinstance(n, Tensor) and n.dim() else 1
    return policy(n, query=torch.ones(1, policy.num_heads, rows, policy.head_dim))
