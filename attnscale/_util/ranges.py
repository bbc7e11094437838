"""Ranges of layers and heads as text: "4-11", "0, 2, 5-7"."""

from __future__ import annotations

import re

from attnscale.errors import reject

_PART = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


def read_range(argument: str, text: str) -> list[int]:
    """Return the integers of a range, sorted.

    >>> read_range("layers", "0, 4-6")
    [0, 4, 5, 6]
    """
    found: set[int] = set()
    for part in str(text).split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            reject(argument, text, "a range such as '4-11' or '0, 2, 5-7'")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(found)


def write_range(numbers: list[int]) -> str:
    """Inverse of `read_range`, in the shortest form.

    >>> write_range([0, 4, 5, 6])
    '0,4-6'
    """
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
