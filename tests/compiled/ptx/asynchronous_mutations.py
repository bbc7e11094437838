"""Changes of the instructions of sm_90 by kind; see mutations.py."""

from __future__ import annotations

import re
from collections.abc import Callable

# A number of 64 bits that makes a descriptor of an address.
_DESCRIPTOR = re.compile(r"^((?:or\.b64|add\.s64)\s+%rd\d+, %rd\d+, )(-?\d{15,})$")


def _field(change: Callable[[int], int]) -> Callable[[str], str | None]:
    """A change of the constant part of a matrix descriptor."""

    def changed(text: str) -> str | None:
        found = _DESCRIPTOR.match(text.rstrip(";"))
        if found is None:
            return None
        before = int(found[2]) & 0xFFFF_FFFF_FFFF_FFFF
        after = change(before)
        if after == before:
            return None
        return f"{found[1]}{after - (1 << 64) if after >> 63 else after};"

    return changed


def _doubled(place: int) -> Callable[[int], int]:
    """Double a field of 14 bits."""
    return lambda bits: bits + (bits & 0x3FFF << place)


def _other_pattern(bits: int) -> int:
    return bits & ~(3 << 62) | (bits >> 62) % 3 + 1 << 62


def _swapped(text: str) -> str | None:
    """Swap two registers of a first factor."""
    found = re.match(r"(wgmma\.mma_async\S+ \{[^}]*\}, \{)(%r\d+),(%r\d+)(,.*)", text)
    return f"{found[1]}{found[3]},{found[2]}{found[4]}" if found else None


def _replaced(pattern: str, to: str | Callable[[re.Match[str]], str]) -> Callable[[str], str | None]:
    def change(text: str) -> str | None:
        changed = re.sub(pattern, to, text, count=1)
        return None if changed == text else changed

    return change


def _removed(pattern: str) -> Callable[[str], str | None]:
    return lambda text: "" if re.search(pattern, text) else None


CHANGES: dict[str, Callable[[str], str | None]] = {
    "warpgroup product removed": _removed(r"wgmma\.mma_async"),
    "wait for products removed": _removed(r"wgmma\.wait_group"),
    "wait for one group of products less": _replaced(
        r"(wgmma\.wait_group\S+ )(\d+)", lambda found: f"{found[1]}{int(found[2]) + 1}"
    ),
    "commit of products removed": _removed(r"wgmma\.commit_group"),
    "fence of registers removed": _removed(r"wgmma\.fence"),
    "proxy fence removed": _removed(r"fence\.proxy\.async"),
    "start in a descriptor changed": _field(lambda bits: bits + 16),
    "leading offset in a descriptor doubled": _field(_doubled(16)),
    "stride in a descriptor doubled": _field(_doubled(32)),
    "pattern in a descriptor changed": _field(_other_pattern),
    "warpgroup factor transposed or not": _replaced(
        r"^(wgmma\.mma_async.*, )([01])(;)$", lambda found: f"{found[1]}{1 - int(found[2])}{found[3]}"
    ),
    "accumulator added or not": _replaced(
        r"^(wgmma\.mma_async.*%rd\d+, )(%p\d+|0)(, 1, 1)",
        lambda found: f"{found[1]}{'1' if found[2] == '0' else '0'}{found[3]}",
    ),
    "registers of a warpgroup factor swapped": _swapped,
    "bulk copy removed": _removed(r"cp\.async\.bulk"),
    "coordinates of a copy swapped": _replaced(r"(cp\.async\.bulk.*\{)(%r\d+), (%r\d+)", r"\1\3, \2"),
    "wait for a bulk copy removed": _replaced(r"^mbarrier\.try_wait\S+ complete,.*", "setp.eq.b32 complete, 1, 1;"),
    "parity of a wait always 0": _replaced(r"^(mbarrier\.try_wait.*\], )%r\d+", r"\g<1>0"),
    "expected bytes changed": _replaced(
        r"(mbarrier\.arrive.*, )(\d+)", lambda found: f"{found[1]}{int(found[2]) // 2}"
    ),
    "expected bytes removed": _removed(r"mbarrier\.arrive"),
    "barrier object not started": _removed(r"mbarrier\.init"),
    "barrier object not ended": _removed(r"mbarrier\.inval"),
    "matrix store removed": _removed(r"stmatrix"),
}
