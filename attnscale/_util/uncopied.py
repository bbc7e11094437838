"""Objects of one run that are neither copied nor saved with a model."""

from __future__ import annotations

from typing import Any


class Uncopied:
    """Copying or pickling it, or whatever holds it, gives None.

    Listeners hold locks, open files and weak references to storages; two owners of such a reference would both release
    it and corrupt memory.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
