"""Sink that keeps records in memory, for notebooks and tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from attnscale._util.checks import read_int
from attnscale.diagnostics.records.record import Event, Record


class MemorySink:
    """Keeps the records of the last `steps` reports, and the last `steps` events.

    Args:
        steps: number of reports to keep, >= 1.

    Raises:
        ArgumentError: `steps` is less than 1.
        ArgumentTypeError: `steps` is not an int.

    Example:
        >>> sink = MemorySink(steps=1)
        >>> for step in range(3):
        ...     sink.log([Record(step, "layers.0", 0)], step)
        >>> [record.step for record in sink.records]
        [2]
    """

    immediate = True

    def __init__(self, steps: int = 1000) -> None:
        steps = read_int("steps", steps, "an int >= 1", least=1)
        self._reports: deque[tuple[int, tuple[Record, ...]]] = deque(maxlen=steps)
        self.events: deque[Event] = deque(maxlen=steps)

    @property
    def records(self) -> list[Record]:
        """Records of the kept reports, oldest first."""
        return [record for _, records in self._reports for record in records]

    def log(self, records: Sequence[Record], step: int) -> None:
        """Keep the records of a step."""
        self._reports.append((step, tuple(records)))

    def event(self, events: Sequence[Event], step: int) -> None:
        """Keep the events of a step."""
        self.events.extend(events)

    def close(self) -> None:
        """Do nothing; the records stay available."""
