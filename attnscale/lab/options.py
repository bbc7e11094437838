"""Lists as a command line or a YAML file writes them: `a,b,c`, `512:32768`, or a list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnscale.errors import reject

NAMES = "names with commas between them (a,b), or a list"
NUMBERS = "whole numbers (128,2048), a range that doubles (512:32768; in quotes in a YAML file), or a list"


def read_names(value: Any, argument: str = "names") -> tuple[Any, ...]:
    """The names in a text, or the items of a list, whose types are for the caller to check.

    >>> read_names("constant, log")
    ('constant', 'log')
    >>> read_names(["constant", "log"])
    ('constant', 'log')
    """
    if isinstance(value, (list, tuple)):
        return tuple(value)
    if not isinstance(value, str):
        reject(argument, value, NAMES)
    names = tuple(name.strip() for name in value.split(","))
    if not all(names):
        reject(argument, value, NAMES)
    return names


def read_lengths(value: Any, argument: str = "lengths") -> tuple[Any, ...]:
    """The numbers in a text, where `a:b` doubles from a to b, or the items of a list.

    >>> read_lengths("512:4096")
    (512, 1024, 2048, 4096)
    >>> read_lengths("128,1024:2048")
    (128, 1024, 2048)
    >>> read_lengths("512:3000")
    Traceback (most recent call last):
    ...
    attnscale.errors.ArgumentError: lengths='512:3000' is not accepted: expected 2048 or 4096 as the end of 512:3000
    """
    if isinstance(value, (list, tuple)):
        return tuple(value)
    # A number is not taken for a list of one: YAML reads 16:32 without quotes as 992 (minutes and seconds).
    if not isinstance(value, str):
        reject(argument, value, NUMBERS)
    return tuple(number for part in value.split(",") for number in _numbers(part.strip(), value, argument))


def _numbers(part: str, value: str, argument: str) -> Iterator[int]:
    """One number, or those of a range."""
    ends = part.split(":")
    if len(ends) > 2 or not all(end.isdecimal() for end in ends):
        reject(argument, value, NUMBERS)
    number, last = int(ends[0]), int(ends[-1])
    if len(ends) == 2 and not 1 <= number <= last:
        reject(argument, value, f"a range from 1 or more upwards, not {part}")
    yield number
    while number < last:
        if 2 * number > last:
            reject(argument, value, f"{number} or {2 * number} as the end of {part}")
        number *= 2
        yield number
