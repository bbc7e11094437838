"""Keys on the sphere: regimes against simulated rows, and the Poisson limit computed twice."""

from __future__ import annotations

import math

import pytest
import torch

from attnscale.errors import ArgumentError
from attnscale.theory import sphere


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_within(values: torch.Tensor, expected: float, errors: float = 3.0) -> None:
    error = float(values.std() / math.sqrt(len(values)))
    assert float(values.mean()) == pytest.approx(expected, abs=errors * error)


@pytest.mark.parametrize(("d", "known"), [(3, 0.561), (4, 0.375), (5, 0.231)])
def test_draws_and_the_integral_of_the_poisson_limit_agree(d: int, known: float) -> None:
    integral = sphere.mean_largest_weight(1.0, (d - 1) / 2)
    limit = sphere.draw_limit(1.0, (d - 1) / 2, 10000, generator(), points=128)
    assert integral == pytest.approx(known, abs=6e-4)
    assert_within(limit.weights[:, 0], integral)
    assert float(limit.weights.sum(-1).max()) <= 1.0 + 1e-12


def test_at_d_3_the_mean_largest_weight_has_a_name() -> None:
    euler = 0.57721566490153286
    assert sphere.mean_largest_weight(1.0, 1.0) == pytest.approx(math.exp(-euler), rel=1e-9)


@pytest.mark.parametrize("d", [3, 5])
def test_the_largest_weight_at_the_critical_scale_is_that_of_the_poisson_limit(d: int) -> None:
    n = 8192
    read = sphere.simulate(sphere.uniform(d), n, sphere.critical_beta(n, d), 300, generator(d))
    assert_within(read.w_max, sphere.mean_largest_weight(1.0, (d - 1) / 2))


@pytest.mark.parametrize(("n", "d"), [(64, 3), (256, 9), (512, 33)])
def test_the_integral_at_finite_n_holds_where_the_limit_does_not(n: int, d: int) -> None:
    beta = 2.0 * sphere.critical_beta(n, d)
    read = sphere.simulate(sphere.uniform(d), n, beta, 600, generator(1))
    assert_within(read.w_max, sphere.mean_largest_weight_at(n, d, beta))


def test_the_finite_integral_tends_to_the_limit() -> None:
    limit = sphere.mean_largest_weight(1.0, 2.0)
    errors = [abs(sphere.mean_largest_weight_at(n, 5, sphere.critical_beta(n, 5)) - limit) for n in (10**3, 10**5)]
    assert errors[1] < 0.2 * errors[0]


def test_the_output_at_the_critical_scale_is_that_of_the_limit() -> None:
    n, d = 8192, 4
    beta = sphere.critical_beta(n, d)
    limit = sphere.draw_limit(1.0, 1.5, 10000, generator(), points=256)
    read = sphere.simulate(sphere.uniform(d), n, beta, 300, generator(2))
    assert_within(beta * (1 - read.output[:, 0]), float(limit.radial.mean()))
    assert_within(beta * read.output[:, 1:].square().sum(-1), float(limit.tangential.mean()))


@pytest.mark.parametrize("exponent", [1.0, 1.5, 2.0, 3.0])
def test_far_above_criticality_one_key_takes_all_at_the_stated_rate(exponent: float) -> None:
    deficit = 1 - sphere.mean_largest_weight(1000.0, exponent)
    assert deficit == pytest.approx(sphere.supercritical_deficit(1000.0, exponent), rel=0.02)
    nearest = sphere.draw_limit(1e6, exponent, 4000, generator(), points=4)
    assert_within(nearest.radial, sphere.nearest_key_moment(exponent))


def test_below_criticality_bias_and_fluctuations_are_as_derived() -> None:
    for d, beta in ((3, 40.0), (5, 30.0)):
        n = 2**15
        read = sphere.simulate(sphere.uniform(d), n, beta, 150, generator(3))
        assert_within(read.output[:, 0], sphere.mean_cosine(d, beta), errors=3.5)
        variance = float(read.output[:, 1:].square().mean())
        assert variance == pytest.approx(sphere.subcritical_variance(n, d, beta), rel=0.2)


def test_the_bias_is_the_first_order_of_the_exact_mean() -> None:
    for d in (3, 5, 8):
        for beta in (200.0, 400.0):
            assert beta * (1 - sphere.mean_cosine(d, beta)) == pytest.approx((d - 1) / 2, rel=0.02)
    query, centre = sphere.tilted_centre(1.0), sphere.tilted_centre(0.5)
    errors = []
    for beta in (100.0, 200.0):
        total = beta * query + 3.0 * centre
        exact = sphere.mean_cosine(3, float(total.norm())) * total / total.norm()
        first = sphere.subcritical_output(query, 3.0 * (centre - 0.5 * query), beta)
        errors.append(float((first - exact).norm()))
    assert errors[1] < 0.27 * errors[0]  # second order in 1/β


def test_a_step_grows_harmonics_as_the_backward_heat_equation_does() -> None:
    density, centre = sphere.tilted(1.5, 1.0), sphere.tilted_centre(1.0)
    x = density.draw(1, 200000, generator())[0]
    for beta in (100.0, 400.0):
        moved = beta * x + 1.5 * centre
        moved = moved / moved.norm(dim=-1, keepdim=True)
        growth = float((moved[:, 0] - x[:, 0]).mean()) / sphere.tilted_harmonic(1.5, 1)
        assert growth * beta == pytest.approx((sphere.heat_growth(3, 1, beta) - 1) * beta, rel=0.03)


def test_only_the_law_at_the_query_sets_the_scale() -> None:
    n, limit = 4096, sphere.mean_largest_weight(1.0, 2.0)
    beta = sphere.critical_beta(n, 5)
    for place in (-1.0, 0.0):
        read = sphere.simulate(sphere.far_keys_at(5, place), n, beta, 200, generator(4))
        assert_within(read.w_max, limit, errors=3.5)
    other = sphere.partly_on_subsphere(5, 3, 0.5)
    assert float(sphere.simulate(other, n, beta, 50, generator(5)).w_max.mean()) < 0.5 * limit
    read = sphere.simulate(other, n, other.law.critical_beta(n), 200, generator(6))
    assert_within(read.w_max, sphere.mean_largest_weight(1.0, 1.0))


def test_a_tilted_density_has_its_own_constant() -> None:
    n, density = 8192, sphere.tilted(2.0, 0.5)
    read = sphere.simulate(density, n, density.law.critical_beta(n), 300, generator(7))
    assert_within(read.w_max, math.exp(-0.57721566490153286))


def test_on_a_circle_the_deficit_has_no_such_rate() -> None:
    with pytest.raises(ArgumentError, match="exponent"):
        sphere.supercritical_deficit(10.0, 0.5)
