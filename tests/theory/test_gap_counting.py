"""Gap counting: contact, exponents, the bounds on every row, and the experiment at a small size."""

from __future__ import annotations

import math
import re

import families as awkward
import pytest
import torch

from attnscale import accumulation_scale, row_statistics
from attnscale.errors import ArgumentError
from attnscale.statistics.gaps import count_gaps
from attnscale.theory import estimates, experiments, families, gap_counting
from attnscale.theory.experiments import gaps as experiment


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_contact_is_where_the_count_touches_the_envelope() -> None:
    scores = families.sample("gaussian", 200, 20, generator())
    contact = gap_counting.contact_point(scores)
    torch.testing.assert_close(contact.accumulation, accumulation_scale(scores))
    for row, gap, rank, top in zip(scores, *contact[1:], contact.accumulation, strict=True):
        assert count_gaps(row, (gap.item() * (1 + 1e-12),)).item() == rank
        assert math.log(rank) / gap == pytest.approx(top.item())
        every = (row.max() - row).sort().values[1:]
        counts = torch.arange(2, 201, dtype=torch.float64)
        assert (counts <= torch.exp(top * every) * (1 + 1e-9)).all()


def test_the_exponents_of_exact_families_are_exact() -> None:
    lengths = [2**6, 2**11, 2**16]
    for name, expected in {"simplex": (1.0, 0.0, 0.0), "cluster": (2.0, 0.0, -1.0)}.items():
        contacts = [gap_counting.contact_point(families.sample(name, n, 2, generator())) for n in lengths]
        found = gap_counting.fit_exponents(lengths, contacts)
        assert [part.value for part in found] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("lengths", [[64], [64, 64], [1, 64], [64, 128, 256], []], ids=str)
def test_exponents_need_two_lengths_and_a_contact_for_each(lengths: list[int]) -> None:
    contacts = [gap_counting.contact_point(families.sample("simplex", 64, 2, generator())) for _ in lengths[:2]]
    with pytest.raises(ArgumentError, match=rf"lengths={re.escape(str(lengths))} is not accepted: expected"):
        gap_counting.fit_exponents(lengths, contacts)


def test_gaussian_medians_grow_with_the_root_of_ln_n() -> None:
    lengths = [2**16, 2**28, 2**40]
    contacts = [
        gap_counting.contact_point(families.Gaussian().sample_best(n, 4000, 128, generator(n % 97))) for n in lengths
    ]
    medians = [estimates.median(contact.accumulation.log()) for contact in contacts]
    x = [math.log(math.log(n)) for n in lengths]
    found = estimates.slope(x, [m.value for m in medians], [m.error for m in medians])
    assert abs(found.value - 0.5) < 0.1
    assert abs(gap_counting.fit_exponents(lengths, contacts).residual) < 1e-12


@pytest.mark.parametrize("d", [3, 4, 5])
def test_medians_on_the_sphere_grow_with_their_power_of_n(d: int) -> None:
    lengths = [64, 512, 4096]
    rows = [3000, 1500, 600]
    medians = [
        estimates.median(accumulation_scale(families.sample("sphere", n, count, generator(n), d=d)).log())
        for n, count in zip(lengths, rows, strict=True)
    ]
    found = estimates.slope([math.log(n) for n in lengths], [m.value for m in medians])
    assert found.value == pytest.approx(2 / (d - 1), rel=0.1)


def test_the_limit_ratio_is_that_of_long_rows() -> None:
    family = families.Sphere(d=3)
    found = accumulation_scale(family.sample(4096, 800, generator())) / family.accumulation(4096)
    limit = gap_counting.limit_ratio(family, 4000, generator(1))
    for share in (0.25, 0.5, 0.75):
        assert found.quantile(share).item() == pytest.approx(limit.quantile(share).item(), rel=0.15)
    assert gap_counting.limit_ratio(families.Cluster(), 2, generator()).tolist() == [1.0, 1.0]
    # The tail of the first gap: P(Λ/law > x) tends to ln 2/x, so that there is no mean.
    tail = gap_counting.limit_ratio(families.Gaussian(), 40000, generator(2), ranks=2)
    assert (tail > 50).double().mean().item() == pytest.approx(1 - 2 ** (-1 / 50), rel=0.15)


@pytest.mark.parametrize("name", awkward.NAMES)
@pytest.mark.parametrize("r", [0.05, 0.5, 0.9, 1.1, 2.0, 10.0])
def test_the_bounds_hold_for_every_row(name: str, r: float) -> None:
    scores, _ = awkward.rows(name, 40, 60)
    top = accumulation_scale(scores)
    scores = scores[(top > 0) & top.isfinite()]
    if not len(scores):
        return  # ties at the top, or a single key: Λ is ∞ or 0
    contact = gap_counting.contact_point(scores)
    beta = r * contact.accumulation
    stats = row_statistics(scores, beta)
    first, second = scores.topk(2, dim=-1).values.T
    separation = stats.w_max * -torch.expm1(-beta * (first - second))
    if r > 1:
        assert (stats.w_max >= gap_counting.certificate(r, scores.shape[-1]) * (1 - 1e-12)).all()
        assert gap_counting.certificate(r, 60) >= gap_counting.certificate(r)
        assert (stats.entropy <= gap_counting.entropy_bound(r)).all()
    else:
        assert (stats.w_max <= gap_counting.converse(r, contact.rank) * (1 + 1e-12)).all()
        assert (separation <= gap_counting.separation_bound(r)).all()


def test_certificate_and_converse_are_attained() -> None:
    k = torch.arange(1, 101, dtype=torch.float64)
    touching = -k.log()[None]  # Δ_k = ln k: every rank is in contact, Λ = 1
    assert row_statistics(touching, 2.0).w_max.item() == pytest.approx(gap_counting.certificate(2.0, 100), rel=1e-12)
    level = families.sample("simplex", 10**5, 1, generator())
    contact = gap_counting.contact_point(level)
    weight = row_statistics(level, 0.5 * contact.accumulation).w_max
    assert weight.item() == pytest.approx(gap_counting.converse(0.5, contact.rank).item(), rel=0.01)


@pytest.mark.parametrize("r", [0.0, 0.5, 1.0, 1.5, 3.0])
def test_the_entropy_of_two_levels_is_that_of_the_row(r: float) -> None:
    scores = families.sample("cluster", 500, 1, generator())
    entropy = row_statistics(scores, r * accumulation_scale(scores)).entropy
    assert entropy.item() == pytest.approx(gap_counting.two_level_entropy(500, r), rel=1e-10)


def test_a_tie_at_the_top_never_collapses() -> None:
    # Ties cannot be broken away: the weights are equal at every temperature.
    scores = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    assert accumulation_scale(scores).item() == math.inf
    assert row_statistics(scores, 1e6).entropy.item() == pytest.approx(math.log(2))


def test_bad_arguments_are_refused() -> None:
    for call in (
        lambda: gap_counting.certificate(1.0),
        lambda: gap_counting.entropy_bound(0.5),
        lambda: gap_counting.separation_bound(1.0),
        lambda: gap_counting.limit_ratio(_Odd(), 1, generator()),
    ):
        with pytest.raises(ArgumentError):
            call()


class _Odd(families.Family):
    random = True


def test_the_experiment_finds_its_laws_at_a_small_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "QUICK", experiment.Sizes([32, 128, 512], 1 << 16, 400, 8, 300))
    monkeypatch.setattr(experiment, "LONG", [2**16, 2**40])
    found = experiment.run(quick=True)
    lines = {(line.quantity, line.parameters.partition(",")[0]): line for line in found.comparisons}
    assert lines["ξ_Λ", "simplex"].measured == pytest.approx(1, abs=1e-9)
    assert lines["ξ_Λ", "cluster"].measured == pytest.approx(2, abs=1e-9)
    assert lines["median Λ", "three levels"].relative_error == pytest.approx(0, abs=1e-12)
    assert lines["entropy/ln n", "simplex"].relative_error == pytest.approx(0, abs=1e-9)
    assert lines["rows that break a bound", "all families"].measured == 0
    assert len(found.data["transition"]) == 9 * 3 * len(experiment.CRITICALITIES)
    figures = {stem: draw() for stem, draw in found.figures.items()}
    assert {stem: len(figure.axes) for stem, figure in figures.items()} == {"laws": 2, "transition": 3, "bounds": 3}
    assert all(axes.get_xlabel() and axes.get_ylabel() for figure in figures.values() for axes in figure.axes)
    assert len(experiments.draw_strip(found.strip).axes) == 2
