"""The folder of the user's cache, where results that hold for this machine outlive the process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

OVERRIDE = "ATTNSCALE_CACHE_DIR"


def cache_folder() -> Path:
    """Where this package may keep files that can be made again; ATTNSCALE_CACHE_DIR names another place.

    >>> os.environ["ATTNSCALE_CACHE_DIR"] = "/somewhere/else"
    >>> cache_folder().as_posix()
    '/somewhere/else'
    >>> del os.environ["ATTNSCALE_CACHE_DIR"]
    """
    chosen = os.environ.get(OVERRIDE)
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "attnscale"
