"""Gap counting and Λ: definitions, invariances, and the inequalities that hold for every row there is."""

import math

import numpy as np
import pytest
import torch
from families import NAMES, harmonic, rows, zeta
from hypothesis import given, settings
from hypothesis import strategies as st

from attnscale import ArgumentError, ArgumentTypeError, StatsRequest, accumulation_scale, row_statistics
from attnscale.statistics.gaps import BRACKET_WIDTH, bracket_accumulation, count_gaps, find_contact, largest

families = pytest.mark.parametrize("family", NAMES)
EVERYTHING = StatsRequest(accumulation="exact", gap_thresholds=(0.0, 0.1, 0.5, 1.0, 5.0, math.inf))


def by_definition(row: list[float], min_rank: int = 2) -> float:
    """Λ from the words of its definition."""
    falling = sorted(row, reverse=True)
    slopes = [
        math.inf if falling[0] == s else math.log(k) / (falling[0] - s)
        for k, s in enumerate(falling, start=1)
        if k >= min_rank
    ]
    return max(slopes, default=0.0)


@families
@pytest.mark.parametrize("min_rank", [2, 8])
def test_the_exact_scale_is_that_of_the_definition(family, min_rank):
    scores, visible = rows(family, 50, 40)
    got = accumulation_scale(scores, min_rank, visible)
    for row, seen, value in zip(scores, visible, got, strict=True):
        assert value.item() == pytest.approx(by_definition(row[seen].tolist(), min_rank), rel=1e-12)


@families
def test_the_contact_is_where_the_supremum_is(family):
    scores, visible = rows(family, 50, 40)
    contact = find_contact(scores, 2, visible)
    usable = (contact.value > 0) & contact.value.isfinite()
    first, other = (scores.gather(-1, at[:, None])[:, 0] for at in (contact.first, contact.key))
    slope = contact.rank.double().log() / (first - other)
    torch.testing.assert_close(slope[usable], contact.value[usable])


@families
@pytest.mark.parametrize("keys", [2, 16, 17, 300, 4096])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_bracket_contains_the_exact_scale_within_its_width(family, keys, dtype):
    scores, visible = rows(family, 200, keys, seed=keys)
    scores = scores.to(dtype)
    for min_rank in (2, 8, 20):
        exact = accumulation_scale(scores, min_rank, visible)
        lower, upper = bracket_accumulation(scores, min_rank, visible)
        assert (lower <= exact).all()
        assert (exact <= upper).all()
        assert ((upper <= (1 + BRACKET_WIDTH) * lower) | (upper == lower)).all()


@pytest.mark.parametrize("family", ["gaussian", "clustered", "heavy_tailed", "ties", "simplex", "sphere"])
@pytest.mark.parametrize("strength", [0.05, 0.5, 0.95, 1.05, 1.5, 2.0, 5.0])
def test_the_certificates_hold_for_every_row(family, strength):
    scores, visible = rows(family, 1000, 64, seed=7)
    scale = accumulation_scale(scores, 2, visible)
    usable = (scale > 0) & scale.isfinite()
    assert usable.any()
    scores, visible, scale = scores[usable], visible[usable], scale[usable]
    stats = row_statistics(scores, strength * scale, visible, EVERYTHING)
    r, n = stats.criticality, stats.visible
    torch.testing.assert_close(r, torch.full_like(r, strength))
    slack = 1e-9
    if strength > 1:
        assert (stats.w_max >= 1 / harmonic(r, n) - slack).all()
        assert (stats.w_max >= 1 / zeta(r) - slack).all()
        excess = r / (r - 1)
        assert (stats.entropy <= excess.log() + excess**2 - 1 + slack).all()
    else:
        rank = find_contact(scores, 2, visible).rank.double()
        assert (stats.w_max <= rank ** -(1 - r) + slack).all()
        top_two = (strength * scale[:, None] * scores).masked_fill(~visible, -math.inf).softmax(-1).topk(2, -1).values
        assert (top_two[:, 0] - top_two[:, 1] <= r / (math.e * (1 - r)) + slack).all()


@families
@pytest.mark.parametrize("beta", [0.1, 1.0, 7.0])
def test_weights_entropy_and_counts_stay_in_their_ranges(family, beta):
    scores, visible = rows(family, 1000, 64, seed=5)
    stats = row_statistics(scores, beta, visible, EVERYTHING)
    n = visible.sum(-1)
    assert torch.equal(stats.visible, n)
    assert (stats.entropy >= 0).all()
    assert (stats.entropy <= n.double().log() + 1e-9).all()
    assert (stats.w_max >= 1 / n.double() - 1e-12).all()
    assert (stats.w_max <= 1).all()
    assert (stats.gap_counts[:, 0] >= 1).all()
    assert (stats.gap_counts.diff(dim=-1) >= 0).all()
    assert torch.equal(stats.gap_counts[:, -1], n)
    assert not stats.accumulation.upper.isnan().any()


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.floats(-50, 50, allow_subnormal=False), min_size=1, max_size=30),
    st.sampled_from([0.25, 0.5, 2.0, 8.0]),
    st.randoms(use_true_random=False),
)
def test_the_scale_is_covariant_and_does_not_see_the_order(row, factor, shuffle):
    scores = torch.tensor(row, dtype=torch.float64)
    scale = accumulation_scale(scores)
    assert accumulation_scale(factor * scores) == pytest.approx(scale.item() / factor, rel=1e-9)
    mixed = list(row)
    shuffle.shuffle(mixed)
    assert torch.equal(accumulation_scale(torch.tensor(mixed, dtype=torch.float64)), scale)
    lower, upper = bracket_accumulation(scores)
    assert lower <= scale <= upper


def test_the_simplex_row_has_the_scale_of_the_theorem():
    scores, _ = rows("simplex", 1, 1000)
    assert accumulation_scale(scores).item() == pytest.approx(math.log(1000) / 0.7, rel=1e-12)


def test_ties_single_keys_and_empty_rows_are_never_nan():
    scores = torch.tensor([[2.0, 2.0, 1.0], [2.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    visible = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    for scale in (accumulation_scale(scores, 2, visible), *bracket_accumulation(scores, 2, visible)):
        assert scale.tolist() == [math.inf, 0.0, 0.0]
    stats = row_statistics(scores, 3.0, visible, EVERYTHING)
    assert stats.criticality.tolist() == [0.0, math.inf, math.inf]
    assert stats.lse[2] == stats.max_logit[2] == -math.inf
    assert stats.w_max[2] == stats.entropy[2] == 0.0
    assert stats.gap_counts[2].sum() == 0


@pytest.mark.parametrize("ranks", [4, 7])
@pytest.mark.parametrize("keys", [0, 3, 31, 515, 1024, 1799, 2050])
def test_the_largest_are_those_of_a_sort(keys, ranks):
    """However they lie in the runs that are searched side by side, with ties and hidden keys among them."""
    scores = torch.randn(64, keys, generator=torch.Generator().manual_seed(keys)).round(decimals=1)
    scores[:, keys // 2 :][:32] = -1e30
    scores[:8] = scores[:8].sort(-1, descending=True).values
    scores[8:16] = scores[8:16].sort(-1).values
    expected = torch.full((64, ranks), -math.inf)
    expected[:, :keys] = scores.sort(-1, descending=True).values[:, :ranks]
    assert torch.equal(largest(scores, ranks), expected)


def test_counts_are_exact_at_the_threshold():
    scores = torch.tensor([3.0, 2.5, 2.5, 1.0, -torch.inf])
    assert count_gaps(scores, (0.0, 0.49, 0.5, 2.0, math.inf)).tolist() == [1, 1, 3, 4, 4]


@pytest.mark.parametrize(
    ("min_rank", "error"), [(1, ArgumentError), (0, ArgumentError), (2.0, ArgumentTypeError), (True, ArgumentTypeError)]
)
def test_a_rank_below_two_is_refused(min_rank, error):
    with pytest.raises(error, match="min_rank"):
        accumulation_scale(torch.zeros(3), min_rank)


def test_a_rank_may_be_a_number_of_numpy():
    scores = torch.tensor([0.0, -1.0, -4.0, -4.0])
    assert accumulation_scale(scores, np.int64(3)) == accumulation_scale(scores, 3)
