"""The bracket of Λ and the β made of it are the same in torch and in the kernels: both count in the same bins."""

from __future__ import annotations

import pytest
import torch
from families import NAMES, rows

from attnscale import StatsRequest, attention_with_stats, build_policy
from attnscale.statistics.gaps import BRACKET_WIDTH, bracket_accumulation
from attnscale_kernels.gaps import bins
from attnscale_kernels.gaps.launch import gap_bracket
from attnscale_kernels.launch import Tile
from attnscale_kernels.visibility import Visibility

TILE = Tile(64, 64, 4, 1)
# A gap on the edge of a bin is counted on one side or the other by a rounding, which moves a bound by one bin at most.
ONE_BIN = 1 + bins.WIDTH


def both(scores: torch.Tensor, visible: torch.Tensor):
    """Lower and upper ends [rows], from torch and from the kernel, of scores that products give exactly."""
    identity = torch.eye(16)[:1].expand(scores.shape[0], -1)
    found = []
    for row, seen in zip(scores, visible, strict=True):
        key = torch.zeros(1, 1, row.shape[0], 16)
        key[..., 0] = row
        mask = seen[None, None, None]
        given = identity[:1][None, None], key, Visibility(mask=mask)
        kernel = gap_bracket(*given, scale=1.0, tile=TILE)
        torchs = bracket_accumulation(row, mask=seen)
        found.append([*torchs, kernel.lower.flatten()[0], kernel.upper.flatten()[0]])
    return torch.tensor(found).unbind(-1)


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("keys", [3, 40, 300])
def test_both_have_the_same_bounds(family, keys):
    scores, visible = rows(family, 4, keys, seed=keys)
    lower, upper, kernel_lower, kernel_upper = both(scores.float(), visible)
    for one, other in ((lower, kernel_lower), (upper, kernel_upper)):
        same = torch.isclose(one, other, rtol=1e-4, atol=0.0)
        neighbours = (one <= other * ONE_BIN) & (other <= one * ONE_BIN)
        assert (same | neighbours).all(), (one, other)
        assert same.float().mean() >= 0.75, (one, other)  # an edge is hit now and then, not in most rows
    apart = lower > 0
    assert (upper[apart] <= lower[apart] * (1 + BRACKET_WIDTH)).logical_or(upper[apart] == lower[apart]).all()


def test_the_temperature_of_a_row_does_not_depend_on_the_backend():
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 70, 16, generator=generator) for _ in range(3))
    policy, request = build_policy("gap_adaptive"), StatsRequest(accumulation="bracket")
    found = [
        attention_with_stats(q, k, v, is_causal=True, policy=policy, request=request, backend=backend).stats
        for backend in ("triton", "blockwise")
    ]
    one, other = (stats.accumulation.upper for stats in found)
    assert torch.isclose(one, other, rtol=1e-4).float().mean() > 0.99
    assert ((one <= other * ONE_BIN) & (other <= one * ONE_BIN)).all()
    torch.testing.assert_close(found[0].max_logit[one == other], found[1].max_logit[one == other], rtol=1e-4, atol=1e-5)
