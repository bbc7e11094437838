"""Reads the file of a monitored run."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attnscale.diagnostics.records.record import STATISTICS, Alert, Event, Record
from attnscale.errors import ArgumentError, reject
from attnscale.report.run import Key, Run, merged

ACCEPTED = (
    'a line of a JsonlSink, {"kind": "record", "step": 0, "layer": "attn", "head": 0, "forward": {…}, "backward": {…}, '
    '"scalars": {…}}'
)
INVALID = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
# Control characters, and characters that change the direction of text.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
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


def _event_of(alert: Alert) -> Event:
    """Convert an alert of an older version. All alerts of a kind have the same number, hence form one event."""
    cause, quantity = OLD_KINDS.get(alert.kind, (alert.kind, ""))
    number = list(OLD_KINDS).index(alert.kind) if alert.kind in OLD_KINDS else len(OLD_KINDS)
    severity = "critical" if alert.kind == "broken" else "warning"
    place, when = ((alert.layer, (alert.head,)),), (alert.step, alert.step)
    numbers = alert.value, alert.limit
    return Event(number, cause, "begun", severity, *when, place, alert.message, "", quantity, *numbers)


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
