"""Fused Triton kernels for CUDA and ROCm: attention with a temperature per row, statistics and gap counts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnscale._util.tracing import autocast_dtype
from attnscale.call.attention_call import AttentionCall
from attnscale.call.tap import Attended
from attnscale.statistics import AttentionOutput, RowStats, StatsRequest, criticality, largest_weight
from attnscale.statistics.gaps import Accumulation
from attnscale.statistics.rows.attend import measure_statistics
from attnscale.statistics.rows.gradients import with_winner_gradients
from attnscale_kernels import Visibility, interpreting, why_unavailable
from attnscale_kernels.arguments import FARTHEST, WIDEST_HEAD

if TYPE_CHECKING:
    from attnscale_kernels.launch import Forward

OUTPUT = StatsRequest(w_max=False, entropy=False, lse=False, max_logit=False)
FEW_ROWS = 16  # up to this number of queries, keys are split over programs, as one program per head is too few


class TritonBackend:
    """β is applied to fp32 scores and never rounded; statistics come from the same pass. No device synchronisation."""

    name = "triton"
    plain = False
    why_unsupported = staticmethod(why_unavailable)

    @property
    def automatic(self) -> bool:
        """False in the interpreter, which is for tests."""
        return not interpreting()

    def why_not(self, call: AttentionCall) -> str | None:
        dtype, *others = (autocast_dtype(x) for x in (call.query, call.key, call.value))
        if any(other != dtype for other in others):
            return "query, key and value have different dtypes"
        if call.key.shape[1] != call.value.shape[1]:
            return "key and value have different numbers of heads"
        if call.key.shape[1] == 0:
            return "triton kernels require at least one head"
        if max(call.query.shape[-1], call.value.shape[-1]) > WIDEST_HEAD:
            return f"triton kernels support head dimensions up to {WIDEST_HEAD}"
        if call.bias is not None and call.bias.requires_grad and torch.is_grad_enabled():
            return "triton kernels have no gradient for an additive mask"
        return None

    def run(self, call: AttentionCall) -> Tensor:
        return _launch(call, OUTPUT).out

    def run_bounded(self, call: AttentionCall) -> Attended:
        found = _launch(call, OUTPUT)
        return Attended(found.out, found.max_logit.detach(), exact=True)

    def measure(self, call: AttentionCall, request: StatsRequest) -> AttentionOutput:
        return AttentionOutput((found := _launch(call, request)).out, _statistics(call, request, found))

    def statistics(self, call: AttentionCall, request: StatsRequest) -> RowStats:
        found = _launch(call, request) if request.softmax else None
        return _statistics(call, request, found)


def _launch(call: AttentionCall, request: StatsRequest) -> Forward:
    from attnscale_kernels.decode.op import decode_attention
    from attnscale_kernels.flash.op import flash_attention

    beta = call.beta if isinstance(call.beta, Tensor) else call.row_beta()
    arguments = call.query, call.key, call.value, beta, visibility_of(call)
    entropy, winner = request.entropy, request.winner
    if call.query.shape[2] <= FEW_ROWS and call.dropout_p == 0.0 and not _needs_gradient(call):
        return decode_attention(
            *arguments, scale=call.scale, softcap=call.softcap, sinks=call.sinks, entropy=entropy, winner=winner
        )
    # Drawn on the device, so that every replay of a captured graph has a new seed.
    seed = torch.randint(2**62, (), device=call.query.device) if call.dropout_p > 0.0 else None
    return flash_attention(
        *arguments,
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        dropout_p=call.dropout_p,
        seed=seed,
        entropy=entropy,
        winner=winner,
        differentiable=request.differentiable,
    )


def _needs_gradient(call: AttentionCall) -> bool:
    inputs = call.query, call.key, call.value, call.beta, call.sinks, call.context.mask
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


def _statistics(call: AttentionCall, request: StatsRequest, found: Forward | None) -> RowStats:
    """Return the requested statistics. Kernels provide `found`, gap counts and Λ brackets of minimum rank 2."""
    from attnscale_kernels.gaps.op import accumulation_bracket, gap_counts

    undetached, call, stats = call, call.detached(), RowStats.counted(call, with_sink=request.softmax)
    asked: dict[str, Any] = {}
    if found is not None:
        given = {"lse": found.lse, "max_logit": found.max_logit, "entropy": found.entropy, "winner": found.winner}
        given["w_max"] = largest_weight(found.max_logit, found.lse)
        asked |= {name: x for name, x in given.items() if name in request.of_softmax}
    scores, scale, softcap = (call.query, call.key, visibility_of(call)), call.scale, call.softcap
    if request.gap_thresholds is not None:
        counts = gap_counts(*scores, request.gap_thresholds, scale=scale, softcap=softcap)
        asked["gap_counts"] = counts.to(torch.int64)
    if request.accumulation == "bracket" and request.min_rank == 2:
        bounds = accumulation_bracket(*scores, scale=scale, softcap=softcap)
        ends = Accumulation(bounds.lower, bounds.upper)
        asked |= {"accumulation": ends, "criticality": criticality(call.row_beta(), ends)}
    elif request.accumulation is not None:  # not supported by the kernels
        measured = measure_statistics(call, replace(request.gaps_alone(), gap_thresholds=None))
        asked |= {"accumulation": measured.accumulation, "criticality": measured.criticality}
    return with_winner_gradients(stats._replace(**asked), request, undetached)


def visibility_of(call: AttentionCall) -> Visibility:
    """Convert the visibility of a call for the kernels."""
    context = call.context
    if isinstance(context.slot, int) and context.first is None:
        # A window larger than FARTHEST hides nothing.
        left, right = (None if x is None or x > FARTHEST else x for x in (context.left, context.right))
        return Visibility(context.slot, left, right, padding=context.padding, mask=context.mask)
    start, stop = (bound.to(torch.int32) for bound in context.bounds())
    return Visibility(start=start, stop=stop, padding=context.padding, mask=context.mask)
