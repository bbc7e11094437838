"""Checks of numbers, flags and score matrices that callers pass."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from attnscale.errors import DtypeError, TensorError, reject, reject_type


def read_number(argument: str, value: object, accepted: str = "a number") -> float:
    """A float from what torch accepts as one: Python's and numpy's numbers, and a tensor with a single value.

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
            reject_type(argument, value, f"{accepted}; a tensor only with a single value, no axis and no gradient")
        return float(value)
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return torch.sym_float(value)  # type: ignore[no-any-return,no-untyped-call]
    if not isinstance(value, numbers.Real):
        reject_type(argument, value, accepted)
    return float(value)


def check_flag(argument: str, value: object) -> None:
    """Refuse anything but a bool: 1 or "no" would be taken for True."""
    if not isinstance(value, (bool, torch.SymBool)):
        reject_type(argument, value, "True or False")


def check_scores(scores: object, mask: object) -> None:
    """Refuse anything but floating scores [..., Tk] with None or a bool mask that broadcasts to them."""
    if not isinstance(scores, Tensor):
        reject_type("scores", scores, "a floating tensor [..., keys]")
    if not scores.dtype.is_floating_point:
        raise DtypeError(f"scores of {scores.dtype} is not accepted: expected a floating dtype")
    if scores.dim() == 0:
        raise TensorError("scores of shape [] is not accepted: expected [..., keys]")
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        reject_type("mask", mask, "a bool tensor (True: visible) or None")
    if mask.dtype != torch.bool:
        raise DtypeError(
            f"mask of {mask.dtype} is not accepted: expected bool (True: visible); add a bias to the scores"
        )
    check_broadcasts("mask", mask, scores.shape)


def check_broadcasts(argument: str, value: Tensor, shape: Sequence[int]) -> None:
    """Refuse a tensor that does not broadcast to a shape."""
    missing = len(shape) - value.dim()
    pairs = zip(value.shape, shape[missing:], strict=True) if missing >= 0 else ()
    # Equality first: a data-dependent extent is known to equal itself, but not whether it is 1.
    if missing < 0 or not all(extent == full or extent == 1 for extent, full in pairs):
        raise TensorError(
            f"{argument} of shape {list(value.shape)} is not accepted: expected one that broadcasts to {list(shape)}"
        )


def check_int(argument: str, value: object, accepted: str, *, least: int) -> None:
    """Refuse anything but an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or value < least:
        reject(argument, value, accepted)
