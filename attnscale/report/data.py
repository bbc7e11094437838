"""Reads the records of a run into planes: one value per step and head for each quantity."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.diagnostics.records.record import STATISTICS, Alert, Record, parse_line
from attnscale.errors import ArgumentError, reject

ACCEPTED = (
    'a line of a JsonlSink, {"kind": "record", "step": 0, "layer": "attn", "head": 0, "forward": {…}, "backward": {…}, '
    '"scalars": {…}} or {"kind": "alert", "alert": {…}}'
)


class Key(NamedTuple):
    """Key of a plane. The phase is "forward", "backward" or "scalar"; the only statistic of scalars is "value"."""

    phase: str
    name: str
    statistic: str


@dataclass(frozen=True)
class Run:
    """The content of a JSONL file of records. A column is one head of a layer, in model order.

    Attributes:
        path: the file.
        steps: recorded steps, ascending.
        columns: (layer, head) of each column.
        planes: fp32 values [steps, columns] of each quantity; NaN where nothing was recorded.
        groups: alerts, grouped by kind and head.
        kinds: kinds of alerts that occurred.
        alerting: bit mask [steps, columns] of alerts, numbered as in `kinds`; kinds beyond the seventh share a bit.

    Example:
        >>> run = Run("run.jsonl", [0, 10], [("attn", 0)], {}, [], [], torch.zeros(2, 1, dtype=torch.uint8))
        >>> run.steps, run.columns
        ([0, 10], [('attn', 0)])
    """

    path: str
    steps: list[int]
    columns: list[tuple[str, int]]
    planes: dict[Key, Tensor]
    groups: list[list[Alert]]
    kinds: list[str]
    alerting: Tensor

    def thinned(self, number: int) -> Run:
        """Return the run with `number` evenly spaced steps, first and last included; alerts move to the step before."""
        index = [round(place * (len(self.steps) - 1) / (number - 1)) for place in range(number)]
        between = [slice(start, stop) for start, stop in zip(index, [*index[1:], len(self.steps)], strict=True)]
        alerting = torch.stack([reduce(torch.bitwise_or, self.alerting[part]) for part in between])
        planes = {key: plane[index] for key, plane in self.planes.items()}
        return replace(self, steps=[self.steps[i] for i in index], planes=planes, alerting=alerting)


def read_run(path: str | Path) -> Run:
    """Read a file written by `JsonlSink`. If a resumed run repeated steps, the last records are used.

    Args:
        path: JSONL file of records.

    Returns:
        The `Run`.

    Raises:
        ArgumentError: the file does not exist, cannot be read, or contains no records or invalid lines.

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
    cells = _Cells()
    alerts: dict[tuple[str, str, int], list[Alert]] = {}  # by kind, layer and head
    try:
        for found in _lines(path):
            if isinstance(found, Alert):
                alerts.setdefault((found.kind, found.layer, found.head), []).append(found)
            else:
                cells.add(found)
    except OSError as error:
        raise ArgumentError(f"path={str(path)!r} cannot be read: {error.strerror}") from error
    if not cells.places:
        reject("path", str(path), f"a file with at least one record, {ACCEPTED}")
    return _assemble(str(path), cells, list(alerts.values()))


def _lines(path: Path) -> Iterator[Record | Alert]:
    """Yield the records and alerts of a file; an incomplete last line is skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            missing = ""
            try:
                found = parse_line(line)
                _check_types(found)
            except KeyError as error:
                missing = f"; {error.args[0]!r} is missing"
            except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
                pass
            else:
                yield found
                continue
            reject(f"line {number} of {path}", line.decode("utf-8", "replace").strip(), ACCEPTED + missing)


def _check_types(found: Record | Alert) -> None:
    """Raise TypeError or OverflowError for a field with an invalid type or an integer beyond float range."""
    texts, numbers = [found.layer], list[float]()
    if isinstance(found, Alert):
        texts += [found.kind, found.message]
        numbers += [found.value, found.limit]
    else:
        numbers += [*found.scalars.values(), *(value for *_, summary in found.summaries() for value in summary)]
    for kind, values in ((str, texts), (int, [found.step, found.head]), ((int, float), numbers)):
        if not all(isinstance(value, kind) for value in values):
            raise TypeError
    for number in numbers:
        float(number)  # JSON allows integers of any size


class _Cells:
    """Values in file order: one array per plane, and the index of each cell."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, str, int], int] = {}
        self.planes: dict[Key, array[float]] = {}
        self.length = 0

    def add(self, record: Record) -> None:
        self.places[record.step, record.layer, record.head] = self.length
        self.length += 1
        numbers: dict[Key, float] = {}
        for phase, name, summary in record.summaries():
            numbers |= {Key(phase, name, statistic): getattr(summary, statistic) for statistic in STATISTICS}
        numbers |= {Key("scalar", name, "value"): value for name, value in record.scalars.items()}
        for key, value in numbers.items():
            plane = self.planes.setdefault(key, array("f"))
            plane.extend([float("nan")] * (self.length - 1 - len(plane)))
            plane.append(value)


def _assemble(path: str, cells: _Cells, groups: list[list[Alert]]) -> Run:
    steps = sorted({step for step, _, _ in cells.places})
    heads: dict[str, set[int]] = {}
    for _, layer, head in cells.places:
        heads.setdefault(layer, set()).add(head)
    columns = [(layer, head) for layer, found in heads.items() for head in sorted(found)]
    row, column = {step: i for i, step in enumerate(steps)}, {one: i for i, one in enumerate(columns)}
    flat = {place: row[place[0]] * len(columns) + column[place[1:]] for place in cells.places}
    where, source = (
        torch.tensor(list(flat.values()), device="cpu"),
        torch.tensor(list(cells.places.values()), device="cpu"),
    )
    planes = {key: torch.full((len(steps) * len(columns),), torch.nan, device="cpu") for key in cells.planes}
    for key, plane in cells.planes.items():
        values = torch.frombuffer(plane, dtype=torch.float32)
        there = source < len(values)
        planes[key][where[there]] = values[source[there]]
        planes[key] = planes[key].view(len(steps), len(columns))
    kinds = list(dict.fromkeys(alerts[0].kind for alerts in groups))
    bits = bytearray(len(steps) * len(columns))
    for alert in (alert for alerts in groups for alert in alerts):
        place = alert.step, alert.layer, alert.head
        if place in flat:
            bits[flat[place]] |= 1 << min(kinds.index(alert.kind), 7)
    alerting = torch.frombuffer(bits, dtype=torch.uint8).view(len(steps), len(columns))
    ordered = sorted(groups, key=lambda alerts: (alerts[0].step, alerts[0].layer, alerts[0].head))
    return Run(path, steps, columns, planes, ordered, kinds, alerting)
