"""Imports of optional packages."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import shlex
from typing import Any

from attnscale.errors import MissingDependencyError

NOT_INSTALLED = "not installed"


def need(module: str, what: str, extra: str) -> Any:
    """Import a module of an optional package, or raise an error with the install command of the extra.

    >>> need("json", "this example", "cli").dumps(1)
    '1'
    >>> need("no_such_package.part", "this example", "cli")
    Traceback (most recent call last):
    ...
    attnscale.errors.MissingDependencyError: this example needs no_such_package: pip install ...
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # The missing package may be a dependency of the module.
        package = (error.name or module).partition(".")[0]
        raise MissingDependencyError(f"{what} needs {package}: {install_command(extra)}") from error


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, by name: attnscale is on no package index."""
    try:
        declared = importlib.metadata.requires("attnscale") or []
    except importlib.metadata.PackageNotFoundError:  # imported from a clone without installation
        return f"pip install '.[{extra}]' in the attnscale repository"
    packages = [line.partition(";")[0].strip() for line in declared if re.search(rf"extra == .{extra}\W", line)]
    return shlex.join(["pip", "install", *packages])


def version_of(package: str) -> str:
    """Return the version of an installed distribution.

    >>> version_of("no-such-package")
    'not installed'
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED
