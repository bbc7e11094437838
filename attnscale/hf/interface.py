"""Our entries in the registries of transformers: under our own name, or in place of "sdpa"."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AttentionInterface, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnscale.hf.attention import attention_forward
from attnscale.hf.configs import NAME, SDPA
from attnscale.hf.sites import has_site, site_at

_stock_sdpa = ALL_ATTENTION_FUNCTIONS[SDPA]
# The sites that answer to "sdpa"; copies of a model bring their own.
_holders: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_known: dict[type, bool] = {}


def register() -> None:
    """Make `attn_implementation="attnscale"` known; the mask too, without which every mask would be None."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


def make_mask(
    *, config: Any, allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False, **arguments: Any
) -> Tensor | None:
    """The mask as for "sdpa": bool, and None where a module's `is_causal` says it all, if it can be relied on."""
    reliable = knows_causality(type(config))
    mask: Tensor | None = sdpa_mask(
        allow_is_causal_skip=allow_is_causal_skip and reliable,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and reliable,
        **arguments,
    )
    return mask


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def knows_causality(kind: type[PreTrainedConfig]) -> bool:
    """Whether the attention of models with this type of config says rightly if it is causal: sdpa needs it to."""
    if kind not in _known:
        models: Any = MODEL_MAPPING.get(kind, ())
        models = models if isinstance(models, (tuple, list)) else (models,)
        _known[kind] = bool(models) and all(getattr(model, "_supports_sdpa", False) for model in models)
    return _known[kind]


def hold_sdpa(site: nn.Module) -> None:
    """Let "sdpa" ask us where a module has a site of ours; everything else goes to transformers' own."""
    global _stock_sdpa
    if ALL_ATTENTION_FUNCTIONS[SDPA] is not sdpa_or_ours:
        _stock_sdpa = ALL_ATTENTION_FUNCTIONS[SDPA]
        AttentionInterface.register(SDPA, sdpa_or_ours)
    _holders.add(site)


def release_sdpa(site: nn.Module) -> None:
    """Undo one `hold_sdpa`; the last one gives the name back."""
    _holders.discard(site)
    if not _holders and ALL_ATTENTION_FUNCTIONS[SDPA] is sdpa_or_ours:
        AttentionInterface.register(SDPA, _stock_sdpa)


def is_asked(module: nn.Module) -> bool:
    """Whether an attention that has a site asks it, which is for its config to say."""
    implementation = getattr(module.config, "_attn_implementation", None)
    if implementation == NAME:
        return True
    return implementation == SDPA and site_at(module).override and ALL_ATTENTION_FUNCTIONS[SDPA] is sdpa_or_ours


def sdpa_or_ours(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, Tensor | None]:
    """What stands in for "sdpa" while a site that was applied with `override=True` lives."""
    attend = attention_forward if has_site(module) and site_at(module).override else _stock_sdpa
    answer: tuple[Tensor, Tensor | None] = attend(module, query, key, value, attention_mask, **arguments)
    return answer
