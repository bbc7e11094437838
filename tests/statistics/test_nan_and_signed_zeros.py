"""A NaN in a mask reaches its row, equal zeros tie, and a given n is the n that statistics report."""

import itertools
import math

import pytest
import torch
from oracle import tensors, visibility
from torch.nn import functional as F

from attnscale import (
    MultiheadAttention,
    StatsRequest,
    accumulation_scale,
    attention_weights,
    attention_with_stats,
    row_statistics,
    scaled_dot_product_attention,
    visible_keys,
)
from attnscale.statistics.gaps import bracket_accumulation, count_gaps, find_contact

ROWS, KEYS, BROKEN = 7, 9, 4  # the row whose mask holds the NaN
MASK = torch.zeros(ROWS, KEYS)
MASK[BROKEN, 3], MASK[:, 5] = math.nan, -math.inf
SEEN = KEYS - 1
OTHERS = [row for row in range(ROWS) if row != BROKEN]
REQUEST = StatsRequest(accumulation="bracket", gap_thresholds=(0.5, math.inf))
EXACT = StatsRequest(accumulation="exact", gap_thresholds=(0.5, math.inf))
FLOATS = ("lse", "max_logit", "w_max", "entropy", "criticality")
measuring = pytest.mark.parametrize("backend", ["blockwise", "triton", "reference"])
requests = pytest.mark.parametrize("request_", [REQUEST, EXACT], ids=["bracket", "exact"])
# The kernels leave an exact Λ to the tiles.
measured = pytest.mark.parametrize(
    ("backend", "request_"),
    [
        ("blockwise", REQUEST),
        ("blockwise", EXACT),
        ("triton", REQUEST),
        ("reference", REQUEST),
        ("reference", EXACT),
    ],
    ids=["blockwise-bracket", "blockwise-exact", "triton-bracket", "reference-bracket", "reference-exact"],
)


def qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tensors((2, 1, ROWS, 16), (2, 1, KEYS, 16), torch.float32)


@pytest.mark.parametrize(
    ("backend", "policy"),
    [
        *itertools.product(["sdpa", "blockwise", "reference"], ["constant", "log", "entropy_adaptive", "gap_adaptive"]),
        ("triton", "log"),
    ],
)
def test_a_nan_in_an_additive_mask_reaches_the_row_as_in_torch(backend, policy):
    q, k, v = qkv()
    assert torch.isnan(F.scaled_dot_product_attention(q, k, v, MASK)[:, :, BROKEN]).all()
    out = scaled_dot_product_attention(q, k, v, MASK, policy=policy, backend=backend)
    assert torch.isnan(out[:, :, BROKEN]).all()
    assert torch.isfinite(out[:, :, OTHERS]).all()


def test_a_key_with_a_nan_bias_is_a_visible_one():
    expected = [[[SEEN] * ROWS]]
    assert visible_keys(ROWS, KEYS, attn_mask=MASK).tolist() == expected
    assert torch.isnan(attention_weights(*qkv()[:2], attn_mask=MASK)[:, :, BROKEN]).all()
    attention = MultiheadAttention(16, 2, batch_first=True, policy="log")
    x = torch.randn(1, ROWS, 16, generator=torch.Generator().manual_seed(0))
    bias = torch.zeros(ROWS, ROWS)
    bias[BROKEN, 1] = math.nan
    for need_weights in (True, False):
        out, _ = attention(x, x, x, attn_mask=bias, need_weights=need_weights)
        assert torch.isnan(out[0, BROKEN]).all()
        assert torch.isfinite(out[0, OTHERS]).all()


@measured
def test_a_row_that_sees_a_nan_has_no_statistics_but_its_n(backend, request_):
    q, k, v = qkv()
    stats = attention_with_stats(q, k, v, MASK, policy="log", backend=backend, request=request_).stats
    assert (stats.visible == SEEN).all()
    for name in FLOATS:
        assert torch.isnan(getattr(stats, name)[:, :, BROKEN]).all(), name
        assert torch.isfinite(getattr(stats, name)[:, :, OTHERS]).all(), name
    for end in stats.accumulation:
        assert torch.isnan(end[:, :, BROKEN]).all()
        assert torch.isfinite(end[:, :, OTHERS]).all()
    assert (stats.gap_counts[:, :, BROKEN] == 0).all()
    assert (stats.gap_counts[:, :, OTHERS, -1] == SEEN).all()


@measured
def test_so_has_one_that_sees_a_nan_key_and_hidden_ones_are_no_matter(backend, request_):
    q, k, v = qkv()
    k[:, :, 2] = math.nan
    rules = {"is_causal": True, "policy": "log", "backend": backend, "request": request_}
    stats = attention_with_stats(q, k, v, **rules).stats
    whole = attention_with_stats(q, k.nan_to_num(0.0), v, **rules).stats
    assert torch.equal(stats.visible, whole.visible)
    for name in FLOATS:
        assert torch.isnan(getattr(stats, name)[:, :, 2:]).all(), name
        torch.testing.assert_close(getattr(stats, name)[:, :, :2], getattr(whole, name)[:, :, :2])
    assert (stats.gap_counts[:, :, 2:] == 0).all()
    assert torch.equal(stats.gap_counts[:, :, :2], whole.gap_counts[:, :, :2])


@requests
def test_row_statistics_of_a_matrix_say_the_same(request_):
    scores = torch.tensor([[1.0, math.nan, 0.0], [math.nan, math.nan, math.nan], [1.0, math.nan, 0.5]])
    mask = torch.tensor([[True, True, True], [True, True, True], [True, False, True]])
    stats = row_statistics(scores, 2.0, mask, request_)
    for name in FLOATS:
        assert torch.isnan(getattr(stats, name)).tolist() == [True, True, False], name
    assert torch.isnan(stats.accumulation.lower).tolist() == [True, True, False]
    assert torch.isnan(stats.accumulation.upper).tolist() == [True, True, False]
    assert stats.gap_counts.tolist() == [[0, 0], [0, 0], [2, 2]]
    assert stats.visible.tolist() == [3, 3, 2]


@pytest.mark.parametrize("zeros", [(-0.0, 0.0), (0.0, -0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("keys", [2, 3, 40, 3000])
def test_zeros_of_either_sign_tie(zeros, dtype, keys):
    scores = torch.full((keys,), -1.0, dtype=dtype)
    scores[keys // 2 - 1], scores[keys // 2] = zeros
    assert accumulation_scale(scores) == math.inf
    assert find_contact(scores).value == math.inf
    assert bracket_accumulation(scores) == (math.inf, math.inf)
    assert count_gaps(scores, (0.0,)).tolist() == [2]
    assert accumulation_scale(scores, mask=torch.arange(keys) != keys // 2) == pytest.approx(
        math.log(keys - 1) if keys > 2 else 0.0
    )


@measured
@pytest.mark.parametrize("first", [-0.0, 0.0])
def test_zeros_of_either_sign_tie_in_every_backend(backend, request_, first):
    q = torch.ones(1, 1, 1, 1)
    k = torch.tensor([first, -first, -1.0, -2.0, -3.0]).view(1, 1, 5, 1)
    for bias in (None, torch.zeros(1, 5)):
        stats = attention_with_stats(q, k, k, bias, scale=1.0, backend=backend, request=request_).stats
        assert [end.item() for end in stats.accumulation] == [math.inf, math.inf]
        assert stats.criticality.item() == 0.0


@measuring
@pytest.mark.parametrize(
    "request_",
    [REQUEST, StatsRequest(rows=3), StatsRequest(w_max=False, entropy=False, lse=False, max_logit=False)],
    ids=["all_rows", "sampled", "only_n"],
)
@pytest.mark.parametrize("shape", [(ROWS,), (2, ROWS), (2, 1, ROWS)], ids=str)
def test_a_given_n_is_the_n_of_the_statistics(backend, request_, shape):
    q, k, v = qkv()
    given = torch.arange(100, 100 + math.prod(shape)).view(shape)
    stats = attention_with_stats(q, k, v, policy="log", visible=given, backend=backend, request=request_).stats
    whole = (given[:, None] if given.dim() == 2 else given).expand(2, 1, ROWS)
    assert torch.equal(stats.visible, whole if stats.rows is None else whole[..., stats.rows])
    assert stats.visible.dtype == torch.int64


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
@pytest.mark.parametrize("ndim", [2, 3, 5])
def test_a_given_n_has_the_leading_dimensions_of_the_query(backend, ndim):
    lead = {2: (), 3: (3,), 5: (2, 3, 2)}[ndim]
    q = torch.randn(*lead, ROWS, 8, generator=torch.Generator().manual_seed(0))
    given = torch.arange(50, 50 + ROWS)
    for rules in ({"is_causal": True}, {"attn_mask": visibility(ROWS, ROWS, causal=True)}):
        stats = attention_with_stats(q, q, q, policy="log", visible=given, backend=backend, **rules).stats
        assert torch.equal(stats.visible, given.expand(*lead, ROWS))
