"""The critical regime on the sphere: ordered weights ∝ e^(−λΓ_k^(1/κ)) at the points of a Poisson process.

Two computations that share nothing: draws of the process, and the mean of the largest weight as an integral. For the
largest weight at finite n the same integral is done with the exact law of the cosines.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale._util.checks import read_int


class PoissonLimit(NamedTuple):
    """Draws of the limit at β = λβ*.

    `weights` are ordered, [draws, points]; `radial` is the limit of β*·(1 − ⟨q, output⟩) and `tangential` that of β*
    times the squared tangential displacement of the output, averaged over the directions of the keys, [draws].
    """

    weights: Tensor
    radial: Tensor
    tangential: Tensor


def draw_limit(
    ratio: float, exponent: float, draws: int, generator: torch.Generator, points: int = 512
) -> PoissonLimit:
    """Ordered weights and the output in the limit n → ∞ at β = ratio·β*, for a local law of that exponent κ.

    Points beyond the last one drawn enter the normalisation with their mean, κλ^(−κ)·Γ(κ, λΓ^(1/κ)). Key k lies
    √2·Γ_k^(1/2κ) away in a uniform direction, so over these the squared displacement has the mean Σ w_k²·2Γ_k^(1/κ).

    >>> limit = draw_limit(1.0, 1.0, 2000, torch.Generator().manual_seed(0))
    >>> abs(float(limit.weights[:, 0].mean()) - math.exp(-0.5772156649)) < 0.02
    True
    """
    draws = read_int("draws", draws, "an int >= 1", least=1)
    arrivals = (
        torch.empty(draws, points, dtype=torch.float64, device="cpu").exponential_(generator=generator).cumsum(-1)
    )
    scaled = arrivals ** (1.0 / exponent)
    shifted = (-ratio * (scaled - scaled[:, :1])).exp()
    kappa = torch.tensor(exponent, dtype=torch.float64, device="cpu")
    last = ratio * scaled[:, -1]
    beyond = torch.special.gammaincc(kappa, last) * math.gamma(exponent + 1.0) * ratio**-exponent
    beyond_radial = torch.special.gammaincc(kappa + 1, last) * math.gamma(exponent + 1.0) * exponent
    beyond_radial = beyond_radial * ratio ** -(exponent + 1.0)
    # Where this would overflow, what lies beyond the last point is zero.
    first = (ratio * scaled[:, 0]).clamp(max=600.0).exp()
    total = shifted.sum(-1) + beyond * first
    weights = shifted / total[:, None]
    radial = (weights * scaled).sum(-1) + beyond_radial * first / total
    return PoissonLimit(weights, radial, (weights.square() * 2 * scaled).sum(-1))


def mean_largest_weight(ratio: float, exponent: float) -> float:
    """E w_max in the limit at β = ratio·β*, as an integral; for κ = 1 and λ = 1 it is e^(−γ), γ Euler's constant.

    Given Γ₁ = s, w_max = 1/(1 + S) with S a sum over the later points, E e^(−xS) = exp(−∫(1 − e^(−x·e^(−v))) dΓ) by
    Campbell's formula, and 1/(1 + S) = ∫ e^(−x(1+S)) dx. All three integrals are trapezoidal sums on logarithmic grids.

    >>> round(mean_largest_weight(1.0, 1.0), 8) == round(math.exp(-0.57721566490153286), 8)
    True
    """
    grid = torch.arange(-32.0, 6.0, 0.25, dtype=torch.float64, device="cpu").exp()
    width = 0.25 * grid  # dz of z = ln of the grid
    first = grid[grid < 60.0]
    at = first[:, None] ** (1.0 / exponent) + grid / ratio  # [s, v], u^(1/κ) at v = λ(u^(1/κ) − s^(1/κ))
    points = exponent / ratio * at ** (exponent - 1.0) * width  # dΓ
    lost = -torch.special.expm1(-grid[:, None] * (-grid).exp())  # [x, v]
    exponentials = (-grid[:, None] - lost @ points.T).exp()  # [x, s]
    inner = (exponentials * width[:, None]).sum(0)
    return float((inner * (-first).exp() * 0.25 * first).sum())


def mean_largest_weight_at(n: int, d: int, beta: float) -> float:
    """E w_max for n keys uniform on S^(d−1) at inverse temperature β, at finite n: no limit is taken.

    As above with the density of t = 1 − ⟨q, k⟩, ∝ (t(2−t))^((d−3)/2), in place of its power law: the largest weight is
    that of one of n keys, and the other n − 1 are independent of each other and not nearer. To about 0.05 %.

    >>> round(mean_largest_weight_at(2, 3, 0.0), 6)
    0.5
    """
    n = read_int("n", n, "an int >= 2", least=2)
    step = 0.3 / (d + 2)  # the chance that no key is nearer changes by e^((d−1)/2·step) from cell to cell
    z = torch.arange(-36.0, 36.0, step, dtype=torch.float64, device="cpu")
    t = 2.0 * torch.sigmoid(z)  # on (0, 2), crowded at both ends
    log_density = (d - 1) / 2 * (torch.nn.functional.logsigmoid(z) + torch.nn.functional.logsigmoid(-z))
    log_mass = log_density - log_density.logsumexp(0)
    kept = log_mass > -60.0 - math.log(n)
    t, mass = t[kept], log_mass[kept].exp()  # P(t in the cell)
    # The cell of the nearest key itself counts half as nearer, half as farther: the trapezoidal rule at that end.
    nearer = mass.cumsum(0) - 0.5 * mass
    x = torch.arange(-36.0, 5.0, 0.25, dtype=torch.float64, device="cpu").exp()
    total = 0.0
    for index in torch.nonzero((n * mass > 1e-12) & (n * nearer < 40.0)).flatten().tolist():
        farther = mass[index:].clone()
        farther[0] *= 0.5
        decay = (-beta * (t[index:] - t[index])).exp()
        lost = nearer[index] - torch.special.expm1(-x[:, None] * decay) @ farther  # [x], 1 − the bracket
        chance = n * float(mass[index])
        total += chance * float(((n - 1) * torch.log1p(-lost.clamp(max=1.0)) - x).exp() @ (0.25 * x))
    return total
