"""Changes to a module that can be undone exactly. Each returns a callable that undoes it.

What is stored in a module is a `partial`, never a closure: a deep copy of the model then refers to the copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

Undo = Callable[[], None]


def set_attribute(owner: nn.Module, name: str, value: object) -> Undo:
    """Give an attribute of a module another value."""
    undo = partial(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
    return undo


def takes_argument(module: nn.Module, name: str) -> bool:
    """Whether a module's forward has an argument of that name."""
    return name in inspect.signature(module.forward).parameters


def change_argument(module: nn.Module, name: str, change: Callable[[Any], Any]) -> Undo:
    """Let a module's forward be given `change(value)` instead of the value of an argument."""
    position = list(inspect.signature(module.forward).parameters).index(name)
    return module.register_forward_pre_hook(partial(_changed, name, position, change), with_kwargs=True).remove


def return_first_argument(module: nn.Module) -> Undo:
    """Let a module return its first argument unchanged."""
    return module.register_forward_hook(_first_argument, with_kwargs=True).remove


def _changed(
    name: str,
    position: int,
    change: Callable[[Any], Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if name in kwargs:
        return args, {**kwargs, name: change(kwargs[name])}
    if position < len(args):
        return (*args[:position], change(args[position]), *args[position + 1 :]), kwargs
    return args, kwargs


def _first_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    return args[0] if args else next(iter(kwargs.values()))
