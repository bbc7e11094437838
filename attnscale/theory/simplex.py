"""Tokens on a simplex: one attention layer in closed form, at finite n and in the limit.

The setting is Assumption 1 of "Critical Attention Scaling in Long-Context Transformers" (arXiv:2510.05554): n tokens
x_i with ‖x_i‖² = q, the same cosine ρ between any two directions y_i = x_i/‖x_i‖, and the layer
x'_i = Σ_j A_ij·y_j + α·x_i with A_ij = softmax_j(β·⟨y_i, y_j⟩). Every row has two weights, p = A_ii on the token itself
and a = A_ij on each other token. All other quantities follow from p and a.

The formulas are Lemmas A.3, A.4 and B.8 to B.10 of the paper, rearranged without cancellation: p and a come from one
logistic function of β(1−ρ) − ln(n−1), accurate even at n = 10¹². The README lists errata of the printed lemmas.

The output of a layer is again a simplex, so (ρ, q) can be iterated exactly over layers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from attnscale._util.checks import read_int, read_number
from attnscale.errors import reject


def logistic(odds: float) -> float:
    """1/(1 + e^(−odds)), accurate at both ends.

    >>> logistic(0.0), logistic(-1000.0), logistic(1000.0)
    (0.5, 0.0, 1.0)
    """
    return 1.0 / (1.0 + math.exp(-odds)) if odds > -700.0 else math.exp(odds)


class SimplexWeights(NamedTuple):
    """The weights of a row on its own token and on each other token, and 1 − own without cancellation."""

    own: float
    other: float
    others_together: float


def critical_beta(n: int, rho: float) -> float:
    """β = ln n/(1−ρ), equal to the accumulation scale Λ of every row.

    >>> round(critical_beta(1000, 0.5), 4)
    13.8155
    """
    n = read_int("n", n, "an int >= 2", least=2)
    return math.log(n) / (1.0 - _cosine(rho))


def weights(n: int, rho: float, beta: float) -> SimplexWeights:
    """The weights in a row of n tokens.

    >>> weights(3, 0.5, 2 * math.log(2.0))
    SimplexWeights(own=0.5, other=0.25, others_together=0.5)
    """
    n = read_int("n", n, "an int >= 2", least=2)
    odds = read_number("beta", beta) * (1.0 - _cosine(rho)) - math.log(n - 1)
    others = logistic(-odds)
    return SimplexWeights(logistic(odds), others / (n - 1), others)


def entropy(n: int, rho: float, beta: float) -> float:
    """Entropy of a row in nats. At the critical β it is about ln 2 + ½ ln n: e^H ≈ 2√n keys take part.

    >>> round(entropy(4, 0.5, 0.0) - math.log(4), 12)
    0.0
    """
    own, other, others = weights(n, rho, beta)
    return -sum(mass * math.log(weight) for mass, weight in ((own, own), (others, other)) if mass > 0.0)


def output_norm(n: int, rho: float, beta: float, q: float = 1.0, alpha: float = 0.0) -> float:
    """‖x'_i‖² after one layer (Lemma A.3): α²q + 2α√q(ρ + (1−ρ)p) + ρ + (1−ρ)(p² + (n−1)a²).

    >>> output_norm(10**12, 0.25, 0.0)  # uniform weights: the mean of all tokens
    0.25...
    """
    rho, residual = _cosine(rho), _residual(q, alpha)
    own, other, others = weights(n, rho, beta)
    return residual**2 + 2 * residual * (rho + (1 - rho) * own) + rho + (1 - rho) * (own**2 + others * other)


def angle_ratio(n: int, rho: float, beta: float, q: float = 1.0, alpha: float = 0.0) -> float:
    """(1 − ⟨y'_i, y'_j⟩)/(1 − ρ) = (α√q + p − a)²/‖x'_i‖², the λ of Eq. 26 for a simplex.

    >>> angle_ratio(100, 0.5, 1000.0)  # attention is the identity
    1.0
    """
    own, other, _ = weights(n, rho, beta)
    return (_residual(q, alpha) + own - other) ** 2 / output_norm(n, rho, beta, q, alpha)


def output_cosine(n: int, rho: float, beta: float, q: float = 1.0, alpha: float = 0.0) -> float:
    """⟨y'_i, y'_j⟩ after one layer, exact at every n (Lemmas A.3 and A.4).

    >>> round(output_cosine(10**12, 0.5, 2 * math.log(10**12)), 6)  # at the critical β: 4ρ/(1+3ρ)
    0.8
    """
    return 1.0 - (1.0 - rho) * angle_ratio(n, rho, beta, q, alpha)


def jacobian_norm(n: int, d: int, rho: float, beta: float, q: float = 1.0) -> float:
    """η = ‖∇_X X'‖²/(nd) of one layer without residual, exact at every n (replaces Lemmas B.8 to B.10).

    The block of output j and input j is P_j(pI + βC)/√q, with C the covariance of the tokens under row j's weights.
    The block of input i ≠ j is a·P_i(I + β·y_j⊗(y_i − μ_j))/√q, with μ_j the output; P_i projects y_i out. A simplex of
    n tokens needs d ≥ n. For d < n the formula serves as reference for almost-simplices.

    >>> jacobian_norm(100, 128, 0.5, 1000.0, q=2.0)  # attention is the identity: (1 − 1/d)/q
    0.49609375
    """
    d = read_int("d", d, "an int >= 2", least=2)
    rho, q = _cosine(rho), _squared_norm(q)
    p, a, others = weights(n, rho, beta)
    step = beta * (1.0 - rho)
    squares = p * p + others * a
    # ‖Q‖² − (1−ρ)‖Qe_j‖² for Q = diag(A) − AAᵀ: every term is positive.
    spread = rho * (p * others) ** 2 + (1 + rho) * p * p * others * a + others * a * (1 - a) ** 2
    spread += others * (others - a) * a * a
    own = p * p * (d - 1) + 2 * p * step * others * (1 - a + rho * p) + step**2 * spread
    other = (d - 1) - 2 * step * (p + rho * (1 - a)) + step**2 * (1 + rho) * (1 - 2 * a + squares)
    return (own + others * a * other) / (q * d)


def output_norm_limit(gamma: float, rho: float, q: float = 1.0, alpha: float = 0.0) -> float:
    """‖x'_i‖² for β = γ·ln n and n → ∞ (Eqs. 9 and 50).

    >>> [output_norm_limit(gamma, 0.5) for gamma in (1.0, 2.0, 3.0)]
    [0.5, 0.625, 1.0]
    """
    rho, residual, own = _cosine(rho), _residual(q, alpha), _own_weight_limit(gamma, rho)
    return residual**2 + 2 * residual * (rho + (1 - rho) * own) + rho + (1 - rho) * own**2


def output_cosine_limit(gamma: float, rho: float, q: float = 1.0, alpha: float = 0.0) -> float:
    """⟨y'_i, y'_j⟩ for β = γ·ln n and n → ∞ (Theorem 2.1, Eq. 6): three phases, critical where γ(1−ρ) = 1.

    >>> [output_cosine_limit(gamma, 0.5) for gamma in (1.0, 2.0, 3.0)]
    [1.0, 0.8, 0.5]
    """
    return _cosine(rho) * (_residual(q, alpha) + 1.0) ** 2 / output_norm_limit(gamma, rho, q, alpha)


def jacobian_norm_limit(gamma: float, rho: float, d: int | None = None, q: float = 1.0) -> float:
    """η for β = γ·ln n and n → ∞ (Theorem 2.4): 0, (1 − 1/d)/(4q) or (1 − 1/d)/q; d = None means d → ∞.

    On the critical line η exceeds its limit by (ρL²/16 + (2+ρ)L/4)/(qd) with L = ln n, so d must grow faster than
    (ln n)². A simplex satisfies this with d ≥ n.

    >>> [jacobian_norm_limit(gamma, 0.5, 4) for gamma in (1.0, 2.0, 3.0)]
    [0.0, 0.1875, 0.75]
    """
    if d is not None:
        d = read_int("d", d, "an int >= 2, or None for infinitely many dimensions", least=2)
    own = _own_weight_limit(gamma, _cosine(rho))
    return own**2 * (1.0 - (0.0 if d is None else 1.0 / d)) / _squared_norm(q)


def _own_weight_limit(gamma: float, rho: float) -> float:
    """p for n → ∞: 0, ½ or 1. γ(1−ρ) = 1 is compared up to rounding."""
    ratio = read_number("gamma", gamma) * (1.0 - rho)
    if math.isclose(ratio, 1.0, rel_tol=1e-12):
        return 0.5
    return 0.0 if ratio < 1.0 else 1.0


def _cosine(rho: float) -> float:
    rho = read_number("rho", rho)
    if not 0.0 <= rho < 1.0:
        reject("rho", rho, "a cosine in [0, 1)")
    return rho


def _squared_norm(q: float) -> float:
    q = read_number("q", q)
    if not 0.0 < q < math.inf:
        reject("q", q, "a squared norm > 0")
    return q


def _residual(q: float, alpha: float) -> float:
    """α√q, the norm of the residual."""
    alpha = read_number("alpha", alpha)
    if not 0.0 <= alpha < math.inf:
        reject("alpha", alpha, "a residual weight >= 0")
    return alpha * math.sqrt(_squared_norm(q))


class Configuration(NamedTuple):
    """A simplex between layers: 1 − ρ, which keeps its digits near collapse, and the squared norm q."""

    apart: float
    q: float

    @property
    def rho(self) -> float:
        """The cosine between any two tokens."""
        return 1.0 - self.apart


def trajectory(n: int, rho: float, beta: float, depth: int, q: float = 1.0, alpha: float = 0.0) -> list[Configuration]:
    """The configurations before the first and after each of `depth` layers with the same β and residual.

    >>> [round(state.rho, 6) for state in trajectory(10**9, 0.5, 2 * math.log(10**9), depth=3)]
    [0.5, 0.8, 1.0, 1.0]
    """
    depth = read_int("depth", depth, "an int >= 0", least=0)
    states = [Configuration(1.0 - rho, q)]
    for _ in range(depth):
        apart, norm = states[-1]
        # Once ρ rounds to 1 all tokens coincide, and the layer adds this token to its residual.
        if apart < 2**-53:
            states.append(Configuration(apart, (1.0 + alpha * math.sqrt(norm)) ** 2))
            continue
        ratio = angle_ratio(n, 1.0 - apart, beta, norm, alpha)
        states.append(Configuration(apart * ratio, output_norm(n, 1.0 - apart, beta, norm, alpha)))
    return states


def lifetime(n: int, rho: float, beta: float) -> float:
    """Approximate number of layers until a supercritical simplex collapses: e^(β(1−ρ))/((n−1)·2ρ(1−ρ)β).

    No residual. A layer adds 2ρ(1−ρ)ε to ρ, with ε = (n−1)e^(−β(1−ρ)) the weight on other tokens. When ρ grows by δ, ε
    grows by e^(βδ); the solution of this equation diverges at the returned depth.

    >>> round(lifetime(1000, 0.5, 4 * math.log(1000)), 1)
    72.5
    """
    log_layers = beta * (1.0 - rho) - math.log(n - 1) - math.log(2.0 * rho * (1.0 - rho) * beta)
    return math.exp(log_layers)


def layers_until_collapse(n: int, rho: float, beta: float, most: int = 10**6) -> int | None:
    """The first layer after which 1 − ρ is less than half of its initial value; None if not within `most` layers.

    >>> layers_until_collapse(10**6, 0.5, math.log(10**6))
    1
    """
    apart = 1.0 - rho
    for depth in range(1, most + 1):
        apart *= angle_ratio(n, 1.0 - apart, beta)
        if apart < 0.5 * (1.0 - rho):
            return depth
    return None
