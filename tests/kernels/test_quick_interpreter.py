"""The faster interpreter gives the same bits and raises the same errors as Triton's own."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from corrected_interpreter import corrected
from quick_interpreter import as_triton_has_it
from torch import Tensor
from triton.runtime.interpreter import InterpreterError, interpreter_builder

from attnscale_kernels.flash.launch import flash_backward, flash_forward
from attnscale_kernels.visibility import Visibility


@triton.jit
def _product_kernel(x_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tl.store(out_ptr + rows, tl.load(x_ptr + rows) * tl.load(x_ptr + columns))


def computed(dtype: torch.dtype) -> list[Tensor]:
    """Outputs, statistics and gradients of a small attention with softcap and dropout."""
    noise = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(1, 2, 21, 16, generator=noise).to(dtype) for _ in range(4))
    beta, seed = torch.linspace(0.5, 1.5, 42).view(1, 2, 21), torch.tensor([3])
    rule = Visibility(right=0, left=12)
    options = {"scale": 0.25, "softcap": 5.0, "dropout_p": 0.2, "seed": seed}
    with corrected():
        found = flash_forward(query, key, value, beta, rule, entropy=True, **options)
        grads = flash_backward(grad, query, key, value, beta, rule, *found[:2], dbeta=True, **options)
    return [x for x in (*found, *grads) if x is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_those_of_triton(dtype: torch.dtype) -> None:
    with as_triton_has_it():
        expected = computed(dtype)

    found = computed(dtype)

    assert len(found) == len(expected) >= 7
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("columns", [8, 12], ids=["shapes that differ", "no power of two"])
def test_what_triton_refuses_is_refused(columns: int) -> None:
    def message() -> str:
        with pytest.raises(InterpreterError) as refusal:
            _product_kernel[(1,)](torch.ones(16), torch.ones(16), ROWS=16, COLUMNS=columns)
        return str(refusal.value)

    with as_triton_has_it():
        expected = message()

    assert message() == expected


def test_what_is_left_out_was_for_an_assertion_that_is_off() -> None:
    assert not interpreter_builder.options.sanitize_overflow
    with as_triton_has_it():
        assert interpreter_builder.options.sanitize_overflow
        assert not interpreter_builder.options.debug
