"""Warnings about measurements that failed, issued at the end of a step."""

from __future__ import annotations

import traceback
import warnings

from attnscale._util.handles import Uncopied
from attnscale.errors import MonitorWarning


class Notices(Uncopied):
    """Collects warnings during forward and backward, one per kind, and issues them at the end of the step."""

    def __init__(self) -> None:
        self._known: set[object] = set()
        self._waiting: list[str] = []

    def add(self, kind: object, text: str) -> None:
        """Add a warning unless one of this kind has been added before."""
        if kind not in self._known:
            self._known.add(kind)
            self._waiting.append(text)

    def add_error(self, text: str, error: BaseException) -> None:
        """Add a warning about an exception. Its kind is the exception type and the line that raised it."""
        places = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        self.add((type(error), *places[-1:]), f"{text}: {error!r}")

    def issue(self) -> None:
        """Issue all pending warnings."""
        waiting, self._waiting = self._waiting, []
        for text in waiting:
            warnings.warn(f"attnscale: {text}", MonitorWarning, stacklevel=3)
