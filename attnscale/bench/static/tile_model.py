"""What a tile should cost: cycles of a unit for each score, from the counts of a loop and the blocks that take turns.

A model, not a measurement, on the rates of cards.py: no latencies, no bank conflicts, caches that always hit, and only
the loop that most tiles run. What it adds to roofline.py is a place between `fastest` and `slowest`.
"""

from __future__ import annotations

from attnscale.bench.static.occupancy import PARTITIONS
from attnscale.bench.static.roofline import roofline
from attnscale.bench.static.table import Row


def taking_turns(row: Row, blocks: int, *, tensor_columns: int = 0) -> float:
    """Who can multiply in a partition while another does the rest.

    Each warp of it; where products stay in tensor memory one instruction multiplies for the whole block, so that only
    blocks can.
    """
    return blocks if tensor_columns else blocks * row.warps / PARTITIONS


def cycles_per_score(row: Row, blocks: int, *, tensor_columns: int = 0) -> float:
    """Cycles of a unit on which `blocks` of the row run at once, for each score of a tile.

    With M cycles of the matrix units and R of the busiest other pipe for a tile, a single one that has a turn takes
    M + R. Several wait for each other, and what they take for a tile is at most max(M, R) + min(M, R) / turns: the
    bound of queueing theory for customers of two stations, who find all others before them at the slower.
    """
    model = roofline(row)
    hidden = model.slowest - model.fastest
    spent = model.fastest + hidden / taking_turns(row, blocks, tensor_columns=tensor_columns)
    return spent / (row.tile[0] * row.tile[1])
