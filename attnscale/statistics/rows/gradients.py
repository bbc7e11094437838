"""Gradients of row statistics, as terms of the softmax backward pass.

With ∂lse/∂ℓ_j = w_j, ∂H/∂ℓ_j = −w_j·(ln w_j + H) and ∂max/∂ℓ_j = [j = winner], the gradient of a logit is

    dℓ_j = w_j·(P_j − Δ − shift − slope·ln w_j) + push·[j = winner],   P = dO·Vᵀ, Δ = Σ w·P,

with shift = dH·H − dlse, slope = dH and push = dmax. The largest weight e^(max − lse) adds dw·w to `push` and `shift`.
A sink is one more key without a value.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale._util.schema import operator_schema
from attnscale.call.attention_call import AttentionCall
from attnscale.statistics.request import StatsRequest
from attnscale.statistics.row_stats import RowStats, finite
from attnscale.statistics.rows.measures import RowMeasures, scores_at


class RowTerms(NamedTuple):
    """Terms of the backward pass, each [B, H, Tq]; None if they are zero."""

    shift: Tensor | None = None
    slope: Tensor | None = None
    push: Tensor | None = None
    winner: Tensor | None = None  # slot of the largest logit, int64; negative if there is none


ROW_TERMS = operator_schema(RowTerms)


def row_terms(request: StatsRequest, gradients: RowMeasures | RowStats, measures: RowMeasures | RowStats) -> RowTerms:
    """The terms from the upstream gradients of the requested statistics. Rows without keys contribute nothing."""
    asked = request.with_gradients
    if not asked:
        return RowTerms()
    shift, push, slope = -gradients.lse, gradients.max_logit, None
    if "w_max" in asked:
        of_weight = gradients.w_max * measures.w_max
        shift, push = shift + of_weight, push + of_weight
    if "entropy" in asked:
        slope = gradients.entropy
        shift = shift + slope * measures.entropy
    # A row with a sink alone has a finite lse, which depends on the sink.
    shift = shift.masked_fill(measures.lse == -math.inf, 0.0)
    unseen = measures.max_logit == -math.inf
    slope = None if slope is None else slope.masked_fill(unseen, 0.0)
    if measures.winner is None or {"max_logit", "w_max"}.isdisjoint(asked):
        return RowTerms(shift, slope)
    return RowTerms(shift, slope, push.masked_fill(unseen, 0.0), measures.winner)


def with_winner_gradients(stats: RowStats, request: StatsRequest, call: AttentionCall) -> RowStats:
    """The statistics with gradients of `max_logit` and `w_max` through the winner's score, for kernels without them.

    `stats` must contain the winner, and the lse with its gradient. Values are unchanged: zeros are added.
    """
    winner = stats.winner
    if winner is None or {"max_logit", "w_max"}.isdisjoint(request.with_gradients):
        return stats
    slots, usable = winner.clamp(min=0)[..., None], (winner >= 0)[..., None]
    logit = (scores_at(call, slots, usable)[..., 0] * call.row_beta()).masked_fill(winner < 0, 0.0)
    push, lse = logit - logit.detach(), finite(stats.lse)
    if stats.max_logit is not None:
        stats = stats._replace(max_logit=stats.max_logit.detach() + push)
    if stats.w_max is not None:
        stats = stats._replace(w_max=stats.w_max.detach() * torch.exp(push - (lse - lse.detach())))
    return stats


def add_push(dlogits: Tensor, push: Tensor, winner: Tensor, left: int) -> None:
    """Add the gradients [n, r] of the largest logits to a tile [n, r, K] whose first slot is `left`."""
    slot = winner - left
    inside = (slot >= 0) & (slot < dlogits.shape[-1])
    slot = slot.clamp(0, dlogits.shape[-1] - 1)
    dlogits.scatter_add_(-1, slot[..., None], torch.where(inside, push, 0.0)[..., None])
