"""A requested Λ that `gap_adaptive` reads too is measured once, and is the same as without the policy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnscale import StatsRequest, attention_with_stats, build_policy, scaled_dot_product_attention
from attnscale.statistics import RowStats
from attnscale.statistics.gaps import find_contact
from attnscale.statistics.rows import measures
from attnscale.statistics.rows.tiles import CallRows
from attnscale_kernels.gaps import op

BATCH, HEADS, LENGTH = 2, 4, 21
ROWS = BATCH * HEADS * LENGTH
THRESHOLDS = (0.5, 2.0)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
GENERATOR = torch.Generator().manual_seed(0)
# In sixty-fourths, so that scores and their gaps are exact in fp32.
Q, K, V = (torch.randn(BATCH, n, LENGTH, 8, generator=GENERATOR).mul(64).round() / 64 for n in (HEADS, 2, 2))
SCALE = 0.25
RULES: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "sinks": SINKS, "scale": SCALE}
BRACKET = StatsRequest(accumulation="bracket", gap_thresholds=THRESHOLDS)
EXACT = StatsRequest(accumulation="exact", gap_thresholds=THRESHOLDS)
backends = pytest.mark.parametrize("backend", ["blockwise", "reference", "triton"])


class Work:
    """Of how many rows Λ was found, and how many tiles of raw scores were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = self.tiles = 0
        whole, sort, kernel, scores = measures.bracket, measures.find_contact, op.gap_bracket, CallRows.scores

        def bracket(spectrum: Any) -> Any:
            self.rows += spectrum.best[..., 0].numel()
            return whole(spectrum)

        def contact(x: Tensor, *others: Any) -> Any:
            self.rows += x[..., 0].numel()
            return sort(x, *others)

        def gap_bracket(query: Tensor, *others: Any, **keywords: Any) -> Any:
            self.rows += query[..., 0].numel()
            return kernel(query, *others, **keywords)

        def tile(rows: CallRows, block: Any) -> Tensor:
            self.tiles += 1
            return scores(rows, block)

        monkeypatch.setattr(measures, "bracket", bracket)
        monkeypatch.setattr(measures, "find_contact", contact)
        monkeypatch.setattr(op, "gap_bracket", gap_bracket)
        monkeypatch.setattr(CallRows, "scores", tile)


def raw_scores() -> Tensor:
    """In fp64, −∞ where hidden."""
    scores = Q.double() @ K.double().repeat_interleave(2, 1).mT * SCALE
    return scores.masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -math.inf)


@pytest.fixture
def work(monkeypatch) -> Work:
    return Work(monkeypatch)


def assert_gaps(found: RowStats, expected: RowStats, beta: Tensor) -> None:
    """Gap counts and Λ are those of a call without the policy, and the criticality that of its own β."""
    if found.rows is not None:
        beta = beta.index_select(2, found.rows)
        expected = expected.select(found.rows)
    assert torch.equal(found.gap_counts, expected.gap_counts)
    for one, other in zip(found.accumulation, expected.accumulation, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    lower, upper = found.accumulation
    middle = torch.where(lower == upper, lower, (lower * upper).sqrt())
    torch.testing.assert_close(found.criticality, beta / middle, rtol=1e-5, atol=0)


@backends
@pytest.mark.parametrize("exact", [False, True], ids=["bracket", "exact"])
@pytest.mark.parametrize("rows", [None, 6])
def test_one_measurement_serves_the_policy_and_the_request(backend, exact, rows, work):
    request = StatsRequest(accumulation="exact" if exact else "bracket", gap_thresholds=THRESHOLDS, rows=rows)
    policy = build_policy("gap_adaptive", exact=exact, floor=0.01, ceiling=50.0)
    scaled_dot_product_attention(Q, K, V, policy=policy, backend=backend, **RULES)
    assert work.rows == ROWS
    for_policy, work.rows, work.tiles = work.tiles, 0, 0
    out, stats = attention_with_stats(Q, K, V, policy=policy, backend=backend, request=request, **RULES)
    assert work.rows == ROWS
    assert work.tiles == for_policy
    whole = StatsRequest(accumulation=request.accumulation, gap_thresholds=THRESHOLDS)
    alone = attention_with_stats(Q, K, V, backend=backend, request=whole, **RULES).stats
    beta = (2.0 * alone.accumulation.upper).clamp(0.01, 50.0)
    assert (stats.rows is None) == (rows is None)
    assert_gaps(stats, alone, beta)
    at_ceiling = beta >= 50.0
    assert torch.equal(stats.at_ceiling, at_ceiling if rows is None else at_ceiling[..., stats.rows])
    # The β that is meant is the one that was used.
    sinks = SINKS.double()[:, None, None].expand(BATCH, HEADS, LENGTH, 1)
    logits = torch.cat([beta.double()[..., None] * raw_scores(), sinks], dim=-1)
    expected = logits.softmax(-1)[..., :-1] @ V.double().repeat_interleave(2, 1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    lse = logits.logsumexp(-1)
    torch.testing.assert_close(stats.lse.double(), lse if rows is None else lse[..., stats.rows], rtol=1e-5, atol=1e-4)


@backends
@pytest.mark.parametrize("rows", [None, 6])
@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        ({"name": "gap_adaptive"}, {"accumulation": "exact"}),
        ({"name": "gap_adaptive"}, {"accumulation": "bracket", "min_rank": 8}),
        ({"name": "gap_adaptive", "min_rank": 8}, {"accumulation": "bracket"}),
        ({"name": "gap_adaptive", "exact": True}, {"accumulation": "bracket"}),
        ({"name": "entropy_adaptive"}, {"accumulation": "bracket"}),
    ],
    ids=str,
)
def test_a_request_for_another_scale_gets_what_it_asks_for(backend, rows, policy, asked):
    law = build_policy(policy)
    request = StatsRequest(gap_thresholds=THRESHOLDS, rows=rows, **asked)
    stats = attention_with_stats(Q, K, V, policy=law, backend=backend, request=request, **RULES).stats
    whole = StatsRequest(gap_thresholds=THRESHOLDS, **asked)
    alone = attention_with_stats(Q, K, V, backend=backend, request=whole, **RULES).stats
    raw = attention_with_stats(Q, K, V, backend=backend, request=law.request, **RULES | {"sinks": None}).stats
    assert_gaps(stats, alone, law.from_stats(raw))
    true = find_contact(raw_scores(), request.min_rank).value
    true = true if rows is None else true[..., stats.rows]
    assert (stats.accumulation.lower <= true * (1 + 1e-6)).all()
    assert (stats.accumulation.upper >= true * (1 - 1e-6)).all()
    assert ((stats.accumulation.upper == stats.accumulation.lower).all()) == (request.accumulation == "exact")


def test_counts_without_a_scale_are_measured_for_the_request_alone(work):
    request = StatsRequest(gap_thresholds=THRESHOLDS)
    stats = attention_with_stats(Q, K, V, policy="gap_adaptive", request=request, **RULES).stats
    assert stats.accumulation is None
    assert stats.criticality is None
    assert torch.equal(stats.gap_counts, attention_with_stats(Q, K, V, request=request, **RULES).stats.gap_counts)


def test_statistics_that_nobody_asked_for_are_not_brought_along():
    nothing = StatsRequest(False, False, False, False, accumulation="bracket")
    for rows in (None, 6):
        request = StatsRequest(False, False, False, False, accumulation="bracket", rows=rows)
        stats = attention_with_stats(Q, K, V, policy="gap_adaptive", request=request, **RULES).stats
        for name in ("gap_counts", "lse", "max_logit", "w_max", "entropy", "winner", "first_share"):
            assert getattr(stats, name) is None, name
        alone = attention_with_stats(Q, K, V, request=nothing, **RULES).stats.accumulation
        shown = alone.upper if rows is None else alone.upper[..., stats.rows]
        assert torch.equal(stats.accumulation.upper, shown)


@pytest.mark.parametrize("training", [True, False])
def test_a_running_estimate_shares_what_it_learns_from_and_leaves_the_rest(training, work):
    law = build_policy("gap_adaptive", scope="head", num_heads=HEADS)
    attention_with_stats(Q, K, V, policy=law, **RULES)
    work.rows = 0
    law.train(training)
    stats = attention_with_stats(Q, K, V, policy=law, request=BRACKET, **RULES).stats
    assert work.rows == ROWS
    beta = law(torch.arange(1, LENGTH + 1)).expand(BATCH, HEADS, LENGTH) if not training else None
    alone = attention_with_stats(Q, K, V, request=BRACKET, **RULES).stats
    assert torch.equal(stats.accumulation.upper, alone.accumulation.upper)
    if beta is not None:
        assert_gaps(stats, alone, beta)


def test_gradients_through_the_scale_are_those_without_statistics(work):
    law = build_policy("gap_adaptive", exact=True, gradient="through")
    found = []
    for request in (None, EXACT):
        leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
        if request is None:
            out = scaled_dot_product_attention(*leaves, policy=law, backend="blockwise", **RULES)
        else:
            work.rows = 0
            out, stats = attention_with_stats(*leaves, policy=law, backend="blockwise", request=request, **RULES)
            assert not stats.criticality.requires_grad
            assert work.rows == ROWS
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_it_compiles_into_one_graph_and_under_autocast_is_of_rounded_inputs():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> RowStats:
        return attention_with_stats(q, k, v, policy="gap_adaptive", request=BRACKET, **RULES).stats

    torch.compiler.reset()
    plain, compiled = attend(Q, K, V), torch.compile(attend, fullgraph=True, backend="aot_eager")(Q, K, V)
    torch.compiler.reset()
    for name in ("gap_counts", "criticality"):
        torch.testing.assert_close(getattr(plain, name), getattr(compiled, name), msg=name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = attend(Q, K, V)
    rounded = attend(*(x.bfloat16() for x in (Q, K, V)))
    for name in ("gap_counts", "criticality", "lse"):
        torch.testing.assert_close(getattr(cast, name), getattr(rounded, name), msg=name)
