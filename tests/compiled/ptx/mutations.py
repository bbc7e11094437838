"""Changes of PTX by kind: places where one instruction is removed or altered."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from compiled.ptx import asynchronous_mutations
from compiled.ptx.parse import parse

# The changed statement, "" if it is removed, or None where the kind does not apply.
Change = Callable[[str], str | None]


def _removed(pattern: str) -> Change:
    return lambda text: "" if re.search(pattern, text) else None


def _replaced(pattern: str, to: str | Callable[[re.Match[str]], str]) -> Change:
    def change(text: str) -> str | None:
        changed = re.sub(pattern, to, text, count=1)
        return None if changed == text else changed

    return change


def _transposed(text: str) -> str | None:
    if "ldmatrix" not in text:
        return None
    return text.replace(".trans", "") if ".trans" in text else text.replace(".shared.b16", ".trans.shared.b16")


def _swapped_factors(text: str) -> str | None:
    """Swap two registers of the left factor of a matrix product."""
    if "mma.sync" not in text:
        return None
    factor = re.findall(r"\{[^}]*\}", text)[1]
    first, second, *others = factor.strip("{} ").split(", ")
    return text.replace(factor, "{ " + ", ".join([second, first, *others]) + " }")


CHANGES: dict[str, Change] = {
    "barrier removed": _removed(r"\bbar\.sync\b"),
    "warp barrier removed": _removed(r"\bbar\.warp\.sync\b"),
    "wait for copies removed": _removed(r"cp\.async\.wait_group"),
    "wait for one group less": _replaced(
        r"(cp\.async\.wait_group\s+)(\d+)", lambda found: f"{found[1]}{int(found[2]) + 1}"
    ),
    "commit removed": _removed(r"cp\.async\.commit_group"),
    "copy removed": _removed(r"cp\.async\.c[ag]\.shared"),
    "matrix product removed": _removed(r"mma\.sync"),
    "matrix load removed": _removed(r"ldmatrix"),
    "matrix load transposed or not": _transposed,
    "global store removed": _removed(r"st\.global"),
    "shared store removed": _removed(r"st\.shared"),
    "guard of a global access removed": _replaced(r"^@!?%p\d+\s+((?:ld|st)\.global|cp\.async)", r"\1"),
    "shuffle with another lane": _replaced(
        r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+, )(\d+)", lambda found: f"{found[1]}{int(found[2]) ^ 3}"
    ),
    "registers of a factor swapped": _swapped_factors,
    "operands of a difference swapped": _replaced(r"(sub\.f32\s+%r\d+, )(%r\d+), (%r\d+)", r"\1\3, \2"),
    "shared offset changed": _replaced(
        r"((?:ld|st|ldmatrix)[\w.]*shared[\w.]* .*\[\s*%r\d+\s*\+\s*)(\d+)",
        lambda found: f"{found[1]}{int(found[2]) + 16}",
    ),
    "global offset changed": _replaced(
        r"((?:ld|st)\.global[\w.]* .*\[\s*%rd\d+\s*\+\s*)(\d+)", lambda found: f"{found[1]}{int(found[2]) + 16}"
    ),
}

CHANGES |= asynchronous_mutations.CHANGES


def places(text: str) -> Iterator[tuple[str, int, str | None]]:
    """Kind, line, and the new instruction or None to remove the old one."""
    lines = text.splitlines()
    for instruction in parse(text).instructions:
        statement = lines[instruction.line - 1].strip()
        for kind, change in CHANGES.items():
            changed = change(statement)
            if changed is not None:
                yield kind, instruction.line, changed or None
