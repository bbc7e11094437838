"""Which backend computes a call, and why the others do not."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.backends.blockwise import BlockwiseBackend
from attnscale.backends.call import AttentionCall, Backend, MeasuringBackend
from attnscale.backends.reference import ReferenceBackend
from attnscale.backends.sdpa import SdpaBackend, torch_dtype
from attnscale.backends.triton import TritonBackend
from attnscale.errors import BackendError, reject
from attnscale.statistics import AttentionOutput, RowStats, StatsRequest, sample_rows

# In order of preference for "auto", but for what `_preference` says.
BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (SdpaBackend(), TritonBackend(), BlockwiseBackend(), ReferenceBackend())
}
# Sorted out once: to ask an object whether it has all methods of a protocol takes longer than some of them.
MEASURING = {name: backend for name, backend in BACKENDS.items() if isinstance(backend, MeasuringBackend)}


class Verdict(NamedTuple):
    """What one backend says of a call."""

    backend: str
    usable: bool
    reason: str


class Dispatch(NamedTuple):
    """Which backend would run, and what each says; prints as a table."""

    chosen: str
    verdicts: tuple[Verdict, ...]

    def __str__(self) -> str:
        rows = [("backend", "usable", "reason")]
        rows += [(v.backend, "yes" if v.usable else "no", v.reason) for v in self.verdicts]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)


def check_backend(backend: str) -> None:
    """Refuse the name of a backend that does not exist."""
    if backend != "auto" and backend not in BACKENDS:
        reject("backend", backend, f"'auto' or one of {', '.join(BACKENDS)}")


def run(call: AttentionCall, backend: str) -> Tensor:
    """The output [B, H, Tq, Dv] from the first usable backend, or from the one asked for and no other."""
    return _choose(call, backend, measuring=False).run(call)


def measure(call: AttentionCall, request: StatsRequest, backend: str) -> AttentionOutput:
    """Output and statistics. Sampled rows are computed once more by themselves, beside an output without statistics."""
    if request.rows is None or request.rows >= call.query.shape[2]:
        return _choose_measuring(call, backend).measure(call, request)
    rows = sample_rows(call.query.shape[2], request.rows, request.seed, call.query.device)
    output, sampled = run(call, backend), call.detached().select(rows)
    observer = "auto" if backend == "sdpa" else backend  # which gives none itself
    return AttentionOutput(output, statistics(sampled, request, observer)._replace(rows=rows.clone()))


def statistics(call: AttentionCall, request: StatsRequest, backend: str = "auto") -> RowStats:
    """The statistics of all rows of a call, without its output."""
    return _choose_measuring(call, backend).statistics(call, request)


def _choose_measuring(call: AttentionCall, backend: str) -> MeasuringBackend:
    return MEASURING[_choose(call, backend, measuring=True).name]


def _choose(call: AttentionCall, backend: str, *, measuring: bool) -> Backend:
    names = [name for name in _preference(call) if BACKENDS[name].automatic] if backend == "auto" else [backend]
    for name in names:
        reason = _why_not(name, call, measuring)
        if reason is None:
            return BACKENDS[name]
        if backend != "auto":
            raise BackendError(f"backend={backend!r} cannot compute this call: {reason}")
    raise BackendError(f"no backend can compute this call:\n{explain(call, measuring=measuring)}")


def _preference(call: AttentionCall) -> list[str]:
    """All backends, the preferred ones first: triton before an sdpa that would have to compute float16 in float32."""
    names = list(BACKENDS)
    if isinstance(call.beta, Tensor) and call.query.device.type != "cpu" and torch_dtype(call.query) == torch.float16:
        names.sort(key=lambda name: name != "triton")
    return names


def _why_not(name: str, call: AttentionCall, measuring: bool) -> str | None:
    if measuring and name not in MEASURING:
        return "it gives no row statistics"
    return BACKENDS[name].why_not(call)


def explain(call: AttentionCall, backend: str = "auto", *, measuring: bool = False) -> Dispatch:
    """What would compute a call, and why; `chosen` is "none" where the answer is an error."""
    verdicts = []
    chosen = "none"
    for name in _preference(call):
        candidate = BACKENDS[name]
        reason = _why_not(name, call, measuring)
        if reason is not None:
            verdicts.append(Verdict(name, False, reason))
        elif backend not in ("auto", name):
            verdicts.append(Verdict(name, True, f"usable, but backend={backend!r} was asked for"))
        elif backend == "auto" and not candidate.automatic:
            verdicts.append(Verdict(name, True, "usable, where asked for by name"))
        elif chosen != "none":
            verdicts.append(Verdict(name, True, f"usable, but {chosen} comes first"))
        else:
            chosen = name
            verdicts.append(
                Verdict(name, True, "chosen: the first usable one" if backend == "auto" else "chosen: asked for")
            )
    return Dispatch(chosen, tuple(verdicts))
