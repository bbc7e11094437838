"""Statistics of rows whose keys come in shards, for which the keys have to travel again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attnscale.call.attention_call import AttentionCall
from attnscale.call.lengths import first_slots
from attnscale.statistics import RowStats, StatsRequest, criticality
from attnscale.statistics.gaps import Spectrum, bracket, count_bins, count_within, largest
from attnscale.statistics.rows.chosen_slots import weight_at
from attnscale.statistics.rows.tiles import whole_row_scores
from attnscale_kernels.gaps.bins import BINS

# A pass over all shards: the same rows against one of them after another, each with the number of its process.
Shards = Callable[[AttentionCall], Iterator[tuple[int, AttentionCall]]]
# Slots of the sequence as slots of a shard, and whether they are in it.
LocalSlots = Callable[[int, Tensor], tuple[Tensor, Tensor]]


def add_gaps(call: AttentionCall, request: StatsRequest, shards: Shards, stats: RowStats) -> RowStats:
    """The statistics with gap counts and a bracket of Λ: one pass for the best scores of each row, one for counting."""
    thresholds, shape = request.gap_thresholds or (), call.query.shape[:3]
    dtype, device = torch.promote_types(call.query.dtype, torch.float32), call.query.device
    best = torch.full((*shape, request.min_rank), -torch.inf, dtype=dtype, device=device)
    for _, part in shards(call):
        for rows, block, scores in whole_row_scores(part):
            both = torch.cat([rows.rows_of(best, block), largest(scores, request.min_rank)], dim=-1)
            rows.store(best, block, largest(both, request.min_rank))
    counts = torch.zeros(*shape, len(thresholds), dtype=torch.int64, device=device)
    histogram = torch.zeros(*shape, BINS, dtype=dtype, device=device)
    for _, part in shards(call):
        for rows, block, scores in whole_row_scores(part):
            of_rows = rows.rows_of(best, block)
            gaps = of_rows[..., :1] - scores
            rows.add(counts, block, count_within(gaps, of_rows[..., :1], thresholds))
            rows.add(histogram, block, count_bins(of_rows, gaps))
    if request.gap_thresholds is not None:
        stats = stats._replace(gap_counts=counts)
    if request.accumulation is None:
        return stats
    found = bracket(Spectrum(best, histogram))
    return stats._replace(accumulation=found, criticality=criticality(call.row_beta(), found))


def add_first_share(
    call: AttentionCall, count: int, shards: Shards, local_slots: LocalSlots, stats: RowStats
) -> RowStats:
    """The statistics, which have the lse of all keys, with the weight of the first keys that each row sees."""
    slots, seen = first_slots(call.context, count)
    share = torch.zeros_like(stats.lse)
    for source, part in shards(call):
        here, held = local_slots(source, slots)
        share += weight_at(part, here, seen & held, stats.lse)
    return stats._replace(first_share=share.clamp(max=1.0))
