"""Theorems 2.3 and 2.5 of "Critical Attention Scaling in Long-Context Transformers" (arXiv:2510.05554) as inequalities.

The paper states limits with o_n(1). Its proofs give explicit bounds, written out here with all constants, for cosines
in [ρ₁, ρ₂] and squared norms in [q₁, q₂] (Assumption 2). Each bound holds for every such configuration at every n and
can be checked against a measurement. `contraction_bound` and `jacobian_upper_bound` tend to the paper's limits
for γ < 1/(1−ρ₁), `identity_bound` and `jacobian_lower_bound` for γ > 1/(1−ρ₂).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.errors import reject
from attnscale.theory.phase import directions
from attnscale.theory.simplex import logistic


class TokenRange(NamedTuple):
    """The constants of Assumption 2: range of the cosines between two tokens, and of the squared norms."""

    n: int
    d: int
    rho_min: float
    rho_max: float
    q_min: float
    q_max: float


def token_range(x: Tensor) -> TokenRange:
    """Compute the constants of Assumption 2 for tokens [n, d].

    >>> token_range(torch.tensor([[1.0, 0.0], [3.0, 4.0]], dtype=torch.float64))
    TokenRange(n=2, d=2, rho_min=0.6, rho_max=0.6, q_min=1.0, q_max=25.0)
    """
    n, d = x.shape
    y = directions(x)
    cosines = (y @ y.T)[~torch.eye(n, dtype=torch.bool, device=x.device)]
    squares = x.square().sum(-1)
    return TokenRange(n, d, *(float(v) for v in (cosines.min(), cosines.max(), squares.min(), squares.max())))


def own_weight(tokens: TokenRange, beta: float) -> tuple[float, float]:
    """Lower and upper bound on the weight A_ii of a token on itself (Lemma A.1).

    >>> own_weight(TokenRange(3, 3, 0.5, 0.5, 1.0, 1.0), 2 * math.log(2.0))
    (0.5, 0.5)
    """
    lower, upper = (beta * (1.0 - rho) - math.log(tokens.n - 1) for rho in (tokens.rho_max, tokens.rho_min))
    return logistic(lower), logistic(upper)


def contraction_bound(tokens: TokenRange, beta: float, alpha: float = 0.0) -> float:
    """A lower bound on min ⟨y'_i, y'_j⟩ (Theorem 2.3, Eq. 10).

    No cosine is below ρ₁, so ⟨x'_i, x'_j⟩ ≥ ρ₁(α‖x_i‖+1)(α‖x_j‖+1). With own weight p, ‖x'_i‖² is at most
    α²‖x_i‖² + 2α‖x_i‖(p + (1−p)ρ₂) + ρ₂ + (1−ρ₂)ΣA². The quotient is smallest at an end of the range of norms.

    >>> round(contraction_bound(TokenRange(10**9, 10**9, 0.4, 0.5, 1.0, 1.0), beta=0.0), 6)  # the limit ρ₁/ρ₂
    0.8
    """
    _, own = own_weight(_positive(tokens), beta)
    squares = _squared_weights(tokens, beta)
    toward = own + (1.0 - own) * tokens.rho_max
    length = tokens.rho_max + (1.0 - tokens.rho_max) * squares
    return tokens.rho_min * _gain(tokens, alpha, toward, length)


def contraction_limit(tokens: TokenRange, alpha: float = 0.0) -> float:
    """The limit of `contraction_bound` for n → ∞ and γ < 1/(1−ρ₁): ρ₁ + ε of Eq. 10, with ε written out.

    >>> contraction_limit(TokenRange(8, 8, 0.4, 0.5, 1.0, 1.0))
    0.8
    """
    return tokens.rho_min * _gain(_positive(tokens), alpha, tokens.rho_max, tokens.rho_max)


def identity_bound(tokens: TokenRange, beta: float) -> float:
    """An upper bound on max ‖ATT(y_i) − y_i‖ (Theorem 2.3, Eq. 11): (1 − p)·√(2(1−ρ₁)).

    >>> identity_bound(TokenRange(100, 100, 0.5, 0.5, 1.0, 1.0), beta=100.0) < 1e-19
    True
    """
    return _others(tokens, beta) * math.sqrt(2.0 * (1.0 - tokens.rho_min))


def jacobian_upper_bound(tokens: TokenRange, beta: float) -> float:
    """An upper bound on η (Theorem 2.5, Eq. 22), from blocks of norm ≤ (2β·δ_ij + (2β+√d)·A_ji)/√q₁ (Lemma B.5).

    Below the critical γ the bound tends to 4β²/(q₁d), not to 0. At d = 128 it is informative for β < 5.7·√q₁ only.

    >>> round(jacobian_upper_bound(TokenRange(10**12, 100, 0.5, 0.5, 1.0, 1.0), beta=1.0), 3)
    0.04
    """
    _, own = own_weight(tokens, beta)
    root = 2.0 * beta + math.sqrt(tokens.d)
    total = 4.0 * beta**2 + 4.0 * beta * root * own + root**2 * _squared_weights(tokens, beta)
    return total / (tokens.q_min * tokens.d)


def jacobian_lower_bound(tokens: TokenRange, beta: float) -> float:
    """A lower bound on η (Theorem 2.5, Eq. 23), from the diagonal blocks alone.

    A diagonal block is P(pI + βC)/‖x‖ with tr C ≤ 2(1−p)(1−ρ₁). Its norm is at least (p√(d−1) − 2β(1−p)(1−ρ₁))/√q₂.

    >>> round(jacobian_lower_bound(TokenRange(100, 128, 0.5, 0.5, 1.0, 2.0), beta=1000.0), 12)
    0.49609375
    """
    own, _ = own_weight(tokens, beta)
    block = own * math.sqrt(tokens.d - 1) - 2.0 * beta * _others(tokens, beta) * (1.0 - tokens.rho_min)
    return max(0.0, block) ** 2 / (tokens.q_max * tokens.d)


def _gain(tokens: TokenRange, alpha: float, toward: float, length: float) -> float:
    """The smallest (α‖x‖+1)²/(α²‖x‖² + 2α‖x‖·toward + length) over the range of norms."""
    residuals = (alpha * math.sqrt(q) for q in (tokens.q_min, tokens.q_max))
    return min((u + 1.0) ** 2 / (u * u + 2.0 * u * toward + length) for u in residuals)


def _others(tokens: TokenRange, beta: float) -> float:
    """The largest weight of a row on other tokens: 1 − p for the smallest p, without cancellation."""
    return logistic(math.log(tokens.n - 1) - beta * (1.0 - tokens.rho_max))


def _squared_weights(tokens: TokenRange, beta: float) -> float:
    """An upper bound on Σ_j A_ij²: p² + max_(j≠i) A_ij, and at most the largest weight."""
    _, own = own_weight(tokens, beta)
    # The best other token competes with the token itself at 1 and n−2 tokens at ρ₁; either term alone gives a bound.
    other = min(
        logistic(-beta * (1.0 - tokens.rho_max)),
        logistic(beta * (tokens.rho_max - tokens.rho_min) - math.log(tokens.n - 2)) if tokens.n > 2 else 1.0,
    )
    return min(own**2 + other, max(own, other))


def _positive(tokens: TokenRange) -> TokenRange:
    if tokens.rho_min < 0.0:
        reject("tokens.rho_min", tokens.rho_min, "a cosine >= 0 (Assumption 2)")
    return tokens
