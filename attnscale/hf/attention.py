"""One attention of a transformers module: transformers' arguments in, its output format out."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from attnscale._util import state
from attnscale._util.tracing import is_watched
from attnscale.call.context import shown
from attnscale.call.context_parallel import active_mesh, refuse_context_parallel, sequence_is_split
from attnscale.errors import ArgumentError
from attnscale.hf.attention_layers import CHOSEN_KEYS
from attnscale.hf.split_attention import attend_split
from attnscale.policies.temperature import mark_counted

# How many masks are remembered: a model has full and sliding ones, those of encoder, decoder and cross attention.
_MOST_MASKS = 8


def attend(
    site: nn.Module,
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
    """Attention of a module with the policy of a site: [B, Tq, H, Dv], and no weights.

    query [B, H, Tq, D], key and value [B, Hkv, Tk, ·]; the mask [B, H|1, Tq, Tk] is bool or additive. A row sees what
    its mask shows; without one it sees the rows up to its own if the module is causal and there are several rows, else
    all keys. β multiplies the score after a softcap and a position bias, but no sink.
    """
    for name in CHOSEN_KEYS:
        if arguments.get(name) is not None:
            raise ArgumentError(f"{type(module).__name__} attends to {name} of its own choice: attnscale cannot")
    mesh = _split_over(site, query)
    if mesh is not None:
        return attend_split(
            site, query, key, value, attention_mask, mesh, position_ids=position_ids, scaling=scaling, dropout=dropout,
            softcap=softcap, sinks=s_aux, window=sliding_window,
            is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        )  # fmt: skip
    if cache is not None:  # the paged cache of continuous batching
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=arguments)
    queries, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = queries > 1 and attention_mask is None and bool(causal)
    if causal and keys > queries:
        # The first call into a static cache: the slots beyond the queries are not filled yet.
        key, value = key[:, :, :queries], value[:, :, :queries]
        position_bias = None if position_bias is None else position_bias[..., :queries]
    visible = None
    if attention_mask is not None:
        attention_mask = attention_mask[..., :keys] if attention_mask.shape[-1] > keys else attention_mask
        visible = _visible_keys(attention_mask, module)
    # In a window n says nothing about the position, which some policies use.
    windowed = sliding_window is not None and not causal and getattr(site.policy, "uses_position", True)
    out = site(
        query,
        key,
        value,
        attention_mask if position_bias is None else _add_bias(attention_mask, position_bias, query.dtype),
        dropout,
        causal,
        scaling,
        enable_gqa=key.shape[1] != query.shape[1],
        softcap=softcap,
        sinks=s_aux,
        visible=visible,
        positions=position_ids if windowed else None,
    )
    return out.transpose(1, 2).contiguous(), None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _sequence_is_split() -> bool:
    return sequence_is_split()


def _split_over(site: nn.Module, query: Tensor) -> Any | None:
    """The mesh over which the sequence is split, by torch's `context_parallel` or our style; None where it is not."""
    if site.spread is not None:
        return cast("Any", site.spread).mesh
    if not _sequence_is_split() and type(query) is Tensor:
        return None
    mesh = None if torch.compiler.is_compiling() or type(query) is not Tensor else active_mesh()
    if mesh is None:
        refuse_split_sequence(query)
    return mesh


def refuse_split_sequence(query: Tensor) -> None:
    """Refuse a split sequence of which nothing else is known: in a compiled graph, and where it is a DTensor."""
    refuse_context_parallel(query, "run it uncompiled under torch's context_parallel, or call handle.remove() first")


def _add_bias(mask: Tensor | None, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A position bias [B|1, H, Tq, Tk] and a mask as one additive mask."""
    bias = bias.to(dtype)
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


class _Counted(NamedTuple):
    """n of one version of a mask, and the module that it was counted for first."""

    mask: weakref.ref[Tensor]
    version: int
    module: weakref.ref[nn.Module]
    visible: Tensor


def _visible_keys(mask: Tensor, module: nn.Module) -> Tensor:
    """n [B|1, H|1, Tq] of a mask [B, H|1, Tq, Tk]: the same tensor for every layer that is given the same mask.

    The module that counted first counts again at its next call, which is the next forward. So a mask that was changed
    in place is noticed, also in inference mode, where tensors have no version.
    """
    if is_watched():
        return _count(mask)  # the compiler merges equal counts
    version = -1 if mask.is_inference() else mask._version
    counted: list[_Counted] = getattr(state.HF_COUNTED_MASKS, "entries", [])
    for entry in counted:
        if entry.mask() is mask and entry.version == version and entry.module() is not module:
            return entry.visible
    # No inference tensor: a later forward outside of inference mode may be given the same mask.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
        entry = _Counted(weakref.ref(mask), version, weakref.ref(module), mark_counted(_count(mask)))
    kept = [old for old in counted if old.mask() is not None and old.mask() is not mask]
    state.HF_COUNTED_MASKS.entries = [entry, *kept[: _MOST_MASKS - 1]]
    return entry.visible


def _count(mask: Tensor) -> Tensor:
    """n [B|1, H|1, Tq]; an axis along which the mask is broadcast is counted once."""
    for axis in (0, 1):
        if mask.shape[axis] > 1 and mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    return shown(mask).sum(-1)
