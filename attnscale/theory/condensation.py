"""Condensation of softmax on Gaussian scores: n independent U_j ~ N(0, σ²), weights e^(β U_j)/Z.

The critical inverse temperature is β_c = √(2 ln n)/σ, and t = β/β_c. What takes n is exact at every finite n, unless
its name or docstring says that it is a limit; `poisson_dirichlet` has the limit law of the weights for t > 1.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from attnscale.errors import reject
from attnscale.theory import log_normal_sums, poisson_dirichlet


def critical_beta(n: float, sigma: float = 1.0) -> float:
    """β_c = √(2 ln n)/σ, where the bulk and the maximum give the same ln Z.

    >>> round(critical_beta(1024, sigma=0.5), 3)
    7.447
    """
    _check(n, sigma)
    return math.sqrt(2 * math.log(n)) / sigma


def critical_dimension(n: float, beta: float = 1.0) -> float:
    """The head dimension 2 ln n/β² above which scores q·k without the factor d^(−1/2), σ² = d, condense at this β.

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

    From E[ln w_max] = β E[M] − E[ln Z] with ln Z = ln n + β²σ²/2 and the mean of the Gumbel limit of M,
    E M/σ = √(2 ln n) − (ln(4π ln n)/2 − γ)/√(2 ln n): w_max is n^(−(1−t)²) (4π ln n)^(−t/2) e^(γt), γ Euler's constant.

    >>> w_max_slope(1e100, 0.5)
    -0.251...
    """
    if not 0 <= t < 1:
        reject("t", t, "a number in [0, 1): above, w_max does not vanish")
    return w_max_exponent(t) - t / (2 * math.log(n))


def mean_ln_w_max(n: float, t: float) -> float:
    """E[ln w_max] = β E[M] − E[ln Z], exactly.

    >>> math.isclose(mean_ln_w_max(1000, 0.0), -math.log(1000))
    True
    """
    b = t * critical_beta(n)
    return b * log_normal_sums.mean_maximum(n) - log_normal_sums.ln_z_moments(n, b).mean


def mean_w_max(n: float, t: float) -> float:
    """E[w_max], exactly; for t > 1 it tends to `poisson_dirichlet.mean_largest(t)`, for t ≤ 1 to 0.

    >>> mean_w_max(2, 0.0)
    0.5...
    """
    return log_normal_sums.mean_largest_weight(n, t * critical_beta(n))


def annealed_log_partition(n: float, beta: float, sigma: float = 1.0) -> float:
    """ln E[Z] = ln n + β²σ²/2.

    >>> annealed_log_partition(1, 2.0)
    2.0
    """
    return log_normal_sums.ln_mean(n, beta * sigma)


def quenched_log_partition(n: float, beta: float, sigma: float = 1.0) -> float:
    """E[ln Z], exactly; at most the annealed one.

    >>> quenched_log_partition(4096, 1.0) < annealed_log_partition(4096, 1.0)
    True
    """
    return log_normal_sums.ln_z_moments(n, beta * sigma).mean


def log_partition_limit(n: float, beta: float, sigma: float = 1.0) -> float:
    """ln Z to leading order: ln n + β²σ²/2 in the bulk phase (β ≤ β_c), βσ√(2 ln n) in the condensed one.

    >>> log_partition_limit(1e6, 100.0) == 100.0 * critical_beta(1e6)
    True
    """
    critical = critical_beta(n, sigma)
    return annealed_log_partition(n, beta, sigma) if beta <= critical else beta * sigma**2 * critical


def log_partition_spread(n: float, beta: float, sigma: float = 1.0) -> float:
    """The standard deviation of ln Z, exactly: at most βσ, as ln Z is β-Lipschitz in the scores.

    >>> log_partition_spread(4096, 6.0) < 6.0
    True
    """
    return math.sqrt(max(0.0, log_normal_sums.ln_z_moments(n, beta * sigma).variance))


def log_partition_spread_limit(t: float) -> float:
    """The limit of the standard deviation of ln Z: 0 up to criticality, π √((t² − 1)/6) above.

    For t > 1, Z is stable with index α = 1/t in the limit, and Var ln Z = (π²/6)(1/α² − 1).

    >>> log_partition_spread_limit(0.5)
    0.0
    """
    return math.pi * math.sqrt(max(0.0, t * t - 1) / 6)


def participation_ratio(n: float, beta: float, sigma: float = 1.0) -> float:
    """E Σ w_j², exactly: its inverse is the number of keys that share the attention.

    >>> round(1 / participation_ratio(1000, 0.0))
    1000
    """
    return log_normal_sums.mean_sum_of_squares(n, beta * sigma)


def participation_limit(t: float) -> float:
    """The limit of E Σ w_j²: 0 up to criticality, 1 − 1/t above.

    >>> participation_limit(2.0)
    0.5
    """
    return poisson_dirichlet.mean_sum_of_squares(t) if t > 1 else 0.0


def participation_exponent(t: float) -> float:
    """The limit of ln Σ w_j²/ln n in a typical row: 2t² − 1 up to t = 1/2, then −2(1−t)², and 0 above criticality.

    Σ w² = Z(2β)/Z(β)², and 2β is beyond β_c from t = 1/2 on: the squares condense before the weights do.

    >>> participation_exponent(0.5), participation_exponent(0.75)
    (-0.5, -0.125)
    """
    return 2 * t * t - 1 if t <= 0.5 else 2 * w_max_exponent(t)


def retrieval_threshold(n: float, beta: float, sigma: float = 1.0) -> float:
    """The score m that a signal key needs among n noise keys: ln n/β + βσ²/2 for β ≤ β_c, and σ√(2 ln n) above.

    >>> retrieval_threshold(1e6, 100.0) == critical_beta(1e6)
    True
    """
    if not beta > 0:
        reject("beta", beta, "a number > 0: at 0 no score is enough")
    return log_partition_limit(n, beta, sigma) / beta


def target_weight(n: float, beta: float, m: float, sigma: float = 1.0) -> float:
    """E[w_*] of a signal key with score m beside n − 1 noise keys, exactly.

    >>> target_weight(2, 1.0, 0.0)
    0.5...
    """
    return log_normal_sums.mean_sigmoid(n - 1, beta * sigma, beta * m)


def chance_of_signal(n: float, m: float, sigma: float = 1.0) -> float:
    """P(the signal key has the largest score of all n) = Φ(m/σ)^(n−1), exactly, at any temperature.

    >>> chance_of_signal(2, 0.0)
    0.5
    """
    return math.exp((n - 1) * torch.special.log_ndtr(torch.tensor(m / sigma, dtype=torch.float64, device="cpu")).item())


def winner(n: float, beta: float, m: float, sigma: float = 1.0) -> Literal["signal", "noise", "nobody"]:
    """Who holds the attention to leading order: the signal above its threshold; below, nobody or a noise extreme.

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
