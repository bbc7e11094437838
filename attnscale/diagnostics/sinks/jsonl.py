"""Sink that appends lines of JSON to a file, which stays readable if the run is killed."""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnscale.diagnostics.records.record import Event, Progress, Record, RunInfo
from attnscale.diagnostics.records.report import Report
from attnscale.errors import reject, reject_type


class JsonlSink:
    """Writes lines of JSON: a header, one line per report, one per event. A resumed run appends to the file.

    A report takes about 250 bytes per head. Each line is one unbuffered append. A killed process leaves at most one
    incomplete line at the end of the file, which readers skip and the next `JsonlSink` on the file removes. Read the
    file with `attnscale.diagnostics.read`.

    Args:
        path: the file. Missing parent folders are created.

    Raises:
        ArgumentError: `path` is a folder.
        ArgumentTypeError: `path` is not a path.

    Example:
        >>> import tempfile
        >>> from attnscale.diagnostics import Record
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sink = JsonlSink(f"{folder}/run/attn.jsonl")
        ...     sink.log([Record(0, "layers.0", 0), Record(0, "layers.0", 1)], step=0)
        ...     sink.close()
        ...     [json.loads(line)["kind"] for line in sink.path.read_text().splitlines()]
        ['report', 'end']
    """

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, (str, os.PathLike)):
            reject_type("path", path, "a path")
        if Path(path).is_dir():
            reject("path", str(path), "a file, not a folder")
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _cut_incomplete_line(self.path)
        self._file = self.path.open("ab", buffering=0)
        self._progress = Progress()
        self._written = False

    def open(self, run: RunInfo) -> None:
        """Append the header."""
        self._write({"kind": "run", **run.as_dict()})

    def progress(self, progress: Progress, step: int) -> None:
        """Keep loss and learning rate for the next report."""
        self._progress = progress

    def log(self, records: Sequence[Record], step: int) -> None:
        """Append the records of a step as one line."""
        report = Report.of(records, step, time=time.time(), **self._progress._asdict())
        self._write({"kind": "report", **report.as_dict()})
        self._written = True

    def event(self, events: Sequence[Event], step: int) -> None:
        """Append the events of a step."""
        for event in events:
            self._write({"kind": "event", "event": event.as_dict()})

    def close(self) -> None:
        """Append a last line, unless there was no report, and close the file. Idempotent."""
        if self._written and not self._file.closed:
            self._written = False
            self._write({"kind": "end", "time": time.time(), "dropped": self._progress.dropped})
        self._file.close()

    def _write(self, content: dict[str, Any]) -> None:
        line = json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"
        view = memoryview(line.encode())
        while view:
            view = view[self._file.write(view) :]


def _cut_incomplete_line(path: Path) -> None:
    with path.open("rb+") as file:
        if size := file.seek(0, 2):  # an empty file cannot be mapped
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                end = content.rfind(b"\n") + 1
            if end < size:
                file.truncate(end)
