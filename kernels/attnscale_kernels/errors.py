"""Exceptions. Messages name the argument, its value and the accepted values."""

from __future__ import annotations

from typing import NoReturn

LONGEST_QUOTE = 120


class KernelError(Exception):
    """Base class of the errors raised for invalid arguments and unsupported devices."""


class KernelArgumentError(KernelError, ValueError):
    """An argument has an unsupported shape, device or value. Also a `ValueError`."""


class KernelTypeError(KernelError, TypeError):
    """An argument has an unsupported type, dtype or layout. Also a `TypeError`."""


class KernelUnavailableError(KernelError, RuntimeError):
    """The kernels cannot run on the device of their arguments. Also a `RuntimeError`."""


def reject(argument: str, value: object, accepted: str) -> NoReturn:
    """Raise `KernelArgumentError` for an invalid value.

    >>> reject("splits", 0, "an int >= 1 or None")
    Traceback (most recent call last):
    ...
    attnscale_kernels.errors.KernelArgumentError: splits=0 is not accepted: expected an int >= 1 or None
    """
    raise KernelArgumentError(f"{argument}={_quoted(value)} is not accepted: expected {accepted}")


def reject_type(argument: str, value: object, accepted: str) -> NoReturn:
    """Raise `KernelTypeError` for a value of the wrong type.

    >>> reject_type("scale", "0.1", "a finite number")
    Traceback (most recent call last):
    ...
    attnscale_kernels.errors.KernelTypeError: scale='0.1' (str) is not accepted: expected a finite number
    """
    raise KernelTypeError(f"{argument}={_quoted(value)} ({type(value).__name__}) is not accepted: expected {accepted}")


def _quoted(value: object) -> str:
    """Return repr(value) on one line, truncated to `LONGEST_QUOTE` characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"
