"""Sink that appends lines of JSON to a file, which stays readable if the run is killed."""

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
    """Writes one line of JSON per layer and head, and one per alert. A resumed run appends to the file.

    Each report is one unbuffered append. A killed process leaves at most one incomplete line at the end of the file.
    `read_jsonl` skips this line, and the next `JsonlSink` on the file removes it.

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
        ...     len(sink.path.read_text().splitlines())
        2
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
        """Append the records of a step."""
        self._write([{"kind": "record", **record.as_dict()} for record in records])

    def alert(self, alerts: Sequence[Alert], step: int) -> None:
        """Append the alerts of a step."""
        self._write([{"kind": "alert", "alert": alert.as_dict()} for alert in alerts])

    def close(self) -> None:
        """Close the file. Idempotent."""
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
