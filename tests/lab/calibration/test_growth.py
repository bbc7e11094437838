"""The fit of Λ against length: exponents, intervals, brackets, and the length at which a head loses its keys."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from attnscale import ArgumentError
from attnscale.lab.calibration.growth import abscissa, fit_growth
from attnscale.lab.calibration.measuring import grid
from scripts.calibration.coverage import LAWS, Coverage, measure

LENGTHS = (128, 256, 512)


def rows(exponent: float, lengths: tuple[int, ...] = LENGTHS, sequences: int = 16) -> dict[int, list[torch.Tensor]]:
    """Λ = ½·(n/128)^exponent, with a spread of 20 % over the rows."""
    generator = torch.Generator().manual_seed(1)
    spread = [[0.2 * torch.randn(8, generator=generator) for _ in range(sequences)] for _ in lengths]
    return {
        n: [0.5 * (n / 128) ** exponent * noise.exp() for noise in some]
        for n, some in zip(lengths, spread, strict=True)
    }


@pytest.mark.parametrize("law", [name for name in LAWS if name != "gaussian"])
def test_the_exponent_of_a_known_law_is_within_its_interval_in_nine_of_ten_runs(law: str) -> None:
    found = measure(Coverage(rows=4, draws=200, lengths=(32, 45, 64)), law)
    assert found["inside"] >= 0.9 * found["runs"]
    assert 0 < found["median_width"] <= found["widest"]


def test_an_interval_that_is_a_tenth_as_wide_does_not_cover_the_law() -> None:
    # The test above can fail: half of the runs miss an interval of a third of the width.
    law = LAWS["power"]
    inside = 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        values = {
            n: [torch.tensor([0.3]).mul(torch.randn(1, generator=generator)).exp() * n**0.25 for _ in range(16)]
            for n in LENGTHS
        }
        estimate, low, high = fit_growth(values, draws=100).exponent(law.form)
        inside += abs(estimate - 0.25) <= (high - low) / 20
    assert inside < 0.5 * 40


def test_both_forms_pass_through_the_measurements_and_bracket_what_lies_beyond() -> None:
    growth = fit_growth(rows(0.4))
    low, high = growth.predict(128 * 128)
    power, log = (growth.forms[name].at(128 * 128)[0].item() for name in ("power", "log"))
    assert low < log < power < high
    for length, median in zip(growth.lengths, growth.medians, strict=True):
        assert growth.forms["power"].at(length)[0].item() == pytest.approx(median, rel=0.1)


def test_a_head_loses_its_keys_where_its_accumulation_scale_reaches_one() -> None:
    growth = fit_growth(rows(0.5, sequences=64))
    for name, (estimate, low, high) in growth.lost_at().items():
        assert low < estimate < high
        assert growth.forms[name].at(estimate)[0].item() == pytest.approx(1.0)
    power = growth.lost_at()["power"]
    assert power[1] < 512 < power[2]  # ½·(512/128)^½ = 1


def test_a_head_whose_scale_does_not_grow_never_loses_its_keys() -> None:
    growth = fit_growth({n: [torch.full((4,), 0.5 - n / 4096)] * 3 for n in LENGTHS})
    assert growth.lost_at()["power"] == (math.inf, math.inf, math.inf)


def test_the_form_is_decided_only_if_nearly_all_resamples_agree() -> None:
    growth = fit_growth(rows(0.3, sequences=4))
    for share, decided in ((0.5, None), (0.95, "power"), (0.05, "log"), (0.94, None)):
        assert dataclasses.replace(growth, power_share=share).decided == decided


def test_sequences_are_resampled_as_wholes() -> None:
    # 8 equal rows per sequence carry the information of one: the interval must not shrink.
    generator = torch.Generator().manual_seed(2)
    single = {n: [0.3 * torch.randn(1, generator=generator) for _ in range(32)] for n in LENGTHS}
    widths = []
    for copies in (1, 8):
        values = {n: [n**0.3 * one.exp().repeat(copies) for one in some] for n, some in single.items()}
        _, low, high = fit_growth(values).exponent("power")
        widths.append(high - low)
    assert widths[1] == pytest.approx(widths[0], rel=0.02)


def test_the_same_seed_gives_the_same_fit() -> None:
    first, second = (fit_growth(rows(0.3), seed=5) for _ in range(2))
    assert torch.equal(first.forms["power"].exponent, second.forms["power"].exponent)
    assert not torch.equal(first.forms["power"].exponent, fit_growth(rows(0.3), seed=6).forms["power"].exponent)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({128: [torch.ones(2)] * 2, 256: [torch.ones(2)] * 2}, "lengths=\\(128, 256\\) is not accepted"),
        ({n: [torch.ones(2)] for n in LENGTHS}, "samples=1 is not accepted"),
        ({n: [torch.zeros(2)] * 2 for n in LENGTHS}, "Λ=.* is not accepted"),
        ({n: [torch.full((2,), 1e30)] * 2 for n in LENGTHS}, "Λ=.* is not accepted"),
    ],
)
def test_measurements_that_do_not_determine_a_growth_are_refused(values, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        fit_growth(values)


def test_the_grid_is_geometric_and_ends_at_both_lengths() -> None:
    lengths = grid(100, 400)
    assert (lengths[0], lengths[-1], len(lengths)) == (100, 400, 5)
    ratios = [after / before for before, after in itertools.pairwise(lengths)]
    assert max(ratios) / min(ratios) < 1.06
    assert abscissa("log", math.e**math.e) == pytest.approx(1.0)
