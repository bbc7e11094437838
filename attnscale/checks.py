"""Numbers and flags as callers write them, to plain Python ones."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor

from attnscale.errors import reject_type


def read_number(argument: str, value: object, accepted: str = "a number") -> float:
    """A float from whatever torch takes for one: Python's and numpy's numbers, and a tensor with a single value.

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
