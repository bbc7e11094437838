"""Which rows of a call are sampled, and their statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from attnscale._util import state
from attnscale.call.attention_call import AttentionCall
from attnscale.statistics.request import StatsRequest
from attnscale.statistics.row_stats import RowStats
from attnscale.statistics.rows.attend import measure_rows
from attnscale.statistics.rows.chosen_slots import first_share


def sample_rows(queries: int, rows: int, seed: int, device: torch.device) -> Tensor:
    """`rows` of the row numbers 0 … queries−1, increasing, one from each of as many equal strata; not to be changed.

    Every row is as likely as any other, and the last stratum may continue at the first row.

    >>> sample_rows(1000, 4, 0, torch.device("cpu")).tolist() == sample_rows(1000, 4, 0, torch.device("cpu")).tolist()
    True
    """
    rows = min(rows, queries)
    found: Tensor = state.SAMPLED_ROWS.recall(
        (queries, rows, seed), device, lambda: _draw_rows(queries, rows, seed, device)
    )
    return found


def _draw_rows(queries: int, rows: int, seed: int, device: torch.device) -> Tensor:
    # On the host whatever the default device, so that a seed draws the same rows everywhere.
    edges = torch.arange(rows + 1, dtype=torch.int64, device="cpu") * queries // max(rows, 1)
    width = edges[1:] - edges[:-1]
    generator = torch.Generator("cpu").manual_seed(seed)
    draw = torch.rand(rows, generator=generator, dtype=torch.float64, device="cpu")
    # Strata differ in width by one row where they do not divide the queries, and a narrow one is more likely to give
    # each of its rows. Rotated by a random number of rows, all rows are equally likely.
    turn = torch.randint(max(queries, 1), (1,), generator=generator, device="cpu")
    chosen = (edges[:-1] + (draw * width).to(torch.int64) + turn) % max(queries, 1)
    return chosen.sort().values.to(device)


def measure_sampled_rows(call: AttentionCall, request: StatsRequest) -> RowStats:
    """The statistics of the rows that a request samples, as [B, H, R]."""
    queries = call.query.shape[2]
    rows = sample_rows(queries, queries if request.rows is None else request.rows, request.seed, call.query.device)
    return measure_statistics(call.detached().select(rows), request)._replace(rows=rows.clone())


def measure_statistics(call: AttentionCall, request: StatsRequest) -> RowStats:
    """The statistics of all rows of a call, as [B, H, Tq], without its output."""
    known = RowStats.counted(call, with_sink=request.softmax)
    measures = measure_rows(call, request)
    stats = measures.to_stats(request, known, call.row_beta().detach())
    if request.first_share is None:
        return stats
    return stats._replace(first_share=first_share(call, request.first_share, measures.lse))
