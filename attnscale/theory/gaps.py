"""Gap counting: Λ as the one scale behind every temperature law, its exponents, and what β/Λ guarantees of a row.

N(t) counts the keys within t of the best, itself included, and Λ = sup ln N(t)/t = max_k ln k/Δ_k: Definition 4.4 of "A
Unified Framework for Critical Scaling of Inverse Temperature in Self-Attention". All bounds here hold for every row, at
every n; r = β/Λ.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.errors import reject
from attnscale.statistics.gaps import find_contact
from attnscale.theory.estimates import Estimate, mean, slope
from attnscale.theory.families import CorrelatedGaussian, Family, Gaussian, Sphere


class ContactPoint(NamedTuple):
    """Where ln N(t)/t is largest, each [rows]: Λ, the gap there, and the rank N there."""

    accumulation: Tensor
    gap: Tensor
    rank: Tensor


class Exponents(NamedTuple):
    """Powers of ln n: of Λ, of α = ln N(Δ_Λ)/ln n, and of the contact gap Δ_Λ. Λ = α ln n/Δ_Λ links the three."""

    accumulation: Estimate
    share: Estimate
    gap: Estimate

    @property
    def residual(self) -> float:
        """ξ_Λ − (ξ_α − ξ_Δ + 1), which is zero (Corollary 4.9)."""
        return self.accumulation.value - (self.share.value - self.gap.value + 1)


def contact_point(scores: Tensor, min_rank: int = 2) -> ContactPoint:
    """The point of contact of raw scores [rows, n] with the envelope e^(Λt).

    >>> contact_point(torch.tensor([[1.0, 0.5, 0.5, 0.5]])).rank
    tensor([4])
    """
    contact = find_contact(scores, min_rank)
    best, touching = (scores.gather(-1, key[:, None])[:, 0] for key in (contact.first, contact.key))
    return ContactPoint(contact.value, best - touching, contact.rank)


def fit_exponents(lengths: list[int], contacts: list[ContactPoint]) -> Exponents:
    """Slopes against ln ln n of the means of ln Λ, ln α and ln Δ_Λ over rows.

    A mean of logarithms is robust against the heavy tail of Λ, and as it is linear the identity holds for the fits too.

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
    """Samples [rows] of the limit of Λ/`family.accumulation(n)` as n grows; 1 where that is not random.

    Near the maximum the scores are a Poisson process. With Γ_k its arrival times, Gaussian rows have the gaps
    ln(Γ_k/Γ_1) in units of σ/√(2 ln n), and rows on the sphere Γ_k^a − Γ_1^a, a = 2/(d−1), in units of (n C_d)^(−a).

    >>> limit_ratio(Gaussian(), 3, torch.Generator().manual_seed(0)).shape
    torch.Size([3])
    """
    if not family.random:
        return torch.ones(rows, dtype=torch.float64, device="cpu")
    arrivals = torch.empty(rows, ranks, dtype=torch.float64, device="cpu").exponential_(generator=generator).cumsum(-1)
    if isinstance(family, Sphere):
        scores = -(arrivals ** (2 / (family.d - 1)))
    elif isinstance(family, (Gaussian, CorrelatedGaussian)):
        scores = -arrivals.log()
    else:
        reject("family", family, "gaussian, correlated_gaussian, sphere, or one that is not random")
    return find_contact(scores).value


def certificate(r: float, n: float = math.inf) -> float:
    """The least w_max that a row of n keys can have at β = rΛ, r > 1: 1/Σ_{k≤n} k^(−r), at least 1/ζ(r).

    e^(−βΔ_k) ≤ k^(−r) for every rank k.

    >>> round(certificate(2.0), 4), certificate(2.0, n=2)
    (0.6079, 0.8)
    """
    _above(r)
    if n == math.inf:
        return 1 / float(
            torch.special.zeta(torch.tensor(r, dtype=torch.float64, device="cpu"), torch.tensor(1.0, device="cpu"))
        )
    return 1 / (torch.arange(1, int(n) + 1, dtype=torch.float64, device="cpu") ** -r).sum().item()


def entropy_bound(r: float) -> float:
    """The largest entropy that a row can have at β = rΛ, r > 1, at most: ln(r/(r−1)) + (r/(r−1))² − 1, in nats.

    >>> entropy_bound(100.0) < 0.04
    True
    """
    _above(r)
    ratio = r / (r - 1)
    return math.log(ratio) + ratio**2 - 1


def converse(r: Tensor | float, rank: Tensor) -> Tensor:
    """The largest w_max at β = rΛ, r < 1: k*^(−(1−r)), k* the rank of contact.

    The first k* keys lie within Δ_Λ = ln k*/Λ, so that Z ≥ k* e^(−r ln k*).

    >>> converse(0.5, torch.tensor([4, 16]))
    tensor([0.5000, 0.2500], dtype=torch.float64)
    """
    return torch.exp((r - 1) * rank.double().log())


def separation_bound(r: float) -> float:
    """The largest w_(1) − w_(2) at β = rΛ, r < 1, at most: r/(e(1−r)); it vanishes with r.

    w_(1) − w_(2) ≤ w_(1) βΔ_2 ≤ k*^(−(1−r)) r ln k*, which is largest at ln k* = 1/(1−r).

    >>> separation_bound(0.5) * math.e
    1.0
    """
    if not 0 <= r < 1:
        reject("r", r, "a number in [0, 1)")
    return r / (math.e * (1 - r))


def two_level_entropy(n: float, r: float) -> float:
    """The entropy of a row with one key ahead of n − 1 equal ones at β = rΛ, exactly, in nats: simplex and cluster.

    >>> round(two_level_entropy(8, 0.0) / math.log(8), 9)
    1.0
    """
    tail = math.log(n - 1) - r * math.log(n)  # ln of the weight of all others relative to the first
    lse = math.log1p(math.exp(tail)) if tail < 0 else tail + math.log1p(math.exp(-tail))
    return lse + math.exp(tail - lse) * r * math.log(n)


def _above(r: float) -> None:
    if not r > 1:
        reject("r", r, "a number > 1: below, a row may be as flat as it likes")
