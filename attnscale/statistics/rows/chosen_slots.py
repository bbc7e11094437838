"""Scores of the rows of a call with a few chosen keys: the contact of Λ, and the first keys that a row sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnscale._util.tracing import autocast_off, without_autocast
from attnscale.call.attention_call import FLAT_CALL, AttentionCall, FlatCall
from attnscale.call.context import first_slots
from attnscale.statistics.gaps import find_contact
from attnscale.statistics.rows.tiles import whole_row_scores


@torch.library.custom_op(
    "attnscale::contacts", mutates_args=(), schema=f"({FLAT_CALL}, SymInt min_rank) -> (Tensor, Tensor)"
)
@without_autocast
def contacts(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Λ [B, H, Tq], and its rank k* and the slots of the keys of rank 1 and k*, [B, H, Tq, 3]."""
    flat, (min_rank,) = FlatCall.split(arguments)
    shape, dtype = flat.query.shape[:3], torch.promote_types(flat.query.dtype, torch.float32)
    value = torch.zeros(shape, dtype=dtype, device=flat.query.device)
    places = torch.zeros(*shape, 3, dtype=torch.int64, device=flat.query.device)
    for rows, block, scores in whole_row_scores(flat.to_call()):
        found = find_contact(scores, min_rank)
        rows.store(value, block, found.value)
        slots = found.first + block.left, found.key + block.left
        rows.store(places, block, torch.stack([found.rank, *slots], dim=-1))
    return value, places


@contacts.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    query = arguments[0]
    value = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    return value, query.new_empty(*query.shape[:3], 3, dtype=torch.int64)


def differentiable_accumulation(call: AttentionCall, min_rank: int) -> Tensor:
    """Λ = ln k* / (s_(1) − s_(k*)) with the gradient of these two scores; none where Λ is 0 or ∞."""
    value, places = contacts(*FlatCall.of(call.detached()), min_rank)
    usable = (value > 0) & torch.isfinite(value)
    first, other = scores_at(call, places[..., 1:], usable[..., None].expand(*usable.shape, 2)).unbind(-1)
    gap = torch.where(usable, first - other, 1.0)
    return torch.where(usable, places[..., 0].to(gap.dtype).log() / gap, value)


def first_share(call: AttentionCall, count: int, lse: Tensor) -> Tensor:
    """The weight [B, H, Tq] of the first `count` keys that each row sees, given its lse; 0 for a row that sees none."""
    if not call.key.shape[2]:
        return torch.zeros_like(lse)
    return weight_at(call.detached(), *first_slots(call.context, count), lse).clamp(max=1.0)


def weight_at(call: AttentionCall, slots: Tensor, seen: Tensor, lse: Tensor) -> Tensor:
    """The weight [B, H, Tq] of the keys in some slots [B|1, H|1, Tq|1, S] together, where they are seen."""
    seen = seen.expand(*call.query.shape[:3], slots.shape[-1])
    logits = scores_at(call, slots, seen) * call.row_beta()[..., None]
    return torch.where(seen, torch.exp(logits - lse[..., None]), 0.0).sum(-1)


def scores_at(call: AttentionCall, slots: Tensor, usable: Tensor) -> Tensor:
    """Raw scores [B, H, Tq, S] of each row with the keys in some slots [B|1, H|1, Tq|1, S].

    Not finite, or 0, where not `usable` [B, H, Tq, S]: a hidden key may hold anything. Slots of the rows themselves
    carry gradients, in which such keys have no part.
    """
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    query, (batch, heads, rows, dim), count = call.query.to(dtype), call.query.shape, slots.shape[-1]
    if slots.shape[1:3] == (1, 1):
        index = slots.view(-1, 1, count, 1).expand(batch, call.key.shape[1], count, dim)
        keys = call.key.gather(2, index).to(dtype).repeat_interleave(call.group, dim=1)  # [B, H, S, D]
        with autocast_off(query.device):
            score = query @ keys.mT * call.scale
    else:
        index = slots.expand(batch, heads, rows, count)
        by_head = call.key.repeat_interleave(call.group, dim=1)
        found = []
        for place, use in zip(index.unbind(-1), usable.unbind(-1), strict=True):
            keys = by_head.gather(2, place[..., None].expand(-1, -1, -1, dim)).masked_fill(~use[..., None], 0.0)
            found.append((query * keys.to(dtype)).sum(-1))
        score = torch.stack(found, dim=-1) * call.scale
    if call.softcap is not None:
        score = call.softcap * torch.tanh(score / call.softcap)
    if call.bias is not None:
        index = slots.expand(batch, heads, rows, count)
        score = score + call.bias.expand(batch, heads, rows, -1).gather(-1, index).to(dtype)
    return score
