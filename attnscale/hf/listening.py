"""Let a monitor hear the attention of a transformers model that `apply` has not been given: β stays 1."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack

from torch import nn
from transformers import PreTrainedModel

from attnscale.errors import ArgumentError
from attnscale.hf.advice import why_unlistened
from attnscale.hf.interface import SDPA, override_sdpa, restore_sdpa
from attnscale.hf.sites import CHILD, has_site, remove_site
from attnscale.hf.survey import AttentionLayer, survey, transformers_model
from attnscale.module import ScaledDotProductAttention

log = logging.getLogger(__name__)


class StockAttention(ScaledDotProductAttention):
    """In an attention module while a monitor listens to it: plain attention, which is what the module asks for."""

    def __init__(self, cross: bool) -> None:
        super().__init__("constant")
        self.cross = cross


def is_listened_to(module: nn.Module) -> bool:
    """Whether an attention has a place for a monitor instead of a policy."""
    return isinstance(module._modules.get(CHILD), StockAttention)


def mark_cross_attention(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Tell the sites of a model which of them attend across sequences; a finder that finds nothing itself."""
    for layer in survey(model) if _is_of_transformers(model) else ():
        site = layer.module._modules.get(CHILD)
        if isinstance(site, ScaledDotProductAttention):
            site.cross = layer.cross
    yield from ()


def open_stock_attention(model: nn.Module, undo: ExitStack) -> dict[str, nn.Module]:
    """Paths and listenable children of every attention that goes through "sdpa", until `undo` is closed.

    The name "sdpa" stays, and what is computed under it: a child is asked instead of transformers' own function, and
    calls torch's in the same way. Where a model has no such attention, this raises with what to do instead.
    """
    if not _is_of_transformers(model):
        return {}
    layers = survey(model)
    heard = [layer for layer in layers if _can_be_heard(layer)]
    if not heard:
        raise ArgumentError(
            f"model={type(transformers_model(model)).__name__} is not accepted: {why_unlistened(layers)}"
        )
    deaf = [layer.path for layer in layers if not _can_be_heard(layer)]
    if deaf:
        log.warning("attnscale: %d of %d attention modules cannot be listened to: %s", len(deaf), len(layers), deaf)
    override_sdpa()
    undo.callback(restore_sdpa)
    found: dict[str, nn.Module] = {}
    for layer in heard:
        found[layer.path] = child = StockAttention(layer.cross)
        layer.module.add_module(CHILD, child)
        undo.callback(remove_site, layer.module)
    return found


def _can_be_heard(layer: AttentionLayer) -> bool:
    if not layer.routed or layer.sparse or has_site(layer.module):
        return False
    return bool(layer.config._attn_implementation == SDPA)


def _is_of_transformers(model: nn.Module) -> bool:
    return any(isinstance(module, PreTrainedModel) for module in model.modules())
