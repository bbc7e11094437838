"""Triton's interpreter without redundant work: the same numbers in about half the time.

The kernels compute little in these tests, so most of the time is Triton's bookkeeping: types and shapes created for
each value, and a second computation in 64 bits for a disabled assertion.
"""

from __future__ import annotations

import builtins
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

_builder = interpreter.interpreter_builder
_own_dtype_of = interpreter._get_np_dtype
_own_equality = tl.dtype.__eq__
_own_block_type = tl.block_type.__init__
_own_broadcast = TritonSemantic.broadcast_impl_value


def install() -> None:
    """Install for the whole process; results and errors do not change."""
    for owner, name, value in _replacements():
        setattr(owner, name, value)


@contextmanager
def as_triton_has_it() -> Iterator[None]:
    """Context: restore Triton's own interpreter."""
    with ExitStack() as stack:
        for (owner, name), value in _own.items():
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _replacements() -> list[tuple[Any, str, Any]]:
    # Integer overflow is computed for an assertion that exists in debug mode only.
    checked = _builder.options.debug
    return [
        (_builder, "options", dataclasses.replace(_builder.options, sanitize_overflow=checked)),
        (interpreter, "_get_np_dtype", _dtype_of),
        (InterpretedFunction, "__call__", _call),
        (tl.dtype, "__eq__", _equal),
        (tl.block_type, "__init__", _init_block_type),
        (tl.tensor, "__init__", _init_tensor),
        (TritonSemantic, "broadcast_impl_value", _broadcast),
    ]


def _call(function: InterpretedFunction, *args: object, **kwargs: object) -> object:
    """Call a device function without patching the language again; a launch does so once."""
    if any(tl.core.is_builtin(language.load) for language in _languages(function.fn)):
        interpreter._patch_lang(function.fn)
    try:
        return function.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


@cache
def _languages(function: Callable[..., object]) -> tuple[Any, ...]:
    return tuple(module for module in (tl, tl.core) if any(x is module for x in function.__globals__.values()))


_dtypes: dict[str, np.dtype[Any]] = {}


def _dtype_of(type_: Any) -> np.dtype[Any]:
    scalar = type_.scalar
    if isinstance(scalar, tl.pointer_type):
        return _own_dtype_of(scalar)
    known = _dtypes.get(scalar.name)
    if known is None:
        known = _dtypes[scalar.name] = _own_dtype_of(scalar)
    return known


def _equal(self: tl.dtype, other: object) -> bool:
    return self is other or _own_equality(self, other)


class _Shape:
    """Cached properties of types and values of one shape."""

    def __init__(self, block: Any, extents: tuple[int, ...]) -> None:
        self.of_type, self.numel, self.name = block.shape, block.numel, str(block.shape)
        self.of_value = tl.tuple([tl.constexpr(extent) for extent in extents])
        self.constant_numel = tl.constexpr(math.prod(extents))


_shapes: dict[tuple[int, ...], _Shape] = {}
_NO_EXTENTS, _ONE = tl.tuple([]), tl.constexpr(1)


def _init_block_type(self: Any, element_ty: tl.dtype, shape: Sequence[Any]) -> None:
    extents = builtins.tuple([x.value if isinstance(x, tl.constexpr) else x for x in shape])
    known = _shapes.get(extents)
    if known is None:
        _own_block_type(self, element_ty, shape)  # rejects invalid shapes
        known = _shapes[extents] = _Shape(self, extents)
    self.element_ty, self.shape, self.numel = element_ty, known.of_type, known.numel
    self.name = f"<{known.name}, {element_ty}>"
    self.common = known


def _init_tensor(self: Any, handle: object, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    if type.is_block():
        self.shape, self.numel = type.common.of_value, type.common.constant_numel
    else:
        self.shape, self.numel = _NO_EXTENTS, _ONE


def _broadcast(self: TritonSemantic, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Skip the broadcast of values that already have the same shape."""
    left, right = lhs.type, rhs.type
    if left.is_block() and right.is_block() and left.common is right.common:
        return lhs, rhs
    return _own_broadcast(self, lhs, rhs)


_own = {(owner, name): getattr(owner, name) for owner, name, _ in _replacements()}
