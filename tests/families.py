"""Families of score rows: typical ones, and numerically difficult ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

NAMES = ("gaussian", "clustered", "heavy_tailed", "constant", "ties", "one_key", "lone_survivor", "simplex", "sphere")


def rows(name: str, count: int, keys: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores [count, keys] in fp64 and their visibility."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(count, keys, generator=g, dtype=torch.float64)
    visible = torch.ones(count, keys, dtype=torch.bool)
    if name == "clustered":
        scores = scores / 50 - torch.randint(0, 4, (count, keys), generator=g)
    elif name == "heavy_tailed":
        scores = scores / torch.randn(count, keys, generator=g, dtype=torch.float64)
    elif name == "constant":
        scores = torch.full_like(scores, 1.5)
    elif name == "ties":
        scores = torch.randint(-3, 4, (count, keys), generator=g).double()
    elif name == "one_key":
        scores = scores[:, :1]
        visible = visible[:, :1]
    elif name == "lone_survivor":
        visible = torch.nn.functional.one_hot(torch.randint(0, keys, (count,), generator=g), keys).bool()
    elif name == "simplex":
        scores = torch.full_like(scores, 0.3)
        scores[:, 0] = 1.0
    elif name == "sphere":
        points = torch.nn.functional.normalize(torch.randn(count, keys, 5, generator=g, dtype=torch.float64), dim=-1)
        scores = points[..., 0]
    else:
        visible = torch.rand(count, keys, generator=g) < 0.8
        visible[:, 0] = True
    return scores, visible


def zeta(r: Tensor) -> Tensor:
    """Riemann's ζ for r > 1."""
    return torch.special.zeta(r, torch.ones((), dtype=r.dtype))


def harmonic(r: Tensor, n: Tensor) -> Tensor:
    """Σ_{k ≤ n} k^(−r)."""
    k = torch.arange(1, int(n.max()) + 1, dtype=r.dtype)
    return torch.where(k <= n[..., None], k ** -r[..., None], 0.0).sum(-1)


LN = math.log
