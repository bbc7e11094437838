"""Exceptions and warnings. Messages name the argument, quote the value and say what is accepted."""

from __future__ import annotations

from typing import NoReturn

LONGEST_QUOTE = 120


class AttnScaleError(Exception):
    """Base of every error raised on purpose by this package."""


class ArgumentError(AttnScaleError, ValueError):
    """An argument has a value or a shape that cannot be used."""


class ArgumentTypeError(AttnScaleError, TypeError):
    """An argument has the wrong type or dtype."""


class TensorError(ArgumentError, RuntimeError):
    """Tensors that do not fit each other, or a number out of range: where torch's attention raises RuntimeError."""


class DtypeError(ArgumentTypeError, RuntimeError):
    """A dtype or layout that attention does not take: where torch's raises RuntimeError."""


class ModuleArgumentError(TensorError, AssertionError):
    """Shapes that do not fit a MultiheadAttention: torch's raises AssertionError for some, RuntimeError for others."""


class ModuleDtypeError(DtypeError, AssertionError):
    """A nested tensor or a dtype of a mask that MultiheadAttention does not take: torch's raises AssertionError."""


class FrozenPolicyError(ArgumentError, AttributeError):
    """A field of a policy was to be changed after the policy was built."""


class BackendError(AttnScaleError, RuntimeError):
    """The backend asked for cannot compute this call, or no backend can."""


class MissingDependencyError(AttnScaleError, ImportError):
    """A feature needs a package that is only installed by an extra."""


class AttnScaleWarning(UserWarning):
    """Something was done as asked that is probably not intended."""


class MonitorWarning(RuntimeWarning):
    """Something that a monitor could not do; the run continues."""


def reject(argument: str, value: object, accepted: str, kind: type[ArgumentError] = ArgumentError) -> NoReturn:
    """Raise the standard sentence for a value that cannot be used.

    >>> reject("window", 0, "an int >= 1")
    Traceback (most recent call last):
    ...
    attnscale.errors.ArgumentError: window=0 is not accepted: expected an int >= 1
    """
    raise kind(f"{argument}={_quoted(value)} is not accepted: expected {accepted}")


def reject_type(argument: str, value: object, accepted: str) -> NoReturn:
    """Raise the standard sentence for a value of the wrong type.

    >>> reject_type("beta", "hot", "a number")
    Traceback (most recent call last):
    ...
    attnscale.errors.ArgumentTypeError: beta='hot' (str) is not accepted: expected a number
    """
    kind = type(value).__name__
    raise ArgumentTypeError(f"{argument}={_quoted(value)} ({kind}) is not accepted: expected {accepted}")


def _quoted(value: object) -> str:
    """repr on one line, cut off at `LONGEST_QUOTE` characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"
