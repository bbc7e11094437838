"""Defects of Triton's interpreter, and their corrections in the interpreter used by the tests."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from corrected_interpreter import corrected, from_bf16, fused, to_bf16

SIZE = 16


@triton.jit
def _product_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def _cast_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(tl.bfloat16))


@triton.jit
def _arithmetic_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    larger = tl.where(a < b, b, a)
    tl.store(out_ptr + at, a * b - a + tl.full([SIZE], 0.5, tl.bfloat16) + larger * 2.0)


@triton.jit
def _difference_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    product = a * b
    tl.store(out_ptr + at, a * b - (product + 0.0))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.full((SIZE, SIZE), torch.nan)
    _product_kernel[(1,)](a, b, out, SIZE=SIZE)
    return out


def cast(x: torch.Tensor) -> torch.Tensor:
    out = torch.full((SIZE,), torch.nan, dtype=torch.bfloat16)
    _cast_kernel[(1,)](x, out, SIZE=SIZE)
    return out


def test_the_plain_interpreter_multiplies_bits():
    a, b = normal(SIZE, SIZE).bfloat16(), normal(SIZE, SIZE, seed=1).bfloat16()
    assert (product(a, b) - a.float() @ b.float()).abs().max() > 1e6
    with corrected():
        torch.testing.assert_close(product(a, b), a.float() @ b.float(), rtol=1e-6, atol=1e-6)


def test_the_plain_interpreter_casts_by_cutting_off():
    x = normal(SIZE)
    assert not torch.equal(cast(x), x.bfloat16())
    with corrected():
        assert torch.equal(cast(x), x.bfloat16())


def test_corrected_arithmetic_is_that_of_torch():
    a, b = normal(SIZE).bfloat16(), normal(SIZE, seed=1).bfloat16()
    out = torch.full_like(a, torch.nan)
    with corrected():
        _arithmetic_kernel[(1,)](a, b, out, SIZE=SIZE)
    assert torch.equal(out, a * b - a + 0.5 + torch.maximum(a, b) * 2)


@pytest.mark.parametrize("scale", [1.0, 1e-39, 1e38], ids=["normal", "subnormal", "huge"])
def test_rounding_is_that_of_torch(scale):
    x = normal(4096) * scale
    x[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1 + 2**-8, 1 + 3 * 2**-8])
    bits = to_bf16(x.numpy())
    assert np.array_equal(bits, x.bfloat16().view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(from_bf16(bits), x.bfloat16().float().numpy())
    assert np.isnan(from_bf16(to_bf16(np.array([np.nan], dtype=np.float32)))).all()


def test_everything_is_as_it_was_afterwards():
    a, b = normal(SIZE, SIZE).bfloat16(), normal(SIZE, SIZE, seed=1).bfloat16()
    before = product(a, b)
    with corrected(), fused():
        product(a, b)
    assert torch.equal(product(a, b), before)


def test_a_fused_product_is_not_rounded():
    a, b = normal(SIZE), normal(SIZE, seed=1)
    out = torch.full_like(a, torch.nan)
    _difference_kernel[(1,)](a, b, out, SIZE=SIZE)
    assert (out == 0).all()
    with fused():
        _difference_kernel[(1,)](a, b, out, SIZE=SIZE)
    exact = a.double() * b.double()
    assert torch.equal(out, (exact - exact.float()).float())
