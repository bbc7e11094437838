"""Rows whose own token is padding: they are in a batch, but must be in no statistic."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import Context, shown


def padding_rows(context: Context) -> Tensor | None:
    """True [B|1, Tq] where a row's own key is padding; None where the rules hide no key from all rows.

    The key in a row's own slot is padding if `padding` says so, or if the mask hides it from every row and head. A mask
    under which rows do not see themselves although others see them (strictly causal ones) says nothing about padding:
    it hides the last key from all rows, and yet that key is real. A row without a slot among the keys, as in cross
    attention, is never padding.
    """
    if context.padding is None and context.mask is None:
        return None
    if isinstance(context.slot, int) and context.slot >= context.keys:
        return None
    # Where every key has a row, slots that were looked up from positions would pass over the padded ones.
    aligned = context.queries == context.keys
    slots = torch.arange(context.keys, device=context.device)[None] if aligned else context.slots()
    own = slots.clamp(0, max(context.keys - 1, 0))
    inside = own == slots
    padded = None if context.padding is None else _at(context.padding, own) & inside
    masked = None if context.mask is None else _hidden_by_mask(context.mask, own, inside)
    return padded | masked if padded is not None and masked is not None else masked if padded is None else padded


def without_padding(call: AttentionCall) -> tuple[AttentionCall, Tensor | None]:
    """The same call with no visible key for padding rows, so that no aggregate contains them; and `padding_rows`."""
    context = call.context
    rows = padding_rows(context)
    if rows is None:
        return call, None
    first = torch.zeros_like(rows, dtype=torch.int64) if context.first is None else context.first
    last = torch.where(rows, first, context.keys if context.last is None else context.last)
    return replace(call, context=replace(context, first=first.expand_as(last), last=last)), rows


def blank(x: Tensor, rows: Tensor | None) -> Tensor:
    """[B, H, Tq, D] with zeros in the given rows [B|1, Tq]."""
    return x if rows is None else x.masked_fill(rows[:, None, :, None], 0.0)


def _at(x: Tensor, slots: Tensor) -> Tensor:
    """x [B|1, Tk] at slots [B|1, Tq], as [B|1, Tq]."""
    batch = max(x.shape[0], slots.shape[0])
    return x.expand(batch, -1).gather(-1, slots.expand(batch, -1))


def _hidden_by_mask(mask: Tensor, own: Tensor, inside: Tensor) -> Tensor | None:
    """True [B|1, Tq] where the mask [B|1, H|1, Tq, Tk] hides a row's own key from every row; None where it hides none.

    On the CPU the rows' own entries are read first: in most masks every row sees itself, and they are far less to read
    than the whole mask. On other devices reading the answer back would synchronise.
    """
    at = own[:, None, :, None].expand(max(mask.shape[0], own.shape[0]), mask.shape[1], -1, 1)
    sees_itself = shown(mask.expand(at.shape[0], -1, -1, -1).gather(-1, at)).squeeze(-1).any(1)  # [B|1, Tq]
    if mask.device.type == "cpu" and bool(sees_itself.all()):
        return None
    for axis in (0, 1, 2):
        if mask.stride(axis) == 0:  # repeated by broadcasting
            mask = mask.narrow(axis, 0, 1)
    seen = _at(shown(mask).any(2).any(1), own)  # by some row, [B|1, Tq]
    hidden = ~seen & inside
    telling = (sees_itself | ~seen | ~inside).all(-1, keepdim=True)
    return hidden & telling
