"""`AttentionOutput.merge`: outputs and statistics of shards of keys, in any order, are those of all keys."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnscale import ArgumentError, AttentionOutput, StatsRequest, attention_with_stats


def parts(sizes: list[int], seed: int, **options: object) -> tuple[AttentionOutput, list[AttentionOutput]]:
    generator = torch.Generator().manual_seed(seed)
    query, key = (3 * torch.randn(1, 2, n, 4, dtype=torch.float64, generator=generator) for n in (3, sum(sizes)))
    shards = key.split(sizes, dim=2)
    return (
        attention_with_stats(query, key, key, **options),
        [attention_with_stats(query, shard, shard, **options) for shard in shards],
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=3, max_size=3), st.integers(0, 2**31))
def test_merging_shards_in_any_order_gives_the_whole(sizes, seed):
    whole, shards = parts(sizes, seed)
    for a, b, c in itertools.permutations(shards):
        for merged in (a.merge(b).merge(c), a.merge(b.merge(c))):
            torch.testing.assert_close(merged.output, whole.output, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(merged.stats.lse, whole.stats.lse, rtol=1e-9, atol=1e-9)


def test_without_lse_there_is_nothing_to_weigh_with():
    _, (a, b) = parts([2, 3], 0, request=StatsRequest(lse=False, entropy=False))
    with pytest.raises(ArgumentError, match=r"StatsRequest\(lse=True\)"):
        a.merge(b)


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
def test_sharp_logits_are_merged_as_exactly_as_they_are_computed(backend):
    """An lse of several hundred is rounded to 1e-5 in fp32, and so would be all weights that are taken from it."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, n, 16, generator=generator) for n in (64, 96, 96))
    options = {"scale": 50.0, "backend": backend}
    true = attention_with_stats(query.double(), key.double(), value.double(), **options).output
    whole = attention_with_stats(query, key, value, **options)
    shards = zip(key.split(24, 2), value.split(24, 2), strict=True)
    merged = functools.reduce(AttentionOutput.merge, (attention_with_stats(query, *one, **options) for one in shards))
    errors = [(found.output - true).square().mean().sqrt().item() for found in (whole, merged)]
    assert whole.stats.lse.abs().mean() > 200
    assert errors[1] <= 2 * errors[0] + torch.finfo(torch.float32).eps * true.square().mean().sqrt().item()
