"""Tiled attention in pure torch, on any device: memory linear in length, statistics in the same pass."""

from __future__ import annotations

from torch import Tensor

from attnscale.call.attention_call import AttentionCall
from attnscale.call.tap import Attended
from attnscale.statistics import AttentionOutput, RowStats, StatsRequest
from attnscale.statistics.rows.attend import attend_rows, measure_statistics


class BlockwiseBackend:
    """Supports every call with equal numbers of key and value heads. β is applied to fp32 scores and never rounded."""

    name = "blockwise"
    automatic = True
    plain = False
    why_unsupported = None

    def why_not(self, call: AttentionCall) -> str | None:
        if call.key.shape[1] != call.value.shape[1]:
            return "key and value have different numbers of heads"
        return None

    def run(self, call: AttentionCall) -> Tensor:
        return attend_rows(call).out

    def run_bounded(self, call: AttentionCall) -> Attended:
        out, measures = attend_rows(call)
        return Attended(out, measures.max_logit, exact=True)

    def measure(self, call: AttentionCall, request: StatsRequest) -> AttentionOutput:
        out, measures = attend_rows(call, request)
        known = RowStats.counted(call, with_sink=request.softmax)
        return AttentionOutput(out, measures.to_stats(request, known, call.row_beta().detach()))

    def statistics(self, call: AttentionCall, request: StatsRequest) -> RowStats:
        return measure_statistics(call, request)
