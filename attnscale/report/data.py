"""Reads the file of a monitored run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnscale.diagnostics.records.file import ACCEPTED, Scan, scan
from attnscale.diagnostics.records.report import Report
from attnscale.errors import ArgumentError, reject
from attnscale.report.run import Key, Run, merged, spaced

MOST_VALUES = 60_000_000  # of a run in memory; reports of a larger run are thinned out, which a page does anyway
FEWEST_REPORTS = 64


def read_run(path: str | Path) -> Run:
    """Read a file written by `JsonlSink`, or some reports of a long run.

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
        skipped = found.tail.skipped
        first = next(found.decode(), None)
        if first is None:
            reject("path", str(path), f"{ACCEPTED} with at least one report that can be read")
        events = merged(found.events)
        most = max(FEWEST_REPORTS, MOST_VALUES // max(1, first.table().numel()))
        kept = spaced([region.step for region in found.regions], [event.start for event in events], most)
        found.tail.skipped = skipped  # the first reports are read again
        reports = list(found._replace(regions=[found.regions[index] for index in kept]).decode())
    except OSError as error:
        raise ArgumentError(f"path={str(path)!r} cannot be read: {error.strerror}") from error
    columns, planes = _arrange(reports)
    return Run(
        str(path),
        [report.step for report in reports],
        columns,
        planes,
        events,
        _header(found),
        [report.loss for report in reports],
        [report.lr for report in reports],
        len(found.regions),
        found.tail.skipped,
    )


def _header(found: Scan) -> dict[str, Any]:
    """Return the fields of the latest header, with the date of the first; empty for files of older versions."""
    return asdict(found.runs[-1]) | {"started": found.runs[0].started} if found.runs else {}


def _arrange(reports: list[Report]) -> tuple[list[tuple[str, int]], dict[Key, Tensor]]:
    """Return layer and head of each column, and the planes."""
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
                planes[key] = torch.full((len(reports), len(columns)), torch.nan, device="cpu")
            planes[key][row, where] = values
    return columns, planes
