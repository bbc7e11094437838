"""Ways to take something out of a module so that it can be put back to the bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Restore = Callable[[], None]


@dataclass(frozen=True, eq=False)
class SetBack:
    """Puts an attribute back. An object rather than a closure: in a copy of the model it refers to the copy."""

    owner: nn.Module
    name: str
    value: object

    def __call__(self) -> None:
        setattr(self.owner, self.name, self.value)


def set_attribute(owner: nn.Module, name: str, value: object) -> Restore:
    """Give an attribute of a module another value."""
    restore = SetBack(owner, name, getattr(owner, name))
    setattr(owner, name, value)
    return restore


def change_argument(module: nn.Module, name: str, change: Callable[[Any], Any]) -> Restore:
    """Let a module's forward see another value of an argument than its caller gives."""
    position = list(inspect.signature(module.forward).parameters).index(name)
    return module.register_forward_pre_hook(_Changed(name, position, change), with_kwargs=True).remove


def takes_argument(module: nn.Module, name: str) -> bool:
    """Whether a module's forward has an argument of that name."""
    return name in inspect.signature(module.forward).parameters


def give_back_first(module: nn.Module) -> Restore:
    """Let a module return its first argument as it is."""
    return module.register_forward_hook(_first_argument, with_kwargs=True).remove


@dataclass(frozen=True)
class _Changed:
    """A hook; an object rather than a closure, so that copying a model copies what it refers to."""

    name: str
    position: int
    change: Callable[[Any], Any]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.name in kwargs:
            return args, {**kwargs, self.name: self.change(kwargs[self.name])}
        if self.position < len(args):
            changed = self.change(args[self.position])
            return (*args[: self.position], changed, *args[self.position + 1 :]), kwargs
        return args, kwargs


def _first_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    return args[0] if args else next(iter(kwargs.values()))
