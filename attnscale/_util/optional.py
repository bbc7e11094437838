"""Imports of packages that an extra installs."""

from __future__ import annotations

import importlib
from typing import Any

from attnscale.errors import MissingDependencyError


def need(module: str, what: str, extra: str) -> Any:
    """Import a module of an optional package, or raise an error that names the extra to install.

    >>> need("json", "this example", "none").dumps(1)
    '1'
    >>> need("no_such_package.part", "this example", "none")
    Traceback (most recent call last):
    ...
    attnscale.errors.MissingDependencyError: this example needs no_such_package: pip install 'attnscale[none]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # The package that is missing may be one that the module needs in turn.
        package = (error.name or module).partition(".")[0]
        raise MissingDependencyError(f"{what} needs {package}: pip install 'attnscale[{extra}]'") from error
