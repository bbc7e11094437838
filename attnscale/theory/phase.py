"""One attention layer on any tokens, measured: angles (Eq. 26), Jacobian norm (Eq. 27), and both over (ρ, γ).

The layer is seed 004's, x'_i = Σ_j softmax_j(β⟨y_i, y_j⟩)·y_j + α·x_i with y = x/‖x‖, and it runs through the attention
of this package, so a phase diagram is also a test of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from attnscale._util.checks import read_int
from attnscale.attention import attention_with_stats, scaled_dot_product_attention
from attnscale.errors import reject
from attnscale.statistics import RowStats, StatsRequest
from attnscale.theory.tokens import almost_simplex


class PhasePoint(NamedTuple):
    """What one layer with β = γ·ln n does to one draw of tokens."""

    rho: float
    gamma: float
    angle_ratio: float
    jacobian_norm: float


def directions(x: Tensor) -> Tensor:
    """y = x/‖x‖, [..., n, d].

    >>> directions(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """
    return functional.normalize(x, dim=-1)


def layer(x: Tensor, beta: float, alpha: float = 0.0, backend: str = "auto") -> Tensor:
    """The tokens after one layer (Eq. 5), [n, d] to [n, d]. β enters as the scale, which is not rounded to fp32.

    >>> x = torch.eye(2, dtype=torch.float64)
    >>> layer(x, beta=math.log(3.0))
    tensor([[0.7500, 0.2500],
            [0.2500, 0.7500]], dtype=torch.float64)
    """
    y = directions(_tokens(x))
    return scaled_dot_product_attention(y, y, y, scale=beta, backend=backend) + alpha * x


def layers(x: Tensor, beta: float, depth: int, alpha: float = 0.0, backend: str = "auto") -> Tensor:
    """The tokens after `depth` layers with the same β, [n, d] to [n, d].

    >>> torch.equal(layers(torch.eye(2), 1.0, depth=0), torch.eye(2))
    True
    """
    for _ in range(depth):
        x = layer(x, beta, alpha, backend)
    return x


def layer_statistics(x: Tensor, beta: float, request: StatsRequest | None = None) -> RowStats:
    """The statistics of the layer's rows, one value per token.

    >>> layer_statistics(torch.eye(2, dtype=torch.float64), beta=math.log(3.0)).w_max
    tensor([0.7500, 0.7500], dtype=torch.float64)
    """
    y = directions(_tokens(x))
    return attention_with_stats(y, y, y, scale=beta, request=request).stats


def angle_ratio(x: Tensor, beta: float, alpha: float = 0.0) -> float:
    """λ, the mean over pairs i < j of (1 − ⟨y'_i, y'_j⟩)/(1 − ⟨y_i, y_j⟩): 0 if all tokens collapse, 1 if none moves.

    Eq. 26 prints the sum over i ≤ j, whose diagonal is 0/0.

    >>> angle_ratio(torch.eye(3, dtype=torch.float64), beta=1e3)
    1.0
    """
    return _mean_ratio(directions(x), directions(layer(x, beta, alpha)))


def jacobian_norm(
    x: Tensor, beta: float, probes: int = 8, generator: torch.Generator | None = None, depth: int = 1
) -> tuple[float, float]:
    """η = ‖∇_X X'‖²/(nd) by Hutchinson's estimator with autograd, and its standard error.

    With a depth, of that many layers end to end. Each probe is a vector of random signs v, and the mean of ‖vᵀ∇_X X'‖²
    over them is ‖∇_X X'‖².

    >>> x = torch.eye(3, dtype=torch.float64)
    >>> estimate, error = jacobian_norm(x, 1e3, probes=4, generator=torch.Generator().manual_seed(0))
    >>> round(estimate, 6)  # the normalisation alone: 1 − 1/d
    0.666667
    """
    probes = read_int("probes", probes, "an int >= 2", least=2)
    leaf = x.detach().clone().requires_grad_()
    output = layers(leaf, beta, depth)
    squares = []
    for probe in range(probes):
        signs = torch.randint(0, 2, output.shape, generator=generator, device=x.device).to(output) * 2 - 1
        (gradient,) = torch.autograd.grad(output, leaf, signs, retain_graph=probe < probes - 1)
        squares.append(gradient.square().sum() / x.numel())
    draws = torch.stack(squares)
    return float(draws.mean()), float(draws.std() / math.sqrt(probes))


def exact_jacobian_norm(x: Tensor, beta: float, depth: int = 1) -> float:
    """η from the full Jacobian by `torch.func.jacrev`, [n, d, n, d] in memory: for small n.

    >>> round(exact_jacobian_norm(torch.eye(3, dtype=torch.float64), 1e3), 12)
    0.666666666667
    """
    # The reference backend is plain torch, which vmap has rules for; fused CPU attention has none.
    jacobian = torch.func.jacrev(lambda tokens: layers(tokens, beta, depth, backend="reference"))(_tokens(x))
    return float(jacobian.square().sum() / x.numel())


def sweep(
    n: int,
    d: int,
    rhos: Sequence[float],
    gammas: Sequence[float],
    generator: torch.Generator,
    probes: int = 2,
    draws: int = 1,
) -> Iterator[PhasePoint]:
    """λ and η over the plane of figures 1 and 2, means over draws of Gaussian tokens (Eq. 25).

    The vectors z of a draw are the same for every (ρ, γ): the tokens of one draw share z₀, whose length scatters, and
    with vectors of its own each ρ would be off by as much as its own z₀.

    >>> points = list(sweep(16, 8, [0.2, 0.5], [0.5, 3.0], torch.Generator().manual_seed(0)))
    >>> [(point.rho, point.gamma) for point in points]
    [(0.2, 0.5), (0.2, 3.0), (0.5, 0.5), (0.5, 3.0)]
    """
    seeds = torch.randint(2**31, (draws,), generator=generator, device=generator.device).tolist()
    for rho in rhos:
        samples = [almost_simplex(n, d, rho, torch.Generator().manual_seed(seed)) for seed in seeds]
        for gamma in gammas:
            beta = gamma * math.log(n)
            angle = sum(angle_ratio(x, beta) for x in samples) / draws
            eta = sum(jacobian_norm(x, beta, probes, generator)[0] for x in samples) / draws
            yield PhasePoint(rho, gamma, angle, eta)


def _mean_ratio(before: Tensor, after: Tensor) -> float:
    # 1 − cosine as half the squared distance: no cancellation where directions nearly coincide.
    return float((functional.pdist(after).square() / functional.pdist(before).square()).mean())


def _tokens(x: Tensor) -> Tensor:
    if x.dim() != 2 or x.shape[0] < 2:
        reject("x", list(x.shape), "tokens [n, d] with n >= 2")
    return x
