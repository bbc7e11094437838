"""Small kernels that have nothing to do with attention: they separate faults of an executor from faults of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from flash_cases import DTYPES, guarded

from attnscale_kernels.launch import Launch, cdiv
from compiled.calls import Call

FP32, FP16, BF16 = DTYPES


@triton.jit
def vector_add_kernel(x_ptr, y_ptr, sum_ptr, count, BLOCK: tl.constexpr):
    """Add two vectors."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.load(x_ptr + at, mask=inside) + tl.load(y_ptr + at, mask=inside)
    tl.store(sum_ptr + at, total, mask=inside)


@triton.jit
def plain_softmax_kernel(x_ptr, weights_ptr, rows, columns, BLOCK: tl.constexpr):
    """Softmax of rows, several per program."""
    at = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(weights_ptr + row * columns + at, e / tl.sum(e, axis=0), mask=at < columns)


@triton.jit
def matrix_product_kernel(
    a_ptr, b_ptr, c_ptr, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """c = a·b for row-major matrices of any size."""
    across = tl.cdiv(n, BLOCK_N)
    rows = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(0, k, BLOCK_K):
        down, over = first + tl.arange(0, BLOCK_K)[:, None], first + tl.arange(0, BLOCK_K)[None, :]
        a = tl.load(a_ptr + rows * k + over, mask=(rows < m) & (over < k), other=0.0)
        b = tl.load(b_ptr + down * n + columns, mask=(down < k) & (columns < n), other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(c_ptr + rows * n + columns, total, mask=(rows < m) & (columns < n))


def _normal(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return guarded(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))


def vector_add(dtype: torch.dtype) -> Call:
    """Exactly torch's sum."""
    x, y = (_normal(1000, dtype=dtype, seed=seed) for seed in (0, 1))
    found = torch.empty_like(x)
    arguments = {"x_ptr": x, "y_ptr": y, "sum_ptr": found, "count": 1000}
    launch = Launch(vector_add_kernel, 4, arguments, {"BLOCK": 256}, 4, 1)

    def check() -> None:
        assert torch.equal(found, x + y), "the sum differs from torch's"

    return Call((launch,), check)


def row_softmax(columns: int) -> Call:
    """Within four roundings of the largest weight, as exp is approximate."""
    x = _normal(7, columns, dtype=FP32, seed=2)
    found = torch.empty_like(x)
    arguments = {"x_ptr": x, "weights_ptr": found, "rows": 7, "columns": columns}
    launch = Launch(plain_softmax_kernel, 3, arguments, {"BLOCK": triton.next_power_of_2(columns)}, 4, 1)

    def check() -> None:
        torch.testing.assert_close(found.double(), x.double().softmax(-1), rtol=1e-6, atol=0.0)

    return Call((launch,), check)


def matrix_product(dtype: torch.dtype, precision: str = "ieee") -> Call:
    """Within the rounding of an fp32 sum of k products; tf32 also rounds the factors to 11 bits."""
    m, n, k = 70, 90, 100
    a, b = _normal(m, k, dtype=dtype, seed=3), _normal(k, n, dtype=dtype, seed=4)
    found = a.new_empty(m, n, dtype=FP32)
    arguments = {"a_ptr": a, "b_ptr": b, "c_ptr": found, "m": m, "n": n, "k": k}
    constants = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 32, "PRECISION": precision}
    launch = Launch(matrix_product_kernel, cdiv(m, 64) * cdiv(n, 32), arguments, constants, 4, 2)
    rounding = 2.0**-9 if precision == "tf32" else 0.0

    def check() -> None:
        true, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
        error = (found.double() - true).abs()
        assert (error <= sizes * (rounding + k * 2.0**-24)).all(), f"off by up to {error.max():.2e}"

    return Call((launch,), check)


CALLS: dict[str, Callable[[], Call]] = {
    "vector add fp32": partial(vector_add, FP32),
    "vector add bf16": partial(vector_add, BF16),
    "row softmax": partial(row_softmax, 300),
    "matrix product fp32": partial(matrix_product, FP32),
    "matrix product tf32": partial(matrix_product, FP32, "tf32"),
    "matrix product fp16": partial(matrix_product, FP16),
    "matrix product bf16": partial(matrix_product, BF16),
}
