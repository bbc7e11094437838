"""What a monitor could not do: each kind is warned of once."""

from __future__ import annotations

import warnings

from attnscale._util.uncopied import Uncopied
from attnscale.errors import MonitorWarning


class Notices(Uncopied):
    """Warnings that wait for a moment at which they interrupt neither forward nor backward."""

    def __init__(self) -> None:
        self._known: set[object] = set()
        self._waiting: list[str] = []

    def add(self, kind: object, text: str) -> None:
        """Have a warning given, unless there has been one of its kind."""
        if kind not in self._known:
            self._known.add(kind)
            self._waiting.append(text)

    def add_error(self, text: str, error: BaseException) -> None:
        """The same of an exception; its kind is its type and the line that raised it."""
        place, trace = None, error.__traceback__
        while trace is not None:
            place, trace = (trace.tb_frame.f_code, trace.tb_lineno), trace.tb_next
        self.add((type(error), place), f"{text}: {error!r}")

    def give(self) -> None:
        """Give the warnings that wait."""
        waiting, self._waiting = self._waiting, []
        for text in waiting:
            warnings.warn(f"attnscale: {text}", MonitorWarning, stacklevel=3)
