"""`RowStats.merge` joins statistics of the same rows over disjoint keys, counts a sink once, and refuses the rest."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import tensors

from attnscale import ArgumentError, RowStats, StatsRequest, attention_with_stats, row_statistics

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
    with pytest.raises(ArgumentError, match=r"both contain an attention sink .* all parts but one without `sinks`"):
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
    with pytest.raises(ArgumentError, match=r"given .* on one side and counted on the other"):
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
