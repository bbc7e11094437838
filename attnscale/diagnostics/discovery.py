"""Where a model attends: the modules that can be listened to, by their paths."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

from torch import nn

from attnscale._util import state
from attnscale.errors import ArgumentError, reject_type
from attnscale.module import MultiheadAttention, ScaledDotProductAttention

Finder = Callable[[nn.Module], Iterator[tuple[str, nn.Module]]]
Opener = Callable[[nn.Module, ExitStack], Mapping[str, nn.Module]]


def add_finder(finder: Finder) -> None:
    """Let `find_attention` know of another kind: a finder yields paths and modules that have a `tap` and use it."""
    if finder not in state.FINDERS:
        state.FINDERS.append(finder)


def add_opener(opener: Opener) -> None:
    """Let `open_attention` know how another kind of model is made listenable, by a change that the stack undoes.

    An opener is asked where a model has no attention of attnscale's. It returns paths and modules as finders do,
    nothing where the model is none of its kind, and raises where it is one that it cannot help.
    """
    if opener not in state.OPENERS:
        state.OPENERS.append(opener)


def find_attention(model: nn.Module) -> dict[str, nn.Module]:
    """Every attention of a model that can be listened to; one that is shared appears once, under its first path."""
    found = _find(model)
    if not found:
        raise ArgumentError(_nothing_found(model))
    return found


def open_attention(model: nn.Module, undo: ExitStack) -> dict[str, nn.Module]:
    """The same, also of models that must be changed for it, until `undo` is closed."""
    found = _find(model)
    for opener in state.OPENERS:
        if not found:
            found = dict(opener(model, undo))
    if not found:
        raise ArgumentError(_nothing_found(model))
    return found


def _find(model: nn.Module) -> dict[str, nn.Module]:
    if not isinstance(model, nn.Module):
        reject_type("model", model, "a torch.nn.Module")
    if _is_of_transformers(model):
        importlib.import_module("attnscale.hf")  # which adds its finders; most programs have no use for it
    found: dict[str, nn.Module] = {}
    for finder in (_ours, *state.FINDERS):
        for path, module in finder(model):
            if all(module is not other for other in found.values()):
                found[path] = module
    return found


def _nothing_found(model: nn.Module) -> str:
    return (
        f"model={type(model).__name__} is not accepted: expected at least one attention of attnscale's; "
        "attnscale.convert gives torch models theirs, attnscale.hf.apply those of transformers "
        "(with the policy 'constant' they compute what they did)"
    )


def _is_of_transformers(model: nn.Module) -> bool:
    return any(base.__module__ == "transformers.modeling_utils" for m in model.modules() for base in type(m).__mro__)


def _ours(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, (ScaledDotProductAttention, MultiheadAttention)):
            # A swapped model holds ours as a child of its own attention, which is the one that people know.
            yield path.removesuffix(".attnscale") or type(module).__name__, module
