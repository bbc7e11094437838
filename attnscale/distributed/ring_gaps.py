"""Gap counts and Λ of rows whose keys come in shards: the maximum first, then what lies how far below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attnscale.call.attention_call import AttentionCall
from attnscale.errors import BackendError
from attnscale.statistics import RowStats, StatsRequest, criticality
from attnscale.statistics.gaps import FAR, TOP, Spectrum, bracket, empty_spectrum, largest, spectrum_of
from attnscale.statistics.rows.call_tiles import CallRows

# A pass over all shards: the same rows against one of them after another.
Shards = Callable[[AttentionCall], Iterator[AttentionCall]]


class RingGaps:
    """Two passes over the shards of keys: the best scores of each row, and a count of the gaps below them."""

    def __init__(self, call: AttentionCall, request: StatsRequest, shards: Shards) -> None:
        if request.accumulation == "exact":
            raise BackendError(
                "method='ring' has no exact Λ, which sorts whole rows: use 'bracket', or method='gather'"
            )
        self._call, self._request, self._shards = call, request, shards
        self._ranks = max(TOP, request.min_rank)
        self._keys = call.context.keys

    @torch.no_grad()
    def add(self, stats: RowStats) -> RowStats:
        """The statistics with the requested ones of raw scores."""
        thresholds, min_rank = self._request.gap_thresholds or (), self._request.min_rank
        rows = self._rows()
        best, histogram = empty_spectrum(rows, min_rank, self._keys)
        for at, scores in self._tiles():
            best[at] = largest(torch.cat([best[at], largest(scores, self._ranks)], -1), self._ranks)
        counts = rows.new_zeros(*rows.shape, len(thresholds))
        for at, scores in self._tiles():
            gaps = best[at][..., :1] - scores
            for number, threshold in enumerate(thresholds):
                counts[at][..., number] += (gaps <= min(threshold, FAR)).sum(-1)
            histogram[at] += spectrum_of(best[at], gaps, min_rank, self._keys).counts
        shape = self._call.query.shape[:3]
        if self._request.gap_thresholds is not None:
            seen = best[..., :1] > -FAR
            stats = stats._replace(gap_counts=torch.where(seen, counts, 0).to(torch.int64).view(*shape, -1))
        if self._request.accumulation is not None:
            found = bracket(Spectrum(best, histogram), min_rank)
            found = found._replace(lower=found.lower.view(shape), upper=found.upper.view(shape))
            stats = stats._replace(accumulation=found, criticality=criticality(self._call.row_beta(), found))
        return stats

    def _rows(self) -> Tensor:
        """Zeros for all rows, [B, Hkv, g, Tq]."""
        return torch.zeros_like(CallRows(self._call).beta)

    def _tiles(self) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """Raw scores of every row against every key, tile by tile, and the place of their rows [B, Hkv, g, Tq]."""
        for part in self._shards(self._call):
            rows = CallRows(part)
            for block in rows.blocks():
                for tile in block.passes(rows.tile)():
                    yield (block.batch, block.heads, slice(None), block.rows), tile.masked
