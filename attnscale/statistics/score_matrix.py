"""Row statistics of a materialised score matrix."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnscale._util.checks import check_broadcasts, check_scores
from attnscale.call.context import Context
from attnscale.statistics.gaps import HIDDEN
from attnscale.statistics.request import StatsRequest, checked_request
from attnscale.statistics.row_stats import RowStats
from attnscale.statistics.rows.measures import RowSums, add_keys, add_shares, best_scores, measure_gaps, row_measures
from attnscale.statistics.rows.tiles import LOG2E


def row_statistics(
    scores: Tensor,
    beta: Tensor | float = 1.0,
    mask: Tensor | None = None,
    request: StatsRequest | None = None,
    *,
    sinks: Tensor | None = None,
) -> RowStats:
    """Row statistics of a matrix of raw scores. This is the definition that every backend is tested against.

    Args:
        scores: [..., Tq, Tk], raw scores.
        beta: the temperature, a number or a tensor that broadcasts to [..., Tq].
        mask: bool (True: visible), broadcasts to the scores.
        request: the statistics to compute. `StatsRequest.rows` does not apply: select rows of the matrix instead.
        sinks: [H], attention sinks of scores [B, H, Tq, Tk].

    Returns:
        `RowStats` with tensors [..., Tq]; detached unless the request is differentiable.

    Raises:
        ArgumentError: a shape is not accepted.
        ArgumentTypeError: a type or dtype is not accepted.

    Example:
        >>> row_statistics(torch.zeros(1, 4)).entropy
        tensor([1.3863])
    """
    request = checked_request(request)
    check_scores(scores, mask)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    beta = torch.as_tensor(beta, dtype=scores.dtype, device=scores.device)
    check_broadcasts("beta", beta, scores.shape[:-1])
    beta = beta.expand(scores.shape[:-1])
    mask = torch.ones((), dtype=torch.bool, device=scores.device) if mask is None else mask
    mask = mask.expand(scores.shape)
    carried: dict[str, Any] = _with_gradients(scores, beta, mask, sinks) if request.with_gradients else {}
    scores, beta = scores.detach(), beta.detach()
    known = RowStats(mask.sum(-1), with_sink=sinks is not None and request.softmax)
    if not scores.shape[-1]:  # reductions need at least one slot
        scores, mask = pad(scores, (0, 1)), pad(mask, (0, 1))
    scores = scores.clamp(min=HIDDEN).masked_fill(~mask, HIDDEN)
    logits = (scores * (beta * LOG2E)[..., None]).masked_fill(scores <= HIDDEN / 2, HIDDEN)
    sums = add_keys(None, logits.clone(), request)
    sums = RowSums._make(None if x is None else x[..., 0] for x in sums)
    gaps = measure_gaps([lambda: scores], best_scores(None, scores, request), request)
    measures = row_measures(sums, gaps, None if sinks is None else sinks.detach()[:, None])
    stats = measures.to_stats(request.with_lse(), known, beta)

    def weigh(slots: Tensor, seen: Tensor) -> Tensor:
        weights = torch.exp(logits.gather(-1, slots) / LOG2E - stats.lse[..., None])
        return torch.where(seen, weights, 0.0).sum(-1)

    context = Context(1, scores.shape[-1], scores.device, mask=mask)  # a mask alone: the number of rows is not read
    stats = add_shares(stats, request, context, weigh)._replace(**carried)
    return stats.only(request)


def _with_gradients(scores: Tensor, beta: Tensor, mask: Tensor, sinks: Tensor | None) -> dict[str, Tensor]:
    """The statistics that may carry gradients, written out in plain torch: every derivative exists."""
    if not scores.shape[-1]:
        scores, mask = pad(scores, (0, 1)), pad(mask, (0, 1))
    hidden = ~mask | (scores <= HIDDEN / 2)
    logits = (scores.masked_fill(hidden, 0.0) * beta[..., None]).masked_fill(hidden, -math.inf)
    max_logit = logits.max(-1).values  # the gradient goes to one key, also in a tie
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)], dim=-1)
    pivot = logits.detach().amax(-1)
    pivot = pivot.masked_fill(pivot == -math.inf, 0.0)
    total = torch.exp(logits - pivot[..., None]).sum(-1)
    log_total = total.masked_fill(total == 0.0, 1.0).log() + pivot
    log_weights = (logits - log_total[..., None]).masked_fill(logits == -math.inf, 0.0)
    weights = log_weights.exp().masked_fill(logits == -math.inf, 0.0)
    return {
        "lse": log_total.masked_fill(total == 0.0, -math.inf),
        "max_logit": max_logit,
        "w_max": torch.exp(max_logit - log_total),
        "entropy": -(weights * log_weights).sum(-1),
    }
