"""Device functions that work on two fp32 numbers with one instruction, which sm_100 has.

LLVM finds such pairs only where a sum over a tile leads to them: of a tile of the forward, it leaves the products with
the accumulator scalar, and the exponents too under most rules. Rounding is that of the scalar instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(x, y, PAIRS: tl.constexpr):
    """x·y in fp32, which broadcast."""
    if PAIRS:
        return _of_two("mul.rn.f32x2", x, y)
    return x * y


@triton.jit
def difference(x, y, PAIRS: tl.constexpr):
    """x − y in fp32, which broadcast."""
    if PAIRS:
        return _of_two("add.rn.f32x2", x, -y)
    return x - y


@triton.jit
def product_less(x, y, z, PAIRS: tl.constexpr):
    """x·y − z in fp32, which broadcast, rounded once where PAIRS."""
    if PAIRS:
        return tl.inline_asm_elementwise(
            """{
            .reg .b64 x, y, z;
            mov.b64 x, {$2, $3};
            mov.b64 y, {$4, $5};
            mov.b64 z, {$6, $7};
            fma.rn.f32x2 x, x, y, z;
            mov.b64 {$0, $1}, x;
            }""",
            "=r,=r,r,r,r,r,r,r",
            [x, y, -z],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return x * y - z


@triton.jit
def _of_two(INSTRUCTION: tl.constexpr, x, y):
    return tl.inline_asm_elementwise(
        """{
        .reg .b64 x, y;
        mov.b64 x, {$2, $3};
        mov.b64 y, {$4, $5};
        """
        + INSTRUCTION
        + """ x, x, y;
        mov.b64 {$0, $1}, x;
        }""",
        "=r,=r,r,r,r,r",
        [x, y],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )
