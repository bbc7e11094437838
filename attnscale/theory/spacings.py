"""Appendix D of seed 004: how far apart the largest of n Gaussian scores lie, and what softmax makes of it.

The gap between the k-th and the next is E_k/k in units of 1/t_n, with independent exponential E_k (Rényi), so the k-th
largest lies Σ_(i<k) E_i/i ≈ ln k below the first. The paper prints Σ E_i ≈ k (Eq. 117), with which the largest weight
would be of order one at every temperature; see the errata.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnscale._util.checks import read_int


def quantile(n: int) -> float:
    """t_n = Φ⁻¹(1 − 1/n) ~ √(2 ln n), the scale of the gaps: they are about 1/t_n.

    >>> round(quantile(1000), 4)
    3.0902
    """
    n = read_int("n", n, "an int >= 2", least=2)
    return float(-torch.special.ndtri(torch.tensor(1.0 / n, dtype=torch.float64, device="cpu")))


def mean_gap(n: int, k: int) -> float:
    """E(a₁ − a_k) for the largest and the k-th largest of n independent N(0, 1), exact.

    The mean of the j-th spacing is C(n, j)·∫ Φ^(n−j)·(1−Φ)^j dx; the integral is a trapezoidal sum, which converges
    exponentially for such integrands.

    >>> round(mean_gap(2, 2), 10) == round(2 / math.sqrt(math.pi), 10)
    True
    """
    k = read_int("k", k, f"an int from 2 to n={n}", least=2, most=n)
    x = torch.linspace(-12.0, 40.0, 8001, dtype=torch.float64, device="cpu")
    below, above = torch.special.log_ndtr(x), torch.special.log_ndtr(-x)
    total = 0.0
    for j in range(1, k):
        choose = math.lgamma(n + 1) - math.lgamma(j + 1) - math.lgamma(n - j + 1)
        total += float((choose + (n - j) * below + j * above).exp().sum() * (x[1] - x[0]))
    return total


def mean_gap_limit(k: int) -> float:
    """lim t_n·E(a₁ − a_k) = 1 + 1/2 + … + 1/(k−1); the paper's Eq. 117 would give k − 1.

    >>> mean_gap_limit(4)
    1.8333333333333333
    """
    return sum(1.0 / j for j in range(1, k))


def printed_top_weight(t: float, draws: int, generator: torch.Generator, terms: int = 200) -> Tensor:
    """The largest weight at β = t·√(2 ln n) as Eq. 118 prints it, [draws]: with gaps E₁ + … + E_(k−1), for comparison.

    With the true gaps E₁ + E₂/2 + … + E_(k−1)/(k−1) the sum is finite only for t > 1, and its law is that of
    `poisson_dirichlet`; for t ≤ 1 the largest weight tends to 0.

    >>> printed_top_weight(1.0, 4, torch.Generator().manual_seed(0)).shape
    torch.Size([4])
    """
    gaps = torch.empty(draws, terms, dtype=torch.float64, device="cpu").exponential_(generator=generator).cumsum(-1)
    return (1.0 + (-t * gaps).exp().sum(-1)).reciprocal()
