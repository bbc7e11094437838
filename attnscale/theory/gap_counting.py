"""Gap counting: the accumulation scale Λ, its exponents, and bounds on a row at a given β/Λ.

N(t) counts the keys with a score within t of the best, including the best key. Λ = sup ln N(t)/t = max_k ln k/Δ_k with
Δ_k the gap of the k-th best key: Definition 4.4 of "A Unified Framework for Critical Scaling of Inverse Temperature in
Self-Attention" (arXiv:2605.12697). All bounds hold for every row at every n; r = β/Λ.

Gaussian rows (Appendix D of "Critical Attention Scaling in Long-Context Transformers", arXiv:2510.05554): the gap
between the k-th largest score and the next is E_k/k in units of 1/t_n, with independent exponential E_k (Rényi). The
k-th largest score lies Σ_(i<k) E_i/i ≈ ln k below the first. Eq. 117 prints Σ E_i ≈ k, erratum 20 of the README.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale._util.checks import read_int
from attnscale.errors import reject
from attnscale.statistics.gaps import find_contact
from attnscale.theory.estimates import Estimate, mean, slope
from attnscale.theory.families import CorrelatedGaussian, Family, Gaussian, Sphere, arrival_times


class ContactPoint(NamedTuple):
    """The point where ln N(t)/t is largest: Λ, the contact gap t and the contact rank N(t), each [rows]."""

    accumulation: Tensor
    gap: Tensor
    rank: Tensor


class Exponents(NamedTuple):
    """Powers of ln n of Λ, of α = ln N(Δ_Λ)/ln n and of the contact gap Δ_Λ, which satisfy Λ = α ln n/Δ_Λ."""

    accumulation: Estimate
    share: Estimate
    gap: Estimate

    @property
    def residual(self) -> float:
        """ξ_Λ − (ξ_α − ξ_Δ + 1), zero by Corollary 4.9."""
        return self.accumulation.value - (self.share.value - self.gap.value + 1)


def contact_point(scores: Tensor, min_rank: int = 2) -> ContactPoint:
    """The point where N(t) of raw scores [rows, n] touches its envelope e^(Λt).

    >>> contact_point(torch.tensor([[1.0, 0.5, 0.5, 0.5]])).rank
    tensor([4])
    """
    contact = find_contact(scores, min_rank)
    best, touching = (scores.gather(-1, key[:, None])[:, 0] for key in (contact.first, contact.key))
    return ContactPoint(contact.value, best - touching, contact.rank)


def fit_exponents(lengths: list[int], contacts: list[ContactPoint]) -> Exponents:
    """Fit the powers of ln n: slopes of the row means of ln Λ, ln α and ln Δ_Λ against ln ln n.

    The mean of logarithms is robust against the heavy tail of Λ, and linear, so Corollary 4.9 also holds for the fits.

    >>> rows = [torch.tensor([[1.0] + [0.5] * (n - 1)], dtype=torch.float64) for n in (16, 256)]
    >>> round(fit_exponents([16, 256], [contact_point(scores.expand(2, -1)) for scores in rows]).accumulation.value, 9)
    1.0
    """
    if len(set(lengths)) < 2 or min(lengths) < 2 or len(lengths) != len(contacts):
        reject("lengths", lengths, f"{len(contacts)} lengths >= 2, as many as contacts, at least two of them different")
    x = [math.log(math.log(n)) for n in lengths]
    logs = [
        (contact.accumulation.log(), (contact.rank.double().log() / math.log(n)).log(), contact.gap.log())
        for n, contact in zip(lengths, contacts, strict=True)
    ]
    fits = []
    for column in zip(*logs, strict=True):
        points = [mean(values) for values in column]
        fits.append(slope(x, [point.value for point in points], [point.error for point in points]))
    return Exponents(*fits)


def limit_ratio(family: Family, rows: int, generator: torch.Generator, ranks: int = 512) -> Tensor:
    """Samples [rows] of Λ/`family.accumulation(n)` for n → ∞; 1 for families with a deterministic limit.

    Near the maximum the scores are a Poisson process with arrival times Γ_k. The gaps are ln(Γ_k/Γ_1) in units of
    σ/√(2 ln n) for Gaussian rows, and Γ_k^a − Γ_1^a, a = 2/(d−1), in units of (n C_d)^(−a) on the sphere.

    >>> limit_ratio(Gaussian(), 3, torch.Generator().manual_seed(0)).shape
    torch.Size([3])
    """
    if not family.random:
        return torch.ones(rows, dtype=torch.float64, device="cpu")
    arrivals = arrival_times(rows, ranks, generator)
    if isinstance(family, Sphere):
        scores = -(arrivals ** (2 / (family.d - 1)))
    elif isinstance(family, (Gaussian, CorrelatedGaussian)):
        scores = -arrivals.log()
    else:
        reject("family", family, "gaussian, correlated_gaussian, sphere, or a family that is not random")
    return find_contact(scores).value


def certificate(r: float, n: float = math.inf) -> float:
    """The smallest possible w_max of a row at β = rΛ: 1/Σ_{k≤n} k^(−r), at least 1/ζ(r).

    The bound follows from e^(−βΔ_k) ≤ k^(−r) for every rank k.

    Args:
        r: β/Λ, larger than 1.
        n: number of keys; infinity by default.

    Returns:
        A lower bound on the largest weight.

    Raises:
        ArgumentError: r is not larger than 1.

    Example:
        >>> round(certificate(2.0), 4), certificate(2.0, n=2)
        (0.6079, 0.8)
    """
    _above(r)
    if n == math.inf:
        zeta = torch.special.zeta(torch.tensor(r, dtype=torch.float64, device="cpu"), torch.tensor(1.0, device="cpu"))
        return 1 / float(zeta)
    return 1 / (torch.arange(1, int(n) + 1, dtype=torch.float64, device="cpu") ** -r).sum().item()


def entropy_bound(r: float) -> float:
    """An upper bound on the entropy of a row at β = rΛ, r > 1, in nats: ln(r/(r−1)) + (r/(r−1))² − 1.

    >>> entropy_bound(100.0) < 0.04
    True
    """
    _above(r)
    ratio = r / (r - 1)
    return math.log(ratio) + ratio**2 - 1


def converse(r: Tensor | float, rank: Tensor) -> Tensor:
    """An upper bound on w_max at β = rΛ, r < 1: k*^(−(1−r)), with k* the contact rank.

    The first k* keys lie within Δ_Λ = ln k*/Λ of the best, so Z ≥ k* e^(−r ln k*).

    >>> converse(0.5, torch.tensor([4, 16]))
    tensor([0.5000, 0.2500], dtype=torch.float64)
    """
    return torch.exp((r - 1) * rank.double().log())


def separation_bound(r: float) -> float:
    """An upper bound on w_(1) − w_(2) at β = rΛ, r < 1: r/(e(1−r)), which vanishes with r.

    w_(1) − w_(2) ≤ w_(1) βΔ_2 ≤ k*^(−(1−r)) r ln k*, largest at ln k* = 1/(1−r).

    >>> separation_bound(0.5) * math.e
    1.0
    """
    if not 0 <= r < 1:
        reject("r", r, "a number in [0, 1)")
    return r / (math.e * (1 - r))


def two_level_entropy(n: float, r: float) -> float:
    """The exact entropy, in nats, of a row with one key ahead of n − 1 equal keys at β = rΛ (simplex, cluster).

    >>> round(two_level_entropy(8, 0.0) / math.log(8), 9)
    1.0
    """
    tail = math.log(n - 1) - r * math.log(n)  # ln of the weight of all others relative to the first
    lse = math.log1p(math.exp(tail)) if tail < 0 else tail + math.log1p(math.exp(-tail))
    return lse + math.exp(tail - lse) * r * math.log(n)


def gaussian_quantile(n: int) -> float:
    """t_n = Φ⁻¹(1 − 1/n) ~ √(2 ln n). The gaps of the largest Gaussian scores are about 1/t_n.

    >>> round(gaussian_quantile(1000), 4)
    3.0902
    """
    n = read_int("n", n, "an int >= 2", least=2)
    return float(-torch.special.ndtri(torch.tensor(1.0 / n, dtype=torch.float64, device="cpu")))


def mean_gap(n: int, k: int) -> float:
    """The exact E(a₁ − a_k) of the largest and the k-th largest of n independent N(0, 1) scores.

    The mean of the j-th spacing is C(n, j)·∫ Φ^(n−j)·(1−Φ)^j dx. The trapezoidal rule converges exponentially here.

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
    """The largest weight at β = t·√(2 ln n) as printed in Eq. 118, with gaps E₁ + … + E_(k−1), [draws]; for comparison.

    With the correct gaps E₁ + E₂/2 + … + E_(k−1)/(k−1) the sum is finite for t > 1 only, where the mean weight is
    `condensation.w_max_limit`. For t ≤ 1 the largest weight tends to 0.

    >>> printed_top_weight(1.0, 4, torch.Generator().manual_seed(0)).shape
    torch.Size([4])
    """
    gaps = arrival_times(draws, terms, generator)
    return (1.0 + (-t * gaps).exp().sum(-1)).reciprocal()


def _above(r: float) -> None:
    if not r > 1:
        reject("r", r, "a number > 1; for r <= 1 there is no such bound")
