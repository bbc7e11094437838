"""Changes to foreign objects that can be undone."""

from __future__ import annotations

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
