"""Token configurations of seed 004 as vectors [n, d]: simplex, almost-simplex, and groups of near tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnscale._util.checks import read_int
from attnscale.errors import reject


def simplex(n: int, d: int, rho: float, q: float = 1.0) -> Tensor:
    """Tokens [n, d] with ‖x_i‖² = q and the same cosine ρ between any two (Assumption 1).

    n such directions are linearly independent for 0 < ρ < 1, so d ≥ n; the rows of the symmetric square root of their
    Gram matrix (1−ρ)I + ρ11ᵀ are such a configuration.

    >>> x = simplex(3, 5, 0.5, q=4.0)
    >>> (x @ x.T).round(decimals=12)
    tensor([[4., 2., 2.],
            [2., 4., 2.],
            [2., 2., 4.]], dtype=torch.float64)
    """
    n = read_int("n", n, "an int >= 2", least=2)
    if d < n:
        reject("d", d, f"at least n={n} dimensions: the tokens of a simplex are linearly independent")
    own = math.sqrt(1.0 - rho)
    shared = (math.sqrt(1.0 - rho + n * rho) - own) / n
    tokens = torch.zeros(n, d, dtype=torch.float64, device="cpu")
    tokens[:, :n] = own * torch.eye(n, dtype=torch.float64, device="cpu") + shared
    return math.sqrt(q) * tokens


def almost_simplex(n: int, d: int, rho: float, generator: torch.Generator) -> Tensor:
    """Gaussian tokens √ρ·z₀ + √(1−ρ)·z_i (Eq. 25), [n, d], with z ~ N(0, I/d) so that E‖x_i‖² = 1.

    The paper prints "standard Gaussian vectors", which give E‖x_i‖² = d.

    >>> x = almost_simplex(64, 4096, 0.5, torch.Generator().manual_seed(0))
    >>> torch.allclose(x @ x.T, 0.5 * (1 + torch.eye(64, dtype=torch.float64)), atol=0.1)
    True
    """
    draws = torch.randn(n + 1, d, generator=generator, dtype=torch.float64, device=generator.device) / math.sqrt(d)
    return math.sqrt(rho) * draws[:1] + math.sqrt(1.0 - rho) * draws[1:]


def groups(n: int, size: int, far: float, near: float) -> Tensor:
    """Unit tokens [n, d] in groups of `size`: cosine `near` inside a group, `far` between groups (Assumption 3).

    Each token has size − 1 near ones, so in the paper's terms n^τ ≈ size − 1, ρ₁ = ρ₂ = far and ρ₃ = ρ₄ = near.

    >>> x = groups(4, 2, far=0.25, near=0.75)
    >>> (x @ x.T)[0].round(decimals=12)
    tensor([1.0000, 0.7500, 0.2500, 0.2500], dtype=torch.float64)
    """
    if not 0.0 <= far <= near < 1.0:
        reject("near", near, f"a cosine from far={far} to 1")
    if size < 1 or n % size:
        reject("size", size, f"a divisor of n={n}")
    shared = torch.full((n, 1), math.sqrt(far), dtype=torch.float64, device="cpu")
    group = torch.eye(n // size, dtype=torch.float64, device="cpu").repeat_interleave(size, 0) * math.sqrt(near - far)
    own = torch.eye(n, dtype=torch.float64, device="cpu") * math.sqrt(1.0 - near)
    return torch.cat((shared, group, own), dim=1)
