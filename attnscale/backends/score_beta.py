"""β of policies that read scores: statistics of each row at β = 1, from which the policy computes its own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnscale.backends import dispatch
from attnscale.backends.gaps import find_contacts
from attnscale.call.attention_call import UnscaledCall
from attnscale.policies.adaptive import ScorePolicy


def score_beta(policy: ScorePolicy, call: UnscaledCall) -> Tensor:
    """β [B, H, Tq] in fp32 from the call's own scores, without its sinks."""
    request = policy.request
    stats = dispatch.statistics(replace(call, sinks=None).at(1.0), request)
    through = differentiable_accumulation(call, request.min_rank) if policy.gradient == "through" else None
    return policy.from_stats(stats, through)


def differentiable_accumulation(call: UnscaledCall, min_rank: int) -> Tensor:
    """Λ = ln k* / (s_(1) − s_(k*)) with the gradient of these two scores; none where Λ is 0 or ∞."""
    contact = find_contacts(call, min_rank)
    keys = call.key.repeat_interleave(call.group, dim=1)
    usable = (contact.value > 0) & torch.isfinite(contact.value)
    first, other = (_score_of(call, keys, at, usable) for at in (contact.first, contact.key))
    gap = torch.where(usable, first - other, 1.0)
    return torch.where(usable, contact.rank.to(gap.dtype).log() / gap, contact.value)


def _score_of(call: UnscaledCall, keys: Tensor, slot: Tensor, usable: Tensor) -> Tensor:
    """The raw score of each row [B, H, Tq] with the key in one slot; 0·q where that slot is not usable.

    A slot that is not usable may hold a hidden key, whose values must not enter a product.
    """
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    key = keys.gather(2, slot[..., None].expand(-1, -1, -1, keys.shape[-1])).masked_fill(~usable[..., None], 0.0)
    score = (call.query.to(dtype) * key.to(dtype)).sum(-1) * call.scale
    if call.softcap is not None:
        score = call.softcap * torch.tanh(score / call.softcap)
    if call.bias is not None:
        bias = call.bias.expand(*call.query.shape[:3], -1).gather(-1, slot[..., None])[..., 0]
        score = score + bias.to(dtype)
    return score
