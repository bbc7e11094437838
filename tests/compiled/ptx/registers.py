"""The registers that each instruction reads and writes, for the digests of a trace."""

from __future__ import annotations

from typing import Any

import numpy as np

from compiled.ptx.encode import ADDRESS, NUMBERS
from compiled.ptx.rules import RULES, WIDTHS

# `struct registers` of core.c.
REGISTERS = np.dtype([("read", np.int32, 12), ("written", np.int32, 8)])

_NAMES = {number: name.removeprefix("OP_") for name, number in NUMBERS.items()}
_RULES = list(RULES.values())


def registers_of(code: np.ndarray) -> np.ndarray:
    """Rows of registers, and whether each is 64-bit; a store writes what it reads."""
    found = np.full(len(code), -1, REGISTERS)
    for place, entry in enumerate(code):
        read, written = _registers(entry)
        if entry["predicate"] >= 0:
            read = [*read, (int(entry["predicate"]), False)]
        for name, rows in (("read", read), ("written", written)):
            found[place][name][: len(rows)] = [2 * row + wide for row, wide in rows]
    return found


Rows = list[tuple[int, bool]]


def _registers(entry: Any) -> tuple[Rows, Rows]:
    rows = [int(row) for row in entry["rows"]]
    numbers = [int(number) for number in entry["numbers"]]
    op = int(entry["op"])
    if op < len(_RULES):
        rule = _RULES[op]
        kinds = [WIDTHS[kind] == 64 for kind in (rule.result, *rule.operands)]
        written, *read = zip(rows, kinds, strict=False)
        return read, [written]
    name = _NAMES[op]
    narrow = [(row, False) for row in rows]
    if name.startswith(("LOAD_GLOBAL", "LOAD_SHARED", "STORE")):
        values = [(row, bool(numbers[3])) for row in rows[: numbers[0]]]
        address = (rows[ADDRESS], name.endswith("GLOBAL"))
        return ([address], values) if name.startswith("LOAD") else ([*values, address],) * 2
    if name == "LOAD_MATRICES":
        return [narrow[ADDRESS]], narrow[: numbers[0]]
    if name == "COPY":
        sized = narrow[2:3] if numbers[1] else []
        return ([narrow[0], (rows[1], True), *sized],) * 2
    ends = {"MULTIPLY": (4, 14), "SHUFFLE": (1, 5), "REDUCE": (1, 3)}
    first, end = ends.get(name, (0, 0))
    return narrow[first:end], narrow[:first]
