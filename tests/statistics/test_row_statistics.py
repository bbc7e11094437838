"""`row_statistics` of a matrix held against torch's softmax, and sampled rows of a call against the matrix."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from attnscale import ArgumentError, ArgumentTypeError, StatsRequest, attention_with_stats, row_statistics
from attnscale.statistics.rows import tiles

EVERYTHING = StatsRequest(gap_thresholds=(0.0, 0.5, math.inf), accumulation="exact")
GENERATOR = torch.Generator().manual_seed(3)
SCORES = 3 * torch.randn(2, 3, 7, 40, dtype=torch.float64, generator=GENERATOR)
MASK = torch.rand(2, 1, 7, 40, generator=GENERATOR) < 0.5
MASK[0, :, 2] = False
SINKS = torch.tensor([0.5, -200.0, 300.0], dtype=torch.float64)


@pytest.mark.parametrize("beta", [1.0, -0.7, 0.0, 40.0, "rows"])
@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("mask", [None, MASK])
def test_they_are_what_torchs_softmax_gives(beta, sinks, mask):
    beta = torch.linspace(-1, 2, 42, dtype=torch.float64).view(2, 3, 7) if beta == "rows" else torch.tensor(beta)
    seen = (torch.ones(1, dtype=torch.bool) if mask is None else mask).expand(SCORES.shape)
    stats = row_statistics(SCORES, beta, mask, EVERYTHING, sinks=sinks)
    logits = (SCORES * beta[..., None]).masked_fill(~seen, -math.inf)
    sink = torch.full((3,), -math.inf, dtype=torch.float64) if sinks is None else sinks
    outcomes = torch.cat([logits, sink[:, None, None].expand(2, 3, 7, 1)], dim=-1)
    chances = outcomes.softmax(-1).nan_to_num()
    raw = SCORES.masked_fill(~seen, -math.inf)
    expected = {
        "visible": seen.sum(-1),
        "lse": outcomes.logsumexp(-1),
        "max_logit": logits.amax(-1),
        "w_max": chances[..., :-1].amax(-1),
        "entropy": torch.special.entr(chances).sum(-1),
    }
    for name, x in expected.items():
        torch.testing.assert_close(getattr(stats, name), x, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: n + m)
    gaps = raw.amax(-1, keepdim=True) - raw
    counts = torch.stack([((gaps <= t) & seen).sum(-1) for t in (0.0, 0.5, math.inf)], dim=-1)
    assert torch.equal(stats.gap_counts, counts)
    ordered = raw.sort(-1, descending=True).values[..., 1:]
    slopes = torch.arange(2, 41, dtype=torch.float64).log() / (raw.amax(-1, keepdim=True) - ordered)
    steepest = slopes.nan_to_num(nan=0.0).amax(-1)
    torch.testing.assert_close(stats.accumulation.lower, steepest)
    torch.testing.assert_close(stats.criticality, (beta / steepest).expand(2, 3, 7), equal_nan=True)


def test_a_score_of_minus_infinity_has_no_weight():
    scores = torch.tensor([[0.0, -math.inf, 1.0], [-math.inf] * 3])
    stats = row_statistics(scores, 2.0, request=StatsRequest(gap_thresholds=(10.0,)))
    torch.testing.assert_close(stats.lse, (2 * scores).logsumexp(-1))
    assert stats.visible.tolist() == [3, 3]
    assert stats.gap_counts.flatten().tolist() == [2, 0]
    assert stats.w_max[1] == stats.entropy[1] == 0.0


def test_rows_of_no_keys():
    stats = row_statistics(torch.zeros(2, 3, 0), request=EVERYTHING)
    assert (stats.lse == -math.inf).all()
    assert (stats.max_logit == -math.inf).all()
    zeros = stats.visible, stats.gap_counts, stats.w_max, stats.entropy, stats.accumulation.upper
    assert not any(x.any() for x in zeros)


@pytest.mark.parametrize("accumulation", ["bracket", "exact"])
@pytest.mark.parametrize("numbers", [60, 2**18])
@pytest.mark.parametrize("sinks", [None, SINKS[[0, 1, 0, 2]].float()])
def test_sampled_rows_are_those_of_the_matrix(accumulation, numbers, sinks, monkeypatch):
    monkeypatch.setattr(tiles, "SAMPLED_SCORES", numbers)
    q, k, v = (torch.randn(2, heads, 50, 8, generator=GENERATOR) for heads in (4, 2, 2))
    request = StatsRequest(gap_thresholds=(0.5, math.inf), accumulation=accumulation, min_rank=3, rows=6)
    rules = {"is_causal": True, "window": 20, "enable_gqa": True, "policy": "log", "sinks": sinks}
    found = attention_with_stats(q, k, v, request=request, **rules).stats
    every = StatsRequest(gap_thresholds=(0.5, math.inf), accumulation=accumulation, min_rank=3)
    whole = attention_with_stats(q, k, v, request=every, backend="reference", **rules).stats
    for name in ("visible", "lse", "max_logit", "w_max", "entropy", "gap_counts"):
        torch.testing.assert_close(getattr(found, name), getattr(whole, name)[:, :, found.rows])
    # A key at the edge of a bin is on one side or the other by a rounding, which the bracket allows for.
    rtol = 0.065 if accumulation == "bracket" else 1e-4
    for end, other in zip(found.accumulation, whole.accumulation, strict=True):
        torch.testing.assert_close(end, other[:, :, found.rows], rtol=rtol, atol=0.0)
    assert found.with_sink == (sinks is not None)


def test_a_request_takes_numbers_of_numpy_as_plain_ones():
    request = StatsRequest(gap_thresholds=(np.float32(0.5),), min_rank=np.int64(3), rows=np.int32(4), seed=np.uint8(7))
    assert request == StatsRequest(gap_thresholds=(0.5,), min_rank=3, rows=4, seed=7)
    assert [type(value) for value in (request.min_rank, request.rows, request.seed)] == [int] * 3
    q = torch.randn(1, 2, 16, 8)
    stats = attention_with_stats(q, q, q, request=request).stats
    assert stats.entropy.shape == (1, 2, 4)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"rows": 0}, ArgumentError),
        ({"rows": 4.0}, ArgumentTypeError),
        ({"min_rank": 1}, ArgumentError),
        ({"min_rank": True}, ArgumentTypeError),
        ({"seed": "7"}, ArgumentTypeError),
        ({"seed": 2**64}, ArgumentError),
    ],
)
def test_a_request_refuses_other_numbers(wrong, error):
    with pytest.raises(error, match=f"{next(iter(wrong))}=.* is not accepted"):
        StatsRequest(**wrong)
