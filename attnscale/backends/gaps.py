"""Gap counts and Λ of every row in one pass over raw scores, tile by tile, as operators for torch.compile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attnscale.backends.blockwise.logits import leaves_of, logit_tile
from attnscale.backends.blockwise.tiles import Scores, Tile, cut, store, workspace_for
from attnscale.call.attention_call import AttentionCall, UnscaledCall
from attnscale.statistics import RowStats, StatsRequest, criticality
from attnscale.statistics.gaps import (
    Accumulation,
    Contact,
    Spectrum,
    bracket,
    count_gaps,
    empty_spectrum,
    find_contact,
    take_spectrum,
)

ROWS_AT_ONCE = 4096


def add_gaps(call: AttentionCall, request: StatsRequest, stats: RowStats) -> RowStats:
    """The statistics with the requested ones of raw scores: gap counts, Λ and criticality."""
    if request.gap_thresholds is not None:
        stats = stats._replace(gap_counts=gap_counts(*_scores(call), list(request.gap_thresholds)))
    if request.accumulation is not None:
        if request.accumulation == "exact":
            exact = find_contacts(call, request.min_rank).value
            found = Accumulation(exact, exact)
        else:
            found = Accumulation(*accumulation_bracket(*_scores(call), request.min_rank))
        stats = stats._replace(accumulation=found, criticality=criticality(call.row_beta().detach(), found))
    return stats


def find_contacts(call: UnscaledCall, min_rank: int) -> Contact:
    """Λ, its rank k*, and the slots of the keys of rank 1 and k*; each [B, H, Tq]."""
    return Contact(*contacts(*_scores(call), min_rank))


@torch.library.custom_op("attnscale::gap_counts", mutates_args=())
def gap_counts(
    query: Tensor,
    key: Tensor,
    start: Tensor,
    stop: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    thresholds: Sequence[float],
) -> Tensor:
    """N(t) [B, H, Tq, thresholds] of the raw scores."""
    counts = torch.zeros(*query.shape[:3], len(thresholds), dtype=torch.int64, device=query.device)
    for tile, scores in _raw_tiles(query, key, start, stop, padding, mask, scale, softcap):
        store(counts, tile, count_gaps(scores, tuple(thresholds)))
    return counts


@torch.library.custom_op("attnscale::accumulation_bracket", mutates_args=())
def accumulation_bracket(
    query: Tensor,
    key: Tensor,
    start: Tensor,
    stop: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    min_rank: int,
) -> tuple[Tensor, Tensor]:
    """Bounds of Λ of the raw scores, each [B, H, Tq]."""
    best, counts = empty_spectrum(_rows(query), min_rank, key.shape[2])
    for tile, scores in _raw_tiles(query, key, start, stop, padding, mask, scale, softcap):
        found = take_spectrum(scores, min_rank, key.shape[2])
        store(best, tile, found.best)
        store(counts, tile, found.counts)
    # Some rows at a time: a bracket needs several times the memory of its spectrum.
    parts = zip(*(torch.split(x.flatten(0, 2), ROWS_AT_ONCE) for x in (best, counts)), strict=True)
    ends = [bracket(Spectrum(*part), min_rank) for part in parts]
    lower, upper = (torch.cat(end).view(query.shape[:3]) for end in zip(*ends, strict=True))
    return lower, upper


@torch.library.custom_op("attnscale::contacts", mutates_args=())
def contacts(
    query: Tensor,
    key: Tensor,
    start: Tensor,
    stop: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    min_rank: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `find_contacts`."""
    value = _rows(query)
    rank, first, other = (torch.zeros_like(value, dtype=torch.int64) for _ in range(3))
    for tile, scores in _raw_tiles(query, key, start, stop, padding, mask, scale, softcap):
        found = find_contact(scores, min_rank)
        store(value, tile, found.value)
        store(rank, tile, found.rank)
        store(first, tile, found.first + tile.left)
        store(other, tile, found.key + tile.left)
    return value, rank, first, other


@gap_counts.register_fake
def _(*arguments: Any) -> Tensor:
    query: Tensor = arguments[0]
    return query.new_empty(*query.shape[:3], len(arguments[8]), dtype=torch.int64)


@accumulation_bracket.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    rows = _rows(arguments[0])
    return rows, torch.empty_like(rows)


@contacts.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    rows = _rows(arguments[0])
    return rows, *(torch.empty_like(rows, dtype=torch.int64) for _ in range(3))


def _scores(call: UnscaledCall) -> tuple[Any, ...]:
    """The arguments that the operators share."""
    start, stop = call.context.bounds()
    mask = None if call.context.mask is None else call.context.mask.detach()
    query, key = call.query.detach(), call.key.detach()
    return query, key, start, stop, call.context.padding, mask, call.scale, call.softcap


def _raw_tiles(query: Tensor, key: Tensor, *visibility_and_scale: Any) -> Iterator[tuple[Tile, Tensor]]:
    scores = Scores(query, key, None, *visibility_and_scale).wide().folded(1.0)
    room = workspace_for(scores, whole_rows=True)
    for tile in cut(scores, whole_rows=True):
        yield tile, logit_tile(scores, leaves_of(scores, tile), tile, room)


def _rows(query: Tensor) -> Tensor:
    return torch.zeros(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)
