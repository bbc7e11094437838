"""From the keywords of an attention call to a checked `Context`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnscale.context import Context, Window
from attnscale.errors import ArgumentError, reject, reject_type
from attnscale.layout import Layout

Packing = Tensor | tuple[Tensor, Tensor]


def describe(
    layout: Layout,
    queries: int,
    keys: int,
    device: torch.device,
    *,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    window: int | Window | None = None,
    positions: Tensor | None = None,
    key_padding: Tensor | None = None,
    document_ids: Tensor | None = None,
    cu_seqlens: Packing | None = None,
    cache_offset: int | Tensor | None = None,
    visible: Tensor | None = None,
) -> Context:
    """Check the keywords against the shapes and settle in which slot each query token lies.

    `cache_offset` says it outright. Otherwise packed queries lie where their document puts them, `positions` are looked
    up among the unpadded keys, and without either the alignment is torch's: query i in slot i.
    """
    if positions is not None:
        positions = layout.rows("positions", _integer("positions", positions), queries, "0-based, per query")
    if key_padding is not None:
        if not isinstance(key_padding, Tensor) or key_padding.dtype != torch.bool:
            reject_type("key_padding", _kind(key_padding), "a bool tensor, True where the key is padding")
        key_padding = layout.rows("key_padding", key_padding, keys, "True where the key is padding")
    if visible is not None:
        visible = _per_row(layout, visible, queries)
    if document_ids is not None and cu_seqlens is not None:
        raise ArgumentError("document_ids and cu_seqlens are not accepted together: they say the same thing")

    slot: int | Tensor = 0
    if cache_offset is not None:
        slot = _offset(layout, cache_offset, queries, device)
    elif isinstance(cu_seqlens, tuple):
        slot = _slots_of_packed(*cu_seqlens, queries=queries, device=device)
    elif positions is not None and document_ids is None and cu_seqlens is None:
        slot = _slots_of_positions(positions, key_padding)
    elif (document_ids is not None or cu_seqlens is not None) and queries != keys:
        reject(
            "queries, keys", (queries, keys), "equal lengths for packed documents, a cache_offset, or two cu_seqlens"
        )

    first = last = None
    if document_ids is not None:
        ids = layout.rows("document_ids", _integer("document_ids", document_ids), keys, "one id per key")
        first, last = _at(slot, *_runs(ids), queries=queries)
    elif cu_seqlens is not None:
        first, last = _documents(cu_seqlens, slot, queries, device)

    return Context(
        queries=queries,
        keys=keys,
        device=device,
        causal=bool(is_causal),
        slot=slot,
        window=_window(window),
        first=first,
        last=last,
        padding=key_padding,
        mask=None if attn_mask is None else _mask(layout, attn_mask, queries, keys),
        positions=positions,
        visible=visible,
    )


def _window(window: int | Window | None) -> Window:
    accepted = "an int >= 1 (keys nearer than that) or (left, right), each an int >= 0 or None"
    if window is None:
        return (None, None)
    if isinstance(window, int) and not isinstance(window, bool):
        if window < 1:
            reject("window", window, accepted)
        return (window - 1, window - 1)
    if not isinstance(window, tuple) or len(window) != 2:
        reject_type("window", window, accepted)
    for extent in window:
        if extent is not None and (isinstance(extent, bool) or not isinstance(extent, int) or extent < 0):
            reject("window", window, accepted)
    return window


def _mask(layout: Layout, mask: Tensor, queries: int, keys: int) -> Tensor:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        reject_type("attn_mask", _kind(mask), "a bool tensor (True: visible) or a floating one (added)")
    return layout.mask(mask, queries, keys)


def _offset(layout: Layout, offset: int | Tensor, queries: int, device: torch.device) -> int | Tensor:
    accepted = f"an int >= 0 or an integer tensor [{layout.size}]: keys in the cache before the first query"
    if isinstance(offset, Tensor):
        offset = _integer("cache_offset", offset)
        if offset.numel() not in (1, layout.size):
            reject("cache_offset", list(offset.shape), accepted)
        return offset.reshape(-1, 1) + torch.arange(queries, device=device)
    if isinstance(offset, bool) or not isinstance(offset, int):
        reject_type("cache_offset", offset, accepted)
    if offset < 0:
        reject("cache_offset", offset, accepted)
    return offset


def _per_row(layout: Layout, visible: Tensor, queries: int) -> Tensor:
    visible = _integer("visible", visible)
    if visible.dim() <= 1:
        visible = visible.reshape(1, 1, -1)
    elif visible.dim() == 2:
        visible = visible[:, None]
    if visible.shape[-1] == queries and visible.dim() == 3:
        return visible  # itself, so that what was made of it can be found again
    try:
        return visible.expand(visible.shape[0], visible.shape[1], queries)
    except RuntimeError:
        reject("visible", list(visible.shape), f"counts that broadcast to [{layout.size}, {layout.heads}, {queries}]")


def _slots_of_positions(positions: Tensor, padding: Tensor | None) -> Tensor:
    """The slot [B|1, Tq] that holds the key of each position: the position itself, moved on by what is padding."""
    if padding is None:
        return positions
    batch = max(positions.shape[0], padding.shape[0])
    real_keys = (~padding).cumsum(-1).expand(batch, -1).contiguous()  # [B, Tk], up to and including the slot
    return torch.searchsorted(real_keys, (positions + 1).expand(batch, -1).contiguous())


def _slots_of_packed(queries_at: Tensor, keys_at: Tensor, *, queries: int, device: torch.device) -> Tensor:
    """The queries of a packed document are its last tokens: slot = end of the keys − distance to the queries' end."""
    token = torch.arange(queries, device=device)
    document = _document_of(queries_at, token)
    return (keys_at[1:][document] - queries_at[1:][document] + token)[None]


def _documents(packing: Packing, slot: int | Tensor, queries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and last slot [B|1, Tq] of each query's document; tokens behind the last document see nothing."""
    if isinstance(packing, tuple):
        queries_at, keys_at = packing
        token = torch.arange(queries, device=device)[None]
    else:
        queries_at = keys_at = packing
        token = slot if isinstance(slot, Tensor) else torch.arange(slot, slot + queries, device=device)[None]
    for name, edges in (("cu_seqlens", queries_at), ("cu_seqlens", keys_at)):
        if _integer(name, edges).dim() != 1 or edges.numel() < 2:
            reject(name, list(edges.shape), "an integer tensor [documents + 1] that starts with 0, or a pair of them")
    document = _document_of(queries_at, token)
    first, last = keys_at[:-1][document], keys_at[1:][document]
    return first, torch.where(token < queries_at[-1], last, first)


def _document_of(edges: Tensor, token: Tensor) -> Tensor:
    inner = edges[1:].contiguous()
    return torch.searchsorted(inner, token.contiguous(), right=True).clamp(max=inner.numel() - 1)


def _runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """First slot of the run of equal ids that each slot is in, and the slot after its last; both [B|1, Tk]."""
    keys = ids.shape[-1]
    slot = torch.arange(keys, device=ids.device).expand_as(ids)
    changes = ids[:, 1:] != ids[:, :-1]
    begins = torch.where(pad(changes, (1, 0), value=True), slot, 0)
    ends = torch.where(pad(changes, (0, 1), value=True), slot + 1, keys)
    return begins.cummax(-1).values, ends.flip(-1).cummin(-1).values.flip(-1)


def _at(slot: int | Tensor, first: Tensor, last: Tensor, *, queries: int) -> tuple[Tensor, Tensor]:
    if isinstance(slot, int):
        return first[:, slot : slot + queries], last[:, slot : slot + queries]
    batch = max(slot.shape[0], first.shape[0])
    index = slot.clamp(0, first.shape[-1] - 1).expand(batch, -1)
    return first.expand(batch, -1).gather(-1, index), last.expand(batch, -1).gather(-1, index)


def _integer(argument: str, value: object) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype.is_floating_point or value.dtype == torch.bool:
        reject_type(argument, _kind(value), "an integer tensor")
    return value.to(torch.int64)


def _kind(value: object) -> object:
    return value.dtype if isinstance(value, Tensor) else value
