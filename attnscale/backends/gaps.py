"""Gap counts and Λ of every row in one pass over raw scores, tile by tile, as operators for torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnscale.backends.tile_logits import logit_tile
from attnscale.backends.tiles import Scores, Tile, cut, store, workspace_for
from attnscale.call.attention_call import SCORE_TENSORS, AttentionCall
from attnscale.statistics import RowStats, StatsRequest, criticality
from attnscale.statistics.gaps import Accumulation, bracket, count_gaps, find_contact, take_spectrum


def add_gaps(call: AttentionCall, request: StatsRequest, stats: RowStats) -> RowStats:
    """The statistics with the requested ones of raw scores: gap counts, Λ and criticality."""
    if request.gap_thresholds is not None:
        stats = stats._replace(gap_counts=gap_counts(*_scores(call), list(request.gap_thresholds)))
    if request.accumulation is not None:
        if request.accumulation == "exact":
            exact = contacts(*_scores(call), request.min_rank)[0]
            found = Accumulation(exact, exact)
        else:
            found = Accumulation(*accumulation_bracket(*_scores(call), request.min_rank))
        stats = stats._replace(accumulation=found, criticality=criticality(call.row_beta().detach(), found))
    return stats


def differentiable_accumulation(call: AttentionCall, min_rank: int) -> Tensor:
    """Λ = ln k* / (s_(1) − s_(k*)) with the gradient of these two scores; none where Λ is 0 or ∞."""
    value, rank, *slots = contacts(*_scores(call), min_rank)
    usable = (value > 0) & torch.isfinite(value)
    first, other = (_score_of(call, slot, usable) for slot in slots)
    gap = torch.where(usable, first - other, 1.0)
    return torch.where(usable, rank.to(gap.dtype).log() / gap, value)


def _score_of(call: AttentionCall, slot: Tensor, usable: Tensor) -> Tensor:
    """The raw score of each row [B, H, Tq] with the key in one slot; 0·q where that slot is not usable.

    A slot that is not usable may hold a hidden key, whose values must not enter a product.
    """
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    key = call.key.repeat_interleave(call.group, dim=1)
    key = key.gather(2, slot[..., None].expand(-1, -1, -1, key.shape[-1])).masked_fill(~usable[..., None], 0.0)
    score = (call.query.to(dtype) * key.to(dtype)).sum(-1) * call.scale
    if call.softcap is not None:
        score = call.softcap * torch.tanh(score / call.softcap)
    if call.bias is not None:
        bias = call.bias.expand(*call.query.shape[:3], -1).gather(-1, slot[..., None])[..., 0]
        score = score + bias.to(dtype)
    return score


SCORES = f"{SCORE_TENSORS}, float scale, float? softcap"


@torch.library.custom_op("attnscale::gap_counts", mutates_args=(), schema=f"({SCORES}, float[] thresholds) -> Tensor")
def gap_counts(*arguments: Any) -> Tensor:
    """N(t) [B, H, Tq, thresholds] of the raw scores."""
    *of_scores, thresholds = arguments
    counts = _rows(arguments[0], torch.int64, len(thresholds))
    for tile, scores in _raw_tiles(*of_scores):
        store(counts, tile, count_gaps(scores, tuple(thresholds)))
    return counts


@torch.library.custom_op(
    "attnscale::accumulation_bracket", mutates_args=(), schema=f"({SCORES}, int min_rank) -> (Tensor, Tensor)"
)
def accumulation_bracket(query: Tensor, key: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Bounds of Λ of the raw scores, each [B, H, Tq]."""
    *others, min_rank = arguments
    lower, upper = _rows(query), _rows(query)
    for tile, scores in _raw_tiles(query, key, *others):
        found = bracket(take_spectrum(scores, min_rank, key.shape[2]), min_rank)
        store(lower, tile, found.lower)
        store(upper, tile, found.upper)
    return lower, upper


@torch.library.custom_op(
    "attnscale::contacts", mutates_args=(), schema=f"({SCORES}, int min_rank) -> (Tensor, Tensor, Tensor, Tensor)"
)
def contacts(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Λ, its rank k*, and the slots of the keys of rank 1 and k*; each [B, H, Tq]."""
    *of_scores, min_rank = arguments
    value = _rows(arguments[0])
    rank, first, other = (torch.zeros_like(value, dtype=torch.int64) for _ in range(3))
    for tile, scores in _raw_tiles(*of_scores):
        found = find_contact(scores, min_rank)
        store(value, tile, found.value)
        store(rank, tile, found.rank)
        store(first, tile, found.first + tile.left)
        store(other, tile, found.key + tile.left)
    return value, rank, first, other


@gap_counts.register_fake
def _(*arguments: Any) -> Tensor:
    return _rows(arguments[0], torch.int64, len(arguments[-1]))


@accumulation_bracket.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    rows = _rows(arguments[0])
    return rows, torch.empty_like(rows)


@contacts.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    rows = _rows(arguments[0])
    return rows, *(torch.empty_like(rows, dtype=torch.int64) for _ in range(3))


def _scores(call: AttentionCall) -> tuple[Any, ...]:
    """The arguments that the operators share."""
    query, key, _, *others = call.detached().score_tensors()
    return query, key, None, *others, call.scale, call.softcap


def _raw_tiles(*of_scores: Any) -> Iterator[tuple[Tile, Tensor]]:
    scores = Scores(*of_scores).wide().folded(1.0)
    room = workspace_for(scores, whole_rows=True)
    for tile in cut(scores, whole_rows=True):
        yield tile, logit_tile(scores, tile, room)


def _rows(query: Tensor, dtype: torch.dtype | None = None, *more: int) -> Tensor:
    """Zeros [B, H, Tq, ...], in fp32 at least where no dtype is given."""
    dtype = torch.promote_types(query.dtype, torch.float32) if dtype is None else dtype
    return torch.zeros(*query.shape[:3], *more, dtype=dtype, device=query.device)
