"""Reading what a `JsonlSink` writes: a finished file, or one that another process is still writing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from attnscale.diagnostics.records.record import Alert, Record

LONGEST = 1 << 24  # bytes of a line; a longer one is no record, and is not kept in memory


def read_jsonl(path: str | Path) -> Iterator[Record | Alert]:
    """What a `JsonlSink` has written, in order; an incomplete last line is left out."""
    with Path(path).open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield parse_line(line)


def parse_line(line: bytes) -> Record | Alert:
    """The content of a line; ValueError, KeyError or TypeError if it is no record or alert."""
    content = json.loads(line)
    return Alert.from_dict(content["alert"]) if content["kind"] == "alert" else Record.from_dict(content)


class Tail:
    """Follows a file: reads what has been added since the last time.

    An incomplete line is left until its end is there. A file that has become shorter, or has been replaced by another,
    is read from its beginning, and `restarts` counts that. `skipped` counts lines that are no records.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.offset = 0
        self.skipped = 0
        self.restarts = 0
        self._identity: tuple[int, int] | None = None
        self._incomplete = b""  # the first byte of a line whose end is not there yet
        self._overlong = False  # the offset is inside a line that is longer than a record can be

    @property
    def foreign(self) -> bool:
        """Whether the file holds something that is no record: lines that were skipped, or the beginning of one."""
        return self.skipped > 0 or self._incomplete not in (b"", b"{")

    def new(self) -> Iterator[Record | Alert]:
        """What has been added since the last call, oldest first; nothing while the file does not exist."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            before, self._identity = self._identity, (status.st_dev, status.st_ino)
            if before not in (None, self._identity) or status.st_size < self.offset:
                self.offset, self.skipped, self._overlong = 0, 0, False
                self.restarts += 1
            self._incomplete = b""
            file.seek(self.offset)
            while line := file.readline(LONGEST):
                complete = line.endswith(b"\n")
                if not complete and len(line) < LONGEST:
                    self._incomplete = line[:1]
                    return
                self.offset += len(line)
                overlong, self._overlong = self._overlong, not complete
                if overlong or not complete:
                    self.skipped += complete
                    continue
                try:
                    yield parse_line(line)
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    self.skipped += 1
