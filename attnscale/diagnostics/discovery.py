"""Finds the attention modules of a model that a monitor can measure, by their paths."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from torch import nn

from attnscale._util import state
from attnscale.errors import ArgumentError, reject_type
from attnscale.module import MultiheadAttention, ScaledDotProductAttention

Finder = Callable[[nn.Module], Iterator[tuple[str, nn.Module]]]
Opener = Callable[[nn.Module, ExitStack], dict[str, nn.Module]]


def add_finder(finder: Finder, opener: Opener | None = None) -> None:
    """Register a finder of another kind of module: it yields paths and modules that have a `tap` and use it.

    The opener makes stock attention measurable until a stack is closed, in a model of its kind where nothing was found.
    """
    state.FINDERS.setdefault(finder, opener)


def find_attention(model: nn.Module, undo: ExitStack | None = None) -> dict[str, nn.Module]:
    """Every attention of a model that can be measured; a shared one appears once, under its first path.

    With `undo`, stock attention of transformers is made measurable, until that is closed.
    """
    if not isinstance(model, nn.Module):
        reject_type("model", model, "a torch.nn.Module")
    origins = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    for package in (state.MODEL_PACKAGES[origin] for origin in origins & state.MODEL_PACKAGES.keys()):
        importlib.import_module(package)  # adds its finder
    found: dict[str, nn.Module] = {}
    for finder in (_ours, *state.FINDERS):
        for path, module in finder(model):
            if all(module is not other for other in found.values()):
                found[path] = module
    if not found and undo is not None:
        for opener in filter(None, state.FINDERS.values()):
            found |= opener(model, undo)
    if not found:
        raise ArgumentError(
            f"model={type(model).__name__} is not accepted: expected at least one attention of attnscale's; "
            "attnscale.convert gives torch models theirs, attnscale.hf.apply those of transformers "
            "(with the policy 'constant' they compute what they did)"
        )
    return found


def _ours(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, (ScaledDotProductAttention, MultiheadAttention)):
            # A swapped model has ours as a child of its own attention, whose path is the one users know.
            yield path.removesuffix(".attnscale") or type(module).__name__, module
