"""Sites: child modules of transformers' attention modules that hold a policy and compute attention with it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnscale._util import state
from attnscale._util.tracing import is_watched
from attnscale.call.context import shown
from attnscale.call.torch_arguments import active_mesh, refuse_context_parallel, rotates_keys, sequence_is_split
from attnscale.errors import ArgumentError, BackendError
from attnscale.hf.attention_layers import CHOSEN_KEYS
from attnscale.module import ScaledDotProductAttention
from attnscale.policies import Policy, build_policy
from attnscale.policies.record import NAME
from attnscale.policies.temperature import mark_counted

SDPA = "sdpa"

Undo = Callable[[], None]

# Size of the mask cache: a model may have full and sliding masks for encoder, decoder and cross-attention.
_MOST_MASKS = 8


class Site(ScaledDotProductAttention):
    """Child module of an attention module: computes its attention with a policy.

    `undo` holds the callbacks to run on removal. They are stored in the site so that copies of the model can be
    restored too. With `override`, the site also serves modules whose implementation is "sdpa".
    """

    def __init__(self, policy: Policy, override: bool = False) -> None:
        super().__init__(policy)
        self.undo: list[Undo] = []
        self.override = override
        self._override_sdpa()

    def __setstate__(self, values: dict[str, Any]) -> None:
        """Copied and unpickled sites override "sdpa" as the original does."""
        super().__setstate__(values)  # type: ignore[no-untyped-call]
        self._override_sdpa()

    def _override_sdpa(self) -> None:
        if not self.override:
            return
        entry = ALL_ATTENTION_FUNCTIONS[SDPA]
        if not isinstance(entry, SdpaOrSite):
            AttentionInterface.register(SDPA, SdpaOrSite(entry))
        state.HF_HOLDERS.add(self)


class MonitoredSite(Site):
    """Site with β = 1, added to a stock model while a monitor is attached.

    Copies of the model are not monitored: the site is copied as None.
    """

    def __init__(self, cross: bool) -> None:
        super().__init__(build_policy("constant"), override=True)
        self.cross = cross

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # also used by deepcopy


@dataclass(frozen=True)
class SdpaOrSite:
    """The implementation "sdpa" while a site overrides it; `stock` serves modules without such a site."""

    stock: Callable[..., tuple[Tensor, Tensor | None]]

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of a module. Arguments: see `attend_at_site`."""
        site = module._modules.get(NAME)
        if isinstance(site, Site) and site.override:
            return attend_at_site(site, module, *args, **kwargs)
        return self.stock(module, *args, **kwargs)


def site_of(module: nn.Module) -> Site | None:
    """Return the site of an attention module, or None."""
    return cast("Site | None", module._modules.get(NAME))


def is_called(site: Site, module: nn.Module) -> bool:
    """Whether the attention implementation in the module's config calls its site."""
    implementation = getattr(module.config, "_attn_implementation", None)
    overridden = isinstance(ALL_ATTENTION_FUNCTIONS[SDPA], SdpaOrSite)
    return implementation == NAME or (implementation == SDPA and overridden and site.override)


def is_decided(module: nn.Module) -> bool:
    """Whether an attention module has a site or is marked as having none (a child that is None)."""
    return NAME in module._modules


def remove_site(module: nn.Module) -> None:
    """Remove the site or marker of an attention module and run the `undo` callbacks of the site.

    Removing the last site that overrides "sdpa" restores transformers' own function.
    """
    site = module._modules.pop(NAME, None)
    if not isinstance(site, Site):
        return
    for undo in reversed(site.undo):
        undo()
    state.HF_HOLDERS.discard(site)
    entry = ALL_ATTENTION_FUNCTIONS[SDPA]
    if site.override and not state.HF_HOLDERS and isinstance(entry, SdpaOrSite):
        AttentionInterface.register(SDPA, entry.stock)


def attend_at_site(
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
    """Compute the attention of a module with the policy of a site.

    Without a mask, attention is causal if the module is causal and there is more than one query row; otherwise every
    row sees all keys. β multiplies the score after softcap and position bias. Attention sinks are not scaled.

    Args:
        site: module with the policy.
        module: the attention module of transformers.
        query: [B, H, Tq, D].
        key: [B, Hkv, Tk, D].
        value: [B, Hkv, Tk, Dv].
        attention_mask: [B, H|1, Tq, Tk], bool or additive.
        **arguments: passed to `cache.update`; all other arguments are those of transformers' attention functions.

    Returns:
        The output [B, Tq, H, Dv], and None in place of the weights.
    """
    for name in CHOSEN_KEYS:
        if arguments.get(name) is not None:
            raise ArgumentError(
                f"{type(module).__name__} selects its own keys (argument {name!r}); attnscale does not support this"
            )
    if arguments.get("sinks") is not None:  # Inkling 2; others pass one sink per head as s_aux
        raise ArgumentError(
            f"{type(module).__name__} has an attention sink per token (argument 'sinks'); this is unsupported"
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    mesh = _split_over(site, query)
    if mesh is not None:
        rules = {"is_causal": causal, "softcap": softcap, "sinks": s_aux, "window": sliding_window, "scale": scaling}
        rules["dropout_p"] = dropout
        out = _attend_split(site, query, key, value, attention_mask, mesh, position_ids, rules)
        return out.transpose(1, 2).contiguous(), None
    if cache is not None:  # the paged cache of continuous batching
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=arguments)
    queries, keys = query.shape[2], key.shape[2]
    causal = queries > 1 and attention_mask is None and causal
    if causal and keys > queries:
        # The first call into a static cache: the slots beyond the queries are not filled yet.
        key, value = key[:, :, :queries], value[:, :, :queries]
        position_bias = None if position_bias is None else position_bias[..., :queries]
    visible = None
    if attention_mask is not None:
        attention_mask = attention_mask[..., :keys] if attention_mask.shape[-1] > keys else attention_mask
        visible = _visible_keys(attention_mask, module)
    # In a sliding window n does not determine the position, which some policies use.
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


def _add_bias(mask: Tensor | None, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Combine a position bias [B|1, H, Tq, Tk] and a mask into one additive mask."""
    bias = bias.to(dtype)
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


class _Counted(NamedTuple):
    """n of one version of a mask, and the module for which it was first counted."""

    mask: weakref.ref[Tensor]
    version: int
    module: weakref.ref[nn.Module]
    visible: Tensor


def _visible_keys(mask: Tensor, module: nn.Module) -> Tensor:
    """Return n [B|1, H|1, Tq] of a mask [B, H|1, Tq, Tk], cached per mask across the layers of a forward pass.

    The module that filled the cache entry recounts on its next call, i.e. in the next forward pass. This detects masks
    changed in place, also in inference mode, where tensors have no version counter.
    """
    if is_watched():
        return _count(mask)  # the compiler eliminates duplicate counts
    version = -1 if mask.is_inference() else mask._version
    counted: list[_Counted] = getattr(state.HF_COUNTED_MASKS, "entries", [])
    for entry in counted:
        if entry.mask() is mask and entry.version == version and entry.module() is not module:
            return entry.visible
    # Not an inference tensor: a later forward pass outside inference mode may reuse the same mask.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
        entry = _Counted(weakref.ref(mask), version, weakref.ref(module), mark_counted(_count(mask)))
    kept = [old for old in counted if old.mask() is not None and old.mask() is not mask]
    state.HF_COUNTED_MASKS.entries = [entry, *kept[: _MOST_MASKS - 1]]
    return entry.visible


def _count(mask: Tensor) -> Tensor:
    """Return n [B|1, H|1, Tq]; broadcast axes of the mask are counted once."""
    for axis in (0, 1):
        if mask.shape[axis] > 1 and mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    return shown(mask).sum(-1)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _sequence_is_split() -> bool:
    return sequence_is_split()


def _split_over(site: nn.Module, query: Tensor) -> Any | None:
    """Return the mesh of a sequence split by torch's `context_parallel` or attnscale's parallel style, or None."""
    if site.spread is not None:
        return cast("Any", site.spread).mesh
    if not _sequence_is_split() and type(query) is Tensor:
        return None
    mesh = None if torch.compiler.is_compiling() or type(query) is not Tensor else active_mesh()
    if mesh is None:
        refuse_split_sequence(query)
    return mesh


def refuse_split_sequence(query: Tensor) -> None:
    """Raise for a split sequence without a known mesh: in a compiled graph, or as a DTensor."""
    refuse_context_parallel(query, "run it uncompiled under torch's context_parallel, or call handle.remove() first")


def _attend_split(
    site: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    mesh: Any,
    position_ids: Tensor | None,
    rules: dict[str, Any],
) -> Tensor:
    """Attention [B, H, L, Dv] of this rank's tokens over the tokens of all ranks of a mesh.

    The method comes from the site's parallel style or from torch's `set_rotate_method`: "allgather" gathers the keys,
    "alltoall" passes them around a ring. Raises if the token positions are unknown.
    """
    if position_ids is None:
        raise BackendError(
            "position_ids=None is not accepted under context parallelism, where they determine n: pass position_ids "
            "to the model, 0 … T−1 of the whole sequence, split in the same way as input_ids (Trainer does this)"
        )
    # Imported late: most models run in one process, and torch.distributed.tensor is slow to import.
    from attnscale.distributed.context_parallel import context_parallel_attention

    method: Any = cast("Any", site.spread).method if site.spread is not None else "ring" if rotates_keys() else "gather"
    rules |= {"enable_gqa": key.shape[1] != query.shape[1], "policy": site.policy, "tap": site.tap, "method": method}
    shards = _shards(position_ids, mesh, query.shape[2], mask is not None)
    return context_parallel_attention(query, key, value, mesh=mesh, positions=shards, **rules).output


def _shards(position_ids: Tensor, mesh: Any, tokens: int, masked: bool) -> Any:
    """Return the tokens of each rank, gathered once for all layers that receive the same `position_ids`.

    A mask on one rank raises on all ranks; the others would otherwise hang in a collective.
    """
    from torch.distributed import _functional_collectives as collectives

    from attnscale.distributed.shards import TokenShards

    version, group = -1 if position_ids.is_inference() else position_ids._version, mesh.get_group()
    entry: tuple[Any, int, Any] = getattr(state.HF_TOKEN_SHARDS, "entry", (lambda: None, 0, None))
    known, known_version, slots = entry
    is_new = known() is not position_ids or known_version != version or version == -1
    if is_new:
        flag = torch.full((1,), float(masked), device=position_ids.device)
        masked = bool(collectives.all_reduce(flag, "max", group))
    if masked:
        raise BackendError(
            "attention_mask is not accepted under context parallelism, where it covers the tokens of one process only: "
            "pass none, and prepare the model with accelerate (ParallelismConfig(cp_size=...)), which drops the mask "
            "made by transformers"
        )
    if is_new:
        slots = TokenShards.of(position_ids, mesh, tokens).slots
        # The group is not cached: a reference to it would keep its threads alive.
        state.HF_TOKEN_SHARDS.entry = weakref.ref(position_ids), version, slots
    return TokenShards(slots, mesh.get_local_rank(), group)
