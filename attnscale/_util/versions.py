"""Versions of installed packages."""

from __future__ import annotations

import importlib.metadata


def version_of(package: str) -> str:
    """The version of an installed distribution.

    >>> version_of("no-such-package")
    'not installed'
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
