"""One layer on any tokens: estimators against each other, bounds that hold, and appendices C and D."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnscale.errors import ArgumentError
from attnscale.statistics import row_statistics
from attnscale.theory import bounds, families, gap_counting, phase, simplex


def scattered(n: int, d: int, rho: float, seed: int) -> torch.Tensor:
    """Gaussian tokens whose lengths differ."""
    generator = torch.Generator().manual_seed(seed)
    x = phase.gaussian_tokens(n, d, rho, generator)
    return x * (0.2 + 2 * torch.rand(n, 1, generator=generator, dtype=x.dtype))


@pytest.mark.parametrize(("n", "d", "beta"), [(7, 4, 2.0), (12, 6, 5.0), (10, 12, 0.7), (9, 3, 30.0)])
def test_the_closed_form_for_any_tokens_is_that_of_automatic_differentiation(n: int, d: int, beta: float) -> None:
    x = scattered(n, d, 0.3, seed=n)
    assert phase.closed_jacobian_norm(x, beta) == pytest.approx(phase.exact_jacobian_norm(x, beta), rel=1e-9)


def test_hutchinsons_estimate_is_within_its_error() -> None:
    x = scattered(24, 8, 0.4, seed=1)
    estimate, error = phase.jacobian_norm(x, 4.0, probes=200, generator=torch.Generator().manual_seed(0))
    assert estimate == pytest.approx(phase.closed_jacobian_norm(x, 4.0), abs=4 * error)
    assert error < 0.1 * estimate


def test_the_jacobian_of_two_layers_is_the_product_of_theirs() -> None:
    x = scattered(5, 3, 0.4, seed=2)
    jacobians = torch.func.jacrev(lambda t: phase.layer(t, 2.0, backend="reference"))
    product = jacobians(phase.layer(x, 2.0)).reshape(15, 15) @ jacobians(x).reshape(15, 15)
    expected = float(product.square().sum() / 15)
    assert phase.exact_jacobian_norm(x, 2.0, depth=2) == pytest.approx(expected, rel=1e-9)


def test_the_angle_ratio_is_the_mean_over_pairs() -> None:
    x = scattered(6, 4, 0.2, seed=3)
    before, after = phase.directions(x), phase.directions(phase.layer(x, 3.0, 0.4))
    pairs = [(i, j) for j in range(6) for i in range(j)]
    ratios = [(1 - after[i] @ after[j]) / (1 - before[i] @ before[j]) for i, j in pairs]
    assert phase.angle_ratio(x, 3.0, 0.4) == pytest.approx(float(torch.stack(ratios).mean()), rel=1e-9)


def test_a_sweep_crosses_the_critical_line() -> None:
    points = list(phase.sweep(64, 256, [0.2, 0.5], [0.4, 5.0], torch.Generator().manual_seed(0), draws=2))
    for below, above in zip(points[::2], points[1::2], strict=True):
        assert below.angle_ratio < 0.1 < 0.9 < above.angle_ratio
        assert below.jacobian_norm < 0.1 < 0.8 < above.jacobian_norm


def test_gaussian_tokens_have_unit_length_in_the_mean_and_cosines_near_rho() -> None:
    x = phase.gaussian_tokens(200, 2048, 0.6, torch.Generator().manual_seed(0))
    assert float(x.square().sum(-1).mean()) == pytest.approx(1.0, abs=0.1)
    assert bounds.token_range(x).rho_min > 0.4


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 24), st.floats(0.3, 0.9), st.floats(0.0, 8.0), st.floats(0.0, 2.0), st.integers(0, 99))
def test_the_bounds_of_theorems_2_3_and_2_5_hold(n: int, rho: float, gamma: float, alpha: float, seed: int) -> None:
    x = scattered(n, 64, rho, seed)
    tokens_spread, beta = bounds.token_range(x), gamma * math.log(n)
    off = ~torch.eye(n, dtype=torch.bool)
    if tokens_spread.rho_min >= 0:
        after = phase.directions(phase.layer(x, beta, alpha))
        assert float((after @ after.T)[off].min()) >= bounds.contraction_bound(tokens_spread, beta, alpha) - 1e-12
    y = phase.directions(x)
    moved = float((phase.layer(y, beta) - y).norm(dim=-1).max())
    assert moved <= bounds.identity_bound(tokens_spread, beta) + 1e-12
    eta = phase.closed_jacobian_norm(x, beta)
    lower, upper = bounds.jacobian_lower_bound(tokens_spread, beta), bounds.jacobian_upper_bound(tokens_spread, beta)
    assert lower * (1 - 1e-9) <= eta <= upper * (1 + 1e-9)


def test_the_bounds_tend_to_the_limits_of_the_theorems() -> None:
    tokens_spread = bounds.TokenRange(10**12, 10**12, 0.45, 0.5, 0.8, 1.3)
    low, high = 1.5 * math.log(10**12), 2.5 * math.log(10**12)
    assert bounds.contraction_bound(tokens_spread, low, 0.5) == pytest.approx(
        bounds.contraction_limit(tokens_spread, 0.5), rel=1e-2
    )
    assert bounds.contraction_limit(tokens_spread, 0.5) > tokens_spread.rho_min
    assert bounds.jacobian_lower_bound(tokens_spread, high) == pytest.approx(1 / tokens_spread.q_max, rel=0.01)
    assert bounds.identity_bound(tokens_spread, high) < 0.01


def test_negative_cosines_are_refused_where_the_bound_needs_assumption_2() -> None:
    with pytest.raises(ArgumentError, match="rho_min"):
        bounds.contraction_bound(bounds.TokenRange(4, 4, -0.1, 0.5, 1.0, 1.0), 1.0)


def test_groups_share_out_the_weight_as_the_closed_form_says() -> None:
    n, size, beta = 24, 4, 5.0
    y = phase.grouped_tokens(n, size, 0.1, 0.7)
    weights = torch.softmax(beta * y @ y.T, -1)[0]
    mass = phase.row_mass(n, size - 1, 0.1, 0.7, beta)
    expected = [float(weights[0]), float(weights[1:size].sum()), float(weights[size:].sum())]
    assert list(mass) == pytest.approx(expected, rel=1e-12)


def test_each_phase_of_lemma_c_1_belongs_to_one_kind_of_tokens() -> None:
    edges = phase.phase_edges(0.5, (0.1, 0.1), (0.8, 0.8))
    assert edges.has_middle
    n, near = 10**12, 10**6
    middles = (0.5 * edges.far_below, 0.5 * (edges.near_above + edges.near_below), 1.5 * edges.own_above)
    for gamma, kind in zip(middles, ("far", "near", "own"), strict=True):
        assert getattr(phase.row_mass(n, near, 0.1, 0.8, gamma * math.log(n)), kind) > 0.99
    assert not phase.phase_edges(0.2, (0.1, 0.1), (0.5, 0.5)).has_middle


def test_gaps_of_gaussian_scores_are_exact_and_tend_to_harmonic_numbers() -> None:
    draws = torch.randn(4000, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).sort(-1).values
    gap = draws[:, -1] - draws[:, -4]
    error = float(gap.std() / math.sqrt(4000))
    assert gap_counting.mean_gap(50, 4) == pytest.approx(float(gap.mean()), abs=4 * error)
    errors = [
        gap_counting.gaussian_quantile(n) * gap_counting.mean_gap(n, 4) - gap_counting.mean_gap_limit(4)
        for n in (10**4, 10**8, 10**12)
    ]
    assert [abs(later) < abs(earlier) for earlier, later in pairwise(errors)] == [True, True]
    assert abs(errors[-1]) < 0.06


def test_the_largest_gaussian_weight_vanishes_below_criticality_where_the_paper_has_it_finite() -> None:
    generator = torch.Generator().manual_seed(0)
    assert float(gap_counting.printed_top_weight(0.5, 500, generator).mean()) > 0.3
    means = []
    for n in (2**8, 2**14):
        weights = row_statistics(families.sample("gaussian", n, 200, generator), 0.5 * math.sqrt(2 * math.log(n))).w_max
        assert weights is not None
        means.append(float(weights.mean()))
    # The law is n^(−(1−t)²), here n^(−1/4) with corrections: sixty-four times as many keys halve it at least.
    assert means[1] < 0.5 * means[0] < 0.1


def test_supercritical_simplices_stay_themselves_through_layers() -> None:
    x = phase.simplex_tokens(12, 12, 0.3)
    beta = 4 * simplex.critical_beta(12, 0.3)
    assert phase.exact_jacobian_norm(x, beta, depth=3) == pytest.approx(1 - 1 / 12, rel=0.02)
    assert phase.exact_jacobian_norm(x, 0.5, depth=3) < 0.35
