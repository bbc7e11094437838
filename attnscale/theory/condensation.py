"""Condensation of softmax on Gaussian scores: n independent U_j ~ N(0, σ²), weights e^(β U_j)/Z.

The model of "A Condensation Crossover in Softmax Attention" (A. Deshpande). The critical inverse temperature is
β_c = √(2 ln n)/σ, and t = β/β_c. Functions of n are exact at every finite n unless their docstring states a limit.

Finite n: with E exponential and independent of Z, P(ln E − ln Z > x) = E e^(−e^x Z) = L(x)^n, b = βσ and
L(x) = E e^(−e^(x + b U/σ)). This function of one variable gives the distribution of ln Z at every n. All integrands
are analytic in a strip and decay, so the trapezoidal rule converges faster than any power of its step.

Limits for t > 1: near the maximum the scores are a Poisson process of exponential density with arrival times Γ_k. The
weights tend to Γ_k^(−t)/Σ_j Γ_j^(−t), the Poisson–Dirichlet law PD(α, 0) with α = 1/t.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnscale.errors import reject
from attnscale.theory.families import arrival_times

EULER = 0.5772156649015329
TAIL = 40.0  # e^−40 is below the rounding error of the sums
SCORES = torch.linspace(-12.0, 12.0, 2401, dtype=torch.float64, device="cpu")  # grid of U
STEP = 0.1  # grid step of x


class Moments(NamedTuple):
    """Mean and variance of ln Z."""

    mean: float
    variance: float


def critical_beta(n: float, sigma: float = 1.0) -> float:
    """β_c = √(2 ln n)/σ, where the bulk and the maximum contribute equally to ln Z.

    >>> round(critical_beta(1024, sigma=0.5), 3)
    7.447
    """
    _check(n, sigma)
    return math.sqrt(2 * math.log(n)) / sigma


def critical_dimension(n: float, beta: float = 1.0) -> float:
    """The head dimension 2 ln n/β² above which unscaled scores q·k (σ² = d) condense at this β.

    >>> round(critical_dimension(4096), 1)
    16.6
    """
    return critical_beta(n, beta) ** 2


def w_max_exponent(t: float) -> float:
    """The limit of ln w_max/ln n at β = t β_c: −(1−t)² below criticality, 0 above.

    >>> w_max_exponent(0.5), w_max_exponent(2.0)
    (-0.25, 0.0)
    """
    return 0.0 - max(0.0, 1 - t) ** 2


def w_max_slope(n: float, t: float) -> float:
    """d E[ln w_max]/d ln n at fixed t < 1, to order 1/ln n: −(1−t)² − t/(2 ln n).

    E[ln w_max] = β E[M] − E[ln Z] with ln Z = ln n + β²σ²/2 and the Gumbel limit of the maximum,
    E M/σ = √(2 ln n) − (ln(4π ln n)/2 − γ)/√(2 ln n). Hence w_max is n^(−(1−t)²) (4π ln n)^(−t/2) e^(γt), γ Euler's
    constant.

    >>> w_max_slope(1e100, 0.5)
    -0.251...
    """
    if not 0 <= t < 1:
        reject("t", t, "a number in [0, 1); for t >= 1 w_max does not fall like a power of n")
    return w_max_exponent(t) - t / (2 * math.log(n))


def mean_ln_w_max(n: float, t: float) -> float:
    """The exact E[ln w_max] = β E[M] − E[ln Z].

    >>> math.isclose(mean_ln_w_max(1000, 0.0), -math.log(1000))
    True
    """
    b = t * critical_beta(n)
    return b * mean_maximum(n) - ln_z_moments(n, b).mean


def mean_maximum(n: float) -> float:
    """The exact E max U_j/σ.

    >>> round(mean_maximum(2) * math.sqrt(math.pi), 9)
    1.0
    """
    density = torch.exp(math.log(n) + (n - 1) * torch.special.log_ndtr(SCORES) - SCORES**2 / 2)
    step = (SCORES[1] - SCORES[0]).item()
    return step / math.sqrt(2 * math.pi) * (SCORES * density).sum().item()


def mean_w_max(n: float, t: float) -> float:
    """The exact E[w_max]: the integral over λ of E e^(−λ/w_max), which is e^(−λ) (G/Φ)^(n−1) given the maximum u.

    G(u, λ) = ∫_(−∞)^u φ(v) e^(−λ e^(−b(u−v))) dv. The integrand does not decay at v = u, so the quadrature nodes of the
    gap u − v are concentrated there (tanh-sinh).

    Args:
        n: number of keys, at least 1; may be large, such as 1e12.
        t: β/β_c.

    Returns:
        The mean of the largest weight.

    Raises:
        ArgumentError: n is less than 1.

    Example:
        >>> round(mean_w_max(5, 0.0), 9)
        0.2
    """
    b = t * critical_beta(n)
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


def w_max_limit(t: float) -> float:
    """The limit of E[w_max] for t > 1: ∫ e^(−λ)/(e^(−λ) + λ^α γ(1−α, λ)) dλ, γ the lower incomplete gamma function.

    Given the largest point, the others are a Poisson process below it. Hence E e^(−λ/w_max) = e^(−λ)/ψ(λ) with
    ψ = 1 + α ∫_0^1 (1 − e^(−λy)) y^(−α−1) dy, and the integral of this transform over λ is E w_max.

    >>> round(w_max_limit(2.0), 3)
    0.627
    """
    alpha = _alpha(t)
    y = torch.arange(-45.0, 5.0, 0.05, dtype=torch.float64, device="cpu")  # λ = e^y
    rate = y.exp()
    incomplete = torch.special.gammainc(torch.full_like(rate, 1 - alpha), rate) * math.gamma(1 - alpha)
    return 0.05 * float((torch.exp(y - rate) / (torch.exp(-rate) + rate**alpha * incomplete)).sum())


def chance_of_more(weight: float, t: float) -> float:
    """The limit of P(w_max > v) for t > 1 and v ≥ 1/2: sin(πα)/(πα) · ((1−v)/v)^α.

    At most one weight can exceed 1/2, which makes the closed form possible.

    >>> round(chance_of_more(0.5, 2.0) * math.pi, 9)
    2.0
    """
    alpha = _alpha(t)
    if not 0.5 <= weight <= 1:
        reject("weight", weight, "a number in [1/2, 1]")
    return math.sin(math.pi * alpha) / (math.pi * alpha) * math.pow((1 - weight) / weight, alpha)


def sample_limit_weights(t: float, rows: int, ranks: int, generator: torch.Generator) -> Tensor:
    """The largest weights [rows, ranks] of the limit for t > 1, in descending order.

    Ranks that are not drawn enter the normalisation with their mean.

    >>> sample_limit_weights(2.0, 3, 100, torch.Generator().manual_seed(0)).shape
    torch.Size([3, 100])
    """
    _alpha(t)
    arrivals = arrival_times(rows, ranks, generator)
    points = arrivals**-t
    beyond = arrivals[:, -1:] ** (1 - t) / (t - 1)  # ∫ x^(−t) dx from the last arrival to infinity
    return points / (points.sum(-1, keepdim=True) + beyond)


def annealed_log_partition(n: float, beta: float, sigma: float = 1.0) -> float:
    """ln E[Z] = ln n + β²σ²/2.

    >>> annealed_log_partition(1, 2.0)
    2.0
    """
    return math.log(n) + (beta * sigma) ** 2 / 2


def quenched_log_partition(n: float, beta: float, sigma: float = 1.0) -> float:
    """The exact E[ln Z], at most `annealed_log_partition` by Jensen's inequality.

    >>> quenched_log_partition(4096, 1.0) < annealed_log_partition(4096, 1.0)
    True
    """
    return ln_z_moments(n, beta * sigma).mean


def ln_z_moments(n: float, b: float) -> Moments:
    """Exact mean and variance of ln Z at βσ = b, from ln E − ln Z with its survival function L^n.

    >>> round(ln_z_moments(1, 2.0).variance, 9)  # Z = e^(2U)
    4.0
    """
    x = _grid(n, b)
    survival = torch.exp(n * _ln_laplace(x, b))
    # E X = x_0 + ∫ P(X > x) dx and E (X − x_0)² = 2 ∫ (x − x_0) P(X > x) dx, integrated from x_0 with P(X > x_0) = 1.
    offset = x - x[0]
    first = STEP * (survival.sum() - 0.5).item()
    # The last term: at x_0 the integrand has slope 1.
    second = 2 * STEP * (offset * survival).sum().item() + STEP**2 / 6
    return Moments(-(x[0].item() + first) - EULER, second - first**2 - math.pi**2 / 6)


def log_partition_limit(n: float, beta: float, sigma: float = 1.0) -> float:
    """ln Z to leading order: ln n + β²σ²/2 in the bulk phase (β ≤ β_c), βσ√(2 ln n) in the condensed one.

    >>> log_partition_limit(1e6, 100.0) == 100.0 * critical_beta(1e6)
    True
    """
    critical = critical_beta(n, sigma)
    return annealed_log_partition(n, beta, sigma) if beta <= critical else beta * sigma**2 * critical


def log_partition_spread(n: float, beta: float, sigma: float = 1.0) -> float:
    """The exact standard deviation of ln Z, at most βσ because ln Z is β-Lipschitz in the scores.

    >>> log_partition_spread(4096, 6.0) < 6.0
    True
    """
    return math.sqrt(max(0.0, ln_z_moments(n, beta * sigma).variance))


def log_partition_spread_limit(t: float) -> float:
    """The limit of the standard deviation of ln Z: 0 up to criticality, π √((t² − 1)/6) above.

    For t > 1, Z tends to a stable law of index α = 1/t, and Var ln Z to (π²/6)(1/α² − 1).

    >>> log_partition_spread_limit(0.5)
    0.0
    """
    return math.pi * math.sqrt(max(0.0, t * t - 1) / 6)


def participation_ratio(n: float, beta: float, sigma: float = 1.0) -> float:
    """The exact E Σ w_j² = n ∫ s E[e^(2bU) e^(−s e^(bU))] L(s)^(n−1) ds; its inverse is the effective number of keys.

    >>> round(participation_ratio(4, 0.0), 9)
    0.25
    """
    b = beta * sigma
    x = _grid(n, b)
    ln_own = 2 * (b * SCORES + x[:, None]) - torch.exp(b * SCORES + x[:, None])  # [X, U]
    ln_normal = -(SCORES**2) / 2
    own = torch.exp(torch.logsumexp(ln_own + ln_normal, -1) - torch.logsumexp(ln_normal, -1))
    return n * STEP * (own * torch.exp((n - 1) * _ln_laplace(x, b))).sum().item()


def participation_limit(t: float) -> float:
    """The limit of E Σ w_j²: 0 up to criticality, 1 − 1/t above.

    >>> participation_limit(2.0)
    0.5
    """
    return 1 - 1 / t if t > 1 else 0.0


def participation_exponent(t: float) -> float:
    """The limit of ln Σ w_j²/ln n in a typical row: 2t² − 1 up to t = 1/2, then −2(1−t)², and 0 above criticality.

    Σ w² = Z(2β)/Z(β)², and 2β > β_c for t > 1/2: the squares condense before the weights do.

    >>> participation_exponent(0.5), participation_exponent(0.75)
    (-0.5, -0.125)
    """
    return 2 * t * t - 1 if t <= 0.5 else 2 * w_max_exponent(t)


def retrieval_threshold(n: float, beta: float, sigma: float = 1.0) -> float:
    """The score at which a signal key among n noise keys gets half of the weight, to leading order.

    ln n/β + βσ²/2 for β ≤ β_c, and σ√(2 ln n) above.

    >>> retrieval_threshold(1e6, 100.0) == critical_beta(1e6)
    True
    """
    if not beta > 0:
        reject("beta", beta, "a number > 0; at β = 0 there is no threshold")
    return log_partition_limit(n, beta, sigma) / beta


def target_weight(n: float, beta: float, m: float, sigma: float = 1.0) -> float:
    """The exact mean weight of a signal key with score m beside n − 1 noise keys: ∫ e^(−s) L(ln s − βm)^(n−1) ds.

    >>> round(target_weight(4, 0.0, 0.0), 9)
    0.25
    """
    lowest = -2 * TAIL - annealed_log_partition(n - 1, beta, sigma)
    y = torch.arange(lowest, 6.0, STEP, dtype=torch.float64, device="cpu")  # s = e^y
    return STEP * torch.exp(y - y.exp() + (n - 1) * _ln_laplace(y - beta * m, beta * sigma)).sum().item()


def chance_of_signal(n: float, m: float, sigma: float = 1.0) -> float:
    """The exact probability that a signal key with score m has the largest of n scores: Φ(m/σ)^(n−1), at any β.

    >>> chance_of_signal(2, 0.0)
    0.5
    """
    return math.exp((n - 1) * torch.special.log_ndtr(torch.tensor(m / sigma, dtype=torch.float64, device="cpu")).item())


def winner(n: float, beta: float, m: float, sigma: float = 1.0) -> Literal["signal", "noise", "nobody"]:
    """The key with most of the weight to leading order: the signal above its threshold, else a noise key or none.

    Returns `"signal"`, `"noise"` (β > β_c) or `"nobody"` (β ≤ β_c, diffuse).

    >>> [winner(1e6, t * critical_beta(1e6), m=4.0) for t in (0.5, 2.0)], winner(1e6, 10.0, m=6.0)
    (['nobody', 'noise'], 'signal')
    """
    if m > retrieval_threshold(n, beta, sigma):
        return "signal"
    return "noise" if beta > critical_beta(n, sigma) else "nobody"


def _check(n: float, sigma: float) -> None:
    if not n >= 1:
        reject("n", n, "a number >= 1")
    if not sigma > 0:
        reject("sigma", sigma, "a number > 0")


def _alpha(t: float) -> float:
    if not t > 1:
        reject("t", t, "a number > 1; for t <= 1 all weights vanish in the limit")
    return 1 / t


def _ln_laplace(x: Tensor, b: float) -> Tensor:
    """ln E e^(−e^(x + b U)) at each x [X], accurate also near 0."""
    parts = x.chunk(1 + len(x) // 256)  # bounds the memory of the grid [x, U]
    weights = torch.exp(-(SCORES**2) / 2)
    weights = weights / weights.sum()
    return torch.cat([torch.log1p(torch.expm1(-torch.exp(part[:, None] + b * SCORES)) @ weights) for part in parts])


def _grid(n: float, b: float) -> Tensor:
    """Grid of x where L(x)^n falls from 1 to 0: P(Z > e^−x) ≤ e^x E Z bounds the left, Z ≥ e^(b max U) the right."""
    unlikely = SCORES[n * torch.special.log_ndtr(SCORES) < -TAIL]
    least = unlikely[-1].item() if len(unlikely) else SCORES[0].item()
    low, high = -annealed_log_partition(n, b) - TAIL, math.log(TAIL) - b * least + STEP
    return torch.arange(low, high, STEP, dtype=torch.float64, device="cpu")
