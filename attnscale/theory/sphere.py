"""A fixed query among n random keys on the sphere (seed 001): critical scale, limit laws, and where they hold.

All that matters is how many keys lie near the query: P(1 − ⟨q, k⟩ ≤ t) ~ C·t^κ for t → 0. The scale is then
β* = (nC)^(1/κ), and the scaled distances β*(1 − ⟨q, k⟩), in order, tend to Γ_k^(1/κ) for the arrival times Γ_k of a
unit Poisson process. Keys uniform on S^(d−1) have κ = (d−1)/2. Seed 001 gives the regimes in words; the formulas and
constants here are derived from that law and checked by simulation.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from attnscale._util.checks import read_int
from attnscale.errors import reject
from attnscale.theory.families import ln_cap_constant


class LocalLaw(NamedTuple):
    """P(1 − ⟨q, k⟩ ≤ t) ~ constant·t^exponent for t → 0; in the distance ‖q − k‖ the exponent is twice this."""

    constant: float
    exponent: float

    def critical_beta(self, n: int) -> float:
        """β* = (n·constant)^(1/exponent)."""
        return math.exp((math.log(n) + math.log(self.constant)) / self.exponent)


def uniform_law(d: int) -> LocalLaw:
    """Keys uniform on S^(d−1): C_d = 2^((d−1)/2)·Γ(d/2)/((d−1)·√π·Γ((d−1)/2)) and exponent (d−1)/2.

    >>> law = uniform_law(3)
    >>> round(law.constant, 12), law.exponent
    (0.5, 1.0)
    """
    d = read_int("d", d, "an int >= 2", least=2)
    return LocalLaw(math.exp(ln_cap_constant(d)), (d - 1) / 2)


def critical_beta(n: int, d: int) -> float:
    """β* = (n·C_d)^(2/(d−1)) for n keys uniform on S^(d−1).

    >>> round(critical_beta(1000, 3), 9)
    500.0
    """
    return uniform_law(d).critical_beta(n)


def mean_cosine(d: int, concentration: float) -> float:
    """A_d(r) = I_(d/2)(r)/I_(d/2−1)(r), the mean of ⟨m, k⟩ under the density ∝ e^(r⟨m, k⟩) on S^(d−1).

    With infinitely many uniform keys the output of attention is A_d(β)·q, exactly. A continued fraction, from its end.

    >>> math.isclose(mean_cosine(3, 2.0), 1 / math.tanh(2.0) - 0.5)
    True
    """
    tail = 0.0
    for step in range(200 + 4 * int(concentration), -1, -1):
        tail = 1.0 / ((d + 2 * step) / concentration + tail)
    return tail


def subcritical_output(q: Tensor, score_gradient: Tensor, beta: float) -> Tensor:
    """The output for 1 ≪ β ≪ β*, to first order: q + (∇log f(q) − ((d−1)/2)·q)/β, with f the density of the keys.

    `score_gradient` is ∇log f(q), tangential to the sphere, [..., d] as q. To first order the projection of the output
    to the sphere is therefore a step of length 1/β up the gradient, which takes a density f to f − Δf/β: the heat
    equation run backward for a time 1/β.

    >>> import torch
    >>> subcritical_output(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([2.0, 0.0, 0.0]), beta=10.0)
    tensor([0.2000, 0.0000, 0.9000])
    """
    return q + (score_gradient - (q.shape[-1] - 1) / 2 * q) / beta


def subcritical_variance(n: int, d: int, beta: float) -> float:
    """The variance of each tangential component of the output for uniform keys and 1 ≪ β ≪ β*.

    β^((d−3)/2)/(n·C_d·Γ((d+1)/2)·2^((d+1)/2)). It is below the squared bias 1/β² only where β ≪ n^(2/(d+1)): from there
    to β* ≍ n^(2/(d−1)) the fluctuations hide the bias of a single output.

    >>> round(subcritical_variance(1000, 3, 10.0), 6)
    0.0005
    """
    log = (d - 3) / 2 * math.log(beta) - math.log(n) - ln_cap_constant(d)
    return math.exp(log - math.lgamma((d + 1) / 2) - (d + 1) / 2 * math.log(2.0))


def supercritical_deficit(ratio: float, exponent: float) -> float:
    """E(1 − w_max) for β = λβ*, λ = `ratio` → ∞: ln 2·κ·Γ(2 − 1/κ)/λ, for κ > ½.

    Two keys share the weight if their scaled distances differ by about 1/λ; ∫ dx/(1 + e^x) = ln 2.

    >>> round(supercritical_deficit(100.0, 1.0), 6)
    0.006931
    """
    if exponent <= 0.5:
        reject("exponent", exponent, "a local exponent > 1/2: on a circle the deficit falls more slowly than 1/ratio")
    return math.log(2.0) * exponent * math.gamma(2.0 - 1.0 / exponent) / ratio


def nearest_key_moment(exponent: float) -> float:
    """lim β*·E(1 − ⟨q, output⟩) above criticality, where the output is the nearest key: Γ(1 + 1/κ).

    >>> nearest_key_moment(1.0)
    1.0
    """
    return math.gamma(1.0 + 1.0 / exponent)


def heat_growth(d: int, degree: int, beta: float) -> float:
    """1 + ℓ(ℓ+d−2)/β: how a step of the backward heat equation of length 1/β scales spherical harmonics of degree ℓ.

    >>> heat_growth(3, 1, 50.0)
    1.04
    """
    return 1.0 + degree * (degree + d - 2) / beta
