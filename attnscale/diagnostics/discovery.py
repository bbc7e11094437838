"""Where a model attends: the modules that can be listened to, by their paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from attnscale.errors import ArgumentError, reject_type
from attnscale.module import MultiheadAttention, ScaledDotProductAttention

Finder = Callable[[nn.Module], Iterator[tuple[str, nn.Module]]]

_FINDERS: list[Finder] = []


def add_finder(finder: Finder) -> None:
    """Let `find_attention` know of another kind: a finder yields paths and modules that have a `tap` and use it."""
    if finder not in _FINDERS:
        _FINDERS.append(finder)


def find_attention(model: nn.Module) -> dict[str, nn.Module]:
    """Every attention of a model that can be listened to; one that is shared appears once, under its first path."""
    if not isinstance(model, nn.Module):
        reject_type("model", model, "a torch.nn.Module")
    found: dict[str, nn.Module] = {}
    for finder in (_ours, *_FINDERS):
        for path, module in finder(model):
            if all(module is not other for other in found.values()):
                found[path] = module
    if not found:
        raise ArgumentError(
            f"model={type(model).__name__} is not accepted: expected at least one attention of attnscale's; "
            "attnscale.convert gives torch models theirs"
        )
    return found


def _ours(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, (ScaledDotProductAttention, MultiheadAttention)):
            # A swapped model holds ours as a child of its own attention, which is the one that people know.
            yield path.removesuffix(".attnscale") or type(module).__name__, module
