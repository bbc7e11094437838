"""One attention layer on arbitrary tokens: measured angles (Eq. 26) and Jacobian norm (Eq. 27), also over (ρ, γ).

Equations, assumptions and lemmas are those of "Critical Attention Scaling in Long-Context Transformers"
(arXiv:2510.05554). The layer is x'_i = Σ_j softmax_j(β⟨y_i, y_j⟩)·y_j + α·x_i with y = x/‖x‖, computed with the
attention of this package.

Appendix C adds a middle phase in which a token attends to near tokens only. Assumption 3: each token has about n^τ near
tokens with cosines in [ρ₃, ρ₄]; all other cosines lie in [ρ₁, ρ₂] with ρ₂ < ρ₃.
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


def simplex_tokens(n: int, d: int, rho: float, q: float = 1.0) -> Tensor:
    """Tokens [n, d] with ‖x_i‖² = q and the same cosine ρ between any two (Assumption 1).

    The rows of the symmetric square root of the Gram matrix (1−ρ)I + ρ11ᵀ. For 0 < ρ < 1 the tokens are linearly
    independent, so d ≥ n.

    >>> x = simplex_tokens(3, 5, 0.5, q=4.0)
    >>> (x @ x.T).round(decimals=12)
    tensor([[4., 2., 2.],
            [2., 4., 2.],
            [2., 2., 4.]], dtype=torch.float64)
    """
    n = read_int("n", n, "an int >= 2", least=2)
    if d < n:
        reject("d", d, f"an int >= n={n}: the tokens of a simplex are linearly independent")
    own = math.sqrt(1.0 - rho)
    shared = (math.sqrt(1.0 - rho + n * rho) - own) / n
    tokens = torch.zeros(n, d, dtype=torch.float64, device="cpu")
    tokens[:, :n] = own * torch.eye(n, dtype=torch.float64, device="cpu") + shared
    return math.sqrt(q) * tokens


def gaussian_tokens(n: int, d: int, rho: float, generator: torch.Generator) -> Tensor:
    """Gaussian tokens √ρ·z₀ + √(1−ρ)·z_i (Eq. 25), [n, d], with z ~ N(0, I/d) so that E‖x_i‖² = 1.

    The "standard Gaussian vectors" of the paper give E‖x_i‖² = d instead.

    >>> x = gaussian_tokens(64, 4096, 0.5, torch.Generator().manual_seed(0))
    >>> torch.allclose(x @ x.T, 0.5 * (1 + torch.eye(64, dtype=torch.float64)), atol=0.1)
    True
    """
    draws = torch.randn(n + 1, d, generator=generator, dtype=torch.float64, device=generator.device) / math.sqrt(d)
    return math.sqrt(rho) * draws[:1] + math.sqrt(1.0 - rho) * draws[1:]


def grouped_tokens(n: int, size: int, far: float, near: float) -> Tensor:
    """Unit tokens [n, d] in groups of `size`: cosine `near` inside a group, `far` between groups (Assumption 3).

    Each token has size − 1 near tokens. In the paper's notation n^τ ≈ size − 1, ρ₁ = ρ₂ = far and ρ₃ = ρ₄ = near.

    >>> x = grouped_tokens(4, 2, far=0.25, near=0.75)
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


class PhasePoint(NamedTuple):
    """The effect of one layer with β = γ·ln n on Gaussian tokens of cosine ρ."""

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
    """The tokens [n, d] after one layer (Eq. 5). β is passed as the scale, which is not rounded to fp32.

    >>> x = torch.eye(2, dtype=torch.float64)
    >>> layer(x, beta=math.log(3.0))
    tensor([[0.7500, 0.2500],
            [0.2500, 0.7500]], dtype=torch.float64)
    """
    y = directions(_tokens(x))
    return scaled_dot_product_attention(y, y, y, scale=beta, backend=backend) + alpha * x


def layers(x: Tensor, beta: float, depth: int, alpha: float = 0.0, backend: str = "auto") -> Tensor:
    """The tokens [n, d] after `depth` layers with the same β.

    >>> torch.equal(layers(torch.eye(2), 1.0, depth=0), torch.eye(2))
    True
    """
    for _ in range(depth):
        x = layer(x, beta, alpha, backend)
    return x


def layer_statistics(x: Tensor, beta: float, request: StatsRequest | None = None) -> RowStats:
    """The row statistics of the layer, one value per token.

    >>> layer_statistics(torch.eye(2, dtype=torch.float64), beta=math.log(3.0)).w_max
    tensor([0.7500, 0.7500], dtype=torch.float64)
    """
    y = directions(_tokens(x))
    return attention_with_stats(y, y, y, scale=beta, request=request).stats


def angle_ratio(x: Tensor, beta: float, alpha: float = 0.0) -> float:
    """λ: the mean of (1 − ⟨y'_i, y'_j⟩)/(1 − ⟨y_i, y_j⟩) over pairs i < j. 0 if all tokens collapse, 1 if none moves.

    Eq. 26 prints the sum over i ≤ j, with diagonal terms 0/0.

    >>> angle_ratio(torch.eye(3, dtype=torch.float64), beta=1e3)
    1.0
    """
    return _mean_ratio(directions(x), directions(layer(x, beta, alpha)))


def jacobian_norm(
    x: Tensor, beta: float, probes: int = 8, generator: torch.Generator | None = None, depth: int = 1
) -> tuple[float, float]:
    """η = ‖∇_X X'‖²/(nd) of `depth` layers, by Hutchinson's estimator with autograd, and its standard error.

    A probe v is a vector of random signs. The mean of ‖vᵀ∇_X X'‖² over probes estimates ‖∇_X X'‖².

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
    """η from the full Jacobian [n, d, n, d] by `torch.func.jacrev`; for small n only.

    >>> round(exact_jacobian_norm(torch.eye(3, dtype=torch.float64), 1e3), 12)
    0.666666666667
    """
    # vmap supports the plain torch operations of the reference backend, but not fused CPU attention.
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
    """λ and η over the (ρ, γ) plane of Figures 1 and 2: means over draws of Gaussian tokens (Eq. 25).

    The vectors z of a draw are shared by all (ρ, γ). The tokens of a draw share z₀, whose length scatters; independent
    vectors per ρ would show up as stripes.

    >>> points = list(sweep(16, 8, [0.2, 0.5], [0.5, 3.0], torch.Generator().manual_seed(0)))
    >>> [(point.rho, point.gamma) for point in points]
    [(0.2, 0.5), (0.2, 3.0), (0.5, 0.5), (0.5, 3.0)]
    """
    seeds = torch.randint(2**31, (draws,), generator=generator, device=generator.device).tolist()
    for rho in rhos:
        samples = [gaussian_tokens(n, d, rho, torch.Generator().manual_seed(seed)) for seed in seeds]
        for gamma in gammas:
            beta = gamma * math.log(n)
            angle = sum(angle_ratio(x, beta) for x in samples) / draws
            eta = sum(jacobian_norm(x, beta, probes, generator)[0] for x in samples) / draws
            yield PhasePoint(rho, gamma, angle, eta)


def _mean_ratio(before: Tensor, after: Tensor) -> float:
    # 1 − cosine as half the squared distance avoids cancellation for nearly equal directions.
    return float((functional.pdist(after).square() / functional.pdist(before).square()).mean())


def _tokens(x: Tensor) -> Tensor:
    if x.dim() != 2 or x.shape[0] < 2:
        reject("x", list(x.shape), "tokens [n, d] with n >= 2")
    return x


def closed_jacobian_norm(x: Tensor, beta: float) -> float:
    """η = ‖∇_X X'‖²/(nd) of x'_j = Σ_k softmax_k(β⟨y_j, y_k⟩)·y_k, tokens [n, d], exact; O(n³ + n²d).

    With the weights A, the outputs μ = Ay and P_i the projection along y_i, the block of output j and input i is

        i = j:  P_j(A_jj·I + β·C_j)/‖x_j‖      C_j = Σ_k A_jk·(y_k − μ_j)(y_k − μ_j)ᵀ
        i ≠ j:  A_ji·P_i(I + β·y_j⊗(y_i − μ_j))/‖x_i‖

    as in Lemmas B.2 and B.3, with the factor 1/‖x_i‖, printed there as ‖x_i‖^(−1/2).

    >>> round(closed_jacobian_norm(torch.eye(3, dtype=torch.float64), 1e3), 12)
    0.666666666667
    """
    n, d = x.shape
    y = directions(x)
    inverse = x.square().sum(-1).reciprocal()  # [n], 1/‖x_i‖²
    gram = y @ y.T
    weights = torch.softmax(beta * gram, dim=-1)  # [j, k]
    toward = weights @ gram  # [j, k], ⟨μ_j, y_k⟩
    length = (weights * toward).sum(-1)  # [j], ‖μ_j‖²

    own = weights.diagonal()
    # tr C², tr C, yᵀCy and ‖Cy‖² of C_j along y_j, each from the Gram matrix.
    covariance_norm = ((weights @ gram.square()) * weights).sum(-1)
    covariance_norm = covariance_norm - 2 * (weights * toward.square()).sum(-1) + length.square()
    centred = gram - toward.diagonal()[:, None]  # [j, k], ⟨y_k − μ_j, y_j⟩
    along = weights * centred
    image = along @ y  # C_j·y_j, as Σ_k A_jk⟨y_k − μ_j, y_j⟩ = 0
    trace = 1.0 - length - (along * centred).sum(-1)  # tr(P_j C_j)
    projected = covariance_norm - image.square().sum(-1)  # ‖P_j C_j‖²
    own_blocks = inverse * (own.square() * (d - 1) + 2 * beta * own * trace + beta**2 * projected)

    across = gram * toward - toward.diagonal()[:, None]  # [j, i], ⟨P_i y_j, y_i − μ_j⟩
    perpendicular = 1.0 - gram.square()  # ‖P_i y_j‖²
    apart = 1.0 - 2 * toward + length[:, None]  # ‖y_i − μ_j‖²
    other = weights.square() * (d - 1 + 2 * beta * across + beta**2 * perpendicular * apart) * inverse
    return float((own_blocks.sum() + other.sum() - other.diagonal().sum()) / (n * d))


class PhaseEdges(NamedTuple):
    """Ranges of γ in Lemma C.1.

    Far tokens dominate below `far_below`, near tokens between `near_above` and `near_below`, the token itself above
    `own_above`.
    """

    far_below: float
    near_above: float
    near_below: float
    own_above: float

    @property
    def has_middle(self) -> bool:
        """Whether near tokens dominate for some γ, equivalent to (1−τ)(1−ρ₂) + ρ₂ < ρ₃."""
        return self.near_above < self.near_below


class RowMass(NamedTuple):
    """The weight of a row on the token itself, on its near tokens and on all others."""

    own: float
    near: float
    far: float


def phase_edges(tau: float, far: tuple[float, float], near: tuple[float, float]) -> PhaseEdges:
    """The edges of Lemma C.1 and Theorem C.2 from τ, [ρ₁, ρ₂] and [ρ₃, ρ₄].

    >>> phase_edges(0.5, far=(0.0, 0.0), near=(0.75, 0.75))
    PhaseEdges(far_below=0.66..., near_above=0.66..., near_below=2.0, own_above=2.0)
    """
    if not 0.0 < tau <= 1.0:
        reject("tau", tau, "a number in (0, 1]")
    if not 0.0 <= far[0] <= far[1] < near[0] <= near[1] < 1.0:
        reject("near", near, f"cosines above far={far} and below 1")
    return PhaseEdges(
        far_below=min(1.0 / (1.0 - far[0]), (1.0 - tau) / (near[1] - far[0])),
        near_above=(1.0 - tau) / (near[0] - far[1]),
        near_below=tau / (1.0 - near[0]),
        own_above=max(1.0 / (1.0 - far[1]), tau / (1.0 - near[1])),
    )


def row_mass(n: int, near_tokens: int, far: float, near: float, beta: float) -> RowMass:
    """The exact weights of a row with `near_tokens` tokens at cosine `near` and the rest at `far`.

    >>> row_mass(4, 1, 0.0, 0.5, 0.0)
    RowMass(own=0.25, near=0.25, far=0.5)
    """
    near_tokens = read_int("near_tokens", near_tokens, f"an int from 0 to n−1={n - 1}", least=0, most=n - 1)
    logs = [0.0, _log(near_tokens) - beta * (1.0 - near), _log(n - 1 - near_tokens) - beta * (1.0 - far)]
    top = max(logs)
    total = sum(math.exp(value - top) for value in logs)
    return RowMass(*(math.exp(value - top) / total for value in logs))


def _log(count: int) -> float:
    return math.log(count) if count else -math.inf
