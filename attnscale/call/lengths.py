"""n and position of each query row: what policies are called with."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import Unpack

from attnscale._util.checks import check_flag, read_int
from attnscale.call.causal_bias import is_causal_bias
from attnscale.call.context import Context
from attnscale.call.layout import Layout
from attnscale.call.parse import VisibilityRules, describe


def visible_keys(
    queries: int, keys: int, *, batch: int = 1, heads: int = 1, **rules: Unpack[VisibilityRules]
) -> Tensor:
    """n [B|1, H|1, Tq]: how many of `keys` each of `queries` rows may see, as int64.

    The rules are the keywords of `scaled_dot_product_attention`: `is_causal`, `attn_mask`, `window`, `positions`,
    `key_padding`, `document_ids`, `cu_seqlens`, `cache_offset`. The tensors among them decide the device.

    >>> visible_keys(4, 4, is_causal=True, window=3)
    tensor([[[1, 2, 3, 3]]])
    >>> visible_keys(1, 8, is_causal=True, cache_offset=5)
    tensor([[[6]]])
    """
    extents = (("queries", queries), ("keys", keys), ("batch", batch), ("heads", heads))
    queries, keys, batch, heads = (read_int(name, extent, "an int >= 0", least=0) for name, extent in extents)
    check_flag("is_causal", rules.get("is_causal", False))
    parts = [part for rule in rules.values() for part in (rule if isinstance(rule, (tuple, list)) else (rule,))]
    # A causal bias of torch holds no values, so that its device means nothing.
    tensors = [part for part in parts if isinstance(part, Tensor) and not is_causal_bias(part)]
    device = tensors[0].device if tensors else torch.device("cpu")
    layout = Layout((batch, heads), True, heads)
    return count_visible(describe(layout, queries, keys, device, **rules))


def count_visible(context: Context) -> Tensor:
    """n [B|1, H|1, Tq] as int64, without a device synchronisation."""
    if context.visible is not None:
        return context.visible
    if context.mask is not None:
        dense = context.dense()
        if dense is not None:
            return dense.sum(-1)
    start, stop = context.bounds()
    return (_real_keys_before(context, stop) - _real_keys_before(context, start))[:, None]


def first_slots(context: Context, count: int) -> tuple[Tensor, Tensor]:
    """The slots [B|1, H|1, Tq|1, count] of the first keys that each row sees, and whether it sees so many.

    One row stands for all where they see the same first keys.
    """
    number = torch.arange(count, device=context.device)
    start, stop = context.bounds()
    if context.mask is None:
        if context.left is None and context.first is None:
            start = start[:, :1]
        slots = start[..., None] + number
        if context.padding is not None:
            real = (~context.padding).cumsum(-1)  # [B|1, Tk], up to and including the slot
            rank = _real_keys_before(context, start)[..., None] + number + 1
            batch = max(real.shape[0], rank.shape[0])
            flat = rank.expand(batch, -1, -1).flatten(1)
            slots = torch.searchsorted(real.expand(batch, -1).contiguous(), flat.contiguous()).view(batch, -1, count)
        seen = slots < stop[..., None]
        return slots.clamp(max=max(0, context.keys - 1))[:, None], seen[:, None]
    left = context.dense()
    left = context.mask if left is None else left
    slot, found = torch.arange(context.keys, device=context.device), []
    for _ in range(count):
        # The first True, or 0 where there is none.
        found.append((left.to(torch.uint8).argmax(-1), left.any(-1)))
        left = left & (slot > found[-1][0][..., None])
    slots, seen = (torch.stack(parts, dim=-1) for parts in zip(*found, strict=True))
    return slots, seen


def same_for_every_row(context: Context) -> int | None:
    """n as a plain int where the host knows that all rows see equally many keys (one-token decoding), else None."""
    if context.visible is not None or not context.is_plain:
        return None
    if context.queries != 1 and (context.left is not None or context.right is not None):
        return None
    start, stop = context.key_range()
    return stop - start


def find_positions(context: Context) -> Tensor | None:
    """Absolute position [B|1, 1, Tq] of each query, or None where it is unknown and policies use n − 1.

    Known where given, and under causality: the rank of the row's own slot among the real keys of its document. A
    window shortens n but not this.
    """
    if context.positions is not None:
        return context.positions[:, None]
    if context.visible is not None or not context.causal:
        return None
    if context.mask is not None:
        # A mask may hide padding, so ranks must be counted through it; without a window that is n itself.
        return None if context.left is None else count_visible(replace(context, window=(None, None))) - 1
    own = context.slots()
    if context.padding is None and context.first is None:
        return own.clamp(max=max(0, context.keys - 1))[:, None]
    before = _real_keys_before(context, (own + 1).clamp(0, context.keys))
    if context.first is not None:
        before = before - _real_keys_before(context, context.first.clamp(0, context.keys))
    return (before - 1).clamp(min=0)[:, None]


def _real_keys_before(context: Context, slot: Tensor) -> Tensor:
    """How many unpadded keys lie before each slot, [B|1, Tq]."""
    if context.padding is None:
        return slot
    count = pad((~context.padding).cumsum(-1), (1, 0))  # [B|1, Tk + 1]
    batch = max(count.shape[0], slot.shape[0])
    return count.expand(batch, -1).gather(-1, slot.expand(batch, -1))
