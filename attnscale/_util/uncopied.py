"""What belongs to one run and is neither copied nor saved with a model."""

from __future__ import annotations

from typing import Any


class Uncopied:
    """Copies of it, by `copy` or `pickle` and whatever holds it, are None.

    What listens to a model holds locks, open files and weak references to storages. Two owners of one such reference
    would both give it back, and corrupt memory.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
