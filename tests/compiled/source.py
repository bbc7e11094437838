"""The source lines that an instruction was made of, from the `.loc` directives of a compiled text."""

from __future__ import annotations

import ast
import functools
import re

from compiled.launching import ROOT

TILES = ROOT / "kernels" / "attnscale_kernels" / "tiles.py"


@functools.lru_cache(maxsize=64)
def origins_of(text: str) -> tuple[tuple[tuple[str, int], ...], ...]:
    """For each line of a text, its chain of inlined calls: file and line, innermost first."""
    found: list[tuple[tuple[str, int], ...]] = [()]
    chain: tuple[tuple[str, int], ...] = ()
    for line in text.splitlines():
        if line.lstrip().startswith(".loc"):
            told = re.split(r"//|;", line, maxsplit=1)[-1]
            chain = tuple((file, int(number)) for file, number in re.findall(r"([\w.]+\.py):(\d+)", told))
        found.append(chain)
    return tuple(found)


@functools.cache
def lines_of(function: str) -> frozenset[int]:
    """The lines of a function of tiles.py."""
    tree = ast.parse(TILES.read_text())
    node = next(x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == function)
    return frozenset(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def is_inside(text: str, line: int, function: str) -> bool:
    """Whether a line of a text comes from a function of tiles.py."""
    return any(file == TILES.name and number in lines_of(function) for file, number in origins_of(text)[line])


@functools.cache
def _marks() -> frozenset[int]:
    """The lines of tiles.py that only a repair phase executes: they look for keys that are not finite."""
    lines = enumerate(TILES.read_text().splitlines(), 1)
    found = frozenset(number for number, line in lines if "tl.sum(wide - wide" in line)
    assert found, "the repair phase has another text"
    return found


@functools.lru_cache(maxsize=64)
def repair_lines(text: str) -> frozenset[int]:
    """The lines of a text that only a repair phase executes; empty for a kernel without one."""
    return frozenset(
        place
        for place, chain in enumerate(origins_of(text))
        if any(file == TILES.name and number in _marks() for file, number in chain)
    )
