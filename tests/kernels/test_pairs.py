"""Packed fp32 instructions: the assembly text executed, and the kernels that use it."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from corrected_interpreter import corrected
from flash_cases import DTYPES, Case, assert_backward, inputs_of
from interpreted_assembly import execute

from attnscale_kernels.device import difference, product, product_less
from attnscale_kernels.flash.launch import backward_launches, forward_launches
from attnscale_kernels.launch import SM_80, SM_90, SM_100, assuming

FP32, FP16, BF16 = DTYPES
ROWS, COLUMNS = 4, 8


@pytest.fixture(autouse=True, scope="module")
def _interpreter():
    with corrected():
        yield


@triton.jit
def _kernel(x_ptr, y_ptr, z_ptr, out_ptr, PAIRS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    at = rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x, y, z = tl.load(x_ptr + at), tl.load(y_ptr + at), tl.load(z_ptr + rows)[:, None]
    tl.store(out_ptr + at, product(x, y, PAIRS))
    tl.store(out_ptr + ROWS * COLUMNS + at, difference(x, y, PAIRS))
    tl.store(out_ptr + 2 * ROWS * COLUMNS + at, product_less(x, y, z, PAIRS))


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_pairs_are_what_single_numbers_are_and_fused():
    x, y, z = normal(ROWS, COLUMNS, seed=0), normal(ROWS, COLUMNS, seed=1), normal(ROWS, seed=2)
    out = torch.full((3, ROWS, COLUMNS), torch.nan)
    _kernel[(1,)](x, y, z, out, PAIRS=True, ROWS=ROWS, COLUMNS=COLUMNS)
    single = torch.full_like(out, torch.nan)
    _kernel[(1,)](x, y, z, single, PAIRS=False, ROWS=ROWS, COLUMNS=COLUMNS)
    assert torch.equal(out[:2], single[:2])
    assert torch.equal(out[2], (x.double() * y.double() - z.double()[:, None]).float())
    torch.testing.assert_close(out[2], single[2])


def test_operands_are_those_that_the_text_names():
    text = "{ .reg .b64 a, b; mov.b64 a, {$2, $3}; mov.b64 b, {$5, $4}; add.rn.f32x2 b, a, b; mov.b64 {$1, $0}, b; }"
    first, second = execute(text, [np.float32(number) for number in (1, 2, 10, 20)])
    assert (first, second) == (12, 21)


@pytest.mark.parametrize(
    ("resources", "dtype", "pairs"),
    [(SM_100, BF16, True), (SM_100, FP32, False), (SM_90, BF16, False), (SM_80, FP16, False)],
)
def test_half_precision_on_sm_100_works_in_pairs(resources, dtype, pairs):
    x = inputs_of(Case(dtype=dtype))
    with assuming(resources):
        (forward,), found = forward_launches(x.q, x.k, x.v, x.beta, x.seen.visibility, **x.options)
        backward, _ = backward_launches(
            x.gradient, x.q, x.k, x.v, x.beta, x.seen.visibility, found.out, found.lse, scale=x.options["scale"]
        )
    assert forward.constants["PAIRS"] is backward[-2].constants["PAIRS"] is pairs


@pytest.mark.parametrize(
    "case",
    [
        Case(sees="causal", queries=65, keys=70, dtype=FP16, beta="each"),
        Case(sees="window_of_20", queries=70, keys=70, dim=24, dtype=BF16, softcap=2.0),
        Case(sees="bias_that_hides", queries=33, keys=65, heads=1, dtype=FP16, dropout_p=0.25),
    ],
    ids=str,
)
def test_gradients_in_pairs_are_as_good(case):
    with assuming(SM_100):
        assert_backward(inputs_of(case))
