"""What a sink is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from attnscale.diagnostics.records.record import Alert, Record


@runtime_checkable
class Sink(Protocol):
    """Where records go. Only the first process of a run calls it; an exception ends the sink, never the run."""

    def log(self, records: Sequence[Record], step: int) -> None:
        """Take the records of a step, one per layer and head."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


@runtime_checkable
class AlertSink(Sink, Protocol):
    """A sink that takes alerts too."""

    def alert(self, alerts: Sequence[Alert], step: int) -> None:
        """Take the alerts of a step."""
        ...
