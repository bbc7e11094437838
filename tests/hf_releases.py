"""Skips for what older supported releases of transformers lack."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import transformers
from packaging.version import Version

INSTALLED = Version(transformers.__version__)

# From this release on, every model type of the tests exists: a missing name is a mistake, not a reason to skip.
COMPLETE = Version("5.22")


def is_before(release: str) -> bool:
    """Whether the installed transformers is older than a release."""
    return Version(release) > INSTALLED


def since(release: str, what: str) -> pytest.MarkDecorator:
    """Mark of a test of something that transformers does since a release."""
    return pytest.mark.skipif(is_before(release), reason=_reason(release, what))


def skip_before(release: str, what: str) -> None:
    """Skip the running test of something that transformers does since a release."""
    if is_before(release):
        pytest.skip(_reason(release, what))


def _reason(release: str, what: str) -> str:
    return f"transformers {INSTALLED} is installed; since {release}, {what}"


class _Names:
    """The names of transformers. Calling a class that an older release lacks skips the running test."""

    def __getattr__(self, name: str) -> Any:
        if INSTALLED >= COMPLETE or hasattr(transformers, name):
            return getattr(transformers, name)

        def skip(*args: Any, **kwargs: Any) -> NoReturn:
            pytest.skip(f"transformers {INSTALLED} has no {name}")

        return skip


models = _Names()


def skip_without_type(model_type: str) -> None:
    """Skip the running test of a model type that an older release lacks."""
    if INSTALLED < COMPLETE and model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {INSTALLED} has no model type {model_type}")
