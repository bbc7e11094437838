"""Reads the records of a run into planes: one value per step and head for each quantity."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.diagnostics.records.file import ACCEPTED, scan
from attnscale.diagnostics.records.record import Event
from attnscale.diagnostics.records.report import Report
from attnscale.errors import ArgumentError, reject

MOST_VALUES = 60_000_000  # of a run in memory; reports of a larger run are thinned out evenly, which a page does anyway
FEWEST_REPORTS = 64


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
        groups: events, grouped by cause and head; each event has one place.
        kinds: causes that occurred.
        alerting: bit mask [steps, columns] of events, numbered as in `kinds`; causes beyond the seventh share a bit.
        reported: number of reports in the file, of which `steps` are read.
        skipped: number of lines that cannot be read.

    Example:
        >>> run = Run("run.jsonl", [0, 10], [("attn", 0)], {}, [], [], torch.zeros(2, 1, dtype=torch.uint8))
        >>> run.steps, run.columns
        ([0, 10], [('attn', 0)])
    """

    path: str
    steps: list[int]
    columns: list[tuple[str, int]]
    planes: dict[Key, Tensor]
    groups: list[list[Event]]
    kinds: list[str]
    alerting: Tensor
    reported: int = 0
    skipped: int = 0

    def thinned(self, number: int) -> Run:
        """Return the run with `number` evenly spaced steps, first and last included; events move to the step before."""
        index = [round(place * (len(self.steps) - 1) / (number - 1)) for place in range(number)]
        between = [slice(start, stop) for start, stop in zip(index, [*index[1:], len(self.steps)], strict=True)]
        alerting = torch.stack([reduce(torch.bitwise_or, self.alerting[part]) for part in between])
        planes = {key: plane[index] for key, plane in self.planes.items()}
        return replace(self, steps=[self.steps[i] for i in index], planes=planes, alerting=alerting)


def read_run(path: str | Path) -> Run:
    """Read a file written by `JsonlSink`, or evenly spaced reports of a long run.

    If a resumed run repeated steps, the last reports are used. Lines that cannot be read are counted.

    Args:
        path: JSONL file of reports.

    Returns:
        The `Run`.

    Raises:
        ArgumentError: the file does not exist, cannot be read, or contains no reports.

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
    try:
        found = scan(path)
        first = next(found.decode(), None)
        if first is None:
            reject("path", str(path), f"{ACCEPTED} with at least one report that can be read")
        values = first.summaries.numel() + first.numbers.numel()
        reports = list(found.decode(max(FEWEST_REPORTS, MOST_VALUES // max(1, values))))
    except OSError as error:
        raise ArgumentError(f"path={str(path)!r} cannot be read: {error.strerror}") from error
    groups: dict[tuple[str, str, int], list[Event]] = {}  # by cause, layer and head
    for event in found.events:
        for layer, heads in event.places:
            for head in heads:
                one = replace(event, places=((layer, (head,)),))
                groups.setdefault((event.cause, layer, head), []).append(one)
    run = _assemble(str(path), reports, list(groups.values()))
    return replace(run, reported=len(found.regions), skipped=found.tail.skipped)


def _assemble(path: str, reports: list[Report], groups: list[list[Event]]) -> Run:
    steps = [report.step for report in reports]
    heads: dict[str, set[int]] = {}
    for layers in dict.fromkeys(report.layers for report in reports):
        for layer, of_layer, _ in layers:
            heads.setdefault(layer, set()).update(of_layer)
    columns = [(layer, head) for layer, found in heads.items() for head in sorted(found)]
    column = {place: index for index, place in enumerate(columns)}
    planes: dict[Key, Tensor] = {}
    for row, report in enumerate(reports):
        where = torch.tensor([column[place] for place in report.places], device="cpu")
        for (phase, name, statistic), values in zip(report.keys, report.table(), strict=True):
            key = Key(phase or "scalar", name, statistic or "value")
            if key not in planes:
                planes[key] = torch.full((len(steps), len(columns)), torch.nan, device="cpu")
            planes[key][row, where] = values
    kinds = list(dict.fromkeys(events[0].cause for events in groups))
    alerting = torch.zeros(len(steps), len(columns), dtype=torch.uint8, device="cpu")
    for event in (event for events in groups for event in events):
        (layer, (head,)), row = event.places[0], bisect_right(steps, event.step) - 1
        if row >= 0 and (layer, head) in column:
            alerting[row, column[layer, head]] |= 1 << min(kinds.index(event.cause), 7)
    ordered = sorted(groups, key=lambda events: (events[0].step, events[0].places))
    return Run(path, steps, columns, planes, ordered, kinds, alerting)
