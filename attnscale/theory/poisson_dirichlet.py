"""Weights in the condensed phase: the Poisson–Dirichlet law PD(α, 0), α = 1/t, of e^(β U_j)/Z at β = t β_c, t > 1.

Near the maximum, Gaussian scores are a Poisson process of exponential density, so that the weights tend to
Γ_k^(−t)/Σ_j Γ_j^(−t), Γ_k the arrival times of a unit Poisson process.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnscale.errors import reject


def mean_largest(t: float) -> float:
    """E w_max: ∫ e^(−λ)/(e^(−λ) + λ^α γ(1−α, λ)) dλ, γ the lower incomplete gamma function.

    Given the largest point, the others are a Poisson process below it, which gives E e^(−λ/w_max) = e^(−λ)/ψ(λ) with
    ψ = 1 + α ∫_0^1 (1 − e^(−λy)) y^(−α−1) dy; the integral over λ of this transform is E w_max.

    >>> round(mean_largest(2.0), 3)
    0.627
    """
    alpha = _alpha(t)
    y = torch.arange(-45.0, 5.0, 0.05, dtype=torch.float64, device="cpu")  # λ = e^y
    rate = y.exp()
    incomplete = torch.special.gammainc(torch.full_like(rate, 1 - alpha), rate) * math.gamma(1 - alpha)
    return 0.05 * float((torch.exp(y - rate) / (torch.exp(-rate) + rate**alpha * incomplete)).sum())


def chance_of_more(weight: float, t: float) -> float:
    """P(w_max > v) for v ≥ 1/2, where no two weights can both be: sin(πα)/(πα) · ((1−v)/v)^α.

    >>> round(chance_of_more(0.5, 2.0) * math.pi, 9)
    2.0
    """
    alpha = _alpha(t)
    if not 0.5 <= weight <= 1:
        reject("weight", weight, "a number in [1/2, 1]")
    return math.sin(math.pi * alpha) / (math.pi * alpha) * math.pow((1 - weight) / weight, alpha)


def mean_sum_of_squares(t: float) -> float:
    """E Σ w_k² = 1 − 1/t, the inverse of the number of keys that share the attention.

    >>> mean_sum_of_squares(4.0)
    0.75
    """
    return 1 - _alpha(t)


def sample_weights(t: float, rows: int, ranks: int, generator: torch.Generator) -> Tensor:
    """The first weights [rows, ranks] in falling order; the sum beyond them is replaced by its mean.

    >>> sample_weights(2.0, 3, 100, torch.Generator().manual_seed(0)).shape
    torch.Size([3, 100])
    """
    _alpha(t)
    gaps = torch.empty(rows, ranks, dtype=torch.float64, device="cpu").exponential_(generator=generator)
    arrivals = gaps.cumsum(-1)
    points = arrivals**-t
    beyond = arrivals[:, -1:] ** (1 - t) / (t - 1)  # ∫ x^(−t) dx from the last arrival on
    return points / (points.sum(-1, keepdim=True) + beyond)


def _alpha(t: float) -> float:
    if not t > 1:
        reject("t", t, "a number > 1: below, all weights vanish")
    return 1 / t
