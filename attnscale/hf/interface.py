"""Our entries in the registries of transformers: the attention and the mask of the implementation "attnscale"."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from attnscale._util import state
from attnscale.errors import ArgumentError
from attnscale.hf.attach import attach
from attnscale.hf.attention import attend
from attnscale.hf.config_record import is_switched, replaces_scaling
from attnscale.hf.sites import NAME, is_decided, site_of
from attnscale.module import ScaledDotProductAttention

_STOCK = ScaledDotProductAttention("constant")


def register() -> None:
    """Make `attn_implementation="attnscale"` known; without an entry for the mask every mask would be None."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


def attention_forward(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Attention of a module with the policy of its site, or with β = 1; further arguments are those of `attend`.

    A model that was loaded with our name is given its policies at its first forward.
    """
    if not is_decided(module) and not is_switched(module.config):
        _give_policies(module)
    return attend(site_of(module) or _STOCK, module, *args, **kwargs)


@torch.compiler.disable(reason="call attnscale.hf.attach(model) before torch.compile")  # type: ignore[untyped-decorator, no-untyped-call]
def _give_policies(module: nn.Module) -> None:
    """Give the model whose forward is running the policies that its config describes."""
    model = _running_model(module)
    if model is None:
        raise ArgumentError(
            f"{type(module).__name__} was called outside of its model, which was loaded by the name {NAME!r} and has "
            "not been given its policies yet: call attnscale.hf.attach(model) first"
        )
    if replaces_scaling(model):
        raise ArgumentError(
            "config.attnscale says on_existing='replace', and this forward has computed the model's own scaling "
            "already: load the model with attnscale.hf.load(path), or call attnscale.hf.attach(model) before its first "
            "forward"
        )
    attach(model)
    if not is_decided(module):
        raise ArgumentError(f"{type(module).__name__} asks for attnscale in a way that attnscale.hf does not know")


def _running_model(module: nn.Module) -> PreTrainedModel | None:
    """The outermost transformers model on the call stack that holds a module: modules do not know what holds them."""
    frame, found, seen = sys._getframe(1), None, set()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, PreTrainedModel) and id(owner) not in seen:
            seen.add(id(owner))
            if any(inner is module for inner in owner.modules()):
                found = owner
        frame = frame.f_back  # type: ignore[assignment]
    return found


def make_mask(
    *, config: Any, allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False, **arguments: Any
) -> Tensor | None:
    """The mask of "sdpa": bool, or None where the module's `is_causal` suffices and can be relied on."""
    reliable = _tells_causality(type(config))
    mask: Tensor | None = sdpa_mask(
        allow_is_causal_skip=allow_is_causal_skip and reliable,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and reliable,
        **arguments,
    )
    return mask


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tells_causality(kind: type[PreTrainedConfig]) -> bool:
    """Whether attention modules of models with this config have the right `is_causal`: "sdpa" relies on it too."""
    known = state.HF_KNOWN_CAUSALITY
    if kind not in known:
        models: Any = MODEL_MAPPING.get(kind, ())
        models = models if isinstance(models, (tuple, list)) else (models,)
        known[kind] = bool(models) and all(getattr(model, "_supports_sdpa", False) for model in models)
    return known[kind]
