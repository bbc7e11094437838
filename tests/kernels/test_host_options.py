"""Host side of the kernels: sign of the scale, result layouts, TF32, and rejected calls."""

from __future__ import annotations

import pytest
import torch
from corrected_interpreter import corrected
from oracle import assert_within_budget, tensors, worst_row
from torch import Tensor

from attnscale import StatsRequest, scaled_dot_product_attention
from attnscale.backends.dispatch import MEASURING
from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import Context
from attnscale_kernels import Visibility, flash_attention
from attnscale_kernels.decode.op import decode_op
from attnscale_kernels.flash.op import flash_backward_op, flash_forward_op
from attnscale_kernels.launch import Tile, attention_constants, multiplies_in_tf32
from attnscale_kernels.operators import FlatAttention

REQUEST = StatsRequest(gap_thresholds=(0.5,), accumulation="bracket")


@pytest.fixture(autouse=True, scope="module")
def _interpreter():
    with corrected():
        yield


def rows_inside(*shape: int, seed: int = 0) -> Tensor:
    """[B, H, T, D] as in models that project to [B, T, H·D]."""
    batch, heads, rows, dim = shape
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, rows, heads, dim, generator=generator).transpose(1, 2)


def measured(backend: str, dtype: torch.dtype, scale: float, queries: int, softcap: float | None) -> dict[str, Tensor]:
    """Output and statistics of a causal call with temperatures of both signs, and gradients if supported."""
    q, k, v = (x.to(dtype) for x in tensors((1, 2, queries, 16), (1, 1, 20, 16), torch.float32))
    beta = (2.0 + torch.arange(queries)).log()[None, None] * torch.tensor([1.0, -1.0])[None, :, None]
    leaves = [x.requires_grad_(queries > 16) for x in (q, k, v, beta.to(dtype))]
    context = Context(queries, 20, q.device, causal=True, slot=20 - queries)
    call = AttentionCall(q, k, v, context, scale, 0.0, softcap, None, leaves[3])
    output, stats = MEASURING[backend].measure(call, REQUEST)
    found = {"output": output.detach(), "counts": stats.gap_counts}
    found |= {name: getattr(stats, name) for name in ("lse", "max_logit", "entropy", "w_max")}
    if queries > 16:
        gradients = torch.autograd.grad(output.square().sum(), leaves)
        found |= dict(zip(("dq", "dk", "dv", "dβ"), gradients, strict=True))
    return found


@pytest.mark.parametrize(("scale", "softcap"), [(-0.3, None), (-0.3, 3.0), (0.0, None)])
@pytest.mark.parametrize("queries", [20, 3], ids=["flash", "decode"])
def test_a_scale_that_is_not_positive_is_an_ordinary_number(scale: float, queries: int, softcap: float | None) -> None:
    found = measured("triton", torch.float32, scale, queries, softcap)
    true = measured("reference", torch.float64, scale, queries, softcap)
    plain = measured("reference", torch.float32, scale, queries, softcap)
    assert torch.equal(found.pop("counts"), true.pop("counts"))
    # A statistic of a row is a row of its own.
    got, expected, own = (
        {name: x[..., None] if x.dim() == 3 else x for name, x in each.items()} for each in (found, true, plain)
    )
    # With so few rows, the error of the same formulas in fp32 may be zero by chance.
    rounding = torch.finfo(torch.float32).eps
    errors = {
        name: max(worst_row(own[name].double() - value), rounding * max(1.0, worst_row(value)))
        for name, value in expected.items()
    }
    assert_within_budget(got, expected, errors, 2.0)


def test_results_have_the_layout_of_the_query() -> None:
    q, k, v = (rows_inside(2, 4, 20, 16, seed=seed).requires_grad_() for seed in range(3))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, policy="log", backend="triton")
    assert out.transpose(1, 2).is_contiguous()
    plain = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    expected = scaled_dot_product_attention(*plain, is_causal=True, policy="log", backend="triton")
    assert expected.is_contiguous()
    assert torch.equal(out, expected)
    pairs = zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), plain), strict=True)
    for one, other in pairs:
        assert one.transpose(1, 2).is_contiguous()
        assert other.is_contiguous()
        assert torch.equal(one, other)


def test_decoding_has_the_layout_of_the_query() -> None:
    q, k, v = rows_inside(2, 4, 3, 16), rows_inside(2, 2, 20, 16, seed=1), rows_inside(2, 2, 20, 16, seed=2)
    found = [
        decode_op(
            *FlatAttention.of(x, k, v, torch.ones(1, 1, 1), Visibility(), scale=0.25, softcap=None),
            False,
            False,
            splits,
        )[0]
        for x in (q, q.contiguous())
        for splits in (1, 3)
    ]
    assert all(out.transpose(1, 2).is_contiguous() for out in found[:2])
    assert all(out.is_contiguous() for out in found[2:])
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_fakes_have_the_layouts_of_the_results() -> None:
    q, k, v = (rows_inside(1, 2, 5, 16, seed=seed) for seed in range(3))
    beta, rule = torch.ones(1, 1, 1), Visibility(right=0)
    checks = ("test_schema", "test_faketensor")
    flat = FlatAttention.of(q, k, v, beta, rule, scale=0.25, softcap=None)
    forward = (*flat, True, True, True)
    torch.library.opcheck(flash_forward_op, forward, test_utils=checks)
    found = flash_forward_op(*forward)
    backward = (*flat, torch.ones_like(q), found[0], found[1], True, found[1], found[3])
    torch.library.opcheck(flash_backward_op, backward, test_utils=checks)
    torch.library.opcheck(decode_op, (*flat, False, True, None), test_utils=checks)


def test_a_bias_that_requires_a_gradient_is_refused() -> None:
    q = torch.randn(1, 1, 4, 16)
    bias = torch.zeros(1, 1, 4, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="no gradient of an additive mask"):
        flash_attention(q, q, q, torch.ones(1, 1, 1), Visibility(mask=bias), scale=0.25)
    with torch.no_grad():
        flash_attention(q, q, q, torch.ones(1, 1, 1), Visibility(mask=bias), scale=0.25)
    leaf = q.clone().requires_grad_()
    found = flash_attention(leaf, q, q, torch.ones(1, 1, 1), Visibility(mask=bias.detach()), scale=0.25)
    found.out.sum().backward()
    assert leaf.grad is not None


def test_products_are_in_tf32_where_torch_is_told_so_in_any_of_its_ways() -> None:
    q, tile = torch.randn(1, 1, 4, 16), Tile(16, 16, 4, 1)
    assert attention_constants(q, tile)["PRECISION"] == "ieee"
    try:
        torch.backends.fp32_precision = "tf32"  # after this, `allow_tf32` raises
        assert attention_constants(q, tile)["PRECISION"] == "tf32"
        assert attention_constants(q.half(), tile)["PRECISION"] == "ieee"
        torch.backends.fp32_precision = "none"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert multiplies_in_tf32()
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert not multiplies_in_tf32()
    finally:
        torch.backends.fp32_precision = "none"
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert torch.backends.cuda.matmul.allow_tf32 is False
