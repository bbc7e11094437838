"""Exceptions and warnings. Messages quote the argument, its value and the accepted values."""

from __future__ import annotations

from typing import NoReturn

LONGEST_QUOTE = 120


class AttnScaleError(Exception):
    """Base class of all exceptions of this package."""


class ArgumentError(AttnScaleError, ValueError):
    """An argument has a value or shape that is not accepted. Also a `ValueError`."""


class ArgumentTypeError(AttnScaleError, TypeError):
    """An argument has the wrong type or dtype. Also a `TypeError`."""


class TensorError(ArgumentError, RuntimeError):
    """Incompatible tensors, or a number out of range. A `RuntimeError`, as in torch's attention."""


class DtypeError(ArgumentTypeError, RuntimeError):
    """A dtype or layout that attention does not support. A `RuntimeError`, as in torch's attention."""


class ModuleArgumentError(TensorError, AssertionError):
    """Shapes that do not fit a MultiheadAttention. torch raises AssertionError or RuntimeError; this error is both."""


class ModuleDtypeError(DtypeError, AssertionError):
    """A nested tensor or mask dtype that MultiheadAttention does not support. An `AssertionError`, as in torch."""


class FrozenPolicyError(ArgumentError, AttributeError):
    """Assignment to a field of a finished policy. Use `dataclasses.replace` instead."""


class BackendError(AttnScaleError, RuntimeError):
    """The requested backend cannot compute this call, or no backend can. Also a `RuntimeError`."""


class MissingDependencyError(AttnScaleError, ImportError):
    """A feature needs an optional dependency that is not installed. Also an `ImportError`."""


class ExportError(AttnScaleError, RuntimeError):
    """An exported model does not reproduce its source, or could not be written. Also a `RuntimeError`."""


class AttnScaleWarning(UserWarning):
    """A valid call that is probably not intended."""


class MonitorWarning(RuntimeWarning):
    """A monitor failed to do something. The run continues."""


def reject(argument: str, value: object, accepted: str, kind: type[ArgumentError] = ArgumentError) -> NoReturn:
    """Raise an `ArgumentError` with the standard message for a value that is not accepted.

    >>> reject("window", 0, "an int >= 1")
    Traceback (most recent call last):
    ...
    attnscale.errors.ArgumentError: window=0 is not accepted: expected an int >= 1
    """
    raise kind(f"{argument}={_quoted(value)} is not accepted: expected {accepted}")


def reject_type(argument: str, value: object, accepted: str) -> NoReturn:
    """Raise an `ArgumentTypeError` with the standard message for a value of the wrong type.

    >>> reject_type("beta", "hot", "a number")
    Traceback (most recent call last):
    ...
    attnscale.errors.ArgumentTypeError: beta='hot' (str) is not accepted: expected a number
    """
    kind = type(value).__name__
    raise ArgumentTypeError(f"{argument}={_quoted(value)} ({kind}) is not accepted: expected {accepted}")


def _quoted(value: object) -> str:
    """repr on one line, truncated to `LONGEST_QUOTE` characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"
