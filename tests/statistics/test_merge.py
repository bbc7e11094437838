"""`RowStats.merge` joins statistics of the same rows over disjoint keys, counts a sink once, and refuses the rest."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import tensors
from torch.utils._pytree import tree_map_only

from attnscale import ArgumentError, RowStats, StatsRequest, attention_with_stats, row_statistics
from attnscale.statistics import RowPlaces, Span
from attnscale.statistics.gaps import count_gaps

NAMES = ("visible", "lse", "max_logit", "w_max", "entropy")
SINKS = torch.tensor([0.5, -1.0], dtype=torch.float64)
Q, K, V = tensors((2, 2, 9, 16), (2, 2, 40, 16))
SHARDS = (slice(0, 11), slice(11, 12), slice(12, 40))
backends = pytest.mark.parametrize("backend", ["blockwise", "reference"])


def statistics(keys: slice = slice(None), **rules: object) -> RowStats:
    return attention_with_stats(Q, K[:, :, keys], V[:, :, keys], **rules).stats


def assert_same(got: RowStats, expected: RowStats) -> None:
    for name in NAMES:
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), msg=lambda m, n=name: f"{n}: {m}")


@backends
@pytest.mark.parametrize("holder", [0, 1, 2])
def test_a_sink_on_one_part_is_counted_once_in_any_order(backend, holder):
    whole = statistics(sinks=SINKS, backend=backend)
    parts = [statistics(keys, sinks=SINKS if at == holder else None, backend=backend) for at, keys in enumerate(SHARDS)]
    for a, b, c in itertools.permutations(parts):
        for merged in (a.merge(b).merge(c), a.merge(b.merge(c))):
            assert_same(merged, whole)
            assert merged.with_sink
    with pytest.raises(ArgumentError, match="sinks"):
        whole.merge(parts[holder])


@backends
def test_two_sinks_are_refused_also_after_a_merge(backend):
    first, second, third = (
        statistics(keys, sinks=sinks, backend=backend) for keys, sinks in zip(SHARDS, (SINKS, None, SINKS), strict=True)
    )
    assert first.merge(second).with_sink
    for a, b in ((first, third), (first.merge(second), third), (third, second.merge(first))):
        with pytest.raises(ArgumentError, match="count twice"):
            a.merge(b)


def test_a_sink_that_no_statistic_contains_is_none():
    only_n = StatsRequest(w_max=False, entropy=False, lse=False, max_logit=False)
    for backend in ("blockwise", "reference"):
        parts = [statistics(keys, sinks=SINKS, request=only_n, backend=backend) for keys in SHARDS[:2]]
        assert parts[0].merge(parts[1]).visible.unique().tolist() == [12]


@backends
def test_statistics_of_other_rows_are_refused(backend):
    rules = {"backend": backend}
    sampled = statistics(SHARDS[0], request=StatsRequest(rows=3, seed=0), **rules)
    same = statistics(SHARDS[2], request=StatsRequest(rows=3, seed=0), **rules)
    others = statistics(SHARDS[2], request=StatsRequest(rows=3, seed=1), **rules)
    assert sampled.rows.tolist() != others.rows.tolist()
    with pytest.raises(ArgumentError, match=r"statistics of rows \[.*\] and of rows \[.*\] are not accepted"):
        sampled.merge(others)
    fewer = statistics(SHARDS[2], request=StatsRequest(rows=2), **rules)
    with pytest.raises(ArgumentError, match=r"shapes \[2, 2, 3\] and \[2, 2, 2\]"):
        sampled.merge(fewer)
    merged = sampled.merge(same)
    assert torch.equal(merged.rows, sampled.rows)
    assert merged.visible.unique().tolist() == [39]


def test_sampled_rows_are_not_merged_with_whole_calls_of_as_many():
    rows = attention_with_stats(Q, K, V, request=StatsRequest(rows=3)).stats
    whole = attention_with_stats(Q[:, :, :3], K, V).stats
    for a, b in ((rows, whole), (whole, rows)):
        with pytest.raises(ArgumentError, match="all rows"):
            a.merge(b)


@pytest.mark.parametrize("cut", [(slice(0, 1), slice(None)), (slice(None), slice(0, 1))], ids=["batch", "heads"])
def test_other_shapes_are_refused_though_they_would_broadcast(cut):
    batch, heads = cut
    one = attention_with_stats(Q[batch, heads], K[batch, heads], V[batch, heads]).stats
    with pytest.raises(ArgumentError, match="visible of shapes"):
        statistics().merge(one)


def test_counts_of_other_thresholds_are_refused_where_they_would_be_added():
    one, two = (
        statistics(keys, request=StatsRequest(gap_thresholds=thresholds))
        for keys, thresholds in ((SHARDS[0], (0.5,)), (SHARDS[2], (0.5, 1.0)))
    )
    with pytest.raises(ArgumentError, match="gap_counts of shapes"):
        one.merge(two, common_maximum=True)
    with pytest.raises(ArgumentError, match="gap_counts is not accepted on one side only"):
        one.merge(statistics(SHARDS[2]), common_maximum=True)
    assert one.merge(two).gap_counts is None


@backends
def test_a_given_n_is_that_of_all_keys_and_does_not_add_up(backend):
    given = torch.arange(40, 49)
    parts = [statistics(keys, visible=given, backend=backend) for keys in SHARDS]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    assert torch.equal(merged.visible, given.expand(2, 2, 9))
    torch.testing.assert_close(merged.entropy, statistics(backend=backend).entropy)
    with pytest.raises(ArgumentError, match="visible="):
        parts[0].merge(statistics(SHARDS[1], backend=backend))


def test_layouts_without_a_batch_keep_what_they_know():
    stats = attention_with_stats(Q[0, 0], K[0, 0], V[0, 0], sinks=SINKS[:1], visible=torch.arange(9)).stats
    assert stats.with_sink
    assert stats.visible_given


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=3, max_size=3),
    st.sampled_from([None, 0, 1, 2]),
    st.floats(0.05, 20.0),
    st.integers(0, 2**31),
)
def test_merging_is_commutative_and_associative_and_gives_the_whole(sizes, holder, beta, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(2, 4, sum(sizes), dtype=torch.float64, generator=generator)
    mask = torch.rand(2, 4, sum(sizes), generator=generator) < 0.8
    pieces = zip(scores.split(sizes, -1), mask.split(sizes, -1), strict=True)
    a, b, c = (
        row_statistics(part, beta, seen, sinks=SINKS if at == holder else None)
        for at, (part, seen) in enumerate(pieces)
    )
    whole = row_statistics(scores, beta, mask, sinks=None if holder is None else SINKS)
    for merged in (a.merge(b).merge(c), a.merge(b.merge(c)), c.merge(a).merge(b), b.merge(c).merge(a)):
        assert merged.with_sink == whole.with_sink
        assert torch.equal(merged.visible, whole.visible)
        for name in NAMES[1:]:
            torch.testing.assert_close(getattr(merged, name), getattr(whole, name), rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=3, max_size=3), st.integers(0, 2**31))
def test_gap_counts_add_up_once_they_are_counted_from_the_common_maximum(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-4, 5, (5, sum(sizes)), generator=generator).double()
    mask = torch.rand(5, sum(sizes), generator=generator) < 0.7
    best, thresholds = scores.masked_fill(~mask, -math.inf).amax(-1), (0.0, 1.0, math.inf)
    a, b, c = (
        row_statistics(part, mask=seen)._replace(gap_counts=count_gaps(part, thresholds, seen, best=best))
        for part, seen in zip(scores.split(sizes, -1), mask.split(sizes, -1), strict=True)
    )
    for one, two, three in itertools.permutations((a, b, c)):
        merged = one.merge(two, common_maximum=True).merge(three, common_maximum=True)
        assert torch.equal(merged.gap_counts, count_gaps(scores, thresholds, mask))


def chunk(first: int, last: int, keys: slice = slice(None), **rules: object) -> RowStats:
    """Causal statistics of the rows [first, last) of a sequence of 40 tokens."""
    query = K[:, :, first:last]
    rules = {"is_causal": True, "cache_offset": first} | rules
    return attention_with_stats(query, K[:, :, keys], V[:, :, keys], **rules).stats


def test_rows_at_other_places_are_refused_though_shapes_agree():
    with pytest.raises(ArgumentError, match=r"rows at 0 … 8 and of those at 9 … 17 .* the same rows"):
        chunk(0, 9).merge(chunk(9, 18))
    apart = (torch.arange(9), torch.arange(9).flip(0))
    one, other = (attention_with_stats(Q, K, V, positions=places).stats for places in apart)
    with pytest.raises(ArgumentError, match=r"rows at \[\[0, 1, .* and of those at \[\[8, 7"):
        one.merge(other)
    scattered = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 9]])
    with pytest.raises(ArgumentError, match="the same rows"):
        chunk(0, 9).merge(chunk(0, 9, cache_offset=scattered))
    sampled = [chunk(at, at + 9, request=StatsRequest(rows=3)) for at in (0, 9)]
    with pytest.raises(ArgumentError, match="rows at 0 … 8 and of those at 9 … 17"):
        sampled[0].merge(sampled[1])


def test_keys_that_both_sides_have_seen_are_refused():
    stats = chunk(20, 29)
    with pytest.raises(ArgumentError, match=r"over the keys 0 … 39 and over 0 … 39 .* count twice"):
        stats.merge(stats)
    with pytest.raises(ArgumentError, match="0 … 39 and over 0 … 19"):
        stats.merge(chunk(20, 29, slice(0, 20)))


def test_parts_of_the_keys_are_merged_where_positions_say_which_rows_they_are_of():
    whole = chunk(20, 29)
    rows = {"positions": torch.arange(20, 29), "visible": whole.visible[:, :1]}
    parts = chunk(20, 29, slice(0, 20), **rows), chunk(20, 29, slice(20, 40), cache_offset=0, **rows)
    for merged in (parts[0].merge(parts[1]), parts[1].merge(parts[0])):
        assert_same(merged, whole)
        assert merged.places.rows.tolist() == [list(range(20, 29))]
    without = chunk(20, 29, slice(0, 20)), chunk(20, 29, slice(20, 40), cache_offset=0)
    with pytest.raises(ArgumentError, match="positions= and visible="):
        without[0].merge(without[1])


def test_a_prefix_that_every_row_sees_is_merged_with_the_rows_own_part():
    prefix = attention_with_stats(K[:, :, 20:29], K[:, :, :20], V[:, :, :20]).stats
    own = chunk(20, 29, slice(20, 29), cache_offset=0)
    assert prefix.places is None
    assert_same(prefix.merge(own), chunk(20, 29))


def test_places_of_rows_cost_no_tensor_and_follow_layouts_and_graphs():
    assert chunk(9, 18).places == RowPlaces(Span(9, 18), (Span(0, 40),))
    alone = attention_with_stats(K[0, 0, 9:18], K[0, 0], V[0, 0], is_causal=True, cache_offset=9).stats
    assert alone.places == chunk(9, 18).places
    cut = tree_map_only(torch.Tensor, lambda x: x[..., :4], chunk(9, 18))
    assert cut.merge(tree_map_only(torch.Tensor, lambda x: x[..., 4:8], chunk(0, 9))).places is None
    compiled = torch.compile(chunk, backend="eager", fullgraph=True)
    assert compiled(9, 18).places == chunk(9, 18).places
