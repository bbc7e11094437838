"""Which loop of a compiled kernel is which: tiles seen whole, tiles at an edge, and what runs around and besides."""

from __future__ import annotations

from typing import NamedTuple

from scripts.static.counts import Counts, count, times, total_of
from scripts.static.loops import Block, Loop, loop_nest


class Structure(NamedTuple):
    """The loops over tiles in the text of a kernel, in the order they run.

    `phases` are those of one sweep over the tiles, and there may be several `sweeps`. Loops after these repair what is
    seldom broken, where `repairs` says that a kernel has such. `heads_around`: each stands in a loop over heads.
    `trips_inside`: passes of a loop inside a loop over tiles, each of which loads one number.
    """

    phases: tuple[str, ...] = ()  # of "before", "hot" and "after", by `Phases`
    sweeps: int = 1
    repairs: bool = False
    heads_around: bool = False
    trips_inside: int = 1


class Phases(NamedTuple):
    """Instructions of a warp for one tile in each phase, over all sweeps; zeros where a kernel has no such loop."""

    before: Counts = Counts()  # an edge tile before those seen whole
    hot: Counts = Counts()  # a tile that every row sees whole
    after: Counts = Counts()  # an edge tile after those seen whole
    repair: Counts = Counts()  # a tile where something is broken: no call is expected to run it
    around: Counts = Counts()  # a head, outside of its tiles
    once: int = 0  # outside of all loops


def find_phases(blocks: list[Block], structure: Structure) -> Phases:
    """The loops of a kernel, named by the order in which they run."""
    kernel = loop_nest(blocks)
    around = Counts()
    tiles = list(kernel.inner)
    if structure.heads_around:
        around = total_of(count(loop.own) for loop in tiles)
        tiles = [inner for loop in tiles for inner in loop.inner]
    expected = structure.phases * structure.sweeps
    if len(tiles) < len(expected) or (len(tiles) > len(expected) and not structure.repairs):
        lengths = [count(loop.instructions).total for loop in tiles]
        raise ValueError(f"found loops over tiles of {lengths} instructions: expected {list(expected)}")
    names = expected + ("repair",) * (len(tiles) - len(expected))
    found = {
        name: total_of(
            _one_tile(loop, structure.trips_inside) for loop, own in zip(tiles, names, strict=True) if own == name
        )
        for name in names
    }
    return Phases(**found, around=around, once=count(kernel.own).total)


def _one_tile(loop: Loop, trips: int) -> Counts:
    """One pass, with all passes of the loops inside; an assembler that unrolls one makes it load more numbers."""
    parts = [count(loop.own)]
    for inner in loop.inner:
        counts = count(inner.instructions)
        parts.append(times(counts, trips // max(counts.memory, 1)))
    return total_of(parts)
