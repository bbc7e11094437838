"""The bracket of Λ, and the β of `gap_adaptive`, are the same on the CPU and in the kernels.

Tested in Triton's interpreter. Scores are exact in fp32 (a query selects a column of given numbers, or both are
multiples of 1/64), so only the rounding of a gap divided by the second-best gap can differ. Both sides bin this
quotient by the same edges. A key within a few roundings of an edge may be counted on either side, which moves an end of
the bracket by at most one bin, `BRACKET_WIDTH`. In all other rows the counts are equal, and the ends differ by the
rounding of a logarithm and two quotients.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from families import NAMES, rows
from torch import Tensor

from attnscale import StatsRequest, attention_with_stats, build_policy, scaled_dot_product_attention
from attnscale.statistics.gaps import BRACKET_WIDTH, accumulation_scale, bracket_accumulation
from attnscale_kernels.gaps import bins
from attnscale_kernels.gaps.launch import gap_bracket
from attnscale_kernels.launch import Tile
from attnscale_kernels.visibility import Visibility

ROUNDING = 1e-5
COUNT = 12  # rows per family


def near_an_edge(scores: Tensor, visible: Tensor) -> Tensor:
    """Rows with a key whose quotient, computed in fp64, is within a few fp32 roundings of a bin edge."""
    falling = scores.double().masked_fill(~visible, -math.inf).sort(-1, descending=True).values
    gaps = falling[..., :1] - falling
    x = (2 + bins.EPSILON) * gaps / gaps[..., 1:2] - bins.EPSILON
    edges = torch.tensor([bins.bin_edge(number) for number in range(1, bins.BINS)], dtype=torch.float64)
    return ((x[..., None] / edges - 1).abs() < 2.0**-20).flatten(-2).any(-1)


def by_kernel(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """The bracket of scores [rows, keys], as products with unit vectors."""
    query, key = torch.eye(scores.shape[0])[None, None], scores.T.contiguous()[None, None]
    found = gap_bracket(query, key, Visibility(mask=visible[None, None]), scale=1.0, tile=Tile(64, 64, 4, 1))
    return found.lower[0, 0], found.upper[0, 0]


def assert_close(one: Tensor, other: Tensor, loose: Tensor) -> None:
    torch.testing.assert_close(one[~loose], other[~loose], rtol=ROUNDING, atol=0)
    torch.testing.assert_close(one[loose], other[loose], rtol=BRACKET_WIDTH, atol=0)


@pytest.mark.parametrize("keys", [2, 3, 17, 130, 300])
def test_both_ends_are_those_of_the_kernels_for_every_family(keys):
    parts = [rows(name, COUNT, keys, seed=keys) for name in NAMES if name != "one_key"]
    spread = torch.logspace(-3, 3, COUNT)[:, None]
    scores = torch.cat([scores.float() * spread for scores, _ in parts])
    visible = torch.cat([seen for _, seen in parts])
    lower, upper = bracket_accumulation(scores, 2, visible)
    of_kernel = by_kernel(scores, visible)
    loose = near_an_edge(scores, visible)
    assert loose.double().mean() < 0.05
    for one, other in zip((lower, upper), of_kernel, strict=True):
        assert_close(one, other, loose)
    exact = accumulation_scale(scores.double(), 2, visible)
    for low, high in ((lower, upper), of_kernel):
        assert (low.double() <= exact).all()
        assert (exact <= high.double()).all()
        closed = high < math.inf
        assert (high[closed] <= (1 + BRACKET_WIDTH) * low[closed]).all()


def test_keys_on_the_edges_of_bins_move_an_end_by_one_bin_at_most():
    """Rows of a best key, a second, and a group of keys with a quotient on an edge or one rounding away."""
    edges = torch.tensor([bins.bin_start(number) for number in range(1, bins.BINS)], dtype=torch.float64)
    beside = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64) * 2.0**-23
    places = (edges[:, None] * (1 + beside)).flatten().float()
    gaps = places[:, None].repeat(1, 20)
    gaps[:, 0], gaps[:, 1] = 0.0, 1.0
    visible = torch.ones_like(gaps, dtype=torch.bool)
    assert near_an_edge(-gaps, visible).all()
    for part in gaps.split(200):  # rows that one query tensor can select
        ends = bracket_accumulation(-part), by_kernel(-part, visible[: len(part)])
        for one, other in zip(*ends, strict=True):
            torch.testing.assert_close(one, other, rtol=BRACKET_WIDTH, atol=0)


LENGTH = 40
GENERATOR = torch.Generator().manual_seed(3)
SEEN = torch.rand(2, 4, LENGTH, LENGTH, generator=GENERATOR) < 0.6
RULES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 9},
    "padding": {"is_causal": True, "key_padding": torch.arange(LENGTH) < torch.tensor([[7], [0]])},
    "documents": {"document_ids": torch.arange(LENGTH) // 11},
    "mask": {"attn_mask": SEEN},
    "bias": {"attn_mask": SEEN.float().log() + torch.arange(LENGTH) / 64},
    "sinks": {"is_causal": True, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """Multiples of 1/64, exact in fp16."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 4, LENGTH, 16), (2, 2, LENGTH, 16), (2, 2, LENGTH, 16))
    return [(torch.randn(shape, generator=generator).clamp(-4, 4) * 64).round().div(64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_temperature_of_gap_adaptive_is_the_same_on_both_backends(rules, dtype):
    request = StatsRequest(accumulation="bracket", gap_thresholds=(0.5, 2.0))
    law = build_policy("gap_adaptive", floor=0.01, ceiling=40.0)
    arguments = {"scale": 0.25, "enable_gqa": True, "request": request, **rules}
    found = {
        backend: attention_with_stats(*inputs(dtype), policy=law, backend=backend, **arguments)
        for backend in ("triton", "blockwise", "reference")
    }
    others = [found[name].stats for name in ("blockwise", "reference")]
    kernel = found["triton"].stats
    for other in others:
        assert torch.equal(kernel.gap_counts, other.gap_counts)
        assert torch.equal(kernel.at_ceiling, other.at_ceiling)
        for name in ("lower", "upper"):
            one, two = (getattr(stats.accumulation, name) for stats in (kernel, other))
            torch.testing.assert_close(one, two, rtol=ROUNDING, atol=0)
        torch.testing.assert_close(kernel.criticality, other.criticality, rtol=2 * ROUNDING, atol=0)
        # β of rows with visible keys
        beta, theirs = (stats.criticality * stats.accumulation.middle for stats in (kernel, other))
        usable = torch.isfinite(beta) & (kernel.accumulation.lower > 0)
        assert usable.any()
        torch.testing.assert_close(beta[usable], theirs[usable], rtol=4 * ROUNDING, atol=0)
        expected = (2.0 * kernel.accumulation.upper).clamp(0.01, 40.0)
        torch.testing.assert_close(beta[usable], expected[usable], rtol=4 * ROUNDING, atol=0)
    tolerance = 1e-4 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found["triton"].output, found["blockwise"].output, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("asked", [{"accumulation": "exact"}, {"accumulation": "bracket", "min_rank": 6}], ids=str)
def test_a_scale_that_no_kernel_gives_is_that_of_the_cpu(asked):
    request = StatsRequest(**asked)
    pair = [
        attention_with_stats(
            *inputs(torch.float32), scale=0.25, enable_gqa=True, is_causal=True, backend=backend, request=request
        ).stats
        for backend in ("triton", "blockwise")
    ]
    for one, other in zip(pair[0].accumulation, pair[1].accumulation, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    torch.testing.assert_close(pair[0].criticality, pair[1].criticality, rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", ["triton", "blockwise", "reference"])
@pytest.mark.parametrize("kind", ["bracket", "exact"])
@pytest.mark.parametrize("min_rank", [2, 3])
@pytest.mark.parametrize("rows", [None, 30])
def test_rows_with_too_few_keys_have_no_scale_and_the_least_temperature(backend, kind, min_rank, rows):
    request = StatsRequest(accumulation=kind, min_rank=min_rank, rows=rows)
    law = build_policy("gap_adaptive", exact=kind == "exact", min_rank=min_rank, floor=0.01, ceiling=40.0)
    arguments = {"scale": 0.25, "enable_gqa": True, "backend": backend, "policy": law, **RULES["padding"]}
    stats = attention_with_stats(*inputs(torch.float32), request=request, **arguments).stats
    few = stats.visible < min_rank
    assert few.any()
    assert (stats.visible == 0).any()
    assert torch.equal(stats.accumulation.upper == 0, few)
    assert torch.equal(stats.accumulation.lower == 0, few)
    assert (stats.criticality[few] == math.inf).all()
    assert not stats.at_ceiling[few].any()


def test_a_running_estimate_learns_the_same_on_both_backends():
    sums = []
    for backend in ("triton", "blockwise"):
        law = build_policy("gap_adaptive", scope="head", num_heads=4)
        arguments = {"scale": 0.25, "enable_gqa": True, "is_causal": True, "policy": law, "backend": backend}
        scaled_dot_product_attention(*inputs(torch.float32), **arguments)
        sums.append(law.sums.clone())
    assert sums[0].any()
    torch.testing.assert_close(*sums, rtol=ROUNDING, atol=1e-9)
