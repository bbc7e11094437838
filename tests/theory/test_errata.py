"""The numbers of the errata of condensation and gap counting in attnscale/theory/README.md."""

from __future__ import annotations

import math

import pytest
import torch

from attnscale import accumulation_scale, row_statistics
from attnscale.theory import condensation
from attnscale.theory.condensation import EULER


def test_1_the_maximum_is_further_below_than_one_over_root_ln_n() -> None:
    missing = []
    for n, exact in ((2**10, 3.248), (2**18, 4.590), (1e12, 7.112)):
        mean = condensation.mean_maximum(n)
        assert mean == pytest.approx(exact, abs=5e-4)
        missing.append((math.sqrt(2 * math.log(n)) - mean) * math.sqrt(math.log(n)))
    assert missing == pytest.approx([1.25, 1.43, 1.69], abs=5e-3)


def test_2_the_bare_power_overstates_w_max_more_and_more() -> None:
    for n, exact, expansion in ((2**8, 0.443, 0.462), (2**18, 0.364, 0.377), (1e12, 0.303, 0.309)):
        assert math.exp(condensation.mean_ln_w_max(n, 0.5)) * n**0.25 == pytest.approx(exact, abs=5e-4)
        assert (4 * math.pi * math.log(n)) ** -0.25 * math.exp(EULER / 2) == pytest.approx(expansion, abs=5e-4)
    for t, slope in ((0.5, -0.268), (0.75, -0.098)):
        short, long = (condensation.mean_ln_w_max(factor * 2**18, t) for factor in (1, 1.01))
        assert (long - short) / math.log(1.01) == pytest.approx(slope, abs=5e-4)


def test_3_diffuse_w_max_exceeds_ln_n_over_n() -> None:
    shares = [
        n * condensation.mean_w_max(n, 1.0 / condensation.critical_beta(n)) / math.log(n) for n in (2**8, 2**18, 1e12)
    ]
    assert shares == pytest.approx([1.99, 4.97, 27.4], rel=2e-3)


def test_4_the_printed_weight_of_the_target_passes_one() -> None:
    n = 2**16
    beta = condensation.critical_beta(n) / 2
    threshold = condensation.retrieval_threshold(n, beta)
    for above, exact in ((0.0, 0.5004), (2.0, 0.8808)):
        m = threshold + above / beta
        printed = math.exp(beta * m - math.log(n) - beta**2 / 2)
        assert printed == pytest.approx(math.exp(above))
        assert condensation.target_weight(n, beta, m) == pytest.approx(exact, abs=1e-4)


def test_5_bulk_and_maximum_touch_but_do_not_cross() -> None:
    n = 2**18
    for t, annealed, extreme in ((0.5, 1.25, 1.0), (1.0, 2.0, 2.0), (2.0, 5.0, 4.0)):
        beta = t * condensation.critical_beta(n)
        assert condensation.annealed_log_partition(n, beta) / math.log(n) == pytest.approx(annealed)
        assert beta * condensation.critical_beta(n) / math.log(n) == pytest.approx(extreme)
    assert condensation.quenched_log_partition(n, beta) / math.log(n) == pytest.approx(3.71, abs=5e-3)


def test_6_a_signal_below_the_hard_limit_may_win() -> None:
    for n, half, at_limit in ((2**10, 0.861, 0.904), (2**16, 0.903, 0.922), (1e12, 0.953, 0.949)):
        limit = condensation.critical_beta(n)
        assert condensation.chance_of_signal(n, half * limit) == pytest.approx(0.5, abs=0.015)
        assert condensation.chance_of_signal(n, limit) == pytest.approx(at_limit, abs=5e-4)


def test_7_the_count_includes_the_best_key() -> None:
    two = torch.tensor([[0.5, 0.0]], dtype=torch.float64)
    assert accumulation_scale(two).item() == pytest.approx(math.log(2) / 0.5)
    assert row_statistics(two, 1e-9).entropy.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("beta", [100.0, 1e6])
def test_8_ties_do_not_break(beta: float) -> None:
    stats = row_statistics(torch.tensor([[1.0, 1.0, 0.0, 0.0]], dtype=torch.float64), beta)
    assert stats.w_max.item() == 0.5
    assert stats.entropy.item() == pytest.approx(math.log(2))


def test_9_ln_n_keys_at_a_fixed_gap_give_ln_ln_n() -> None:
    n = 2**16
    near = round(math.log(n))  # 11 keys, as there are no 11.09
    scores = torch.full((1, n), -1e3, dtype=torch.float64)
    scores[0, :near] = -1.0
    scores[0, 0] = 0.0
    assert accumulation_scale(scores).item() == pytest.approx(math.log(near))
    assert math.log(math.log(n)) == pytest.approx(2.41, abs=5e-3)
    assert math.sqrt(math.log(n)) == pytest.approx(3.33, abs=5e-3)


@pytest.mark.parametrize(("r", "separation"), [(1.0, 1 / 3), (2.0, 0.6)])
def test_10_two_keys_have_no_threshold(r: float, separation: float) -> None:
    scores = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    stats = row_statistics(scores, r * accumulation_scale(scores))
    assert 2 * stats.w_max.item() - 1 == pytest.approx(separation)
    if r == 2:
        assert stats.entropy.item() == pytest.approx(0.5, abs=1e-3)
