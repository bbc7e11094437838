"""A monitored run: planes, one value per step and head for each quantity; its events, loss and header."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from attnscale.diagnostics.records.record import Event
from attnscale.diagnostics.views.display import QUANTITIES

SEVERITIES = ("critical", "warning")
# The statistic over rows that shows a problem; the mean for other quantities.
SHOWN = {"max_logit": "max", "w_max": "p50"}
# NaN and infinity show in any quantity; the largest logit also shows what preceded them.
SHOWN_INSTEAD = {"broken_row": "max_logit"}


class Key(NamedTuple):
    """Key of a plane. The phase is "forward", "backward" or "scalar"; the only statistic of scalars is "value"."""

    phase: str
    name: str
    statistic: str

    @classmethod
    def shown(cls, name: str) -> Key:
        """Return the key of the statistic that shows a problem of a quantity."""
        phase = QUANTITIES[name].phase if name in QUANTITIES else "forward"
        return cls(phase, name, SHOWN.get(name, "mean")) if phase else cls("scalar", name, "value")


@dataclass(frozen=True)
class Run:
    """The content of a JSONL file of a monitor. A column is one head of a layer, in model order.

    Attributes:
        path: the file.
        steps: recorded steps, ascending.
        columns: (layer, head) of each column.
        planes: fp32 values [steps, columns] of each quantity; NaN where nothing was recorded.
        events: the last message of each event, the most severe first, then by start.
        header: fields of the header; empty for files of older versions.
        loss, lr: training loss and learning rate of each step; None where they were not recorded.
        reports: number of reports in the file.
        unreadable: number of lines that could not be read.

    Example:
        >>> run = Run("run.jsonl", [0, 10], [("attn", 0)], {})
        >>> run.steps, run.columns, run.reports
        ([0, 10], [('attn', 0)], 2)
    """

    path: str
    steps: list[int]
    columns: list[tuple[str, int]]
    planes: dict[Key, Tensor]
    events: list[Event] = field(default_factory=list)
    header: Mapping[str, Any] = field(default_factory=dict)
    loss: list[float | None] = field(default_factory=list)
    lr: list[float | None] = field(default_factory=list)
    reports: int = 0
    unreadable: int = 0

    def __post_init__(self) -> None:
        nothing: list[float | None] = [None] * len(self.steps)
        for name, value in (("loss", nothing), ("lr", nothing), ("reports", len(self.steps))):
            object.__setattr__(self, name, getattr(self, name) or value)

    def thinned(self, number: int) -> Run:
        """Return the run with `number` steps, evenly spaced except for the starts of some events."""
        index = spaced(self.steps, [event.start for event in self.events], number)
        return replace(
            self,
            steps=[self.steps[i] for i in index],
            planes={key: plane[index] for key, plane in self.planes.items()},
            loss=[self.loss[i] for i in index],
            lr=[self.lr[i] for i in index],
        )

    def worst(self, event: Event) -> int:
        """Return the column of the head that shows an event most clearly at its first step."""
        places = [column for column, place in enumerate(self.columns) if _concerns(event, *place)]
        plane, value, usual = self.planes.get(Key.shown(event.quantity)), event.value, event.usual
        if not places or plane is None or value is None:
            return places[0] if places else 0
        now = plane[nearest(self.steps, event.start)][places].double()
        if event.quantity == "broken_row":  # recorded only for the heads with NaN or infinity
            clearness = now.isfinite().double()
        elif usual is None or math.isnan(usual):
            clearness = -(now - value).abs()
        else:
            clearness = now if value > usual else -now
        return places[int(clearness.nan_to_num(-math.inf).argmax())]

    def start(self) -> tuple[int, int, str]:
        """Return step index, column and quantity with which the page opens: the worst event, else the largest logit."""
        if self.events:
            worst = self.events[0]
            quantity = SHOWN_INSTEAD.get(worst.quantity, worst.quantity)
            return nearest(self.steps, worst.start), self.worst(worst), quantity
        key = Key.shown("max_logit")
        if key not in self.planes:
            return len(self.steps) - 1, 0, "w_max"
        return len(self.steps) - 1, int(self.planes[key][-1].nan_to_num(-math.inf).argmax()), "max_logit"


def nearest(steps: Sequence[int], step: int) -> int:
    """Return the index of the report nearest to a step."""
    return min(range(len(steps)), key=lambda index: abs(steps[index] - step))


def spaced(steps: Sequence[int], starts: Sequence[int], number: int) -> list[int]:
    """Return the indices of `number` steps, first and last included: some starts of events, the others evenly spaced.

    >>> spaced(range(0, 1000, 10), [30], 5)
    [0, 3, 33, 66, 99]
    """
    if len(steps) <= number:
        return list(range(len(steps)))
    kept = {nearest(steps, start) for start in starts[: number // 4]}
    last, even = len(steps) - 1, number - len(kept)
    return sorted(kept | {round(place * last / (even - 1)) for place in range(even)})


def _concerns(event: Event, layer: str, head: int) -> bool:
    return not event.places or any(name == layer and (not heads or head in heads) for name, heads in event.places)


def merged(messages: Iterable[Event]) -> list[Event]:
    """Return the last message of each event, the most severe first, then by start.

    A message "begun" with a known number starts another event, because a resumed run counts from 0 again, unless the
    earlier one has the same cause and is not over: then the problem goes on.
    """
    events: list[Event] = []
    current: dict[int, int] = {}  # number → index in events
    for event in messages:
        known = events[current[event.number]] if event.number in current else None
        if known is None or known.status == "over" or (event.status == "begun" and event.cause != known.cause):
            current[event.number] = len(events)
            events.append(event)
            continue
        start = min(known.start, event.start)
        if event.status == "begun":
            event = replace(known, step=event.step, places=_union(known.places, event.places))
        events[current[event.number]] = replace(event, start=start)
    order = {severity: index for index, severity in enumerate(SEVERITIES)}
    return sorted(events, key=lambda event: (order.get(event.severity, len(order)), event.start))


def _union(*groups: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    if not all(groups):  # no layers means the whole model, no heads the whole layer
        return ()
    found: dict[str, tuple[int, ...]] = {}
    for layer, heads in (place for places in groups for place in places):
        found[layer] = tuple(sorted({*found.get(layer, heads), *heads})) if heads and found.get(layer, heads) else ()
    return tuple(found.items())
