"""Choice of the backend for a call, with the reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale._util.tracing import autocast_dtype, is_watched
from attnscale.backends import trust
from attnscale.backends.backend import Backend, MeasuringBackend
from attnscale.backends.blockwise import BlockwiseBackend
from attnscale.backends.reference import ReferenceBackend
from attnscale.backends.sdpa import SdpaBackend
from attnscale.backends.triton import TritonBackend
from attnscale.call.attention_call import AttentionCall
from attnscale.call.tap import Attended
from attnscale.errors import BackendError, reject
from attnscale.policies import Policy
from attnscale.policies.base import ScorePolicy, check_beta, reads_scores
from attnscale.policies.temperature import temperature
from attnscale.statistics import AttentionOutput, RowStats, StatsRequest, criticality
from attnscale.statistics.gaps import Accumulation
from attnscale.statistics.rows.attend import add_call_shares, measure_sampled_rows, no_derivative
from attnscale.statistics.rows.measures import differentiable_accumulation
from attnscale_kernels.availability import other_derivative

# In order of preference for "auto"; `_preference` has one exception.
MEASURING: dict[str, MeasuringBackend] = {
    backend.name: backend for backend in (TritonBackend(), BlockwiseBackend(), ReferenceBackend())
}
BACKENDS: dict[str, Backend] = {"sdpa": SdpaBackend(), **MEASURING}


class Needs(NamedTuple):
    """Requirements of a call beyond the output and its gradient."""

    statistics: bool
    derivative: str | None  # description of a derivative that a first-order backward pass does not provide


class Verdict(NamedTuple):
    """Whether a backend can compute a call, with the reason."""

    backend: str
    usable: bool
    reason: str


class Dispatch(NamedTuple):
    """The chosen backend and the verdicts of all backends; prints as a table."""

    chosen: str
    verdicts: tuple[Verdict, ...]

    def __str__(self) -> str:
        rows = [("backend", "usable", "reason")]
        rows += [(v.backend, "yes" if v.usable else "no", v.reason) for v in self.verdicts]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)


def check_backend(backend: str) -> None:
    """Reject unknown backend names."""
    if backend != "auto" and backend not in BACKENDS:
        reject("backend", backend, f"'auto' or one of {', '.join(BACKENDS)}")


class Prepared(NamedTuple):
    """A call with its β, and the backend that computes it."""

    call: AttentionCall
    backend: Backend
    gaps: RowStats | None = None  # all requested raw-score statistics, if they were measured for β


def prepare(call: AttentionCall, policy: Policy, backend: str, request: StatsRequest | None = None) -> Prepared:
    """Compute β of a call at β = 1, from lengths or scores, and choose the backend."""
    if not reads_scores(policy):
        call = replace(call, beta=temperature(policy, call.context, call.query))
        return Prepared(call, choose(call, backend, request))
    chosen = choose(call, backend, request, by_row=True)
    stats, through = score_statistics(policy, call, chosen, request)
    call = replace(call, beta=check_beta(policy.from_stats(stats, through), call.query))
    return Prepared(call, chosen, stats if shares_gaps(policy, request) else None)


def run(call: AttentionCall, chosen: Backend) -> Tensor:
    """Return the output [B, H, Tq, Dv]."""
    # torch applies autocast itself, after β has been multiplied into the query.
    return chosen.run(call if chosen.name == "sdpa" else call.autocast())


def run_bounded(call: AttentionCall, chosen: Backend) -> Attended:
    """The output of `run`, to the bit, with a bound of each row's largest logit if the backend computes one."""
    return chosen.run_bounded(call if chosen.name == "sdpa" else call.autocast())


def measure(
    call: AttentionCall, request: StatsRequest, chosen: Backend, known: RowStats | None = None
) -> AttentionOutput:
    """Return output and statistics. Sampled rows are measured separately from the output.

    `known` raw-score statistics of all rows are not measured again.
    """
    asked = request if known is None else replace(request, gap_thresholds=None, accumulation=None)
    if _is_sampled(call, request):
        _refuse_derivative_of_sample(call, asked)
        output, stats = run(call, chosen), measure_sampled_rows(call.autocast(), asked)
    else:
        output, stats = MEASURING[chosen.name].measure(call.autocast(), asked.with_lse())
        stats = add_call_shares(stats, request, call.autocast()).only(request)
    return AttentionOutput(output, stats if known is None else with_known_gaps(stats, known, call.row_beta().detach()))


def statistics(call: AttentionCall, request: StatsRequest) -> RowStats:
    """Return the requested softmax statistics without the output, by the backend that "auto" would choose for them."""
    backend = choose(call, "auto", request).name
    # One column of the values is the least that kernels take; it has no gradient.
    call = replace(call.autocast(), value=call.value[..., :1].detach(), dropout_p=0.0)
    if _is_sampled(call, request):
        _refuse_derivative_of_sample(call, request)
        return measure_sampled_rows(call, request)
    stats = MEASURING[backend].statistics(call, request.with_lse())
    return add_call_shares(stats, request, call).only(request)


def _refuse_derivative_of_sample(call: AttentionCall, request: StatsRequest) -> None:
    derivative = _needs(call, request).derivative
    if derivative is not None and request.with_gradients:
        raise BackendError(f"StatsRequest(rows={request.rows}, differentiable=True): {no_derivative(derivative)}")


def with_known_gaps(stats: RowStats, known: RowStats, beta: Tensor) -> RowStats:
    """Add known gap counts and Λ of all rows to statistics of all or sampled rows; `beta` is the β of all rows."""
    if stats.rows is not None:
        known, beta = known.select(stats.rows), beta.index_select(2, stats.rows)
    stats = stats._replace(gap_counts=known.gap_counts, accumulation=known.accumulation)
    return stats if known.accumulation is None else stats._replace(criticality=criticality(beta, known.accumulation))


def score_statistics(
    policy: ScorePolicy, call: AttentionCall, chosen: Backend, request: StatsRequest | None = None
) -> tuple[RowStats, Tensor | None]:
    """Return the arguments of `from_stats`: statistics at β = 1 without sinks, and Λ with a gradient if needed.

    The chosen backend measures the statistics if it can, otherwise the first one that can. If the policy reads the
    requested Λ, the requested gap counts are included.
    """
    asked, raw = gaps_for(policy, request), replace(call, sinks=None)
    through = differentiable_accumulation(call, asked.min_rank) if policy.gradient == "through" else None
    known = through is not None and asked.accumulation == "exact"  # the same Λ: rows are not sorted again
    measured = replace(asked, accumulation=None) if known else asked
    stats = _score_backend(raw, chosen.name).statistics(raw.autocast().detached(), measured)
    if through is not None and known:
        scale = Accumulation(through.detach(), through.detach())
        stats = stats._replace(accumulation=scale, criticality=criticality(1.0, scale))
    return stats, through


def gaps_for(policy: ScorePolicy, request: StatsRequest | None) -> StatsRequest:
    """Return the statistics a policy needs at β = 1, with the requested gap counts if Λ is shared."""
    shared = request is not None and shares_gaps(policy, request)
    return replace(policy.request, gap_thresholds=request.gap_thresholds) if request and shared else policy.request


def shares_gaps(policy: Policy, request: StatsRequest | None) -> bool:
    """Whether β is computed from the requested Λ, so that one measurement serves both."""
    if request is None or request.accumulation is None or not reads_scores(policy):
        return False
    asked = policy.request
    return (asked.accumulation, asked.min_rank) == (request.accumulation, request.min_rank)


def _score_backend(call: AttentionCall, chosen: str) -> MeasuringBackend:
    name = chosen if chosen in MEASURING else _first_automatic(call, Needs(statistics=True, derivative=None))
    if name is None:
        raise BackendError(f"no backend can measure the scores of this call:\n{explain(call, request=StatsRequest())}")
    return MEASURING[name]


def choose(call: AttentionCall, backend: str, request: StatsRequest | None = None, *, by_row: bool = False) -> Backend:
    """Return the explicit backend, or for "auto" the first usable one for the output and requested statistics.

    Set `by_row` if β is not yet known and will differ between rows.
    """
    needs = _needs(call, request)
    if backend != "auto":
        reason = _why_not(backend, call, needs)
        if reason is not None:
            raise BackendError(f"backend={backend!r} cannot compute this call: {reason}")
        return BACKENDS[backend]
    name = _first_automatic(call, needs, by_row)
    if name is None:
        raise BackendError(f"no backend can compute this call:\n{explain(call, request=request, by_row=by_row)}")
    return BACKENDS[name]


def _first_automatic(call: AttentionCall, needs: Needs, by_row: bool = False) -> str | None:
    """Return the choice of "auto", or None."""
    for name in _preference(call, by_row):
        if _why_not(name, call, needs) is None and _why_not_automatic(name, call, needs) is None:
            return name
    return None


def _needs(call: AttentionCall, request: StatsRequest | None) -> Needs:
    """Return the requirements of a call, including the derivative currently taken of its tensors."""
    tensors = call.query, call.key, call.value, call.beta, call.sinks, call.context.mask
    derivative = other_derivative(*tensors) if is_watched() else None
    return Needs(request is not None and not _is_sampled(call, request), derivative)


def _preference(call: AttentionCall, by_row: bool) -> list[str]:
    """Return all backends by preference. On GPUs, triton precedes sdpa for a per-row β in half precision."""
    names = list(BACKENDS)
    by_row = by_row or isinstance(call.beta, Tensor)
    if by_row and call.query.device.type != "cpu" and autocast_dtype(call.query).itemsize == 2:
        names.sort(key=lambda name: name != "triton")
    return names


def _why_not_automatic(name: str, call: AttentionCall, needs: Needs) -> str | None:
    """Return when a capable backend is used that "auto" may not choose; None if it may."""
    if name == ReferenceBackend.name and needs.derivative is not None:
        return None  # no other backend has it
    if not BACKENDS[name].automatic:
        return "only on explicit request"
    if name == TritonBackend.name:
        reason = why_kernels_distrusted(call.query.device, autocast_dtype(call.query))
        return None if reason is None else f"only on explicit request: {reason}"
    return None


def why_kernels_distrusted(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why "auto" does not use the kernels on a supported device, or None."""
    return trust.why_distrusted(device, dtype, check_kernels)


# torch.compile treats the result as a constant of the graph; derivatives.py explains why this is not a decorator.
why_kernels_distrusted._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    """Describe the first fault of the kernels on a device; None if there is none."""
    from attnscale.backends.self_check import find_fault

    return find_fault(MEASURING[TritonBackend.name], MEASURING[ReferenceBackend.name], device, dtype)


def _why_not(name: str, call: AttentionCall, needs: Needs) -> str | None:
    if needs.statistics and name not in MEASURING:
        return "it has no row statistics"
    if needs.derivative is not None and not BACKENDS[name].plain:
        return no_derivative(needs.derivative)
    unsupported = BACKENDS[name].why_unsupported
    reason = None if unsupported is None else unsupported(call.query.device, autocast_dtype(call.query))
    return BACKENDS[name].why_not(call) if reason is None else reason


def explain(
    call: AttentionCall, backend: str = "auto", request: StatsRequest | None = None, *, by_row: bool = False
) -> Dispatch:
    """Explain the result of `choose` for the same arguments; `chosen` is "none" if it would raise.

    With `by_row`, the reason names the backend that measures the scores for β.
    """
    sampled = request is not None and _is_sampled(call, request)
    verdicts = []
    chosen = "none"
    needs = _needs(call, request)
    for name in _preference(call, by_row):
        reason = _why_not(name, call, needs)
        if reason is not None:
            verdicts.append(Verdict(name, False, reason))
        elif backend not in ("auto", name):
            verdicts.append(Verdict(name, True, f"usable, but backend={backend!r} was requested"))
        elif backend == "auto" and (when := _why_not_automatic(name, call, needs)) is not None:
            verdicts.append(Verdict(name, True, f"usable, {when}"))
        elif chosen != "none":
            verdicts.append(Verdict(name, True, f"usable, but {chosen} comes first"))
        else:
            chosen = name
            why = "chosen: the first usable one" if backend == "auto" else "chosen: explicit request"
            if sampled:
                why += "; statistics.rows measures the sampled rows"
            if by_row:
                why += f"; {_score_backend(call, chosen).name} measures the scores for β"
            verdicts.append(Verdict(name, True, why))
    return Dispatch(chosen, tuple(verdicts))


def _is_sampled(call: AttentionCall, request: StatsRequest) -> bool:
    return request.rows is not None and request.rows < call.query.shape[2]
