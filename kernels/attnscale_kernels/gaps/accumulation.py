"""A lower bound of Λ that costs no pass over keys: from the largest logit and the lse that attention returns anyway."""

from __future__ import annotations

import math

import torch
from torch import Tensor

EXACT_TERMS = 16  # of Σ k^(−σ); behind them an integral stands for the sum
STEEPEST = 64.0
STEPS = 32


def accumulation_lower_bound(max_logit: Tensor, lse: Tensor, beta: Tensor, visible: Tensor) -> Tensor:
    """Λ ≥ β/σ [B, H, Tq], where Σ_{k ≤ n} k^(−σ) = exp(lse − max_logit) = 1/w_max.

    All broadcast against each other; `visible` is n. For every rank Δ_k ≥ ln k/Λ, so that a row's sum of e^(−βΔ_k) is
    at most Σ k^(−β/Λ), and β/Λ at most the σ at which the two are equal. σ is rounded up in every step, doubts about
    lse included. Rows of one key, rows whose w_max is 1 to rounding, and β ≤ 0 have a bound of 0. Not for attention
    with sinks, whose lse has a term that no key has.

    >>> logits = -torch.arange(1.0, 9.0).log()  # Λ = 1, attained at every rank
    >>> bound = accumulation_lower_bound(logits.max(), logits.logsumexp(0), torch.tensor(1.0), torch.tensor(8))
    >>> bool(0.999 < bound <= 1)
    True
    """
    rounding = torch.finfo(lse.dtype).eps
    n = visible.to(lse.dtype)
    usable = (n > 1) & (beta > 0) & (max_logit > -math.inf)
    doubt = 16 * rounding * (1 + lse.abs() + max_logit.abs())
    excess = torch.expm1(torch.where(usable, lse - max_logit - doubt, 0.0).clamp(min=0))
    gentle, steep = torch.zeros_like(excess), torch.full_like(excess, STEEPEST)
    usable = usable & (_harmonic_excess(steep, n) <= excess)
    for _ in range(STEPS):
        middle = (gentle + steep) / 2
        enough = _harmonic_excess(middle, n) <= excess
        gentle, steep = torch.where(enough, gentle, middle), torch.where(enough, middle, steep)
    return torch.where(usable, beta * (1 - 4 * rounding) / steep, 0.0)


def _harmonic_excess(sigma: Tensor, n: Tensor) -> Tensor:
    """Not less than Σ_{1 < k ≤ n} k^(−σ), and above it by a thousandth of the tail at most.

    A convex term is at most its mean over [k − 1/2, k + 1/2], so the tail is at most one integral.
    """
    k = torch.arange(2, EXACT_TERMS + 1, dtype=sigma.dtype, device=sigma.device)
    terms = torch.where(k <= n[..., None], torch.exp(-sigma[..., None] * k.log()), 0.0).sum(-1)
    first = EXACT_TERMS + 0.5
    octaves = ((n + 0.5) / first).clamp(min=1).log()
    power = (1 - sigma) * octaves
    flat = power.abs() < 1e-3  # where expm1(x)/x is its series, and at 0 has no other form
    mean = torch.where(flat, 1 + power / 2 + power * power / 6, torch.expm1(power) / torch.where(flat, 1.0, power))
    tail = torch.exp((1 - sigma) * math.log(first)) * octaves * mean
    return (terms + tail) * (1 + 32 * torch.finfo(sigma.dtype).eps)
