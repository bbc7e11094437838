"""Our entries in the registries of transformers: under our own name, or in place of "sdpa"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AttentionInterface, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnscale.hf.attention import attention_forward
from attnscale.hf.sites import has_site

NAME = "attnscale"
SDPA = "sdpa"

_stock_sdpa = ALL_ATTENTION_FUNCTIONS[SDPA]
_overriding = 0
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


def override_sdpa() -> None:
    """Let "sdpa" ask us where a module has a site of ours; everything else goes to transformers' own."""
    global _overriding, _stock_sdpa
    if _overriding == 0:
        _stock_sdpa = ALL_ATTENTION_FUNCTIONS[SDPA]
        AttentionInterface.register(SDPA, sdpa_or_ours)
    _overriding += 1


def restore_sdpa() -> None:
    """Undo one `override_sdpa`."""
    global _overriding
    _overriding -= 1
    if _overriding == 0:
        AttentionInterface.register(SDPA, _stock_sdpa)


def sdpa_or_ours(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, Tensor | None]:
    """What stands in for "sdpa" while a model has been applied to with `override=True`."""
    attend = attention_forward if has_site(module) else _stock_sdpa
    answer: tuple[Tensor, Tensor | None] = attend(module, query, key, value, attention_mask, **arguments)
    return answer
