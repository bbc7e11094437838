"""Triton's interpreter with correct bfloat16 and some inline assembly, and a variant with fused multiply-add.

The interpreter of triton 3.7 stores bfloat16 as 16-bit integers. It truncates when casting, and all operations,
including matrix products, work on these integers as if they were the numbers. Here bfloat16 is widened to float32,
computed, and rounded to nearest even, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import triton.language as tl
from interpreted_assembly import create_inline_asm
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

Array = np.ndarray


@contextmanager
def corrected() -> Iterator[None]:
    """Context: interpreted kernels compute bfloat16 correctly and execute inline assembly."""
    methods = {
        "binary_op": _binary_op,
        "ternary_op": _ternary_op,
        "unary_op": _unary_op,
        "cast_impl": _cast,
        "create_fp_to_fp": _cast_rounding,
        "create_dot": _dot,
        "create_fma": _fma,
        "get_bf16": _constant,
        "create_inline_asm": create_inline_asm,
    }
    with mock.patch.multiple(InterpreterBuilder, create=True, **methods):
        yield


@contextmanager
def fused() -> Iterator[None]:
    """Context: products that feed a sum or a difference are not rounded first, as in contracted x·y ± z.

    Code must not rely on both sides of a difference being rounded alike.
    """
    methods = {
        "create_fmul": _product,
        "create_fadd": lambda builder, lhs, rhs: _contracted(builder, lhs, rhs, np.add),
        "create_fsub": lambda builder, lhs, rhs: _contracted(builder, lhs, rhs, np.subtract),
    }
    with mock.patch.multiple(InterpreterBuilder, **methods):
        yield


def to_bf16(x: Array) -> Array:
    """Round float32 numbers to the nearest bfloat16, ties to even, and return the bits."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    """Return the float32 numbers of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _is_bf16(handle: TensorHandle) -> bool:
    # A comparison result keeps the dtype of its operands and holds bools.
    return handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16


def _wide(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(from_bf16(handle.data), tl.float32) if _is_bf16(handle) else handle


def _narrow(handle: TensorHandle) -> TensorHandle:
    if handle.data.dtype != np.float32:
        return TensorHandle(handle.data, tl.bfloat16)
    return TensorHandle(to_bf16(handle.data), tl.bfloat16)


_own = {name: getattr(InterpreterBuilder, name) for name in vars(InterpreterBuilder) if not name.startswith("__")}


def _binary_op(builder: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle, op: Callable) -> TensorHandle:
    if not (_is_bf16(lhs) or _is_bf16(rhs)):
        return _own["binary_op"](builder, lhs, rhs, op)
    return _narrow(_own["binary_op"](builder, _wide(lhs), _wide(rhs), op))


def _ternary_op(
    builder: InterpreterBuilder, first: TensorHandle, second: TensorHandle, third: TensorHandle, op: Callable
) -> TensorHandle:
    if op is np.where or not _is_bf16(third):  # selecting bits selects numbers
        return _own["ternary_op"](builder, first, second, third, op)
    return _narrow(_own["ternary_op"](builder, _wide(first), _wide(second), _wide(third), op))


def _unary_op(builder: InterpreterBuilder, arg: TensorHandle, op: Callable) -> TensorHandle:
    result = _own["unary_op"](builder, _wide(arg), op)
    return _narrow(result) if _is_bf16(arg) else result


def _cast(builder: InterpreterBuilder, source: TensorHandle, target: tl.dtype) -> TensorHandle:
    wide = _wide(source)
    if target.scalar == tl.bfloat16:
        return _narrow(TensorHandle(wide.data.astype(np.float32), tl.float32))
    return TensorHandle(wide.data.astype(interpreter._get_np_dtype(target)), target.scalar)


def _cast_rounding(
    builder: InterpreterBuilder, source: TensorHandle, target: tl.dtype, rounding: object
) -> TensorHandle:
    if tl.bfloat16 in (source.dtype.scalar, target.scalar):
        return _cast(builder, source, target)
    return _own["create_fp_to_fp"](builder, source, target, rounding)


def _dot(
    builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, precision: object, imprecise: int
) -> TensorHandle:
    return _own["create_dot"](builder, _wide(a), _wide(b), d, precision, imprecise)


def _fma(builder: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    result = _own["create_fma"](builder, _wide(x), _wide(y), _wide(z))
    return _narrow(result) if _is_bf16(z) else result


def _constant(builder: InterpreterBuilder, value: float) -> TensorHandle:
    return TensorHandle(to_bf16(np.array([value], dtype=np.float32)), tl.bfloat16)


def _product(builder: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
    result = builder.binary_op(lhs, rhs, np.multiply)
    if result.data.dtype == np.float32:
        result.set_attr("product", np.multiply(lhs.data, rhs.data, dtype=np.float64))
    return result


def _contracted(builder: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle, op: Callable) -> TensorHandle:
    for handle in (lhs, rhs):
        if "product" in handle.attr:
            sides = (x.attr["product"] if x is handle else x.data for x in (lhs, rhs))
            return TensorHandle(op(*sides, dtype=np.float64).astype(np.float32), tl.float32)
    return builder.binary_op(lhs, rhs, op)
