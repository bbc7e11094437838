"""Gap counting in Triton's interpreter: certified brackets of Λ, exact counts, and adaptive attention.

Scores that are multiples of a small power of two are exact in fp32, and so are the expected results: Λ by sorting in
fp64, and gaps counted one by one. Other scores have an uncertainty, and the expected result is an interval. New memory
holds NaN, with NaN on both sides. Nothing has run on a GPU.
"""

import math

import numpy as np
import pytest
import torch
from corrected_interpreter import corrected, fused
from families import NAMES, rows, zeta
from flash_cases import RULES, Case, Inputs, guarded, poisoned
from gap_cases import RATIO, THRESHOLDS, assert_bracket, assert_counts, bounds, dyadic, written_out
from torch import Tensor

from attnscale.policies.adaptive import GapAdaptive
from attnscale.statistics import RowStats
from attnscale.statistics.gaps import count_gaps
from attnscale_kernels.flash.launch import flash_forward
from attnscale_kernels.gaps.bins import BINS, bin_edge
from attnscale_kernels.gaps.launch import gap_bracket, gap_count
from attnscale_kernels.gaps.op import accumulation_bracket, adaptive_attention, gap_bracket_op, gap_count_op, gap_counts
from attnscale_kernels.launch import Tile
from attnscale_kernels.visibility import Visibility

TILE = Tile(64, 64, 4, 1)
WIDE = Tile(128, 128, 4, 1)
OURS = ("near_tie", "every_rank", "on_the_edges", "crowd", "steps", "far_crowd")
ROWS = 8  # rows per family


def family(name: str, keys: int) -> tuple[Tensor, Tensor]:
    """Scores [ROWS, keys] in fp32 and their visibility: the families of every test, and some that are hard for bins."""
    if name in NAMES:
        scores, visible = rows(name, ROWS, keys, seed=keys)
        scores, visible = (torch.nn.functional.pad(x, (0, keys - x.shape[1])) for x in (scores, visible))
        return scores.float(), visible
    g = torch.Generator().manual_seed(keys)
    unit = torch.rand(ROWS, keys, generator=g)
    place = torch.arange(keys)
    edges = torch.tensor([bin_edge(number) / 2 for number in range(BINS)])
    gaps = {
        "near_tie": 1e-6 * (place == 1) + (place > 1) * (0.1 + 4 * unit),
        "every_rank": (1.0 + place).log().expand(ROWS, -1),
        "on_the_edges": edges[place % BINS] * (place > 0) * torch.ones(ROWS, 1),
        "crowd": (place > 0) * (1 + unit / 4),
        "steps": ((place + 1.0).log2().floor() + (place > 1) * unit / 3) * torch.logspace(-3, 3, ROWS)[:, None],
        "far_crowd": (place > 0) + (place > 1) * (12.5 + 3 * unit),
    }[name]
    order = torch.rand(ROWS, keys, generator=g).argsort(-1)
    return (2.0 - gaps.float()).gather(-1, order), torch.ones(ROWS, keys, dtype=torch.bool)


def all_families(keys: int) -> tuple[Tensor, Tensor]:
    """All families concatenated, [families · ROWS, keys]."""
    scores, visible = zip(*(family(name, keys) for name in (*NAMES, *OURS)), strict=True)
    return torch.cat(scores), torch.cat(visible)


def as_products(scores: Tensor) -> tuple[Tensor, Tensor]:
    """A query and a key with these scores as products: row r selects column r."""
    return guarded(torch.eye(scores.shape[0])[None, None]), guarded(scores.T[None, None])


def assert_right(x: Inputs, tile: Tile | None = TILE) -> None:
    """Check the bracket and the counts of a call."""
    told = {"scale": x.scale, "softcap": x.softcap, "tile": tile}
    with corrected(), poisoned(), np.errstate(all="raise", under="ignore"):
        found = gap_bracket(x.q, x.k, x.seen.visibility, **told)
        counts = gap_count(x.q, x.k, x.seen.visibility, THRESHOLDS, **told)
    scores, visible, doubt = written_out(x)
    assert_bracket(found, scores, visible, doubt)
    assert_counts(counts, scores, visible, doubt)


# Families of rows.


@pytest.mark.parametrize("keys", [1, 2, 3, 17, 128, 300])
def test_the_bracket_contains_the_exact_scale_of_every_family(keys):
    scores, visible = all_families(keys)
    q, k = as_products(scores)
    with poisoned(), np.errstate(all="raise", under="ignore"):
        found = gap_bracket(q, k, Visibility(mask=visible[None, None]), scale=0.5, tile=WIDE)
    assert_bracket(found, (scores / 2)[None, None], visible[None, None])


def test_it_does_so_for_rows_of_four_thousand_keys():
    scores, visible = all_families(4096)
    q, k = as_products(scores)
    with poisoned():
        found = gap_bracket(q, k, Visibility(mask=visible[None, None]), scale=2.0, tile=WIDE)
    assert_bracket(found, (2 * scores)[None, None], visible[None, None])


def test_it_does_so_where_no_tile_has_an_edge_and_where_scores_come_from_a_bias():
    scores = torch.cat([family(name, 256)[0] for name in (*NAMES[:5], *OURS)])
    everything = torch.ones_like(scores, dtype=torch.bool)[None, None]
    q, k = as_products(scores)
    nothing = torch.zeros(1, 1, scores.shape[0], 16), torch.zeros(1, 1, 256, 16)
    with poisoned():
        plain = gap_bracket(q, k, Visibility(), scale=1.0, tile=TILE)
        biased = gap_bracket(*nothing, Visibility(mask=guarded(scores[None, None])), scale=1.0, tile=TILE)
    assert_bracket(plain, scores[None, None], everything)
    for one, other in zip(plain, biased, strict=True):
        assert torch.equal(one, other)


def test_keys_beyond_the_last_bin_are_taken_at_its_end():
    keys = 2**15  # ln of this is over fourteen times ln 2: here the far keys decide
    gaps = torch.full((4, keys), 14.2)
    gaps[:, 0], gaps[:, 1] = 0.0, 1.0
    gaps[1, 2:] = 14.9
    gaps[2, 2:] = torch.linspace(13.9, 30.0, keys - 2)
    gaps[3, 2:] = torch.linspace(1.3, 14.5, keys - 2)
    q, k = as_products(-gaps)
    visible = torch.ones(1, 1, 4, keys, dtype=torch.bool)
    found = gap_bracket(q, k, Visibility(), scale=1.0, tile=Tile(16, 128, 4, 1))
    assert_bracket(found, -gaps[None, None], visible)
    assert bounds(-gaps, visible[0, 0])[0][0] > math.log(2)


def test_a_thousandth_of_an_octave_apart_bins_tell():
    """All keys but two at one gap: each bracket is the pair of bin edges around it and contains the exact Λ."""
    places = torch.cat([edge * (1 + torch.tensor([-2e-3, -1e-6, 0.0, 1e-6])) for edge in _edges()])
    gaps = places[:, None].repeat(1, 130).clamp(min=1.0)
    gaps[:, 3], gaps[:, 77] = 0.0, 1.0
    q, k = as_products(-gaps)
    visible = torch.ones(1, 1, *gaps.shape, dtype=torch.bool)
    assert_bracket(gap_bracket(q, k, Visibility(), scale=1.0, tile=WIDE), -gaps[None, None], visible)


def _edges() -> Tensor:
    """Bin edges without ε."""
    return torch.tensor([bin_edge(number) / 2 for number in range(BINS)])


# Every visibility rule, in every dtype.


@pytest.mark.parametrize("sees", RULES)
def test_every_rule_of_visibility(sees):
    assert_right(dyadic(Case(sees, 40, 129, batch=2, heads=2, kv_heads=1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (2, 2), (1, 2), (63, 63), (64, 64), (65, 65), (1, 257), (3, 129)]
)
def test_odd_lengths(queries, keys, dtype):
    x = dyadic(Case("causal", queries, keys, heads=2, kv_heads=2, dtype=dtype))
    if dtype == torch.bfloat16:
        x.q, x.k = (guarded((t * 4).round() / 4) for t in (x.q, x.k))
    assert_right(x)


@pytest.mark.parametrize(
    "tile", [Tile(64, 64, 4, 1), Tile(128, 128, 4, 1), Tile(32, 32, 4, 1), Tile(64, 16, 4, 1), None]
)
def test_every_size_of_tile(tile):
    assert_right(dyadic(Case("window_of_100", 257, 257, heads=1)), tile=tile)


@pytest.mark.parametrize("sees", ["causal", "bias_that_hides", "documents"])
@pytest.mark.parametrize("dim", [16, 40, 80])
def test_softcap_and_head_dimensions(sees, dim):
    x = dyadic(Case(sees, 65, 65, dim=dim, softcap=3.0))
    x.scale = 0.125
    assert_right(x)


def test_four_query_heads_share_a_key_head():
    assert_right(dyadic(Case("causal", 65, 65, batch=2, heads=8, kv_heads=2)))


@pytest.mark.parametrize("scale", [-0.25, 0.0])
@pytest.mark.parametrize("sees", ["causal", "bias_per_head"])
def test_a_scale_may_be_negative_or_zero(sees, scale):
    x = dyadic(Case(sees, 20, 33))
    x.scale = scale
    assert_right(x)


def test_strided_and_expanded_inputs():
    x = dyadic(Case("causal", 65, 65, batch=2, heads=2, kv_heads=2))
    told = {"scale": x.scale, "tile": TILE}
    plain = gap_bracket(x.q, x.k, x.seen.visibility, **told)
    apart = x.q.transpose(1, 2).contiguous().transpose(1, 2), x.k.mT.contiguous().mT
    for one, other in zip(plain, gap_bracket(*apart, x.seen.visibility, **told), strict=True):
        assert torch.equal(one, other)
    shared = x.k[:, :1].expand(-1, 2, -1, -1)
    counts = gap_count(x.q, shared, x.seen.visibility, THRESHOLDS, **told)
    assert torch.equal(counts, gap_count(x.q, x.k[:, :1], x.seen.visibility, THRESHOLDS, **told))


def test_products_that_are_fused_into_sums_keep_the_bracket():
    x = dyadic(Case("bias_that_hides", 33, 65, softcap=20.0))
    with fused():
        assert_right(x)


@pytest.mark.parametrize("scale", [2.0**-6, 2.0**6])
def test_rows_that_see_nothing_have_nothing_at_any_scale(scale):
    q = torch.ones(1, 1, 5, 16)
    visibility = Visibility(slot=-3, right=0)  # the first three rows precede the first key
    found = gap_bracket(q, q, visibility, scale=scale, tile=TILE)
    assert found.top[0, 0].tolist() == [-math.inf] * 3 + [16 * scale] * 2
    assert found.second_gap[0, 0].tolist() == [math.inf] * 4 + [0.0]
    assert found.upper[0, 0].tolist() == [0.0] * 4 + [math.inf]
    counts = gap_count(q, q, visibility, (0.0, math.inf), scale=scale, tile=TILE)
    assert counts[0, 0].tolist() == [[0, 0]] * 3 + [[1, 1], [2, 2]]


# Ties, near ties, NaN and infinity.


def test_gaps_from_one_rounding_to_the_smallest_number():
    second = torch.tensor([1.0, 2.0**-23, 2.0**-30, 2.0**-90, 2.0**-99, 2.0**-110, 2.0**-140, 0.0])
    scores = torch.full((8, 40), -1.0)
    scores[:, 7], scores[:, 30] = 0.0, -second
    scores[1, 7], scores[1, 30] = 1 + second[1], 1.0
    q, k = as_products(scores)
    found = gap_bracket(q, k, Visibility(), scale=1.0, tile=TILE)
    assert_bracket(found, scores[None, None], torch.ones(1, 1, 8, 40, dtype=torch.bool))
    assert found.upper[0, 0].isfinite().tolist() == [True] * 5 + [False] * 3
    assert found.lower[0, 0].isfinite().tolist() == [True] * 7 + [False]


@pytest.mark.parametrize("place", [(0, 1), (0, 8), (0, 32), (5, 64), (63, 64), (3, 129)])
def test_a_tie_is_found_wherever_it_is(place):
    scores = -1 - torch.rand(3, 130)
    scores[1:, place] = 0.5
    scores[2, place[1]] = 0.25
    found = gap_bracket(*as_products(scores), Visibility(), scale=1.0, tile=TILE)
    assert found.upper[0, 0].isfinite().tolist() == [True, False, True]
    assert found.second_gap[0, 0, 1:].tolist() == [0.0, 0.25]


def test_a_visible_nan_spoils_its_own_rows_and_a_hidden_one_none():
    x = dyadic(Case("causal", 33, 65, heads=1))
    told = {"scale": x.scale, "tile": TILE}
    broken = x.k.clone()
    broken[..., 50, :] = math.nan
    sees = x.seen.table[0, 0, :, 50]
    assert sees.any()
    assert (~sees).any()
    pairs = zip(
        gap_bracket(x.q, x.k, x.seen.visibility, **told),
        gap_bracket(x.q, broken, x.seen.visibility, **told),
        strict=True,
    )
    for good, bad in pairs:
        assert bad[0, 0, sees].isnan().all()
        assert torch.equal(good[0, 0, ~sees], bad[0, 0, ~sees])
    counts = gap_count(x.q, broken, x.seen.visibility, THRESHOLDS, **told)[0, 0]
    assert (counts[sees] == 0).all()
    assert torch.equal(counts[~sees], gap_count(x.q, x.k, x.seen.visibility, THRESHOLDS, **told)[0, 0, ~sees])


# Counts.


def test_counts_are_those_of_the_package():
    scores, visible = all_families(150)
    q, k = as_products(scores)
    thresholds = (0.0, 1e-6, 0.1, 0.5, 1.0, 1.25, 2.0, 5.0, math.inf)
    with poisoned():
        got = gap_count(q, k, Visibility(mask=visible[None, None]), thresholds, scale=1.0, tile=WIDE)
    assert torch.equal(got[0, 0].long(), count_gaps(scores, thresholds, visible))


def test_a_key_at_the_threshold_counts():
    scores = torch.tensor([[3.0, 2.5, 2.5, 1.0]])
    got = gap_count(
        *as_products(scores), Visibility(), (0.0, 0.49, 0.5, 2.0, math.inf, -0.0, -1.0), scale=1.0, tile=TILE
    )
    assert got[0, 0, 0].tolist() == [1, 1, 3, 4, 4, 1, 0]


def test_counts_with_no_thresholds_queries_or_keys_are_empty_or_zero():
    q, k = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 5, 16)
    assert gap_count(q, k, Visibility(), (), scale=1.0).shape == (1, 2, 3, 0)
    assert gap_count(q[:, :, :0], k, Visibility(), (1.0,), scale=1.0).shape == (1, 2, 0, 1)
    assert (gap_count(q, k[:, :, :0], Visibility(), (1.0, math.inf), scale=1.0) == 0).all()
    nothing = gap_bracket(q, k[:, :, :0], Visibility(), scale=1.0)
    assert (nothing.upper == 0).all()
    assert (nothing.top == -math.inf).all()


def test_what_cannot_be_counted_is_refused():
    q = torch.randn(1, 1, 3, 16)
    with pytest.raises(ValueError, match="tile"):
        gap_bracket(q, q, Visibility(), scale=1.0, tile=Tile(64, 256, 4, 1))


# Adaptive attention.


@pytest.mark.parametrize("sees", ["causal", "window_with_padding_and_bias", "mask_per_batch_and_head"])
def test_adaptive_attention_keeps_its_promise(sees):
    x = dyadic(Case(sees, 32, 65, heads=2))
    told = {"scale": x.scale, "entropy": True}
    forward, beta = adaptive_attention(x.q, x.k, x.v, x.seen.visibility, r=2.0, floor=0.01, ceiling=1e4, **told)
    found = gap_bracket(x.q, x.k, x.seen.visibility, scale=x.scale)
    stats = RowStats(visible=None, accumulation=found)
    assert torch.equal(beta, GapAdaptive(r=2.0, floor=0.01, ceiling=1e4).from_stats(stats))
    for one, other in zip(forward, flash_forward(x.q, x.k, x.v, beta, x.seen.visibility, **told), strict=True):
        assert one is other or torch.equal(one, other)
    within = (beta > 0.01) & (beta < 1e4)
    assert within.any()
    w_max = (forward.max_logit - forward.lse).exp()
    assert (w_max[within] >= 1 / zeta(torch.tensor(2.0)) - 1e-5).all()


def test_adaptive_attention_gives_ties_the_ceiling_and_single_keys_the_floor():
    q, k = torch.ones(1, 1, 3, 16), torch.ones(1, 1, 3, 16)
    k[0, 0, 2] = 2.0
    forward, beta = adaptive_attention(q, k, k, Visibility(right=0), r=1.5, floor=0.125, ceiling=50.0, scale=0.25)
    assert beta[0, 0, :2].tolist() == [0.125, 50.0]
    assert 1.5 * math.log(3) / 4 <= beta[0, 0, 2] <= RATIO * 1.5 * math.log(3) / 4
    assert not forward.out.isnan().any()


# Operators.


def operands(sees: str) -> tuple:
    x = dyadic(Case(sees, 17, 33, heads=2))
    return x.q, x.k, *x.seen.visibility, x.scale, None


@pytest.mark.parametrize("sees", ["causal", "any_intervals", "window_with_padding_and_bias"])
def test_the_operators_pass_the_checks_of_torch(sees):
    torch.library.opcheck(gap_bracket_op, operands(sees))
    torch.library.opcheck(gap_count_op, (*operands(sees), [0.5, math.inf]))


def test_the_operators_compile_into_one_graph_and_have_no_gradient():
    x = dyadic(Case("causal", 17, 33, heads=2))
    x.q.requires_grad_()
    visibility = x.seen.visibility

    def measure(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        found = accumulation_bracket(q, k, visibility, scale=x.scale)
        return found.lower, found.upper, gap_counts(q, k, visibility, (0.5, 2.0), scale=x.scale)

    plain = measure(x.q, x.k)
    compiled = torch.compile(measure, fullgraph=True, backend="aot_eager")(x.q, x.k)
    for one, other in zip(plain, compiled, strict=True):
        assert not one.requires_grad
        assert torch.equal(one, other)


def test_adaptive_attention_has_the_gradients_of_attention_at_that_temperature():
    x = dyadic(Case("causal", 17, 33, heads=2))
    told = {"r": 1.5, "floor": 0.1, "ceiling": 20.0, "scale": x.scale}
    plain, same = adaptive_attention(x.q, x.k, x.v, x.seen.visibility, **told)
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    forward, beta = adaptive_attention(*leaves, x.seen.visibility, **told)
    assert torch.equal(plain.out, forward.out)
    assert torch.equal(beta, same)
    assert not beta.requires_grad
    got = torch.autograd.grad(forward.out, leaves, x.gradient)
    logits = x.scale * beta[..., None] * leaves[0] @ leaves[1].repeat_interleave(2, 1).mT
    out = logits.masked_fill(~x.seen.table, -math.inf).softmax(-1) @ leaves[2].repeat_interleave(2, 1)
    for one, other in zip(got, torch.autograd.grad(out, leaves, x.gradient), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
