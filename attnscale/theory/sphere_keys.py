"""Random keys around the query q = (1, 0, …, 0) on the sphere, by density, with the local law of each at the query."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from attnscale.attention import attention_with_stats
from attnscale.statistics import StatsRequest
from attnscale.theory.sphere import LocalLaw, mean_cosine, uniform_law

Draw = Callable[[int, int, torch.Generator], Tensor]


class KeyDensity(NamedTuple):
    """A density of keys: how to draw them, [rows, n, d] from (rows, n, generator), and their law near the query."""

    name: str
    d: int
    draw: Draw
    law: LocalLaw


class Readout(NamedTuple):
    """What attention makes of the draws: outputs [rows, d], largest weight and entropy of each row [rows]."""

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


def far_keys_at(d: int, place: float, beyond: float = 0.5) -> KeyDensity:
    """Uniform, but every key with a cosine below `beyond` is moved to the cosine `place`: the same law near the query.

    >>> float(far_keys_at(3, -1.0).draw(1, 100, torch.Generator().manual_seed(0))[..., 0].median())
    -1.0
    """
    around = uniform(d).draw

    def draw(rows: int, n: int, generator: torch.Generator) -> Tensor:
        keys = around(rows, n, generator)
        tangent = keys[..., 1:]
        height = math.sqrt(1.0 - place * place) / tangent.norm(dim=-1, keepdim=True)
        moved = torch.cat((torch.full_like(keys[..., :1], place), height * tangent), dim=-1)
        return torch.where(keys[..., :1] < beyond, moved, keys)

    return KeyDensity(f"far keys at cosine {place:g}", d, draw, uniform_law(d))


def partly_on_subsphere(d: int, inner: int, share: float) -> KeyDensity:
    """Uniform on S^(d−1), but a `share` of the keys uniform on a subsphere S^(inner−1) through the query.

    Near the query the subsphere has far more keys than the rest, so the local law is that of dimension `inner`.

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
        # The cosine with m by inversion of its distribution function, the angle around m uniform.
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


def attend(density: KeyDensity, n: int, beta: float, rows: int, generator: torch.Generator) -> Readout:
    """Rows of attention from the query to n keys each, with the keys as values, through this package's attention.

    >>> attend(uniform(3), 64, 10.0, 8, torch.Generator().manual_seed(0)).output.shape
    torch.Size([8, 3])
    """
    parts = [read(keys, beta) for keys in batches(density, n, rows, generator)]
    return Readout(*(torch.cat(column) for column in zip(*parts, strict=True)))


def batches(density: KeyDensity, n: int, rows: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The keys of `rows` rows in batches of bounded memory, [batch, n, d] each.

    >>> sum(len(keys) for keys in batches(uniform(3), 2**20, 5, torch.Generator().manual_seed(0)))
    5
    """
    size = max(1, 2**22 // (n * density.d))
    for start in range(0, rows, size):
        yield density.draw(min(size, rows - start), n, generator)


def read(keys: Tensor, beta: float) -> Readout:
    """Attention from the query to given keys [rows, n, d].

    >>> read(torch.eye(2, dtype=torch.float64)[None], 0.0).w_max
    tensor([0.5000], dtype=torch.float64)
    """
    query = torch.zeros(len(keys), 1, 1, keys.shape[-1], dtype=keys.dtype, device=keys.device)
    query[..., 0] = 1.0
    request = StatsRequest(lse=False, max_logit=False)
    output, stats = attention_with_stats(query, keys[:, None], keys[:, None], scale=beta, request=request)
    return Readout(output[:, 0, 0], stats.w_max[:, 0, 0], stats.entropy[:, 0, 0])
