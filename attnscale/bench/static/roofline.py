"""What the counts of a loop say about its speed: cycles of each pipe for a tile, and a range for the whole.

A model on published peak rates, not a measurement: no latencies, no conflicts, caches that always hit. Between all
pipes running at once (`fastest`) and the matrix units waiting for the others (`slowest`) lies what a kernel can do.
"""

from __future__ import annotations

from typing import NamedTuple

from attnscale.bench.static.cards import CARDS, Card
from attnscale.bench.static.per_score import per_score
from attnscale.bench.static.table import Row, baseline


class Roofline(NamedTuple):
    """Cycles of one unit for one pass of the loop by one block."""

    cycles: dict[str, float]  # of each pipe; "matrix" among them
    fastest: float
    slowest: float

    @property
    def bound(self) -> str:
        """The pipe that is busiest."""
        return max(self.cycles, key=lambda pipe: self.cycles[pipe])

    @property
    def fraction_of_peak(self) -> tuple[float, float]:
        """Of the matrix units' peak: at least and at most."""
        return self.cycles["matrix"] / self.slowest, self.cycles["matrix"] / self.fastest


class Overhead(NamedTuple):
    """What statistics add to the same kernel without them, for each score: tiles may differ."""

    instructions: float  # of the loop
    fastest: float  # of the predicted time, at the two ends of the range
    slowest: float


def roofline(row: Row, card: Card | None = None) -> Roofline:
    """Cycles from the counts of a row of the table, on the card that stands for its target."""
    card = card or CARDS[row.target]
    loop = row.loop._asdict()
    in_partition = row.warps / 4
    cycles = {
        pipe: in_partition * sum(price * loop[kind] for kind, price in prices.items())
        for pipe, prices in card.pipes.items()
    }
    cycles["matrix"] = row.matrix_flops / card.matrix_flops[row.dtype]
    cycles["shared"] = row.warps * row.lanes * row.loop.shared_bytes / card.shared_bytes
    cycles["memory"] = row.tile_bytes / card.memory_bytes
    others = max(spent for pipe, spent in cycles.items() if pipe != "matrix")
    return Roofline(cycles, max(cycles["matrix"], others), cycles["matrix"] + others)


def overhead(row: Row, rows: list[Row]) -> Overhead | None:
    """Of a row with statistics against the one of `rows` without; None where it has none, or there is no such row."""
    plain = baseline(row, rows)
    if plain is None:
        return None
    ours, theirs = roofline(row), roofline(plain)
    area = plain.tile[0] * plain.tile[1] / (row.tile[0] * row.tile[1])
    return Overhead(
        per_score(row, row.loop) / per_score(plain, plain.loop) - 1,
        area * ours.fastest / theirs.fastest - 1,
        area * ours.slowest / theirs.slowest - 1,
    )
