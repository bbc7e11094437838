"""Records as lines of JSON, in a file that stays readable if the run is killed."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnscale.diagnostics.records.record import Alert, Record
from attnscale.errors import reject, reject_type


class JsonlSink:
    """One line per layer and head, and one per alert; a resumed run appends to the file.

    Each report is one unbuffered write to a file opened for appending: a process that is killed leaves at most the last
    line incomplete, which is cut off when the file is next opened for writing and skipped by `read_jsonl`.
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

    def log(self, records: Sequence[Record], step: int) -> None:
        self._write([{"kind": "record", **record.as_dict()} for record in records])

    def alert(self, alerts: Sequence[Alert], step: int) -> None:
        self._write([{"kind": "alert", "alert": alert.as_dict()} for alert in alerts])

    def close(self) -> None:
        self._file.close()

    def _write(self, lines: list[dict[str, Any]]) -> None:
        content = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
        view = memoryview(content.encode())
        while view:
            view = view[self._file.write(view) :]


def _cut_incomplete_line(path: Path) -> None:
    with path.open("rb+") as file:
        if size := file.seek(0, 2):  # an empty file cannot be mapped
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                end = content.rfind(b"\n") + 1
            if end < size:
                file.truncate(end)
