"""Closed forms of condensation against brute force, their limits, and the experiment at a small size."""

from __future__ import annotations

import math

import pytest
import torch

from attnscale.errors import ArgumentError
from attnscale.theory import condensation
from attnscale.theory.condensation import EULER
from attnscale.theory.experiments import condensation as experiment

ROWS = 40000


def gaussian_logits(n: int, b: float, rows: int = ROWS) -> torch.Tensor:
    return b * torch.randn(rows, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def close(samples: torch.Tensor, predicted: float) -> bool:
    """Whether a prediction is within four standard errors of the mean of samples."""
    return abs(samples.mean().item() - predicted) < 4 * samples.std().item() / math.sqrt(samples.numel())


@pytest.mark.parametrize(("n", "b"), [(2, 1.0), (8, 0.5), (64, 3.0), (256, 5.0)])
def test_exact_means_are_those_of_samples(n: int, b: float) -> None:
    logits = gaussian_logits(n, b)
    ln_z, weights = logits.logsumexp(-1), logits.softmax(-1)
    assert close(ln_z, condensation.quenched_log_partition(n, b))
    assert close((ln_z - ln_z.mean()).square(), condensation.log_partition_spread(n, b) ** 2)
    assert close(weights.amax(-1), condensation.mean_w_max(n, b / condensation.critical_beta(n)))
    assert close(weights.square().sum(-1), condensation.participation_ratio(n, b))
    assert close(logits.amax(-1) / b, condensation.mean_maximum(n))
    t = b / condensation.critical_beta(n)
    assert close(weights.amax(-1).log(), condensation.mean_ln_w_max(n, t))
    assert close(torch.sigmoid(2.0 * b - ln_z), condensation.target_weight(n + 1, b, 2.0))


def test_two_keys_agree_with_a_quadrature_of_one_dimension() -> None:
    # Of two keys only the difference of the scores matters, which is N(0, 2).
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    weight = torch.sigmoid(1.5 * math.sqrt(2) * x.abs())
    assert condensation.mean_w_max(2, 1.5 / condensation.critical_beta(2)) == pytest.approx(
        (density * weight).sum().item(), rel=1e-9
    )
    squares = weight**2 + (1 - weight) ** 2
    assert condensation.participation_ratio(2, 1.5) == pytest.approx((density * squares).sum().item(), rel=1e-9)
    softplus = torch.nn.functional.softplus(1.5 * math.sqrt(2) * x)
    assert condensation.ln_z_moments(2, 1.5).mean == pytest.approx((density * softplus).sum().item(), rel=1e-9)


@pytest.mark.parametrize("t", [0.25, 0.5, 0.75])
def test_the_slope_of_w_max_tends_to_its_power_as_the_expansion_says(t: float) -> None:
    def local_slope(n: float) -> float:
        return (condensation.mean_ln_w_max(1.01 * n, t) - condensation.mean_ln_w_max(n, t)) / math.log(1.01)

    errors = [abs(local_slope(n) - condensation.w_max_slope(n, t)) for n in (1e6, 1e9, 1e12, 1e15)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 4e-4
    assert condensation.w_max_slope(1e300, t) == pytest.approx(condensation.w_max_exponent(t), abs=1e-3)


@pytest.mark.parametrize("t", [0.25, 0.5, 0.75])
def test_w_max_has_the_prefactor_that_the_bare_power_lacks(t: float) -> None:
    n = 1e12
    power = math.exp(condensation.mean_ln_w_max(n, t)) * n ** -condensation.w_max_exponent(t)
    assert power == pytest.approx((4 * math.pi * math.log(n)) ** (-t / 2) * math.exp(EULER * t), rel=0.025)


def test_at_criticality_the_largest_weight_vanishes_like_one_over_root_ln_n() -> None:
    ratios = [
        math.exp(condensation.mean_ln_w_max(n, 1.0)) * math.sqrt(4 * math.pi * math.log(n)) / (2 * math.exp(EULER))
        for n in (1e3, 1e9, 1e15)
    ]
    assert ratios == sorted(ratios)
    assert 0.93 < ratios[-1] < 1


@pytest.mark.parametrize("t", [0.3, 1.0, 1.7, 4.0])
@pytest.mark.parametrize("n", [2, 1e3, 1e12])
def test_the_log_partition_is_where_the_bounds_allow(n: float, t: float) -> None:
    beta, sigma = t * condensation.critical_beta(n, 0.5), 0.5
    quenched = condensation.quenched_log_partition(n, beta, sigma)
    maximum = beta * sigma * condensation.mean_maximum(n)
    assert maximum <= quenched <= maximum + math.log(n)
    assert quenched <= condensation.annealed_log_partition(n, beta, sigma)
    assert condensation.log_partition_spread(n, beta, sigma) <= beta * sigma


@pytest.mark.parametrize("t", [0.5, 2.0])
def test_the_quenched_log_partition_tends_to_its_limit(t: float) -> None:
    shares = []
    for n in (1e3, 1e6, 1e12):
        beta = t * condensation.critical_beta(n)
        quenched, limit = condensation.quenched_log_partition(n, beta), condensation.log_partition_limit(n, beta)
        shares.append(abs(quenched / limit - 1))
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.06


@pytest.mark.parametrize("t", [1.5, 2.0, 4.0])
def test_the_condensed_phase_tends_to_the_poisson_dirichlet_law(t: float) -> None:
    def at(n: float) -> tuple[float, float, float]:
        beta = t * condensation.critical_beta(n)
        ratio, spread = condensation.participation_ratio(n, beta), condensation.log_partition_spread(n, beta)
        return condensation.mean_w_max(n, t), ratio, spread

    limits = (
        condensation.w_max_limit(t),
        condensation.participation_limit(t),
        condensation.log_partition_spread_limit(t),
    )
    for short, long, limit in zip(at(1e6), at(1e12), limits, strict=True):
        assert abs(long - limit) < abs(short - limit)
        # The distance goes like 1/ln n, which is halved from the one to the other; what remains is of higher order.
        assert 2 * long - short == pytest.approx(limit, rel=0.05)


@pytest.mark.parametrize("t", [0.3, 0.5, 0.8])
def test_the_participation_ratio_of_typical_rows_has_its_exponent(t: float) -> None:
    def typical(n: float) -> float:
        b = t * condensation.critical_beta(n)
        return condensation.ln_z_moments(n, 2 * b).mean - 2 * condensation.ln_z_moments(n, b).mean

    slope = (typical(1e15) - typical(1e12)) / math.log(1e3)
    assert slope == pytest.approx(condensation.participation_exponent(t), abs=0.04)


def test_poisson_dirichlet_samples_have_the_closed_forms() -> None:
    weights = condensation.sample_limit_weights(2.0, 20000, 300, torch.Generator().manual_seed(0))
    assert (weights[:, :-1] >= weights[:, 1:]).all()
    assert close(weights[:, 0], condensation.w_max_limit(2.0))
    assert close(weights.square().sum(-1), condensation.participation_limit(2.0))
    for v in (0.5, 0.7, 0.9):
        assert close((weights[:, 0] > v).double(), condensation.chance_of_more(v, 2.0))


def test_signal_and_noise_share_the_plane() -> None:
    n, beta = 2**16, condensation.critical_beta(2**16)
    assert condensation.retrieval_threshold(n, beta / 2) == pytest.approx(1.25 * beta)
    assert condensation.winner(n, beta / 2, 1.2 * beta) == "nobody"
    assert condensation.winner(n, beta / 2, 1.3 * beta) == "signal"
    assert condensation.winner(n, 2 * beta, 0.9 * beta) == "noise"
    # At the threshold of the diffuse phase the signal has half of the attention.
    assert condensation.target_weight(n, beta / 2, 1.25 * beta) == pytest.approx(0.5, abs=0.001)
    assert condensation.chance_of_signal(1e12, condensation.critical_beta(1e12)) == pytest.approx(0.949, abs=0.001)


def test_without_the_factor_a_head_condenses_above_its_critical_dimension() -> None:
    n = 4096
    d = condensation.critical_dimension(n)
    assert condensation.critical_beta(n, sigma=math.sqrt(d)) == pytest.approx(1.0)
    assert d == pytest.approx(2 * math.log(n))


def test_bad_arguments_are_refused() -> None:
    for call in (
        lambda: condensation.critical_beta(0),
        lambda: condensation.critical_beta(8, sigma=-1.0),
        lambda: condensation.w_max_slope(8, 1.5),
        lambda: condensation.retrieval_threshold(8, 0.0),
        lambda: condensation.w_max_limit(1.0),
        lambda: condensation.chance_of_more(0.4, 2.0),
    ):
        with pytest.raises(ArgumentError):
            call()


def test_the_experiment_agrees_with_its_predictions_at_a_small_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(experiment, "QUICK", experiment.Sizes([16, 64, 256], 400, 200, 128, 64, 40))
    steps: list[tuple[int, int, str]] = []
    found = experiment.run(quick=True, progress=lambda *step: steps.append(step))
    assert steps[-1][:2] == (5, 5)
    for line in found.comparisons:
        assert line.standard_error is not None
        assert abs(line.measured - line.predicted) < 4 * line.standard_error, line
    assert all(row["highest_bound"] <= 1 for row in found.data["crossover"])  # ln Z ≤ βM + ln n
    figures = {stem: draw() for stem, draw in found.figures.items()}
    assert {stem: len(figure.axes) for stem, figure in figures.items()} == {"crossover": 1, "order": 3, "retrieval": 3}
    assert all(axes.get_xlabel() and axes.get_ylabel() for figure in figures.values() for axes in figure.axes)
    assert len(found.strip) == 1
