"""Finished cells of an evaluation on disk: one JSON file each, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from attnscale._util.files import write_whole
from attnscale.errors import ArgumentError

Key = dict[str, Any]


class Cells:
    """The cells in a folder, by a key of everything that decides their result."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: Key) -> dict[str, Any] | None:
        """What was stored for a key, if anything."""
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ArgumentError(f"{path} is not a cell of an evaluation ({error}): remove it and run again") from error
        return stored

    def write(self, key: Key, **content: Any) -> None:
        """Store a cell, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(key), json.dumps({"key": key, **content}, sort_keys=True))

    def _path(self, key: Key) -> Path:
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
        return self.folder / f"{key['task']}-{name}.json"
