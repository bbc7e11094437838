"""Skips for what older supported releases of transformers lack."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import transformers

from attnscale._util.versions import release

INSTALLED = transformers.__version__


def is_before(version: str) -> bool:
    """Whether the installed transformers is older than a release."""
    return release(INSTALLED) < release(version)


# Since 5.22, every model type of the tests exists: a missing name is a mistake, not a reason to skip.
MAY_LACK_MODELS = is_before("5.22")


def since(version: str, what: str) -> pytest.MarkDecorator:
    """Mark of a test of something that transformers does since a release."""
    return pytest.mark.skipif(is_before(version), reason=_reason(version, what))


def skip_before(version: str, what: str) -> None:
    """Skip the running test of something that transformers does since a release."""
    if is_before(version):
        pytest.skip(_reason(version, what))


def skip_without_type(model_type: str) -> None:
    """Skip the running test of a model type that an older release lacks."""
    if MAY_LACK_MODELS and model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {INSTALLED} has no model type {model_type}")


def _reason(version: str, what: str) -> str:
    return f"transformers {INSTALLED} is installed; since {version}, {what}"


class _Names:
    """The names of transformers. Calling a class that an older release lacks skips the running test."""

    def __getattr__(self, name: str) -> Any:
        if not MAY_LACK_MODELS or hasattr(transformers, name):
            return getattr(transformers, name)

        def skip(*args: Any, **kwargs: Any) -> NoReturn:
            pytest.skip(f"transformers {INSTALLED} has no {name}")

        return skip


models = _Names()
