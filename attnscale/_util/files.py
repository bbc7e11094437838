"""Atomic writes."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file atomically: a failure leaves the previous file of that name unchanged, and no partial one.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp(), "note.txt")
    >>> write_whole(target, "kept")
    >>> target.read_text()
    'kept'
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(content if isinstance(content, bytes) else content.encode())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
