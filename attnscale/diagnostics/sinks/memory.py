"""Records kept in memory, for a notebook or a test."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from attnscale._util.checks import read_int
from attnscale.diagnostics.records.record import Alert, Record


class MemorySink:
    """Keeps the records of the last `steps` reports, and their alerts."""

    def __init__(self, steps: int = 1000) -> None:
        steps = read_int("steps", steps, "an int >= 1", least=1)
        self._reports: deque[tuple[int, tuple[Record, ...]]] = deque(maxlen=steps)
        self.alerts: deque[Alert] = deque(maxlen=steps)

    @property
    def records(self) -> list[Record]:
        """The records of the kept reports, oldest first."""
        return [record for _, records in self._reports for record in records]

    def log(self, records: Sequence[Record], step: int) -> None:
        self._reports.append((step, tuple(records)))

    def alert(self, alerts: Sequence[Alert], step: int) -> None:
        self.alerts.extend(alerts)

    def close(self) -> None:
        pass
