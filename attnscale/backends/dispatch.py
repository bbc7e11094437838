"""Which backend computes a call, and why the others do not."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnscale.backends.call import AttentionCall, Backend
from attnscale.backends.reference import ReferenceBackend
from attnscale.backends.sdpa import SdpaBackend
from attnscale.errors import BackendError, reject

# In order of preference for "auto".
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (SdpaBackend(), ReferenceBackend())}


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
    if backend != "auto":
        reason = BACKENDS[backend].why_not(call)
        if reason is not None:
            raise BackendError(f"backend={backend!r} cannot compute this call: {reason}")
        return BACKENDS[backend].run(call)
    for candidate in BACKENDS.values():
        if candidate.why_not(call) is None:
            return candidate.run(call)
    raise BackendError(f"no backend can compute this call:\n{explain(call)}")


def explain(call: AttentionCall, backend: str = "auto") -> Dispatch:
    """What would compute a call, and why; `chosen` is "none" where the answer is an error."""
    verdicts = []
    chosen = "none"
    for name, candidate in BACKENDS.items():
        reason = candidate.why_not(call)
        if reason is not None:
            verdicts.append(Verdict(name, False, reason))
        elif backend not in ("auto", name):
            verdicts.append(Verdict(name, True, f"usable, but backend={backend!r} was asked for"))
        elif chosen != "none":
            verdicts.append(Verdict(name, True, f"usable, but {chosen} comes first"))
        else:
            chosen = name
            verdicts.append(
                Verdict(name, True, "chosen: " + ("the first usable one" if backend == "auto" else "asked for"))
            )
    return Dispatch(chosen, tuple(verdicts))
