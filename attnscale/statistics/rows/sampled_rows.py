"""The measures and statistics of the rows of a call, for all backends alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnscale._util.tracing import is_watched
from attnscale.call.attention_call import SCORE_TENSORS, AttentionCall
from attnscale.call.context import Context
from attnscale.call.lengths import count_visible
from attnscale.statistics.request import StatsRequest
from attnscale.statistics.row_stats import RowStats
from attnscale.statistics.rows.call_tiles import CallRows
from attnscale.statistics.rows.row_measures import SCALARS, RowMeasures, measure_tiles
from attnscale.statistics.sampling import sample_rows


def measure_sampled_rows(call: AttentionCall, request: StatsRequest) -> RowStats:
    """The statistics of the rows that a request samples, as [B, H, R]."""
    queries = call.query.shape[2]
    rows = sample_rows(queries, queries if request.rows is None else request.rows, request.seed, call.query.device)
    call = call.detached().select(rows)
    visible = count_visible(call.context).expand(call.query.shape[:3])
    stats = _measures(call, request).to_stats(request, visible, call.row_beta())
    return stats._replace(
        rows=rows.clone(),
        with_sink=call.sinks is not None and request.softmax,
        visible_given=call.context.visible is not None,
    )


def measure_call(call: AttentionCall, request: StatsRequest, *, prominence: bool = False) -> RowMeasures:
    """The measures [B, H, R] of all rows of a call."""
    rows = CallRows(call)
    thresholds = 0 if request.gap_thresholds is None else len(request.gap_thresholds)
    found = rows.query.new_empty(*rows.query.shape[:4], SCALARS + thresholds)
    sinks = None if call.sinks is None else rows.by_key_head(call.sinks[None, :, None].expand(call.query.shape[:3]))
    for block in rows.blocks():
        sink = None if sinks is None else block.of(sinks)
        tiles = block.passes(rows.tile)
        block.of(found).copy_(measure_tiles(tiles, request, sink, keys=rows.keys, prominence=prominence).packed())
    return RowMeasures.unpacked(found.flatten(1, 2))


def _measures(call: AttentionCall, request: StatsRequest) -> RowMeasures:
    """`measure_call`, but as an operator where torch traces or transforms what is computed, or has no values."""
    if type(call.query) in (Tensor, torch.nn.Parameter) and not call.query.is_meta and not is_watched():
        return measure_call(call, request)
    asked = request.softmax, request.entropy, list(request.gap_thresholds or ()), request.accumulation, request.min_rank
    packed = row_measures(*call.score_tensors(), call.sinks, call.scale, call.softcap, *asked)
    return RowMeasures.unpacked(packed)


@torch.library.custom_op(
    "attnscale::row_measures",
    mutates_args=(),
    schema=f"({SCORE_TENSORS}, Tensor? sinks, float scale, float? softcap, bool softmax, bool entropy,"
    " float[] thresholds, str? accumulation, SymInt min_rank) -> Tensor",
)
def row_measures(query: Tensor, key: Tensor, beta: Tensor, *others: Any) -> Tensor:
    """The packed measures [B, H, R, C] of all rows of a call."""
    start, stop, padding, mask, sinks, scale, softcap, *asked = others
    softmax, entropy, thresholds, accumulation, min_rank = asked
    context = Context(query.shape[2], key.shape[2], query.device, first=start, last=stop, padding=padding, mask=mask)
    call = AttentionCall(query, key, key, context, scale, 0.0, softcap, sinks, beta=beta)
    request = StatsRequest(softmax, entropy, softmax, softmax, tuple(thresholds) or None, accumulation, min_rank)
    return measure_call(call, request).packed()


@row_measures.register_fake
def _(query: Tensor, *others: Any) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*query.shape[:3], SCALARS + len(others[-3]), dtype=dtype)
