"""Gap counts and brackets of Λ of rows whose keys come in shards: the maximum first, then what lies how far below."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from attnscale.backends.call_stats import counted
from attnscale.call.attention_call import AttentionCall
from attnscale.statistics import RowStats, StatsRequest, criticality
from attnscale.statistics.gaps import TOP, Spectrum, bracket, count_gaps, empty_spectrum, largest, spectrum_of
from attnscale.statistics.rows.call_tiles import CallRows

# A pass over all shards: the same rows against one of them after another.
Shards = Callable[[AttentionCall], Iterator[AttentionCall]]


class RingGaps:
    """Two passes over the shards of keys: the best scores of each row, and a count of the gaps below them."""

    def __init__(self, call: AttentionCall, request: StatsRequest, shards: Shards) -> None:
        self._call, self._request, self._shards = call, request, shards
        self._ranks = max(TOP, request.min_rank)
        self._keys = call.context.keys

    @torch.no_grad()
    def add(self, stats: RowStats) -> RowStats:
        """The statistics with the requested ones of raw scores."""
        best = self._best()
        merged, histogram = self._count(best)
        if self._request.gap_thresholds is not None:
            stats = stats._replace(gap_counts=merged.gap_counts)
        if self._request.accumulation is not None:
            shape = self._call.query.shape[:3]
            found = bracket(Spectrum(best, histogram), self._request.min_rank)
            found = found._replace(lower=found.lower.view(shape), upper=found.upper.view(shape))
            stats = stats._replace(accumulation=found, criticality=criticality(self._call.row_beta(), found))
        return stats

    def _best(self) -> Tensor:
        """The best scores of each row over all shards, [B, Hkv, g, Tq, ranks]."""
        best, _ = empty_spectrum(self._rows(), self._request.min_rank, self._keys)
        for part in self._shards(self._call):
            for at, scores in _tiles(part):
                best[at] = largest(torch.cat([best[at], largest(scores, self._ranks)], -1), self._ranks)
        return best

    def _count(self, best: Tensor) -> tuple[RowStats, Tensor]:
        """Gap counts of all shards, each counted from the common maximum and merged, and the histogram of gaps."""
        thresholds, min_rank = self._request.gap_thresholds or (), self._request.min_rank
        _, histogram = empty_spectrum(self._rows(), min_rank, self._keys)
        total: RowStats | None = None
        for part in self._shards(self._call):
            counts = torch.zeros(*best.shape[:-1], len(thresholds), dtype=torch.int64, device=best.device)
            for at, scores in _tiles(part):
                if thresholds:
                    counts[at] += count_gaps(scores, thresholds, best=best[at][..., 0])
                gaps = best[at][..., :1] - scores
                histogram[at] += spectrum_of(best[at], gaps, min_rank, self._keys).counts
            found = counted(part)._replace(gap_counts=counts.flatten(1, 2))
            total = found if total is None else total.merge(found, common_maximum=True)
        return cast("RowStats", total), histogram  # a process group has at least one process

    def _rows(self) -> Tensor:
        """Zeros for all rows, [B, Hkv, g, Tq]."""
        return torch.zeros_like(CallRows(self._call).beta)


def _tiles(part: AttentionCall) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Raw scores of every row against the keys of a shard by tiles, and the place of their rows [B, Hkv, g, Tq]."""
    rows = CallRows(part)
    for block in rows.blocks():
        for tile in block.passes(rows.tile)():
            yield (block.batch, block.heads, slice(None), block.rows), tile.masked
