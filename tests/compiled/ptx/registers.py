"""The registers that each instruction reads and writes, for the digests of a trace."""

from __future__ import annotations

from typing import Any

import numpy as np

from compiled.ptx.asynchronous import FACTOR_IN_REGISTERS
from compiled.ptx.encode import ADDRESS, NUMBERS
from compiled.ptx.rules import RULES, WIDTHS

# `struct registers` of core.c. A product of a warpgroup has up to 128 results and reads 4 + 3 registers and a guard.
MOST = 140
REGISTERS = np.dtype([("read", np.int32, MOST), ("written", np.int32, MOST)])

_NAMES = {number: name.removeprefix("OP_") for name, number in NUMBERS.items()}
_RULES = list(RULES.values())


def registers_of(code: np.ndarray, lists: np.ndarray) -> np.ndarray:
    """Rows of registers, and whether each is 64-bit; a store writes what it reads."""
    found = np.full(len(code), -1, REGISTERS)
    for place, entry in enumerate(code):
        read, written = _product(entry, lists) if entry["op"] == NUMBERS["OP_PRODUCT"] else _registers(entry)
        if entry["predicate"] >= 0:
            read = [*read, (int(entry["predicate"]), False)]
        for name, rows in (("read", read), ("written", written)):
            found[place][name][: len(rows)] = [2 * row + wide for row, wide in rows]
    return found


Rows = list[tuple[int, bool]]


def _product(entry: Any, lists: np.ndarray) -> tuple[Rows, Rows]:
    """A product of a warpgroup. Its results count as written when it is issued: the executor computes them at once."""
    _, columns, flags, first = (int(number) for number in entry["numbers"])
    results = [(int(row), False) for row in lists[first:][: columns // 2]]
    scaled, a, b = (int(row) for row in entry["rows"][:3])
    in_registers = [(int(row), False) for row in lists[first + len(results) :][:4]]
    factor = in_registers if flags & FACTOR_IN_REGISTERS else [(a, True)]
    return [*results, *factor, (b, True), (scaled, False)], results


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
    if name == "COPY_BOX":
        return ([(rows[0], True), *narrow[1 : 2 + numbers[0]], narrow[ADDRESS]],) * 2
    if name in ("OBJECT_START", "OBJECT_EXPECT", "OBJECT_END"):
        return ([*narrow[: int(entry["used"])], narrow[ADDRESS]],) * 2
    if name == "OBJECT_WAIT":
        return [narrow[1], narrow[ADDRESS]], narrow[:1]
    ends = {"ELECT": (2, 3), "MULTIPLY": (4, 14), "SHUFFLE": (1, 5), "REDUCE": (1, 3)}
    first, end = ends.get(name, (0, 0))
    return narrow[first:end], narrow[:first]
