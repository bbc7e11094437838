"""Parse the keywords of an attention call into a checked `Context`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import Unpack

from attnscale._util.checks import check_broadcasts, check_dense, check_flag, is_floating, read_int
from attnscale._util.tracing import is_watched
from attnscale.call.context import COUNTED, Context, Window, count_visible
from attnscale.call.torch_arguments import Layout, is_causal_bias, read_causal_bias
from attnscale.errors import ArgumentError, DtypeError, TensorError, reject, reject_type

Packing = Tensor | tuple[Tensor, Tensor]


class KeyRules(TypedDict, total=False):
    """Keywords that restrict the visible keys; documented in `scaled_dot_product_attention`."""

    window: int | Window | None
    positions: Tensor | None
    key_padding: Tensor | None
    document_ids: Tensor | None
    cu_seqlens: Packing | None
    cache_offset: int | Tensor | None
    visible: Tensor | None


class VisibilityRules(KeyRules, total=False):
    """`KeyRules` plus the two restrictions of torch's function."""

    attn_mask: Tensor | None
    is_causal: bool


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
    """Check the keywords against the shapes and determine the slot of each query token.

    The slot comes from `cache_offset`; else from the document of packed queries; else from `positions`, looked up among
    the unpadded keys; else query i is in slot i, as in torch. Tensor values (negative positions, decreasing boundaries)
    are checked on the CPU only: on other devices, reading them back would synchronise.
    """
    if positions is not None:
        positions = layout.rows("positions", _integer("positions", positions, device), queries, "0-based, per query")
        _check_values("positions", positions, _any_negative, "0-based positions, none of them negative")
    if key_padding is not None:
        if not isinstance(key_padding, Tensor) or key_padding.dtype != torch.bool:
            reject_type("key_padding", _kind(key_padding), "a bool tensor, True where the key is padding")
        check_dense("key_padding", key_padding)
        _check_device("key_padding", key_padding, device)
        key_padding = layout.rows("key_padding", key_padding, keys, "True where the key is padding")
    if visible is not None:
        visible = per_row(layout, visible, queries, device)
    if document_ids is not None and cu_seqlens is not None:
        raise ArgumentError("document_ids and cu_seqlens are not accepted together: expected one of them")
    if cu_seqlens is not None:
        cu_seqlens = _edges(cu_seqlens, queries, keys, device)

    slot: int | Tensor = 0
    aligned = positions is not None or cache_offset is not None or cu_seqlens is not None or document_ids is not None
    rule = read_causal_bias(attn_mask, queries, keys, device, is_causal=is_causal, aligned=aligned)
    if rule is not None:
        attn_mask, is_causal, slot = rule.mask, rule.is_causal, rule.slot
    if attn_mask is not None:
        check_mask(layout, attn_mask, queries, keys, device)
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
        ids = layout.rows("document_ids", _integer("document_ids", document_ids, device), keys, "one id per key")
        first, last = _at(slot, *_runs(ids), queries=queries)
    elif cu_seqlens is not None:
        first, last = _documents(cu_seqlens, slot, queries, device)

    return Context(
        queries=queries,
        keys=keys,
        device=device,
        causal=is_causal,
        slot=slot,
        window=_window(window),
        first=first,
        last=last,
        padding=key_padding,
        mask=None if attn_mask is None else layout.mask(attn_mask, queries, keys),
        positions=positions,
        visible=visible,
    )


def visible_keys(
    queries: int, keys: int, *, batch: int = 1, heads: int = 1, **rules: Unpack[VisibilityRules]
) -> Tensor:
    """n, the number of visible keys of each query row.

    Args:
        queries: Tq, the number of query rows.
        keys: Tk, the number of keys.
        batch: B, the number of sequences.
        heads: H, the number of query heads.
        **rules: keywords of `scaled_dot_product_attention`: `is_causal`, `attn_mask`, `window`, `positions`,
            `key_padding`, `document_ids`, `cu_seqlens`, `cache_offset`. Their tensors determine the device.

    Returns:
        n [B|1, H|1, Tq], as int64.

    Raises:
        ArgumentError: a shape or value is not accepted.
        ArgumentTypeError: a type or dtype is not accepted.

    Example:
        >>> visible_keys(4, 4, is_causal=True, window=3)
        tensor([[[1, 2, 3, 3]]])
        >>> visible_keys(1, 8, is_causal=True, cache_offset=5)
        tensor([[[6]]])
    """
    extents = (("queries", queries), ("keys", keys), ("batch", batch), ("heads", heads))
    queries, keys, batch, heads = (read_int(name, extent, "an int >= 0", least=0) for name, extent in extents)
    check_flag("is_causal", rules.get("is_causal", False))
    parts = [part for rule in rules.values() for part in (rule if isinstance(rule, (tuple, list)) else (rule,))]
    # torch's CausalBias holds no values, so its device is meaningless.
    tensors = [part for part in parts if isinstance(part, Tensor) and not is_causal_bias(part)]
    device = tensors[0].device if tensors else torch.device("cpu")
    layout = Layout((batch, heads), True, heads)
    return count_visible(describe(layout, queries, keys, device, **rules))


def check_mask(layout: Layout, mask: Tensor, queries: int, keys: int, device: torch.device) -> None:
    """Reject a mask with an unsupported type, device or shape."""
    if not isinstance(mask, Tensor):
        reject_type("attn_mask", mask, "a bool tensor (True: visible) or a floating one (added)")
    check_dense("attn_mask", mask)
    if mask.dtype != torch.bool and not is_floating(mask.dtype):
        raise DtypeError(
            f"attn_mask of {mask.dtype} is not accepted: expected bool (True: visible) or floating of at least 16 bits "
            "(added)"
        )
    _check_device("attn_mask", mask, device)
    check_broadcasts("attn_mask", mask, (*layout.lead, queries, keys))


def per_row(layout: Layout, visible: Tensor, queries: int, device: torch.device) -> Tensor:
    """Reshape a given n from [Tq], [B, Tq] or [B, H, Tq] to [B|1, H|1, Tq]."""
    given = _integer("visible", visible, device)
    n = given.reshape(1, 1, -1) if given.dim() <= 1 else given[:, None] if given.dim() == 2 else given
    fits = n.dim() == 3 and n.shape[0] in (1, layout.size) and n.shape[1] in (1, layout.heads)
    if not fits or n.shape[2] not in (1, queries):
        full = [layout.size, layout.heads, queries]
        reject("visible.shape", list(given.shape), f"[Tq], [B, Tq] or [B, H, Tq] that broadcasts to {full}")
    if not hasattr(given, COUNTED):
        _check_values("visible", n, _any_negative, "numbers of keys, none of them negative")
    # A tensor of full length stays the same object: its β may be cached (`mark_counted`).
    return n if n.shape[2] == queries else n.expand(n.shape[0], n.shape[1], queries)


def _window(window: int | Window | None) -> Window:
    accepted = "an int >= 1 (keys nearer than that) or (left, right), each an int >= 0 or None"
    if window is None:
        return (None, None)
    if not isinstance(window, tuple):
        near = read_int("window", window, accepted, least=1) - 1
        return (near, near)
    if len(window) != 2:
        reject("window", window, accepted)
    left, right = (
        None if extent is None else read_int(f"window[{side}]", extent, "an int >= 0 or None", least=0)
        for side, extent in enumerate(window)
    )
    return (left, right)


def _offset(layout: Layout, offset: int | Tensor, queries: int, device: torch.device) -> int | Tensor:
    accepted = "an int >= 0 or an integer tensor [B]: keys before the first query; or [B|1, Tq]: before each query"
    if isinstance(offset, Tensor):
        offset = _integer("cache_offset", offset, device)
        of_each = offset.dim() == 2 and offset.shape[1] == queries and offset.shape[0] in (1, layout.size)
        if offset.numel() not in (1, layout.size) and not of_each:
            reject("cache_offset", list(offset.shape), accepted)
        _check_values("cache_offset", offset, _any_negative, accepted)
        if of_each:
            return offset
        return offset.reshape(-1, 1) + torch.arange(queries, device=device)
    return read_int("cache_offset", offset, accepted, least=0)


def _slots_of_positions(positions: Tensor, padding: Tensor | None) -> Tensor:
    """The slot [B|1, Tq] of the key at each position: the position, shifted by the padding before it."""
    if padding is None:
        return positions
    batch = max(positions.shape[0], padding.shape[0])
    real_keys = (~padding).cumsum(-1).expand(batch, -1).contiguous()  # [B, Tk], up to and including the slot
    return torch.searchsorted(real_keys, (positions + 1).expand(batch, -1).contiguous())


def _slots_of_packed(queries_at: Tensor, keys_at: Tensor, *, queries: int, device: torch.device) -> Tensor:
    """Slots of packed queries, the last tokens of their document: end of keys − distance to end of queries."""
    token = torch.arange(queries, device=device)
    document = _document_of(queries_at, token)
    return (keys_at[1:][document] - queries_at[1:][document] + token)[None]


def _documents(packing: Packing, slot: int | Tensor, queries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and last slot [B|1, Tq] of each query's document. Tokens after the last document see no keys."""
    if isinstance(packing, tuple):
        queries_at, keys_at = packing
        token = torch.arange(queries, device=device)[None]
    else:
        queries_at = keys_at = packing
        token = slot if isinstance(slot, Tensor) else torch.arange(slot, slot + queries, device=device)[None]
    document = _document_of(queries_at, token)
    first, last = keys_at[:-1][document], keys_at[1:][document]
    return first, torch.where(token < queries_at[-1], last, first)


def _edges(packing: Packing, queries: int, keys: int, device: torch.device) -> Packing:
    """Checked `cu_seqlens` as int64; a pair if queries and keys are packed differently."""
    accepted = "an integer tensor [documents + 1] that starts with 0 and increases, or a pair of them"
    pair = isinstance(packing, (tuple, list))
    if pair and len(packing) != 2:
        reject_type("cu_seqlens", packing, accepted)
    of_queries, of_keys = (_integer("cu_seqlens", x, device) for x in (packing if pair else (packing, packing)))
    for edges, tokens in ((of_queries, queries), (of_keys, keys)):
        if edges.dim() != 1 or edges.numel() < 2:
            reject("cu_seqlens.shape", list(edges.shape), accepted)
        limit = tokens if pair else keys

        def wrong(edges: Tensor, limit: int = limit) -> Tensor:
            return (edges[0] != 0) | (edges[-1] > limit) | (edges[1:] < edges[:-1]).any()

        _check_values("cu_seqlens", edges, wrong, f"{accepted}; the last is at most the number of tokens")
    if of_queries.numel() != of_keys.numel():
        reject(
            "cu_seqlens",
            (list(of_queries.shape), list(of_keys.shape)),
            "a pair with the same number of documents for queries and keys",
        )
    return (of_queries, of_keys) if pair else of_keys


def _document_of(edges: Tensor, token: Tensor) -> Tensor:
    inner = edges[1:].contiguous()
    return torch.searchsorted(inner, token.contiguous(), right=True).clamp(max=inner.numel() - 1)


def _runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Start and end (exclusive) of the run of equal ids around each slot; both [B|1, Tk]."""
    keys = ids.shape[-1]
    slot = torch.arange(keys, device=ids.device).expand_as(ids)
    changes = ids[:, 1:] != ids[:, :-1]
    begins = torch.where(pad(changes, (1, 0), value=True), slot, 0)
    ends = torch.where(pad(changes, (0, 1), value=True), slot + 1, keys)
    return begins.cummax(-1).values, ends.flip(-1).cummin(-1).values.flip(-1)


def _at(slot: int | Tensor, first: Tensor, last: Tensor, *, queries: int) -> tuple[Tensor, Tensor]:
    """Bounds of the document at each query's slot. Queries after the last key see no keys."""
    keys = first.shape[-1]
    if isinstance(slot, int):
        if queries > keys:
            reject(
                "queries, keys", (queries, keys), "no more queries than keys with document_ids, which number the keys"
            )
        if slot + queries > keys:
            reject(
                "cache_offset", slot, f"at most {keys - queries}: {queries} queries among {keys} keys with document_ids"
            )
        return first[:, slot : slot + queries], last[:, slot : slot + queries]
    batch = max(slot.shape[0], first.shape[0])
    index = slot.clamp(0, max(0, keys - 1)).expand(batch, -1)
    begin, end = (bound.expand(batch, -1).gather(-1, index) for bound in (first, last))
    return begin, torch.where(slot < keys, end, begin)


def _integer(argument: str, value: object, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype == torch.bool or value.is_floating_point() or value.is_complex():
        reject_type(argument, _kind(value), "an integer tensor")
    check_dense(argument, value)
    _check_device(argument, value, device)
    return value.to(torch.int64)


def _check_device(argument: str, value: Tensor, device: torch.device) -> None:
    if value.device != device:
        reject(f"{argument}.device", str(value.device), f"that of the query, {device}", TensorError)


def _any_negative(value: Tensor) -> Tensor:
    return (value < 0).any()


def _check_values(argument: str, value: Tensor, wrong: Callable[[Tensor], Tensor], accepted: str) -> None:
    if value.device.type == "cpu" and not is_watched() and bool(wrong(value)):
        reject(argument, value.tolist(), accepted)


def _kind(value: object) -> object:
    return value.dtype if isinstance(value, Tensor) else value
