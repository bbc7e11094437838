"""Objects that hold on to others: handles that undo a change, and listeners, which must not be copied."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self


class Removable:
    """Base of handles with an idempotent `remove()`, which a `with` statement calls at its end."""

    def remove(self) -> None:
        """Undo the change. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Uncopied:
    """Copying or pickling it, or whatever holds it, gives None.

    Listeners hold locks, open files and weak references to storages; two owners of such a reference would both release
    it and corrupt memory.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
