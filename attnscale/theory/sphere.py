"""A fixed query and n random keys on the sphere: critical scale, limit laws, and their range of validity.

The density of keys near the query sets the scale: P(1 − ⟨q, k⟩ ≤ t) ~ C·t^κ for t → 0 gives β* = (nC)^(1/κ). The
ordered scaled distances β*(1 − ⟨q, k⟩) tend to Γ_k^(1/κ), with Γ_k the arrival times of a unit Poisson process. At
β = λβ* the ordered weights are ∝ e^(−λΓ_k^(1/κ)). Keys uniform on S^(d−1) have κ = (d−1)/2.

The regimes are those of "Scaling Limits of Long-Context Transformers" (arXiv:2605.08505); only its abstract was used.
Formulas and constants are derived here from the law above and checked by simulation with the query q = (1, 0, …, 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from attnscale._util.checks import read_int
from attnscale.attention import attention_with_stats
from attnscale.errors import reject
from attnscale.statistics import StatsRequest
from attnscale.theory.families import arrival_times, ln_cap_constant

Draw = Callable[[int, int, torch.Generator], Tensor]


class LocalLaw(NamedTuple):
    """P(1 − ⟨q, k⟩ ≤ t) ~ constant·t^exponent for t → 0. The exponent of the distance ‖q − k‖ is twice as large."""

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

    With infinitely many uniform keys the output of attention is exactly A_d(β)·q. Evaluated as a continued fraction.

    >>> math.isclose(mean_cosine(3, 2.0), 1 / math.tanh(2.0) - 0.5)
    True
    """
    tail = 0.0
    for step in range(200 + 4 * int(concentration), -1, -1):
        tail = 1.0 / ((d + 2 * step) / concentration + tail)
    return tail


def subcritical_output(q: Tensor, score_gradient: Tensor, beta: float) -> Tensor:
    """The output for 1 ≪ β ≪ β* to first order in 1/β: q + (∇log f(q) − ((d−1)/2)·q)/β, with key density f.

    `score_gradient` is ∇log f(q), tangential to the sphere, [..., d] like q. Projected to the sphere, the output is a
    step of length 1/β along the gradient. The step maps a density f to f − Δf/β: the heat equation backward in time.

    >>> subcritical_output(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([2.0, 0.0, 0.0]), beta=10.0)
    tensor([0.2000, 0.0000, 0.9000])
    """
    return q + (score_gradient - (q.shape[-1] - 1) / 2 * q) / beta


def subcritical_variance(n: int, d: int, beta: float) -> float:
    """The variance of each tangential component of the output for uniform keys and 1 ≪ β ≪ β*.

    β^((d−3)/2)/(n·C_d·Γ((d+1)/2)·2^((d+1)/2)). The variance is below the squared bias 1/β² for β ≪ n^(2/(d+1)) only.
    From there to β* ≍ n^(2/(d−1)) the fluctuations hide the bias of a single output.

    >>> round(subcritical_variance(1000, 3, 10.0), 6)
    0.0005
    """
    log = (d - 3) / 2 * math.log(beta) - math.log(n) - ln_cap_constant(d)
    return math.exp(log - math.lgamma((d + 1) / 2) - (d + 1) / 2 * math.log(2.0))


def supercritical_deficit(ratio: float, exponent: float) -> float:
    """E(1 − w_max) at β = λβ* for large λ = `ratio`: ln 2·κ·Γ(2 − 1/κ)/λ, for κ > ½.

    Two keys share the weight if their scaled distances differ by about 1/λ, and ∫ dx/(1 + e^x) = ln 2.

    >>> round(supercritical_deficit(100.0, 1.0), 6)
    0.006931
    """
    if exponent <= 0.5:
        reject("exponent", exponent, "a local exponent > 1/2; otherwise the deficit falls more slowly than 1/ratio")
    return math.log(2.0) * exponent * math.gamma(2.0 - 1.0 / exponent) / ratio


def nearest_key_moment(exponent: float) -> float:
    """The limit Γ(1 + 1/κ) of β*·E(1 − ⟨q, output⟩) above criticality, where the output is the nearest key.

    >>> nearest_key_moment(1.0)
    1.0
    """
    return math.gamma(1.0 + 1.0 / exponent)


def heat_growth(d: int, degree: int, beta: float) -> float:
    """The factor 1 + ℓ(ℓ+d−2)/β on spherical harmonics of degree ℓ after a backward heat step of length 1/β.

    >>> heat_growth(3, 1, 50.0)
    1.04
    """
    return 1.0 + degree * (degree + d - 2) / beta


class PoissonLimit(NamedTuple):
    """Draws of the limit at β = λβ*.

    Attributes:
        weights: weights in descending order, [draws, points].
        radial: limit of β*·(1 − ⟨q, output⟩), [draws].
        tangential: limit of β* times the squared tangential displacement of the output, averaged over the directions
            of the keys, [draws].
    """

    weights: Tensor
    radial: Tensor
    tangential: Tensor


def draw_limit(
    ratio: float, exponent: float, draws: int, generator: torch.Generator, points: int = 512
) -> PoissonLimit:
    """Ordered weights and the output for n → ∞ at β = ratio·β* and a local law with exponent κ.

    Points beyond the last drawn point enter the normalisation with their mean, κλ^(−κ)·Γ(κ, λΓ^(1/κ)). Key k lies at
    distance √2·Γ_k^(1/2κ) in a uniform direction, so the mean squared displacement is Σ w_k²·2Γ_k^(1/κ).

    >>> limit = draw_limit(1.0, 1.0, 2000, torch.Generator().manual_seed(0))
    >>> abs(float(limit.weights[:, 0].mean()) - math.exp(-0.5772156649)) < 0.02
    True
    """
    draws = read_int("draws", draws, "an int >= 1", least=1)
    scaled = arrival_times(draws, points, generator) ** (1.0 / exponent)
    shifted = (-ratio * (scaled - scaled[:, :1])).exp()
    kappa = torch.tensor(exponent, dtype=torch.float64, device="cpu")
    last = ratio * scaled[:, -1]
    beyond = torch.special.gammaincc(kappa, last) * math.gamma(exponent + 1.0) * ratio**-exponent
    beyond_radial = torch.special.gammaincc(kappa + 1, last) * math.gamma(exponent + 1.0) * exponent
    beyond_radial *= ratio ** -(exponent + 1.0)
    # Clamped against overflow; the sum beyond the last point is zero in this range.
    first = (ratio * scaled[:, 0]).clamp(max=600.0).exp()
    total = shifted.sum(-1) + beyond * first
    weights = shifted / total[:, None]
    radial = (weights * scaled).sum(-1) + beyond_radial * first / total
    return PoissonLimit(weights, radial, (weights.square() * 2 * scaled).sum(-1))


def mean_largest_weight(ratio: float, exponent: float) -> float:
    """The limit of E w_max at β = ratio·β* as an integral. At κ = λ = 1 it is e^(−γ), with γ Euler's constant.

    Given Γ₁ = s, w_max = 1/(1 + S) with S a sum over the later points. E e^(−xS) = exp(−∫(1 − e^(−x·e^(−v))) dΓ) by
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
    """E w_max for n keys uniform on S^(d−1) at inverse temperature β and finite n, accurate to about 0.05 %.

    As `mean_largest_weight`, with the density ∝ (t(2−t))^((d−3)/2) of t = 1 − ⟨q, k⟩ instead of its power law. Given
    the nearest key, the other n − 1 keys are independent and not nearer.

    >>> round(mean_largest_weight_at(2, 3, 0.0), 6)
    0.5
    """
    n = read_int("n", n, "an int >= 2", least=2)
    step = 0.3 / (d + 2)  # the probability of no nearer key changes by e^((d−1)/2·step) per cell
    z = torch.arange(-36.0, 36.0, step, dtype=torch.float64, device="cpu")
    t = 2.0 * torch.sigmoid(z)  # on (0, 2), denser at both ends
    log_density = (d - 1) / 2 * (functional.logsigmoid(z) + functional.logsigmoid(-z))
    log_mass = log_density - log_density.logsumexp(0)
    kept = log_mass > -60.0 - math.log(n)
    t, mass = t[kept], log_mass[kept].exp()  # P(t in the cell)
    # Trapezoidal rule: the cell of the nearest key counts half as nearer and half as farther.
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


class KeyDensity(NamedTuple):
    """A density of keys: `draw(rows, n, generator)` returns keys [rows, n, d]; `law` describes them near the query."""

    name: str
    d: int
    draw: Draw
    law: LocalLaw


class Readout(NamedTuple):
    """The result of attention: outputs [rows, d], and largest weight and entropy of each row [rows]."""

    output: Tensor
    w_max: Tensor
    entropy: Tensor


def uniform(d: int) -> KeyDensity:
    """Keys uniform on S^(d−1).

    >>> keys = uniform(3).draw(2, 5, torch.Generator().manual_seed(0))
    >>> keys.shape, torch.allclose(keys.norm(dim=-1), torch.ones(2, 5, dtype=torch.float64))
    (torch.Size([2, 5, 3]), True)
    """

    def draw(rows: int, n: int, generator: torch.Generator) -> Tensor:
        keys = torch.randn(rows, n, d, generator=generator, dtype=torch.float64, device=generator.device)
        return functional.normalize(keys, dim=-1)

    return KeyDensity("uniform", d, draw, uniform_law(d))


def far_keys_at(d: int, place: float) -> KeyDensity:
    """Uniform keys, with every cosine below 1/2 moved to the cosine `place`. The law near the query is unchanged.

    >>> float(far_keys_at(3, -1.0).draw(1, 100, torch.Generator().manual_seed(0))[..., 0].median())
    -1.0
    """
    around = uniform(d).draw

    def draw(rows: int, n: int, generator: torch.Generator) -> Tensor:
        keys = around(rows, n, generator)
        tangent = keys[..., 1:]
        height = math.sqrt(1.0 - place * place) / tangent.norm(dim=-1, keepdim=True)
        moved = torch.cat((torch.full_like(keys[..., :1], place), height * tangent), dim=-1)
        return torch.where(keys[..., :1] < 0.5, moved, keys)

    return KeyDensity(f"far keys at cosine {place:g}", d, draw, uniform_law(d))


def partly_on_subsphere(d: int, inner: int, share: float) -> KeyDensity:
    """A `share` of the keys uniform on a subsphere S^(inner−1) through the query, the others uniform on S^(d−1).

    Near the query the keys of the subsphere dominate, so the local law is that of dimension `inner`.

    >>> partly_on_subsphere(5, 3, 0.5).law.exponent
    1.0
    """
    outside, inside = uniform(d).draw, uniform(inner).draw

    def draw(rows: int, n: int, generator: torch.Generator) -> Tensor:
        keys = outside(rows, n, generator)
        some = functional.pad(inside(rows, n, generator), (0, d - inner))
        chosen = torch.rand(rows, n, 1, generator=generator, device=generator.device) < share
        return torch.where(chosen, some, keys)

    law = uniform_law(inner)
    return KeyDensity(f"{share:.0%} on a {inner - 1}-sphere", d, draw, LocalLaw(share * law.constant, law.exponent))


def tilted(concentration: float, cosine: float) -> KeyDensity:
    """Keys on S² with the density ∝ e^(r⟨m, k⟩), r = `concentration`, where ⟨m, q⟩ = `cosine` (von Mises–Fisher).

    Near the query the density is 4π·f(q) times the uniform one. ∇log f(q) = r·(m − ⟨m, q⟩q).

    >>> keys = tilted(4.0, 1.0).draw(1, 20000, torch.Generator().manual_seed(0))
    >>> abs(float(keys[..., 0].mean()) - (1 / math.tanh(4.0) - 1 / 4.0)) < 0.01
    True
    """
    centre = tilted_centre(cosine)
    rest = torch.tensor([-centre[1], centre[0], 0.0], dtype=torch.float64, device="cpu")

    def draw(rows: int, n: int, generator: torch.Generator) -> Tensor:
        uniforms = torch.rand(rows, n, 2, generator=generator, dtype=torch.float64, device=generator.device)
        # The cosine with m by inverse transform sampling; the angle around m is uniform.
        decay = math.exp(-2.0 * concentration)
        along = 1.0 + torch.log(decay + (1.0 - decay) * (1.0 - uniforms[..., 0])) / concentration
        height, angle = (1.0 - along.square()).clamp(min=0.0).sqrt(), 2.0 * math.pi * uniforms[..., 1]
        keys = along[..., None] * centre + (height * angle.cos())[..., None] * rest
        keys[..., 2] += height * angle.sin()
        return keys

    density = concentration / math.sinh(concentration) * math.exp(concentration * cosine)
    return KeyDensity("tilted", 3, draw, LocalLaw(uniform_law(3).constant * density, 1.0))


def tilted_centre(cosine: float) -> Tensor:
    """The direction m of `tilted`, [3].

    >>> tilted_centre(0.0)
    tensor([0., 1., 0.], dtype=torch.float64)
    """
    return torch.tensor([cosine, math.sqrt(1.0 - cosine * cosine), 0.0], dtype=torch.float64, device="cpu")


def tilted_harmonic(concentration: float, degree: int) -> float:
    """The mean of the Legendre polynomial P_ℓ(⟨m, k⟩) under `tilted`, for ℓ = 1 or 2.

    >>> round(tilted_harmonic(3.0, 2), 6)  # 1 − 3·A(r)/r
    0.328364
    """
    mean = mean_cosine(3, concentration)
    return mean if degree == 1 else 1.0 - 3.0 * mean / concentration


def simulate(density: KeyDensity, n: int, beta: float, rows: int, generator: torch.Generator) -> Readout:
    """Attention from the query to n keys per row, with the keys as values, computed with this package.

    >>> simulate(uniform(3), 64, 10.0, 8, torch.Generator().manual_seed(0)).output.shape
    torch.Size([8, 3])
    """
    return simulate_at(density, n, [beta], rows, generator)[0]


def simulate_at(
    density: KeyDensity, n: int, betas: Sequence[float], rows: int, generator: torch.Generator
) -> list[Readout]:
    """`simulate` at several β with the same keys.

    >>> len(simulate_at(uniform(3), 64, [1.0, 10.0], 8, torch.Generator().manual_seed(0)))
    2
    """
    parts = [[attention_to(keys, beta) for beta in betas] for keys in batches(density, n, rows, generator)]
    return [Readout(*map(torch.cat, zip(*found, strict=True))) for found in zip(*parts, strict=True)]


def batches(density: KeyDensity, n: int, rows: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Keys of `rows` rows in batches [batch, n, d] of bounded memory.

    >>> sum(len(keys) for keys in batches(uniform(3), 2**20, 5, torch.Generator().manual_seed(0)))
    5
    """
    size = max(1, 2**22 // (n * density.d))
    for start in range(0, rows, size):
        yield density.draw(min(size, rows - start), n, generator)


def attention_to(keys: Tensor, beta: float) -> Readout:
    """Attention from the query to keys [rows, n, d].

    >>> attention_to(torch.eye(2, dtype=torch.float64)[None], 0.0).w_max
    tensor([0.5000], dtype=torch.float64)
    """
    query = torch.zeros(len(keys), 1, 1, keys.shape[-1], dtype=keys.dtype, device=keys.device)
    query[..., 0] = 1.0
    request = StatsRequest(lse=False, max_logit=False)
    output, stats = attention_with_stats(query, keys[:, None], keys[:, None], scale=beta, request=request)
    return Readout(output[:, 0, 0], stats.w_max[:, 0, 0], stats.entropy[:, 0, 0])
