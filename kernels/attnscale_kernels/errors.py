"""Exceptions. Messages name the argument, quote what was seen of it and say what is accepted."""

from __future__ import annotations

from typing import NoReturn

LONGEST_QUOTE = 120


class KernelError(Exception):
    """Base of the errors that this package raises for its arguments and for where it runs."""


class KernelArgumentError(KernelError, ValueError):
    """An argument has a shape, a device or a value that the kernels do not take."""


class KernelTypeError(KernelError, TypeError):
    """An argument has a type, a dtype or a layout that the kernels do not take."""


class KernelUnavailableError(KernelError, RuntimeError):
    """The kernels cannot run on the device of their arguments."""


def reject(argument: str, value: object, accepted: str) -> NoReturn:
    """Raise for a value that cannot be used.

    >>> reject("splits", 0, "an int >= 1 or None")
    Traceback (most recent call last):
    ...
    attnscale_kernels.errors.KernelArgumentError: splits=0 is not accepted: expected an int >= 1 or None
    """
    raise KernelArgumentError(f"{argument}={_quoted(value)} is not accepted: expected {accepted}")


def reject_type(argument: str, value: object, accepted: str) -> NoReturn:
    """Raise for a value of the wrong type.

    >>> reject_type("scale", "0.1", "a finite number")
    Traceback (most recent call last):
    ...
    attnscale_kernels.errors.KernelTypeError: scale='0.1' (str) is not accepted: expected a finite number
    """
    raise KernelTypeError(f"{argument}={_quoted(value)} ({type(value).__name__}) is not accepted: expected {accepted}")


def _quoted(value: object) -> str:
    """repr on one line, cut off at `LONGEST_QUOTE` characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"
