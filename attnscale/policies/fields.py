"""Fields of policies that say which values they take; `LengthPolicy` checks them on construction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import MISSING
from functools import partial
from typing import Any

import torch

from attnscale._util.checks import check_flag
from attnscale.errors import reject, reject_type

# No length is longer: int64 arithmetic on lengths cannot overflow below it.
LONGEST_CONTEXT = 2**62


def number(accepted: str, default: Any = MISSING, *, above: float = -math.inf, below: float = math.inf) -> Any:
    """A field of a policy that takes numbers between two bounds; None only where that is the default."""
    return _field(default, partial(check_number, accepted=accepted, above=above, below=below))


def positive(default: Any = MISSING) -> Any:
    """A field that takes numbers > 0."""
    return number("a number > 0", default, above=0.0)


def not_negative(default: Any = MISSING) -> Any:
    """A field that takes numbers ≥ 0."""
    return number("a number >= 0", default, above=-math.ulp(0.0))


def length(default: Any = MISSING, *, least: int = 2) -> Any:
    """A field that takes ints of at least `least` (2: the first length whose logarithm is positive)."""
    return _field(default, partial(check_length, least=least))


def flag(default: bool) -> Any:
    """A field that takes True or False."""
    return _field(default, check_flag)


def check_number(
    argument: str, value: object, accepted: str, *, above: float = -math.inf, below: float = math.inf
) -> None:
    """Refuse anything but an int or float between the bounds that fp32 can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        reject_type(argument, value, accepted)
    if not abs(value) <= torch.finfo(torch.float32).max or value <= above:
        reject(argument, value, f"{accepted}, finite in fp32")
    if value >= below:
        reject(argument, value, accepted)


def check_length(argument: str, value: object, *, least: int = 2) -> None:
    """Refuse anything but an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        reject_type(argument, value, f"an int >= {least}")
    if not least <= value <= LONGEST_CONTEXT:
        reject(argument, value, f"an int >= {least} and <= {LONGEST_CONTEXT}")


def _field(default: Any, check: Callable[[str, object], None]) -> Any:
    return dataclasses.field(default=default, metadata={"check": check})
