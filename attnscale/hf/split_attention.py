"""Attention of a transformers module whose sequence is split over processes: n is that of the whole sequence."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnscale._util import state
from attnscale.call.context_parallel import rotates_keys
from attnscale.errors import BackendError


def attend_split(
    site: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    mesh: Any,
    *,
    position_ids: Tensor | None,
    scaling: float | None,
    dropout: float,
    **rules: Any,
) -> tuple[Tensor, None]:
    """Attention [B, L, H, Dv] of the tokens of this process over those of all processes of a mesh.

    The method is that of the site's style, or follows torch's `set_rotate_method`: "allgather" gathers the keys,
    "alltoall" passes them on in a ring. Refused where the place of a token is not known.
    """
    if position_ids is None:
        raise BackendError(
            "under context parallelism n is not known without the places of the tokens: pass position_ids to the "
            "model, 0 … T−1 of the whole sequence, split with input_ids (Trainer does so by itself)"
        )
    # Imported late: most models run in one process, and torch.distributed.tensor is slow to import.
    from attnscale.distributed.context_parallel import context_parallel_attention

    method: Any = cast("Any", site.spread).method if site.spread is not None else "ring" if rotates_keys() else "gather"
    shards = _shards(position_ids, mesh, query.shape[2], attention_mask is not None)
    rules |= {
        "scale": scaling,
        "dropout_p": dropout,
        "enable_gqa": key.shape[1] != query.shape[1],
        "policy": site.policy,
        "tap": site.tap,
    }
    out = context_parallel_attention(query, key, value, mesh=mesh, positions=shards, method=method, **rules).output
    return out.transpose(1, 2).contiguous(), None


def _shards(position_ids: Tensor, mesh: Any, tokens: int, masked: bool) -> Any:
    """Who holds which tokens: gathered once for all layers that are given the same tensor.

    A mask is refused in all processes where one has it: the others would wait for that one.
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
            "under context parallelism a mask of one process's tokens says nothing of the others: pass no "
            "attention_mask, and let accelerate prepare the model (ParallelismConfig(cp_size=...)), which drops that "
            "of transformers"
        )
    if is_new:
        slots = TokenShards.of(position_ids, mesh, tokens).slots
        # Without the group: its threads could not end while a reference is left.
        state.HF_TOKEN_SHARDS.entry = weakref.ref(position_ids), version, slots
    return TokenShards(slots, mesh.get_local_rank(), group)
