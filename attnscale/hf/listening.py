"""Let a monitor hear the attention of a transformers model that `apply` has not been given: β stays 1."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torch import nn

from attnscale.errors import ArgumentError
from attnscale.hf.advice import few, why_unheard
from attnscale.hf.configs import SDPA
from attnscale.hf.sites import CHILD, Site, has_site, remove_site
from attnscale.hf.survey import AttentionLayer, holds_transformers_model, survey
from attnscale.module import ScaledDotProductAttention
from attnscale.policies import build_policy

log = logging.getLogger(__name__)


class StockAttention(Site):
    """A child of an attention module while a monitor listens to it: plain attention, which is what the module asks for.

    A copy of the model is not listened to, and gets None in its place.
    """

    def __init__(self, cross: bool) -> None:
        super().__init__(build_policy("constant"), override=True)
        self.cross = cross

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # asked by deepcopy too


def is_listened_to(module: nn.Module) -> bool:
    """Whether an attention has a place for a monitor instead of a policy."""
    return isinstance(module._modules.get(CHILD), StockAttention)


def mark_cross_attention(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Tell the sites of a model which of them attend across sequences; a finder that finds nothing itself."""
    for layer in survey(model) if holds_transformers_model(model) else ():
        site = layer.module._modules.get(CHILD)
        if isinstance(site, ScaledDotProductAttention):
            site.cross = layer.cross
    yield from ()


def open_stock_attention(model: nn.Module, undo: ExitStack) -> dict[str, nn.Module]:
    """Paths and listenable children of every attention that goes through "sdpa", until `undo` is closed.

    The name "sdpa" stays, and what is computed under it: a child is asked instead of transformers' own function, and
    calls torch's in the same way. Where a model has no such attention, this raises with what to do instead.
    """
    if not holds_transformers_model(model):
        return {}
    layers = survey(model)
    heard = [layer for layer in layers if _can_be_heard(layer)]
    if not heard:
        raise ArgumentError(why_unheard(model, layers))
    deaf = [layer.path for layer in layers if not _can_be_heard(layer)]
    if deaf:
        log.warning("attnscale: %s cannot be listened to, of %d attention modules", few(deaf), len(layers))
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
