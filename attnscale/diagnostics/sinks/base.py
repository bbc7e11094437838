"""The protocol of sinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from attnscale.diagnostics.records.record import Alert, Record


@runtime_checkable
class Sink(Protocol):
    """Takes records. Only the first process of a run uses it; an exception drops the sink and never stops the run."""

    def log(self, records: Sequence[Record], step: int) -> None:
        """Take the records of a step, one per layer and head."""

    def close(self) -> None:
        """End of the run."""


@runtime_checkable
class AlertSink(Sink, Protocol):
    """A sink that takes alerts too."""

    def alert(self, alerts: Sequence[Alert], step: int) -> None:
        """Take the alerts of a step."""
