"""Row statistics that need further passes of the keys around the ring."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attnscale.call.attention_call import AttentionCall
from attnscale.statistics import RowStats, StatsRequest, criticality
from attnscale.statistics.gaps import Accumulation
from attnscale.statistics.rows.measures import GapSums, add_shares, best_scores, gap_measures, gap_sums, weight_at
from attnscale.statistics.rows.tiles import Block, CallRows
from attnscale_kernels.gaps.bins import BINS

# One pass over all shards: yields each rank with the call of the same rows against the keys of that rank.
Shards = Callable[[AttentionCall], Iterator[tuple[int, AttentionCall]]]
# Converts slots of the sequence to slots of a shard; the second tensor marks slots in the shard.
LocalSlots = Callable[[int, Tensor], tuple[Tensor, Tensor]]


def add_gaps(call: AttentionCall, request: StatsRequest, shards: Shards, stats: RowStats) -> RowStats:
    """Add gap counts and a bracket of Λ: one pass finds the best scores of each row, a second one counts gaps."""
    shape, device = call.query.shape[:3], call.query.device
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    ranks = request.min_rank if request.accumulation == "bracket" else 1
    best = torch.full((*shape, ranks), -torch.inf, dtype=dtype, device=device)
    for rows, piece, scores in _tiles(call, shards):
        rows.store(best, piece, best_scores(rows.rows_of(best, piece), scores, request))
    counts = torch.zeros(*shape, len(request.gap_thresholds or ()), dtype=torch.int64, device=device)
    bins = torch.zeros(*shape, BINS if request.accumulation == "bracket" else 0, dtype=dtype, device=device)
    for rows, piece, scores in _tiles(call, shards):
        found = gap_sums(scores, rows.rows_of(best, piece), request, room=rows.room)
        rows.add(counts, piece, found.counts)
        rows.add(bins, piece, found.bins)
    measured = gap_measures(best, GapSums(counts, bins, bins[..., :0]), request)
    if request.gap_thresholds is not None:
        stats = stats._replace(gap_counts=measured.counts)
    if request.accumulation is None:
        return stats
    scale = Accumulation(measured.lower, measured.upper)
    return stats._replace(accumulation=scale, criticality=criticality(call.row_beta(), scale))


def _tiles(call: AttentionCall, shards: Shards) -> Iterator[tuple[CallRows, Block, Tensor]]:
    """Yield tiles of raw scores of all rows, shard by shard."""
    for _, part in shards(call):
        rows = CallRows(part)
        for block in rows.blocks(whole=True):
            for piece in block.pieces():
                yield rows, piece, rows.scores(piece)


def add_shard_shares(
    call: AttentionCall, request: StatsRequest, shards: Shards, local_slots: LocalSlots, stats: RowStats
) -> RowStats:
    """Add the requested weights of selected keys to statistics that contain the lse over all keys."""

    def weigh(slots: Tensor, seen: Tensor) -> Tensor:
        share = torch.zeros_like(stats.lse)
        for source, part in shards(call):
            here, held = local_slots(source, slots)
            share += weight_at(part, here, seen & held, stats.lse)
        return share

    return add_shares(stats, request, call.context, weigh)
