"""Reads the records of a run into planes: for each quantity one number per step and head."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.diagnostics.records.jsonl import read_jsonl
from attnscale.diagnostics.records.record import STATISTICS, Alert, Record
from attnscale.errors import ArgumentError, reject


class Key(NamedTuple):
    """Which number of a head: the phase is forward, backward or scalar, whose only statistic is "value"."""

    phase: str
    name: str
    statistic: str


class AlertGroup(NamedTuple):
    """The alerts of one kind in one head: how many, when, and the first and the latest of them."""

    times: int
    first: Alert
    latest: Alert


@dataclass(frozen=True)
class Run:
    """The content of a file of records. A column is a head of a layer; columns are in the order of the model.

    `planes` are [steps, columns] in fp32, NaN where nothing was recorded. `alerting` [steps, columns] has a bit for
    each kind of alert, numbered as in `kinds`; kinds beyond the seventh share the last bit.
    """

    path: str
    steps: list[int]
    columns: list[tuple[str, int]]
    planes: dict[Key, Tensor]
    groups: list[AlertGroup]
    kinds: list[str]
    alerting: Tensor

    def thinned(self, number: int) -> Run:
        """So many steps, evenly spaced, with the first and the last; alerts between two move to the earlier."""
        index = [round(place * (len(self.steps) - 1) / (number - 1)) for place in range(number)]
        between = [slice(start, stop) for start, stop in zip(index, [*index[1:], len(self.steps)], strict=True)]
        alerting = torch.stack([reduce(torch.bitwise_or, self.alerting[part]) for part in between])
        planes = {key: plane[index] for key, plane in self.planes.items()}
        return replace(self, steps=[self.steps[i] for i in index], planes=planes, alerting=alerting)


def read_run(path: str | Path) -> Run:
    """Read what a `JsonlSink` has written; of steps that a resumed run repeated, the last records count."""
    path = Path(path)
    if path.is_dir():
        reject("path", str(path), "a JSONL file of records, not a directory")
    if not path.exists():
        reject("path", str(path), "an existing JSONL file of records")
    cells, alerts, line = _Cells(), _Alerts(), 0
    try:
        for line, found in enumerate(read_jsonl(path), start=1):  # noqa: B007
            if isinstance(found, Alert):
                alerts.add(found)
            else:
                cells.add(found)
    except OSError as error:
        raise ArgumentError(f"path={str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"line {line + 1} of {path} is not a record of attnscale's JsonlSink: {error}") from error
    if not cells.places:
        reject("path", str(path), "a file with at least one record")
    return _assemble(str(path), cells, alerts)


class _Cells:
    """Numbers in the order of the file: an array per plane, and for each cell its index there."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, str, int], int] = {}
        self.planes: dict[Key, array[float]] = {}
        self.length = 0

    def add(self, record: Record) -> None:
        self.places[record.step, record.layer, record.head] = self.length
        self.length += 1
        for phase, name, summary in record.summaries():
            for statistic, value in zip(STATISTICS, summary, strict=False):
                self._put(Key(phase, name, statistic), value)
        for name, value in record.scalars.items():
            self._put(Key("scalar", name, "value"), value)

    def _put(self, key: Key, value: float) -> None:
        plane = self.planes.setdefault(key, array("f"))
        if missing := self.length - 1 - len(plane):
            plane.extend([float("nan")] * missing)
        plane.append(value)


class _Alerts:
    """Alerts as groups, and as bits of the cells where they were raised."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, str, int], AlertGroup] = {}
        self.kinds: list[str] = []
        self.bits: dict[tuple[int, str, int], int] = {}

    def add(self, alert: Alert) -> None:
        key = (alert.kind, alert.layer, alert.head)
        before = self.groups.get(key, AlertGroup(0, alert, alert))
        self.groups[key] = AlertGroup(before.times + 1, before.first, alert)
        if alert.kind not in self.kinds:
            self.kinds.append(alert.kind)
        place = (alert.step, alert.layer, alert.head)
        self.bits[place] = self.bits.get(place, 0) | 1 << min(self.kinds.index(alert.kind), 7)


def _assemble(path: str, cells: _Cells, alerts: _Alerts) -> Run:
    steps = sorted({step for step, _, _ in cells.places})
    heads: dict[str, set[int]] = {}
    for _, layer, head in cells.places:
        heads.setdefault(layer, set()).add(head)
    columns = [(layer, head) for layer, found in heads.items() for head in sorted(found)]
    row, column = {step: i for i, step in enumerate(steps)}, {one: i for i, one in enumerate(columns)}

    def flat(places: Iterable[tuple[int, str, int]]) -> Tensor:
        return torch.tensor([row[step] * len(columns) + column[layer, head] for step, layer, head in places])

    where, source = flat(cells.places), torch.tensor(list(cells.places.values()))
    planes = {key: _scatter(plane, where, source, len(steps), len(columns)) for key, plane in cells.planes.items()}
    known = {place: bits for place, bits in alerts.bits.items() if place in cells.places}
    alerting = torch.zeros(len(steps) * len(columns), dtype=torch.uint8)
    if known:
        alerting[flat(known)] = torch.tensor(list(known.values()), dtype=torch.uint8)
    groups = sorted(alerts.groups.values(), key=lambda group: (group.first.step, group.first.layer, group.first.head))
    return Run(path, steps, columns, planes, groups, alerts.kinds, alerting.view(len(steps), len(columns)))


def _scatter(plane: array[float], where: Tensor, source: Tensor, steps: int, columns: int) -> Tensor:
    """Numbers in the order of the file as [steps, columns]."""
    values = torch.frombuffer(plane, dtype=torch.float32)
    found = torch.full((steps * columns,), torch.nan)
    there = source < len(values)
    found[where[there]] = values[source[there]]
    return found.view(steps, columns)
