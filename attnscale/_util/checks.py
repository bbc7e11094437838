"""Checks of numbers, flags and tensors passed by callers."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnscale.errors import DtypeError, TensorError, reject, reject_type


def read_number(argument: str, value: object, accepted: str = "a number") -> float:
    """Return a float from any number that torch accepts: Python and numpy numbers, and single-value tensors.

    >>> read_number("scale", torch.tensor(0.5))
    0.5
    >>> read_number("scale", "0.5")
    Traceback (most recent call last):
    ...
    attnscale.errors.ArgumentTypeError: scale='0.5' (str) is not accepted: expected a number
    """
    if type(value) is float:
        return value
    if isinstance(value, Tensor):
        if value.requires_grad or value.dim() > 0 or value.is_complex():
            reject_type(argument, value, f"{accepted}, or a 0-dimensional real tensor without gradient")
        return float(value)
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return torch.sym_float(value)  # type: ignore[no-any-return,no-untyped-call]
    if not isinstance(value, numbers.Real):
        reject_type(argument, value, accepted)
    try:
        return float(value)
    except OverflowError:
        reject(argument, value, f"{accepted}, within the range of a float")


LARGEST = 2**62  # keeps the sum of two ints within 64 bits


def read_int(argument: str, value: object, accepted: str, *, least: int | None = None, most: int | None = None) -> int:
    """Return an int within bounds from any object with `__index__`, such as numpy ints.

    Rejects bools and tensors; reading a tensor would synchronise with its device.

    >>> read_int("rows", 0, "an int >= 1", least=1)
    Traceback (most recent call last):
    ...
    attnscale.errors.ArgumentError: rows=0 is not accepted: expected an int >= 1
    """
    if type(value) is int or isinstance(value, torch.SymInt):
        number: Any = value
    elif isinstance(value, (bool, Tensor)):
        reject_type(argument, value, accepted)
    else:
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            reject_type(argument, value, accepted)
    if (least is not None and number < least) or (most is not None and number > most):
        reject(argument, value, accepted)
    if isinstance(number, int) and abs(number) > LARGEST:
        reject(argument, value, f"{accepted}, at most 2**62")
    return number  # type: ignore[no-any-return]


def plain_numbers(value: Any) -> Any:
    """Convert real numbers to Python ints and floats, also inside mappings, lists and tuples.

    >>> import numpy
    >>> plain_numbers({"name": "log", "reference_length": numpy.int64(2048)})
    {'name': 'log', 'reference_length': 2048}
    """
    if isinstance(value, Mapping):
        return {key: plain_numbers(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain_numbers, value))
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def check_flag(argument: str, value: object) -> None:
    """Raise unless value is a bool; 1 or "no" would otherwise count as True."""
    if not isinstance(value, (bool, torch.SymBool)):
        reject_type(argument, value, "True or False")


def check_dense(argument: str, value: Tensor) -> None:
    """Raise for sparse tensors and others without strides."""
    if value.layout != torch.strided:
        raise DtypeError(f"{argument} as a {value.layout} tensor is not accepted: expected a dense one (.to_dense())")


def is_floating(dtype: torch.dtype) -> bool:
    """Whether a dtype is floating point with at least 16 bits. torch does not compute in narrower ones."""
    return dtype.is_floating_point and dtype.itemsize >= 2


def check_floating(argument: str, value: Tensor) -> None:
    """Raise for integer dtypes and floating dtypes below 16 bits."""
    if not is_floating(value.dtype):
        raise DtypeError(f"{argument} of {value.dtype} is not accepted: expected a floating dtype of at least 16 bits")


def check_scores(scores: object, mask: object) -> None:
    """Check floating scores [..., Tk] and an optional bool mask that broadcasts to them."""
    if not isinstance(scores, Tensor):
        reject_type("scores", scores, "a floating tensor [..., keys]")
    check_dense("scores", scores)
    check_floating("scores", scores)
    if scores.dim() == 0:
        raise TensorError("scores of shape [] is not accepted: expected [..., keys]")
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        reject_type("mask", mask, "a bool tensor (True: visible) or None")
    check_dense("mask", mask)
    if mask.dtype != torch.bool:
        raise DtypeError(
            f"mask of {mask.dtype} is not accepted: expected bool (True: visible); add a bias to the scores instead"
        )
    check_broadcasts("mask", mask, scores.shape)


def check_broadcasts(argument: str, value: Tensor, shape: Sequence[int]) -> None:
    """Raise if a tensor does not broadcast to a shape."""
    missing = len(shape) - value.dim()
    pairs = zip(value.shape, shape[missing:], strict=True) if missing >= 0 else ()
    # Equality is tested first: for a data-dependent extent, `== 1` is not decidable.
    if missing < 0 or not all(extent == full or extent == 1 for extent, full in pairs):
        raise TensorError(
            f"{argument} of shape {list(value.shape)} is not accepted: expected one that broadcasts to {list(shape)}"
        )
