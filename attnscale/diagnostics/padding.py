"""Padding rows of a call: rows whose own key is padding. Statistics exclude them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import Context, shown


def padding_rows(context: Context) -> Tensor | None:
    """Return a mask [B|1, Tq], True for rows whose own key is padding; None if no key is hidden from all rows.

    The key in a row's own slot is padding if `padding` marks it, or if the mask hides it from every row and head. A
    strictly causal mask carries no information about padding: rows do not see themselves, and the last key is hidden
    from all rows although it is real. A row without its own key, as in cross attention, is never padding.
    """
    if context.padding is None and context.mask is None:
        return None
    if isinstance(context.slot, int) and context.slot >= context.keys:
        return None
    # If every key has a row, use indices: slots derived from positions would skip padding.
    aligned = context.queries == context.keys
    slots = torch.arange(context.keys, device=context.device)[None] if aligned else context.slots()
    own = slots.clamp(0, max(context.keys - 1, 0))
    inside = own == slots
    padded = None if context.padding is None else _at(context.padding, own) & inside
    masked = None if context.mask is None else _hidden_by_mask(context.mask, own, inside)
    return masked if padded is None else padded if masked is None else padded | masked


def without_padding(call: AttentionCall) -> tuple[AttentionCall, Tensor | None]:
    """Return the call without visible keys for padding rows, which excludes them from sums; and `padding_rows`."""
    context = call.context
    rows = padding_rows(context)
    if rows is None:
        return call, None
    first = torch.zeros_like(rows, dtype=torch.int64) if context.first is None else context.first
    last = torch.where(rows, first, context.keys if context.last is None else context.last)
    return replace(call, context=replace(context, first=first.expand_as(last), last=last)), rows


def blank(x: Tensor, rows: Tensor | None) -> Tensor:
    """Zero the given rows [B|1, Tq] of x [B, H, Tq, D]."""
    return x if rows is None else x.masked_fill(rows[:, None, :, None], 0.0)


def _at(x: Tensor, slots: Tensor) -> Tensor:
    """Gather x [B|1, Tk] at slots [B|1, Tq]. Returns [B|1, Tq]."""
    batch = max(x.shape[0], slots.shape[0])
    return x.expand(batch, -1).gather(-1, slots.expand(batch, -1))


def _hidden_by_mask(mask: Tensor, own: Tensor, inside: Tensor) -> Tensor | None:
    """Return True [B|1, Tq] where the mask [B|1, H|1, Tq, Tk] hides a row's own key from all rows; None if nowhere.

    On the CPU, the diagonal is checked first: in most masks every row sees itself, and the diagonal is much smaller
    than the mask. On other devices, reading the result back would synchronise.
    """
    at = own[:, None, :, None].expand(max(mask.shape[0], own.shape[0]), mask.shape[1], -1, 1)
    sees_itself = shown(mask.expand(at.shape[0], -1, -1, -1).gather(-1, at)).squeeze(-1).any(1)  # [B|1, Tq]
    if mask.device.type == "cpu" and bool(sees_itself.all()):
        return None
    for axis in (0, 1, 2):
        if mask.stride(axis) == 0:  # repeated by broadcasting
            mask = mask.narrow(axis, 0, 1)
    seen = _at(shown(mask).any(2).any(1), own)  # by at least one row, [B|1, Tq]
    hidden = ~seen & inside
    telling = (sees_itself | ~seen | ~inside).all(-1, keepdim=True)
    return hidden & telling
