"""The function that transformers calls for attention: its arguments in, its output out, attnscale between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnscale.errors import ArgumentError
from attnscale.hf.attach import site_of
from attnscale.hf.counting import visible_keys_of
from attnscale.hf.parallel import refuse_split

# Arguments by which a model says which keys its indexer chose: attention without them would silently be dense.
SPARSE = ("indices", "block_indices", "topk_indices")


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    cache: Any = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attention of a transformers module with the policy of its site: [B, Tq, H, Dv], and no weights.

    query [B, H, Tq, D], key and value [B, Hkv, Tk, ·]; the mask [B, H|1, Tq, Tk] is bool or additive. A row sees what
    its mask shows; without one it sees the rows up to its own if the module is causal and there are several rows, else
    all keys. β multiplies the score after a softcap and a position bias, but no sink.
    """
    for name in SPARSE:
        if arguments.get(name) is not None:
            raise ArgumentError(f"{type(module).__name__} attends to {name} of its own choice: attnscale cannot")
    site = site_of(module)
    refuse_split(query)
    if cache is not None:  # the paged cache of continuous batching
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=arguments)
    queries, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = queries > 1 and attention_mask is None and bool(causal)
    if causal and keys > queries:
        # The first call into a static cache: what lies behind the queries is not filled yet.
        key, value = key[:, :, :queries], value[:, :, :queries]
        position_bias = None if position_bias is None else position_bias[..., :queries]
    visible = None
    if attention_mask is not None:
        attention_mask = attention_mask[..., :keys] if attention_mask.shape[-1] > keys else attention_mask
        visible = visible_keys_of(attention_mask, module)
    out = site(
        query,
        key,
        value,
        attention_mask if position_bias is None else add_bias(attention_mask, position_bias, query.dtype),
        dropout,
        causal,
        scaling,
        enable_gqa=key.shape[1] != query.shape[1],
        softcap=softcap,
        sinks=s_aux,
        visible=visible,
        positions=position_ids if sliding_window is not None and not causal and _uses_position(site) else None,
    )
    return out.transpose(1, 2).contiguous(), None


def add_bias(mask: Tensor | None, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A position bias [B|1, H, Tq, Tk] and a mask as one additive mask; β multiplies what is not hidden."""
    bias = bias.to(dtype)
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _uses_position(site: nn.Module) -> bool:
    """Whether a policy has to be told where a row stands, of which n says nothing in a window."""
    return bool(getattr(site.policy, "uses_position", True))
