"""Wrapping methods of other packages."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

_WRAPPED = "attnscale"  # attribute that marks a wrapped function


def wrap_method(owner: type | ModuleType, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function or method by `wrapper`, which gets the original as its first argument. Idempotent.

    >>> class Greeter:
    ...     def greet(self):
    ...         return "hello"
    >>> for _ in range(2):
    ...     wrap_method(Greeter, "greet", lambda stock, self: stock(self) + "!")
    >>> Greeter().greet()
    'hello!'
    """
    found = inspect.getattr_static(owner, name)
    bound = type(found) if isinstance(found, (classmethod, staticmethod)) else None
    stock: Callable[..., Any] = found if bound is None else found.__func__
    if getattr(stock, _WRAPPED, False):
        return

    @functools.wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(stock, *args, **kwargs)

    setattr(wrapped, _WRAPPED, True)
    setattr(owner, name, wrapped if bound is None else bound(wrapped))
