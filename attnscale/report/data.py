"""Reads a run into planes, one value per step and head for each quantity, with its events, loss and header."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscale.diagnostics.records.record import STATISTICS, Alert, Event, Record
from attnscale.diagnostics.views.display import QUANTITIES
from attnscale.errors import ArgumentError, reject

ACCEPTED = (
    'a line of a JsonlSink, {"kind": "record", "step": 0, "layer": "attn", "head": 0, "forward": {…}, "backward": {…}, '
    '"scalars": {…}}'
)
INVALID = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
SEVERITIES = ("critical", "warning")
# Control characters, and characters that change the direction of text.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# The statistic over rows that shows a problem; the mean for other quantities.
SHOWN = {"max_logit": "max", "w_max": "p50"}
# NaN and infinity show in any quantity; the largest logit also shows what preceded them.
SHOWN_INSTEAD = {"broken_row": "max_logit"}
# Cause and quantity of the alerts in files of older versions.
OLD_KINDS = {
    "diffuse": ("diffuse", "relative_entropy"),
    "collapsed": ("collapse", "w_max"),
    "noise": ("noise", "prominence"),
    "exploding": ("exploding", "max_logit"),
    "vanishing": ("vanishing", "gain"),
    "mismatch": ("mismatch", "mismatch"),
    "broken": ("nan", "broken_row"),
}


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
        starts = [self.nearest(event.start) for event in self.events]
        kept = set(starts[: number // 4])
        last, even = len(self.steps) - 1, number - len(kept)
        index = sorted(kept | {round(place * last / (even - 1)) for place in range(even)})
        return replace(
            self,
            steps=[self.steps[i] for i in index],
            planes={key: plane[index] for key, plane in self.planes.items()},
            loss=[self.loss[i] for i in index],
            lr=[self.lr[i] for i in index],
        )

    def nearest(self, step: int) -> int:
        """Return the index of the report nearest to a step."""
        return min(range(len(self.steps)), key=lambda index: abs(self.steps[index] - step))

    def worst(self, event: Event) -> int:
        """Return the column of the head that shows an event most clearly."""
        places = [column for column, place in enumerate(self.columns) if _concerns(event, *place)]
        plane = self.planes.get(Key.shown(event.quantity))
        if not places or plane is None:
            return places[0] if places else 0
        end = event.step if event.status == "over" else self.steps[-1]
        rows = [index for index, step in enumerate(self.steps) if event.start <= step <= end]
        values = plane[rows or [self.nearest(event.start)]][:, places].double()
        if event.quantity == "broken_row":  # recorded only for the heads with NaN or infinity
            return places[int(values.isfinite().any(0).int().argmax())]
        rising = event.value is None or event.usual is None or not event.value < event.usual
        values = values.nan_to_num(-math.inf) if rising else -values.nan_to_num(math.inf)
        return places[int(values.amax(0).argmax())]

    def start(self) -> tuple[int, int, str]:
        """Return step index, column and quantity with which the page opens: the worst event, else the largest logit."""
        if self.events:
            worst = self.events[0]
            quantity = SHOWN_INSTEAD.get(worst.quantity, worst.quantity)
            return self.nearest(worst.start), self.worst(worst), quantity
        key = Key.shown("max_logit")
        if key not in self.planes:
            return len(self.steps) - 1, 0, "w_max"
        return len(self.steps) - 1, int(self.planes[key][-1].nan_to_num(-math.inf).argmax()), "max_logit"


def _concerns(event: Event, layer: str, head: int) -> bool:
    return not event.places or any(name == layer and (not heads or head in heads) for name, heads in event.places)


def read_run(path: str | Path) -> Run:
    """Read a file written by `JsonlSink`. If a resumed run repeated steps, the last records are used.

    Lines that cannot be read are skipped and counted.

    Args:
        path: JSONL file of records.

    Returns:
        The `Run`.

    Raises:
        ArgumentError: the file does not exist, cannot be read, or contains no records.

    Example:
        >>> import tempfile
        >>> import attnscale
        >>> from attnscale.diagnostics import JsonlSink
        >>> model = attnscale.MultiheadAttention(16, 2, batch_first=True, policy="log")
        >>> x = torch.randn(1, 8, 16)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     monitor = attnscale.Monitor(model, every=1, sinks=[JsonlSink(f"{folder}/run.jsonl")])
        ...     _ = model(x, x, x), monitor.step(0), monitor.close()
        ...     run = read_run(f"{folder}/run.jsonl")
        >>> run.steps, len(run.columns)
        ([0], 2)
    """
    path = Path(path)
    if path.is_dir():
        reject("path", str(path), "a JSONL file of records, not a directory")
    if not path.exists():
        reject("path", str(path), "an existing JSONL file of records")
    found = _Content()
    try:
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):  # else it is incomplete, at the end of the file
                    found.add(line)
    except OSError as error:
        raise ArgumentError(f"path={str(path)!r} cannot be read: {error.strerror}") from error
    if not found.places:
        reject("path", str(path), f"a file with at least one record, {ACCEPTED}")
    return found.run(str(path))


class _Content:
    """Values in file order: one array per plane, and the index of each cell; and the other lines of a file."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, str, int], int] = {}
        self.planes: dict[Key, array[float]] = {}
        self.length = 0
        self.messages: list[Event] = []
        self.headers: list[dict[str, Any]] = []
        self.progress: dict[int, dict[str, float]] = {}  # loss and lr by step
        self.unreadable = 0
        self._latest = -1  # step

    def add(self, line: bytes) -> None:
        try:
            content = _cleaned(json.loads(line))
            kind = content["kind"]
            if kind == "record":
                self._record(_checked_record(content))
            elif kind == "event":
                self.messages.append(_checked_event(Event.from_dict(content["event"])))
            elif kind == "alert":
                self.messages.append(_checked_event(_event_of(Alert.from_dict(content["alert"]))))
            elif kind in ("header", "run"):
                self.headers.append(content)
            if kind != "event" and "step" in content:
                known = {name: float(content[name]) for name in ("loss", "lr") if content.get(name) is not None}
                self.progress.setdefault(int(content["step"]), {}).update(known)
        except INVALID:
            self.unreadable += 1

    def _record(self, record: Record) -> None:
        if record.step < self._latest:  # the run was resumed and repeats these steps
            self.messages = [event for event in self.messages if event.step < record.step]
        self._latest = record.step
        self.places[record.step, record.layer, record.head] = self.length
        self.length += 1
        numbers: dict[Key, float] = {}
        for phase, name, summary in record.summaries():
            numbers |= {Key(phase, name, statistic): getattr(summary, statistic) for statistic in STATISTICS}
        numbers |= {Key("scalar", name, "value"): value for name, value in record.scalars.items()}
        for key, value in numbers.items():
            plane = self.planes.setdefault(key, array("f"))
            plane.extend([math.nan] * (self.length - 1 - len(plane)))
            plane.append(value)

    def run(self, path: str) -> Run:
        steps = sorted({step for step, _, _ in self.places})
        heads: dict[str, set[int]] = {}
        for _, layer, head in self.places:
            heads.setdefault(layer, set()).add(head)
        columns = [(layer, head) for layer, found in heads.items() for head in sorted(found)]
        row, column = {step: i for i, step in enumerate(steps)}, {one: i for i, one in enumerate(columns)}
        flat = [row[step] * len(columns) + column[layer, head] for step, layer, head in self.places]
        where, source = (torch.tensor(list(one), device="cpu") for one in (flat, self.places.values()))
        planes = {key: torch.full((len(steps) * len(columns),), torch.nan, device="cpu") for key in self.planes}
        for key, plane in self.planes.items():
            values = torch.frombuffer(plane, dtype=torch.float32)
            there = source < len(values)
            planes[key][where[there]] = values[source[there]]
            planes[key] = planes[key].view(len(steps), len(columns))
        loss, lr = ([self.progress.get(step, {}).get(name) for step in steps] for name in ("loss", "lr"))
        events, header = merged(self.messages), self.headers[-1] if self.headers else {}
        return Run(path, steps, columns, planes, events, header, loss, lr, unreadable=self.unreadable)


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


def _event_of(alert: Alert) -> Event:
    """Convert an alert of an older version. All alerts of a kind have the same number, hence form one event."""
    cause, quantity = OLD_KINDS.get(alert.kind, (alert.kind, ""))
    number = list(OLD_KINDS).index(alert.kind) if alert.kind in OLD_KINDS else len(OLD_KINDS)
    severity = "critical" if alert.kind == "broken" else "warning"
    places = ((alert.layer, (alert.head,)),)
    return Event(
        number, cause, "begun", severity, alert.step, alert.step, places, alert.message, "", quantity, alert.value, alert.limit
    )


def _cleaned(content: Any) -> Any:
    """Escape control characters in all texts of JSON data."""
    if isinstance(content, str):
        return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), content)
    if isinstance(content, dict):
        return {_cleaned(name): _cleaned(value) for name, value in content.items()}
    return [_cleaned(value) for value in content] if isinstance(content, list) else content


def _checked_record(content: Mapping[str, Any]) -> Record:
    record = Record.from_dict(content)
    numbers = [*record.scalars.values(), *(value for *_, summary in record.summaries() for value in summary)]
    _check_types([record.layer], [record.step, record.head], numbers)
    return record


def _checked_event(event: Event) -> Event:
    texts = [event.cause, event.status, event.severity, event.message, event.advice, event.quantity]
    heads = [head for _, heads in event.places for head in heads]
    numbers = [value for value in (event.value, event.usual) if value is not None]
    _check_types([*texts, *(layer for layer, _ in event.places)], [event.start, event.step, *heads], numbers)
    return event


def _check_types(texts: list[str], whole: list[int], numbers: list[float]) -> None:
    """Raise TypeError or OverflowError for a field with an invalid type or an integer beyond float range."""
    for kind, values in ((str, texts), (int, whole), ((int, float), numbers)):
        if not all(isinstance(value, kind) for value in values):
            raise TypeError("a field has the wrong type")
    for number in numbers:
        float(number)  # JSON allows integers of any size
