"""The statistics of a given matrix of scores."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnscale._util.checks import check_broadcasts, check_scores
from attnscale.statistics.gaps import HIDDEN
from attnscale.statistics.request import StatsRequest, checked_request
from attnscale.statistics.row_stats import RowStats
from attnscale.statistics.rows.measures import RowSums, add_keys, best_scores, measure_gaps, row_measures
from attnscale.statistics.rows.tiles import LOG2E


def row_statistics(
    scores: Tensor,
    beta: Tensor | float = 1.0,
    mask: Tensor | None = None,
    request: StatsRequest | None = None,
    *,
    sinks: Tensor | None = None,
) -> RowStats:
    """The statistics of a given matrix of raw scores [..., Tq, Tk].

    β broadcasts to [..., Tq]; the mask to the scores (True: visible). This is the definition that every backend is
    held against. Sampling (`rows`) does not apply: choose the rows of the matrix.

    >>> row_statistics(torch.zeros(1, 4)).entropy
    tensor([1.3863])
    """
    request = checked_request(request)
    check_scores(scores, mask)
    scores = scores.detach().to(torch.promote_types(scores.dtype, torch.float32))
    beta = torch.as_tensor(beta, dtype=scores.dtype, device=scores.device).detach()
    check_broadcasts("beta", beta, scores.shape[:-1])
    beta = beta.expand(scores.shape[:-1])
    mask = torch.ones((), dtype=torch.bool, device=scores.device) if mask is None else mask
    mask = mask.expand(scores.shape)
    known = RowStats(mask.sum(-1), with_sink=sinks is not None and request.softmax)
    if not scores.shape[-1]:  # one hidden slot, as reductions need one
        scores, mask = pad(scores, (0, 1)), pad(mask, (0, 1))
    scores = scores.clamp(min=HIDDEN).masked_fill(~mask, HIDDEN)
    logits = (scores * (beta * LOG2E)[..., None]).masked_fill(scores <= HIDDEN / 2, HIDDEN)
    sums = add_keys(None, logits.clone(), request)
    sums = RowSums._make(None if x is None else x[..., 0] for x in sums)
    gaps = measure_gaps([lambda: scores], best_scores(None, scores, request), request)
    measures = row_measures(sums, gaps, None if sinks is None else sinks.detach()[:, None])
    stats = measures.to_stats(request, known, beta)
    if request.first_share is None:
        return stats
    first = mask & (mask.cumsum(-1) <= request.first_share)
    weights = torch.where(first, torch.exp(logits / LOG2E - measures.lse[..., None]), 0.0)
    return stats._replace(first_share=weights.sum(-1).clamp(max=1.0))
