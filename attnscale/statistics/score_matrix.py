"""The statistics of a given matrix of scores."""

from __future__ import annotations

import torch
from torch import Tensor

from attnscale._util.checks import check_broadcasts, check_scores
from attnscale.statistics.gaps import HIDDEN
from attnscale.statistics.request import StatsRequest, checked_request
from attnscale.statistics.row_stats import RowStats
from attnscale.statistics.rows.row_measures import measure_tiles
from attnscale.statistics.rows.score_tile import ScoreTile


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
    if mask is None:
        mask = torch.ones((), dtype=torch.bool, device=scores.device)
    mask = mask.expand(scores.shape)
    tile = ScoreTile.without_keys(beta)
    if scores.shape[-1]:
        tile = ScoreTile(scores.clamp(min=HIDDEN).masked_fill(~mask, 0.0), mask.to(scores.dtype), beta)
    sink_logits = None if sinks is None else sinks.detach()[:, None]
    measures = measure_tiles(lambda: (tile,), request, sink_logits, keys=scores.shape[-1])
    stats = measures.to_stats(request, mask.sum(-1), beta)
    return stats._replace(with_sink=sinks is not None and request.softmax)
