"""Formulas of "Critical Attention Scaling in Long-Context Transformers" (arXiv:2510.05554) exactly as printed.

Used by the tests of which formulas hold.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class PrintedBlocks(NamedTuple):
    """R₁, R₂ [d, d] and U₁ + U₂, y-vectors of U₃ + U₄ [d] of Lemma B.6 for one pair of tokens."""

    r1: Tensor
    r2: Tensor
    u12: Tensor
    u34: Tensor


def blocks(y: Tensor, rho: float, beta: float, i: int, j: int, u3: int) -> PrintedBlocks:
    """Eqs. 83 and 84; `u3` is the token of the direction of U₃: i as printed, j as intended."""
    near, far = math.exp(beta), math.exp(beta * rho)
    total, moment = y.sum(0), y.T @ y
    weight = near if i == j else far
    tangent = y[j] - (y[j] @ y[i]) * y[i]
    r1, u1 = torch.zeros_like(moment), torch.zeros_like(total)
    if i == j:
        r1 = beta * far * (moment - torch.outer(y[i], moment @ y[i]))
        u1 = beta * far * (total - (total @ y[i]) * y[i])
    r2 = weight * (torch.outer(-y[i] + beta * tangent, y[i]) + torch.eye(y.shape[1], dtype=y.dtype))
    return PrintedBlocks(r1, r2, u1 + beta * weight * tangent, (near - far) * y[u3] + far * total)


def lemma_b8(n: int, d: int, rho: float, beta: float, cross: float) -> float:
    """Eq. 90; the term from R₁ᵀR₂ is printed with `cross` = 1."""
    near, far = math.exp(beta), math.exp(beta * rho)
    inner = n**2 * rho**2 * (1 - rho) + n * (1 - rho) * (1 + rho - 3 * rho**2) - (1 + 2 * rho) * (1 - rho) ** 2
    first = beta**2 * far**2 * n * inner
    second = cross * beta * near * far * n * (n - 1) * (1 - rho**2)
    third = near**2 * (d - 1) * n + far**2 * (beta**2 * (1 - rho**2) + d - 1) * n * (n - 1)
    return first + second + third


def lemma_b9(n: int, rho: float, beta: float) -> float:
    """Eq. 96."""
    near, far, m = math.exp(beta), math.exp(beta * rho), n * rho + 1 - rho
    terms = (
        rho * beta**2 * far**2 * (near - far) * m * (1 - rho),
        beta**2 * far**3 * m**2 * (1 - rho),
        beta * far**2 * near * m * (1 - rho),
        beta * far**2 * (near - far) * (beta * rho + 1) * (1 - rho**2),
        beta * far**3 * m * (beta * (1 - rho**2) + (1 - rho)),
    )
    return n * (n - 1) * sum(terms)


def lemma_b10(n: int, rho: float, beta: float) -> float:
    """Eq. 105."""
    near, far, m = math.exp(beta), math.exp(beta * rho), n * rho + 1 - rho
    length = (near - far) ** 2 + 2 * far * (near - far) * m + far**2 * n * m
    return beta**2 * far**2 * n * (n - 1) * (n * rho + 2) * (1 - rho) * length


def jacobian_norm(n: int, d: int, rho: float, beta: float, q: float, cross: float) -> float:
    """η from Eq. 86 and the three lemmas."""
    z = math.exp(beta) + (n - 1) * math.exp(beta * rho)
    total = z**2 * lemma_b8(n, d, rho, beta, cross) - 2 * z * lemma_b9(n, rho, beta) + lemma_b10(n, rho, beta)
    return total / (z**4 * q * n * d)


def lemma_b2(y: Tensor, beta: float, j: int, k: int) -> Tensor:
    """Eq. 55: ∂ATT(y_j)_v/∂(y_k)_w, [w, v]."""
    weights = (beta * y @ y[j]).exp()
    z, mean = weights.sum(), weights @ y
    own = 1.0 if j == k else 0.0
    first = own * beta * (y.T * weights) @ y
    first = first + weights[k] * (beta * torch.outer(y[j], y[k]) + torch.eye(y.shape[1], dtype=y.dtype))
    second = own * beta * mean + beta * weights[k] * y[j]
    return (first * z - torch.outer(second, mean)) / z**2
