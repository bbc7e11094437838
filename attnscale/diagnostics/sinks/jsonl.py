"""Records as lines of JSON, in a file that a killed run leaves readable."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attnscale.diagnostics.records.record import Alert, Record
from attnscale.errors import reject, reject_type


class JsonlSink:
    """One line per layer and head, and one per alert; a run that is resumed goes on where the file ends.

    Each report is one write to a file opened for appending: a process that is killed leaves at most the last line
    incomplete, which is cut off when the file is next opened for writing and skipped by `read_jsonl`.
    """

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, (str, os.PathLike)):
            reject_type("path", path, "a path")
        if Path(path).is_dir():
            reject("path", str(path), "a file, not a folder")
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _cut_incomplete(self.path)
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


def read_jsonl(path: str | Path) -> Iterator[Record | Alert]:
    """What a `JsonlSink` has written, in order; a line that is not complete yet is left out."""
    with Path(path).open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield parse_line(line)


def parse_line(line: bytes) -> Record | Alert:
    """What one line says; a ValueError, KeyError or TypeError where it says nothing of the kind."""
    content = json.loads(line)
    return Alert.from_dict(content["alert"]) if content["kind"] == "alert" else Record.from_dict(content)


def _cut_incomplete(path: Path) -> None:
    """Drop what follows the last line break."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, 2)
        position = size
        while position > 0:
            block = min(4096, position)
            file.seek(position - block)
            found = file.read(block).rfind(b"\n")
            if found >= 0:
                position = position - block + found + 1
                break
            position -= block
        if position < size:
            file.truncate(position)
