"""The plain baseline kernel computes attention: interpreter against fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from attnscale import scaled_dot_product_attention
from attnscale_kernels.launch import Tile
from scripts.static.reference_launch import has_descriptors, reference_launches, reference_tile
from scripts.static.targets import TARGETS


@pytest.mark.parametrize("descriptors", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize(("dtype", "tile"), [(torch.float32, Tile(64, 32, 4, 1)), (torch.float16, Tile(64, 64, 4, 1))])
def test_it_is_as_right_as_torch(dtype: torch.dtype, tile: Tile, descriptors: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (2 * torch.randn(1, 2, 192, 32, generator=generator).to(dtype) for _ in range(3))
    wide = [x.double() for x in (query, key, value)]
    exact = scaled_dot_product_attention(*wide, is_causal=True, scale=0.3, backend="reference")
    allowed = (F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3) - exact).abs().max()

    (launch,), out = reference_launches(query, key, value, scale=0.3, tile=tile, descriptors=descriptors)
    out.fill_(torch.nan)
    launch.run(query)

    rounding = exact.abs().max() * torch.finfo(dtype).eps / 2
    assert (out - exact).abs().max() <= 2 * allowed + rounding
    logits = (wide[0] @ wide[1].mT * 0.3).masked_fill(torch.ones(192, 192).triu(1).bool(), -torch.inf)
    lse = launch.arguments["lse_ptr"]
    assert isinstance(lse, torch.Tensor)
    torch.testing.assert_close(lse.double() * 0.6931471805599453, logits.logsumexp(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("target", "expected"), {"sm_80": False, "sm_90": True, "sm_100": True, "sm_120": False}.items()
)
def test_descriptors_are_taken_on_cards_that_copy_by_them(target: str, expected: bool) -> None:
    resources = TARGETS[target].resources

    assert has_descriptors(resources) == expected
    assert reference_tile(64, resources)[:2] == (128, 128)
