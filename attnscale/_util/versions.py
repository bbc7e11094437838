"""Supported versions of Python and transformers. `make test-versions` runs the tests with their oldest and newest."""

from __future__ import annotations

import re
from typing import NamedTuple


class VersionRange(NamedTuple):
    """The oldest and the newest supported version, each with all its patch releases."""

    oldest: str
    newest: str

    def covers(self, version: str) -> bool:
        """Whether a version is supported.

        >>> [TRANSFORMERS.covers(version) for version in ("4.57.6", "5.0.0", "5.9.0.dev0")]
        [False, True, True]
        """
        return release(self.oldest) <= release(version) <= release(self.newest)


PYTHON = VersionRange("3.10", "3.13")
TRANSFORMERS = VersionRange("5.0", "5.23")


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, for comparisons.

    >>> release("5.22.2") < release("5.23")
    True
    """
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
