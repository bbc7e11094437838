"""Dataclass fields of policies with validation; `LengthPolicy` converts the values to plain numbers on construction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import MISSING
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnscale._util.checks import check_flag, read_int, read_number
from attnscale.errors import reject, reject_type

# Upper limit of lengths; int64 arithmetic cannot overflow below it.
LONGEST_CONTEXT = 2**62


def number(accepted: str, default: Any = MISSING, *, above: float = -math.inf, below: float = math.inf) -> Any:
    """A field for numbers between two bounds; None is accepted only as the default."""
    return _field(default, partial(read_between, accepted=accepted, above=above, below=below))


def positive(default: Any = MISSING) -> Any:
    """A field for numbers > 0."""
    return number("a number > 0", default, above=0.0)


def not_negative(default: Any = MISSING) -> Any:
    """A field for numbers ≥ 0."""
    return number("a number >= 0", default, above=-math.ulp(0.0))


def length(default: Any = MISSING, *, least: int = 2) -> Any:
    """A field for ints of at least `least` (2 is the first length with a positive logarithm)."""
    return _field(default, partial(read_length, least=least))


def flag(default: bool) -> Any:
    """A field for True or False."""
    return _field(default, _read_flag)


def read_between(
    argument: str, value: object, accepted: str, *, above: float = -math.inf, below: float = math.inf
) -> float:
    """Return a float between the bounds that is finite in fp32."""
    if isinstance(value, (bool, Tensor)):
        reject_type(argument, value, accepted)
    number = read_number(argument, value, accepted)
    if not abs(number) <= torch.finfo(torch.float32).max or number <= above:
        reject(argument, value, f"{accepted}, finite in fp32")
    if number >= below:
        reject(argument, value, accepted)
    return number


def read_length(argument: str, value: object, *, least: int = 2) -> int:
    """Return an int of at least `least`."""
    return read_int(argument, value, f"an int >= {least}, at most 2**62", least=least, most=LONGEST_CONTEXT)


def _read_flag(argument: str, value: bool) -> bool:
    check_flag(argument, value)
    return value


def _field(default: Any, read: Callable[[str, Any], Any]) -> Any:
    return dataclasses.field(default=default, metadata={"read": read})
