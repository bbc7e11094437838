"""Z = Σ_j e^(b U_j) over n independent U_j ~ N(0, 1): its moments at every finite n, by one quadrature.

With E exponential and independent of Z, P(ln E − ln Z > x) = E e^(−e^x Z) = L(x)^n, where L(x) = E e^(−e^(x + b U)). So
one function of one variable gives the law of ln Z, for n = 2 as for n = 10^12 (n ln L is summed in log space). All
integrands are analytic in a strip and decay, so that the trapezoidal rule converges faster than any power of its step.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

EULER = 0.5772156649015329
TAIL = 40.0  # e^−40 is below the rounding of what is summed
SCORES = torch.linspace(-12.0, 12.0, 2401, dtype=torch.float64, device="cpu")  # the grid of U
STEP = 0.1  # of x


class Moments(NamedTuple):
    """Mean and variance of ln Z."""

    mean: float
    variance: float


def ln_z_moments(n: float, b: float) -> Moments:
    """Mean and variance of ln Z: those of ln E − ln Z, whose survival function is L^n, without those of ln E.

    >>> round(ln_z_moments(1, 2.0).variance, 9)  # Z = e^(2U)
    4.0
    """
    x = _grid(n, b)
    survival = torch.exp(n * ln_laplace(x, b))
    # E X = x_0 + ∫ P(X > x) dx, and E (X − x_0)² = 2 ∫ (x − x_0) P(X > x) dx, from x_0 where P is 1.
    offset = x - x[0]
    first = STEP * (survival.sum() - 0.5).item()
    second = (
        2 * STEP * (offset * survival).sum().item() + STEP**2 / 6
    )  # the last term: at x_0 the integrand has slope 1
    return Moments(-(x[0].item() + first) - EULER, second - first**2 - math.pi**2 / 6)


def mean_sum_of_squares(n: float, b: float) -> float:
    """E Σ w_j² of the weights w_j = e^(b U_j)/Z: n ∫ s E[e^(2bU) e^(−s e^(bU))] L(s)^(n−1) ds.

    >>> round(mean_sum_of_squares(4, 0.0), 9)
    0.25
    """
    x = _grid(n, b)
    own = _expectation(2 * (b * SCORES + x[:, None]) - torch.exp(b * SCORES + x[:, None]))
    return n * STEP * (own * torch.exp((n - 1) * ln_laplace(x, b))).sum().item()


def mean_sigmoid(n: float, b: float, logit: float) -> float:
    """E of e^a/(e^a + Z) for a logit a beside n others: ∫ e^(−s) L(ln s − a)^n ds.

    >>> round(mean_sigmoid(3, 0.0, 0.0), 9)
    0.25
    """
    y = torch.arange(-2 * TAIL - ln_mean(n, b), 6.0, STEP, dtype=torch.float64, device="cpu")  # s = e^y
    return STEP * torch.exp(y - y.exp() + n * ln_laplace(y - logit, b)).sum().item()


def mean_maximum(n: float) -> float:
    """E max U_j of n independent N(0, 1).

    >>> round(mean_maximum(2) * math.sqrt(math.pi), 9)
    1.0
    """
    density = torch.exp(math.log(n) + (n - 1) * torch.special.log_ndtr(SCORES) - SCORES**2 / 2)
    step = (SCORES[1] - SCORES[0]).item()
    return step / math.sqrt(2 * math.pi) * (SCORES * density).sum().item()


def mean_largest_weight(n: float, b: float) -> float:
    """E w_max: the integral over λ of E e^(−λ/w_max), which is e^(−λ) (G/Φ)^(n−1) given the maximum u.

    G(u, λ) = ∫_(−∞)^u φ(v) e^(−λ e^(−b(u−v))) dv. At v = u the integrand has no decay, so the gap u − v gets nodes that
    crowd there (tanh-sinh).

    >>> round(mean_largest_weight(5, 0.0), 9)
    0.2
    """
    likely = SCORES[(n - 1) * torch.special.log_ndtr(SCORES) + math.log(n) - SCORES**2 / 2 > -TAIL]
    spacing = max((likely[-1] - likely[0]).item() / 100, 0.01)
    u = torch.arange(likely[0].item(), likely[-1].item(), spacing, dtype=torch.float64, device="cpu")
    density = torch.exp(math.log(n) + (n - 1) * torch.special.log_ndtr(u) - u**2 / 2) / math.sqrt(2 * math.pi)
    z = torch.arange(-3.2, 3.2, 0.03, dtype=torch.float64, device="cpu")
    unit = 0.5 * (1 + torch.tanh(math.pi / 2 * torch.sinh(z)))
    weight = 0.03 * math.pi / 4 * torch.cosh(z) / torch.cosh(math.pi / 2 * torch.sinh(z)) ** 2
    y = torch.arange(-TAIL, 4.5, 0.2, dtype=torch.float64, device="cpu")  # λ = e^y
    total = 0.0
    for top, mass in zip(u.tolist(), density.tolist(), strict=True):
        reach = max(top, 0.0) + 10
        ln_normal = -((top - reach * unit) ** 2) / 2 - math.log(2 * math.pi) / 2
        below = torch.exp(ln_normal - torch.special.log_ndtr(u.new_tensor(top))) * weight * reach
        lost = -torch.expm1(-torch.exp(y[:, None] - b * reach * unit)) @ below  # 1 − G/Φ
        total += mass * torch.exp(y - y.exp() + (n - 1) * torch.log1p(-lost.clamp(max=1 - 1e-16))).sum().item()
    return total * spacing * 0.2


def ln_laplace(x: Tensor, b: float) -> Tensor:
    """ln E e^(−e^(x + b U)) at each x [X], exact to rounding also where it is nearly 0."""
    parts = x.chunk(1 + len(x) // 256)  # bounds the memory of the grid [x, U]
    weights = torch.exp(-(SCORES**2) / 2)
    weights = weights / weights.sum()
    return torch.cat([torch.log1p(torch.expm1(-torch.exp(part[:, None] + b * SCORES)) @ weights) for part in parts])


def ln_mean(n: float, b: float) -> float:
    """ln E Z = ln n + b²/2: no ln Z is much larger."""
    return math.log(n) + b**2 / 2


def _expectation(ln_values: Tensor) -> Tensor:
    """E over U of e^(ln_values) [X, U]."""
    weights = -(SCORES**2) / 2
    return torch.exp(torch.logsumexp(ln_values + weights, -1) - torch.logsumexp(weights, -1))


def _grid(n: float, b: float) -> Tensor:
    """Where L(x)^n goes from 1 to 0: P(Z > e^−x) ≤ e^x E Z on the left, and Z ≥ e^(b max U) on the right."""
    unlikely = SCORES[n * torch.special.log_ndtr(SCORES) < -TAIL]
    least = unlikely[-1].item() if len(unlikely) else SCORES[0].item()
    return torch.arange(
        -ln_mean(n, b) - TAIL, math.log(TAIL) - b * least + STEP, STEP, dtype=torch.float64, device="cpu"
    )
