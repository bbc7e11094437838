"""Families of scores: shapes, seeds, refusals, and Λ on its law."""

from __future__ import annotations

import math

import pytest
import torch

from attnscale import accumulation_scale
from attnscale.errors import ArgumentError, ArgumentTypeError
from attnscale.theory import families
from attnscale.theory.families import FAMILIES, Gaussian, family, sample


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_in_double_precision_and_repeat_with_the_generator(name: str) -> None:
    first, again, other = (sample(name, 16, 3, generator(seed)) for seed in (0, 0, 1))
    assert first.shape == (3, 16)
    assert first.dtype == torch.float64
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("n", [2, 17, 1024, 65536])
@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.3, 0.9])
def test_a_simplex_row_has_its_law_to_rounding(n: int, rho: float) -> None:
    found = accumulation_scale(sample("simplex", n, 2, generator(), rho=rho))
    torch.testing.assert_close(found, torch.full_like(found, math.log(n) / (1 - rho)), rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", ["cluster", "three_level"])
@pytest.mark.parametrize("n", [2, 64, 4096])
def test_rows_with_few_levels_have_their_law_to_rounding(name: str, n: int) -> None:
    found = accumulation_scale(sample(name, n, 2, generator()))
    torch.testing.assert_close(found, torch.full_like(found, family(name).accumulation(n)), rtol=1e-13, atol=0)


def test_three_levels_may_leave_none_at_the_lowest() -> None:
    everyone = family("three_level", tau=1.0)
    found = accumulation_scale(everyone.sample(50, 1, generator()))
    assert found.item() == pytest.approx(everyone.accumulation(50), rel=1e-13)


@pytest.mark.parametrize(("rho", "d"), [(0.5, 1024), (0.2, 512)])
def test_an_almost_simplex_follows_its_law_within_two_per_cent(rho: float, d: int) -> None:
    model = family("almost_simplex", rho=rho, d=d)
    found = accumulation_scale(model.sample(2048, 300, generator())).median().item()
    assert found == pytest.approx(model.accumulation(2048), rel=0.02)


def test_an_almost_simplex_has_the_scores_of_its_tokens() -> None:
    rho, d, n = 0.4, 8, 4
    source = generator(3)
    shared, own = (torch.randn(20000, k, d, generator=source, dtype=torch.float64) / math.sqrt(d) for k in (1, n))
    tokens = math.sqrt(rho) * shared + math.sqrt(1 - rho) * own
    direct = torch.einsum("rd,rkd->rk", tokens[:, 0], tokens).sort(-1).values
    drawn = sample("almost_simplex", n, 20000, generator(4), rho=rho, d=d).sort(-1).values
    error = math.hypot(direct.std(0).max().item(), drawn.std(0).max().item()) / math.sqrt(20000)
    assert ((direct.mean(0) - drawn.mean(0)).abs() < 4 * error).all()
    torch.testing.assert_close(direct.var(0), drawn.var(0), rtol=0.06, atol=0)


def test_an_almost_simplex_becomes_gaussian_where_noise_beats_the_own_key() -> None:
    assert family("almost_simplex", rho=0.5, d=8).accumulation(4096) == pytest.approx(
        family("gaussian", sigma=math.sqrt(0.5 / 8)).accumulation(4096)
    )


def test_a_common_shift_of_gaussian_scores_leaves_their_own_part_alone() -> None:
    scores = sample("correlated_gaussian", 2, 40000, generator(), sigma=2.0, rho=0.75)
    assert torch.corrcoef(scores.T)[0, 1].item() == pytest.approx(0.75, abs=0.01)
    own = family("gaussian", sigma=1.0)  # 2 √(1 − 0.75)
    assert family("correlated_gaussian", sigma=2.0, rho=0.75).accumulation(99) == pytest.approx(own.accumulation(99))


@pytest.mark.parametrize("d", [2, 3, 6])
def test_keys_on_the_sphere_have_the_moments_of_a_coordinate(d: int) -> None:
    scores = sample("sphere", 1000, 40, generator(), d=d)
    assert scores.abs().max() <= 1
    assert scores.square().mean().item() == pytest.approx(1 / d, rel=0.03)


@pytest.mark.parametrize("d", [3, 4, 5])
def test_the_constant_of_the_cap_is_that_of_small_caps(d: int) -> None:
    gap = 1e-3  # P(1 − s ≤ t) by the density (1 − s²)^((d−3)/2) of a coordinate
    s = torch.linspace(-1, 1, 2_000_001, dtype=torch.float64)
    density = (1 - s**2).clamp(min=0) ** ((d - 3) / 2)
    inside = 1 - gap + gap * torch.linspace(0, 1, 100_001, dtype=torch.float64)
    cap = ((1 - inside**2).clamp(min=0) ** ((d - 3) / 2)).mean() * gap / (density.mean() * 2)
    assert cap.item() == pytest.approx(math.exp(families.ln_cap_constant(d)) * gap ** ((d - 1) / 2), rel=2e-3)


def test_the_best_scores_of_long_rows_have_the_law_of_whole_rows() -> None:
    whole = Gaussian(2.0).sample(500, 6000, generator()).topk(5, dim=-1).values
    best = Gaussian(2.0).sample_best(500, 6000, 5, generator(1))
    error = math.sqrt(2) * whole.std(0) / math.sqrt(6000)
    assert ((whole.mean(0) - best.mean(0)).abs() < 4 * error).all()


def test_bad_arguments_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="name='comet'"):
        sample("comet", 4, 1, generator())
    with pytest.raises(ArgumentTypeError, match="gaussian has no parameter 'rho': expected sigma"):
        sample("gaussian", 4, 1, generator(), rho=0.5)
    for name, parameters in {
        "gaussian": {"sigma": 0.0},
        "simplex": {"rho": 1.0},
        "almost_simplex": {"d": 0},
        "three_level": {"low": 0.8},
        "sphere": {"d": 1},
    }.items():
        with pytest.raises(ArgumentError):
            family(name, **parameters)
    with pytest.raises(ArgumentError, match="n=0"):
        sample("cluster", 0, 1, generator())
