"""Following a file of records while another process writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from attnscale.diagnostics.records.record import Alert, Record
from attnscale.diagnostics.sinks.jsonl import parse_line

BLOCK = 1 << 20
LONGEST = 1 << 24  # bytes of a line; what is longer is no record of ours, and would be kept in memory


class Tail:
    """Reads what has been added to a file since the last look, and never what it has read before.

    A line without its end is kept until the rest is there. A file that has become shorter, or has been replaced by
    another, is read from its beginning, and `restarts` counts that. Lines that hold no record are counted in `skipped`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.offset = 0
        self.skipped = 0
        self.restarts = 0
        self._identity: tuple[int, int] | None = None
        self._rest = b""
        self._overlong = False

    def new(self) -> Iterator[Record | Alert]:
        """What has come since the last call, oldest first; nothing while the file does not exist."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            self._notice_restart(file)
            file.seek(self.offset)
            while block := file.read(BLOCK):
                self.offset += len(block)
                yield from self._parse(block)

    def _notice_restart(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        replaced = self._identity is not None and identity != self._identity
        self._identity = identity
        if replaced or status.st_size < self.offset:
            self.offset, self.skipped, self._rest, self._overlong = 0, 0, b"", False
            self.restarts += 1

    def _parse(self, block: bytes) -> Iterator[Record | Alert]:
        *lines, rest = block.split(b"\n")
        if lines:
            lines[0] = self._rest + lines[0]
            self._rest = b""
        for index, line in enumerate(lines):
            if index == 0 and self._overlong:
                self._overlong = False
                self.skipped += 1
                continue
            try:
                yield parse_line(line)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                self.skipped += 1
        self._rest += rest
        if len(self._rest) > LONGEST:
            self._rest, self._overlong = b"", True
