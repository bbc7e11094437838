"""Closed forms of the simplex against brute force at small n, and against their limits at large n."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from attnscale.errors import ArgumentError
from attnscale.statistics.gaps import accumulation_scale
from attnscale.theory import phase, simplex

# n, d, ρ, q, γ, α: below, on and above the critical line.
CASES = [
    (2, 3, 0.3, 1.0, 1.0, 0.0),
    (8, 12, 0.6, 2.0, 2.5, 0.7),
    (12, 14, 0.1, 0.4, 1 / 0.9, 1.3),
    (16, 16, 0.8, 3.0, 7.0, 0.2),
    (16, 17, 0.0, 1.0, 0.5, 0.1),
    (20, 24, 0.4, 0.01, 0.3, 2.0),
]


@pytest.mark.parametrize(("n", "d", "rho", "q", "gamma", "alpha"), [*CASES, (48, 48, 0.5, 1.5, 2.0, 0.5)])
def test_cosine_and_norm_are_those_of_the_layer(
    n: int, d: int, rho: float, q: float, gamma: float, alpha: float
) -> None:
    beta = gamma * math.log(n)
    after = phase.layer(phase.simplex_tokens(n, d, rho, q), beta, alpha)
    assert simplex.output_norm(n, rho, beta, q, alpha) == pytest.approx(float(after[0].square().sum()), rel=1e-9)
    cosine = float((phase.directions(after)[0] * phase.directions(after)[1]).sum())
    assert simplex.output_cosine(n, rho, beta, q, alpha) == pytest.approx(cosine, rel=1e-9)
    ratio = phase.angle_ratio(phase.simplex_tokens(n, d, rho, q), beta, alpha)
    assert simplex.angle_ratio(n, rho, beta, q, alpha) == pytest.approx(ratio, rel=1e-9)


@pytest.mark.parametrize(("n", "d", "rho", "q", "gamma", "alpha"), CASES)
def test_the_jacobian_norm_is_that_of_automatic_differentiation(
    n: int, d: int, rho: float, q: float, gamma: float, alpha: float
) -> None:
    beta = gamma * math.log(n)
    exact = phase.exact_jacobian_norm(phase.simplex_tokens(n, d, rho, q), beta)
    assert simplex.jacobian_norm(n, d, rho, beta, q) == pytest.approx(exact, rel=1e-9)


def test_the_jacobian_norm_at_48_tokens_is_that_of_automatic_differentiation() -> None:
    x, beta = phase.simplex_tokens(48, 50, 0.5, 2.0), 2 * math.log(48)  # on the critical line

    def written_out(x: Tensor) -> Tensor:
        y = x / x.norm(dim=-1, keepdim=True)
        return torch.softmax(beta * y @ y.T, dim=-1) @ y

    expected = torch.func.jacrev(written_out, chunk_size=256)(x).square().sum().item() / (48 * 50)
    assert simplex.jacobian_norm(48, 50, 0.5, beta, 2.0) == pytest.approx(expected, rel=1e-9)
    for gamma in (0.5, 2.0, 4.0):
        beta = gamma * math.log(48)
        assert simplex.jacobian_norm(48, 50, 0.5, beta, 2.0) == pytest.approx(
            phase.closed_jacobian_norm(x, beta), rel=1e-9
        )


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("q", "alpha"), [(1.0, 0.0), (2.0, 0.7)])
def test_three_phases_are_reached_from_a_thousand_to_a_trillion_tokens(rho: float, q: float, alpha: float) -> None:
    for ratio, slowest in ((0.5, 0.5), (1.0, 0.9), (1.5, 0.5)):
        gamma = ratio / (1 - rho)
        cosine_errors, jacobian_errors = [], []
        for n in (10**3, 10**6, 10**9, 10**12):
            beta = gamma * math.log(n)
            limit = simplex.output_cosine_limit(gamma, rho, q, alpha)
            cosine_errors.append(abs(simplex.output_cosine(n, rho, beta, q, alpha) - limit))
            limit = simplex.jacobian_norm_limit(gamma, rho, n, q)
            jacobian_errors.append(abs(simplex.jacobian_norm(n, n, rho, beta, q) - limit))
        for errors in (cosine_errors, jacobian_errors):
            # Each thousandfold n divides the error by at least 1000^½, up to powers of ln n and to rounding.
            assert all(later < earlier * 1000**-slowest * 8 + 1e-14 for earlier, later in pairwise(errors))
            assert errors[-1] < 1e-4


def test_the_limits_are_the_printed_ones() -> None:
    rho, q, alpha = 0.3, 2.0, 0.6
    u = alpha * math.sqrt(q)
    printed = [
        rho * (u + 1) ** 2 / (u**2 + 2 * u * rho + rho),
        rho * (u + 1) ** 2 / (u**2 + u * (1 + rho) + (1 + 3 * rho) / 4),
        rho,
    ]
    gammas = [ratio / (1 - rho) for ratio in (0.9, 1.0, 1.1)]
    assert [simplex.output_cosine_limit(gamma, rho, q, alpha) for gamma in gammas] == pytest.approx(printed)
    limits = [simplex.jacobian_norm_limit(gamma, rho, 5, q) for gamma in gammas]
    assert limits == pytest.approx([0.0, 0.8 / (4 * q), 0.8 / q])
    assert simplex.jacobian_norm_limit(gammas[2], rho, q=q) == 1 / q


def test_on_the_critical_line_the_excess_over_the_limit_is_the_squared_logarithm() -> None:
    n, rho, q, d = 10**12, 0.4, 2.0, 10**4
    beta = simplex.critical_beta(n, rho)
    excess = simplex.jacobian_norm(n, d, rho, beta, q) - simplex.jacobian_norm_limit(1 / (1 - rho), rho, d, q)
    length = math.log(n)
    assert excess == pytest.approx((rho * length**2 / 16 + (2 + rho) * length / 4) / (q * d), rel=1e-6)


def test_the_critical_beta_is_the_accumulation_scale_of_every_row() -> None:
    y = phase.simplex_tokens(40, 40, 0.7)
    scale = accumulation_scale(y @ y.T)
    torch.testing.assert_close(scale, torch.full_like(scale, simplex.critical_beta(40, 0.7)))


def test_weights_and_entropy_are_those_of_the_package() -> None:
    n, rho, beta = 30, 0.4, 6.0
    stats = phase.layer_statistics(phase.simplex_tokens(n, n, rho), beta)
    assert stats.w_max is not None
    assert stats.entropy is not None
    assert float(stats.w_max[3]) == pytest.approx(simplex.weights(n, rho, beta).own, rel=1e-12)
    assert float(stats.entropy[3]) == pytest.approx(simplex.entropy(n, rho, beta), rel=1e-12)


def test_several_layers_are_one_after_another() -> None:
    n, rho, q, alpha = 12, 0.4, 2.0, 0.3
    beta = 1.2 * simplex.critical_beta(n, rho)
    after = phase.layers(phase.simplex_tokens(n, n, rho, q), beta, 3, alpha)
    state = simplex.trajectory(n, rho, beta, 3, q, alpha)[-1]
    assert state.q == pytest.approx(float(after[0].square().sum()), rel=1e-9)
    assert state.rho == pytest.approx(float(phase.directions(after)[:2].prod(0).sum()), rel=1e-9)


def test_a_collapsed_configuration_stays_so_and_grows_by_its_residual() -> None:
    states = simplex.trajectory(100, 0.5, 0.0, 3, alpha=1.0) + simplex.trajectory(10**9, 0.9, 1.0, 40)
    assert all(math.isfinite(state.q) for state in states)
    assert states[-1].rho == 1.0
    assert states[-1].q == pytest.approx(1.0)


def test_criticality_lasts_one_layer_and_the_supercritical_phase_for_its_lifetime() -> None:
    n, rho = 10**9, 0.5
    first, second = (state.rho for state in simplex.trajectory(n, rho, simplex.critical_beta(n, rho), 2)[1:])
    assert first == pytest.approx(4 * rho / (1 + 3 * rho), abs=1e-6)
    assert second > 0.9999
    beta = 1.75 * simplex.critical_beta(10**5, rho)
    assert simplex.layers_until_collapse(10**5, rho, beta) == pytest.approx(simplex.lifetime(10**5, rho, beta), rel=0.1)
    assert simplex.layers_until_collapse(10**5, rho, 3 * beta, most=10) is None


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"rho=1\.5 .*\[0, 1\)"):
        simplex.weights(10, 1.5, 1.0)
    with pytest.raises(ArgumentError, match="n=1 "):
        simplex.output_cosine(1, 0.5, 1.0)
    with pytest.raises(ArgumentError, match="q=0"):
        simplex.jacobian_norm(4, 4, 0.5, 1.0, q=0.0)
    with pytest.raises(ArgumentError, match="alpha=-1"):
        simplex.output_norm(4, 0.5, 1.0, alpha=-1.0)
    with pytest.raises(ArgumentError, match="d=3"):
        phase.simplex_tokens(4, 3, 0.5)
