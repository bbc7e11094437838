"""Base classes of removable handles and of objects that must not be copied."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self


class Removable:
    """Base class of handles with an idempotent `remove()`, also called at the end of a `with` statement."""

    def remove(self) -> None:
        """Undo the change. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Uncopied:
    """Base class of objects that copying or pickling, directly or inside a container, replaces with None.

    Such objects hold locks, open files and weak references to storages. Two owners of such a reference would both
    release it and corrupt memory.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
