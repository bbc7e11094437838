"""Triton's interpreter with its bfloat16 put right and some assembly, and one that fuses products into sums as a GPU.

The interpreter of triton 3.7 keeps bfloat16 as 16-bit integers. It casts to it by cutting bits off, and everything
else — products of matrices too — works on those integers as if they were the numbers. Here bfloat16 is widened to
float32, worked on, and rounded to nearest even: what a GPU does.
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
    """Inside, kernels that are interpreted compute with bfloat16 as it is meant, and assembly is executed."""
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
    """Inside, a product that goes into a sum or a difference is not rounded before: x·y ± z as compilers contract it.

    What holds only because both sides of a difference were rounded alike does not hold on a GPU.
    """
    methods = {
        "create_fmul": _product,
        "create_fadd": lambda builder, lhs, rhs: _contracted(builder, lhs, rhs, np.add),
        "create_fsub": lambda builder, lhs, rhs: _contracted(builder, lhs, rhs, np.subtract),
    }
    with mock.patch.multiple(InterpreterBuilder, **methods):
        yield


def to_bf16(x: Array) -> Array:
    """The bits of float32 numbers rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    """The float32 numbers that bfloat16 bits stand for."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _is_bf16(handle: TensorHandle) -> bool:
    # A comparison keeps the dtype of what it compared and holds bools.
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
    if op is np.where or not _is_bf16(third):  # a choice between bits is a choice between numbers
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
