"""What a monitor reports of rows: from their measures in forward, and with the gradients of their scores in backward.

Everything is in fp32, and NaN for a row that sees nothing: such rows are in no aggregate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnscale.call.attention_call import AttentionCall
from attnscale.statistics.request import StatsRequest
from attnscale.statistics.rows.row_measures import RowMeasures
from attnscale.statistics.rows.sampled_rows import measure_call
from attnscale.statistics.rows.score_gradients import ScoreGradients

# Gaps at which N(t) is counted: in units of raw scores, from a tie to the whole row.
THRESHOLDS = (0.5, 1.0, 2.0, 4.0, 8.0)
MIN_RANK = 2
REQUEST = StatsRequest(gap_thresholds=THRESHOLDS, accumulation="bracket", min_rank=MIN_RANK)


def gap_name(threshold: float) -> str:
    """The name of N(t)."""
    return f"gap_count_{threshold:g}"


# What is compared between forward and backward, to notice a recomputation that differs.
COMPARED = ("w_max", "entropy", *map(gap_name, THRESHOLDS))
FORWARD = (*COMPARED, "visible", "beta", "relative_entropy", "max_logit", "accumulation", "criticality", "prominence")
BACKWARD = (*COMPARED, "score_gradient", "beta_gradient")


def measure_quantities(call: AttentionCall) -> RowMeasures:
    """The measures of all rows of a call that the quantities are made of."""
    return measure_call(call, REQUEST, prominence=True)


def forward_quantities(measures: RowMeasures, beta: Tensor) -> Tensor:
    """Each quantity of `FORWARD` [Q, ...] of rows [...]."""
    accumulation = measures.accumulation.middle
    # Rows of one key or a tie at the top have none: Λ is 0 or infinite there, and would spoil any mean.
    accumulation = torch.where((accumulation < math.inf) & (accumulation > 0), accumulation, math.nan)
    visible = measures.visible
    relative = measures.entropy / torch.where(visible > 1, visible, math.nan).log()
    others = visible, beta, relative, measures.max_logit, accumulation, beta / accumulation, measures.prominence
    return _stacked(measures, [*_compared(measures), *others])


def compared_quantities(measures: RowMeasures) -> Tensor:
    """Those of `COMPARED`."""
    return _stacked(measures, _compared(measures))


def backward_quantities(measures: RowMeasures, beta: Tensor, gradients: ScoreGradients) -> Tensor:
    """Each quantity of `BACKWARD` [Q, ...] of rows [...]."""
    return _stacked(measures, [*_compared(measures), gradients.norm * beta.abs(), gradients.beta])


def _compared(measures: RowMeasures) -> list[Tensor]:
    return [measures.w_max, measures.entropy, *measures.gap_counts.unbind(-1)]


def _stacked(measures: RowMeasures, quantities: list[Tensor]) -> Tensor:
    return torch.where(measures.visible > 0, torch.stack(quantities).to(torch.float32), math.nan)
