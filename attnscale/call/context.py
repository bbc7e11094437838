"""Visible keys of each query row: causality, cache, window, padding, documents and masks in one description.

Keys are in *slots* 0 … Tk−1. Except for an explicit mask, every rule restricts a row to an interval of slots, minus
padding. Two integers describe a row, and no Tq × Tk tensor exists unless a backend builds one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

# An additive mask at or below this hides the key: exp(−10⁴) is 0 in every dtype, and finfo.min often stands for −∞.
HIDDEN_BELOW = -1e4

# Attribute set by `policies.temperature.mark_counted` on an n counted by this package and never modified.
COUNTED = "_attnscale_count"

Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class Context:
    """Validated description of the visible keys of one attention call, made by `parse.describe`.

    `slot` is the slot of the query tokens: an int if they are at `slot, slot + 1, …` in every sequence, else a tensor
    [B|1, Tq]. `first` and `last` are document bounds [B|1, Tq]. `padding` [B|1, Tk] is True for padding. `mask`
    [B|1, H|1, Tq, Tk] is bool (True: visible) or additive. `positions` and `visible` override the derived values.
    """

    queries: int
    keys: int
    device: torch.device
    causal: bool = False
    slot: int | Tensor = 0
    window: Window = (None, None)
    first: Tensor | None = None
    last: Tensor | None = None
    padding: Tensor | None = None
    mask: Tensor | None = None
    positions: Tensor | None = None
    visible: Tensor | None = None

    @property
    def left(self) -> int | None:
        """Number of visible slots before a row's own slot; None for all."""
        return self.window[0]

    @property
    def right(self) -> int | None:
        """Number of visible slots after a row's own slot; None for all."""
        return 0 if self.causal else self.window[1]

    @property
    def is_plain(self) -> bool:
        """Whether all rules are known on the host: no padding, documents, mask or per-sequence slots."""
        return isinstance(self.slot, int) and self.first is None and self.padding is None and self.mask is None

    @property
    def is_causal_alone(self) -> bool:
        """Whether causality from slot 0 is the only rule."""
        starts_there = isinstance(self.slot, int) and self.slot == 0
        nothing_else = self.positions is None and self.visible is None and self.window == (None, None)
        return self.causal and self.is_plain and starts_there and nothing_else

    def slots(self) -> Tensor:
        """The slot of each query token, [B|1, Tq]."""
        if isinstance(self.slot, Tensor):
            return self.slot
        return torch.arange(self.slot, self.slot + self.queries, device=self.device)[None]

    def with_own_slots(self, own_keys: bool | None) -> Context:
        """Move `slot` behind all keys if rows have no own key among them. Used by monitors.

        `own_keys`: queries and keys come from the same tokens. None (unknown) is taken as True if their numbers are
        equal, if the slots of the queries are given, or if there is no mask and no padding.
        """
        if self.causal or self.window != (None, None):
            return self  # rows see by their slots
        if own_keys is None:
            slots_given = isinstance(self.slot, Tensor) or self.slot != 0
            own_keys = slots_given or (self.padding is None and self.mask is None) or self.queries == self.keys
        return self if own_keys else replace(self, slot=self.keys)

    def key_range(self) -> tuple[int, int]:
        """Host-side range [start, stop). Slots outside are hidden from every row."""
        start, stop = 0, self.keys
        if isinstance(self.slot, int):
            if self.right is not None:
                stop = max(0, min(stop, self.slot + self.queries + self.right))
            if self.left is not None:
                start = min(stop, max(0, self.slot - self.left))
        return start, stop

    def bounds(self) -> tuple[Tensor, Tensor]:
        """First visible slot and one past the last, each [B|1, Tq] in [0, Tk]. Ignores padding and mask."""
        if self.left is None and self.right is None and self.first is not None and self.last is not None:
            start, stop = self.first, self.last
        else:
            slots = self.slots()
            start = torch.zeros_like(slots) if self.left is None else slots - self.left
            stop = torch.full_like(slots, self.keys) if self.right is None else slots + self.right + 1
            if self.first is not None and self.last is not None:
                start, stop = torch.maximum(start, self.first), torch.minimum(stop, self.last)
        start = start.clamp(0, self.keys)
        return start, torch.maximum(start, stop.clamp(0, self.keys))

    def select(self, rows: Tensor) -> Context:
        """The context of some rows [R]."""

        def pick(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.index_select(-1, rows)

        return replace(
            self,
            queries=rows.numel(),
            slot=self.slot.index_select(-1, rows) if isinstance(self.slot, Tensor) else (self.slot + rows)[None],
            first=pick(self.first),
            last=pick(self.last),
            mask=None if self.mask is None else self.mask[:, :, rows],
            positions=pick(self.positions),
            visible=pick(self.visible),
        )

    def dense(self, start: int = 0, stop: int | None = None) -> Tensor | None:
        """Visibility [B|1, H|1, Tq, stop−start] as bool, or None if every row sees every key of the range."""
        stop = self.keys if stop is None else stop
        visible: Tensor | None = None
        if self.left is not None or self.right is not None or self.first is not None:
            slot = torch.arange(start, stop, device=self.device)
            low, high = self.bounds()
            visible = ((slot >= low[..., None]) & (slot < high[..., None]))[:, None]
        if self.padding is not None:
            visible = _both(visible, ~self.padding[:, None, None, start:stop])
        if self.mask is not None:
            visible = _both(visible, shown(self.mask[..., start:stop]))
        return visible


def shown(mask: Tensor) -> Tensor:
    """A mask as bool, True for visible keys. A NaN does not hide a key: it must propagate to the row."""
    return mask if mask.dtype == torch.bool else ~(mask <= HIDDEN_BELOW)


def _both(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a & b


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


def count_visible_before(context: Context, slots: Tensor) -> Tensor:
    """Number of visible keys before a visible slot [B, H, Tq] of each row."""
    if context.mask is not None:
        dense = context.dense()
        seen = (context.mask if dense is None else dense).cumsum(-1, dtype=torch.int32)
        last = (slots - 1).clamp(0, context.keys - 1)[..., None]
        before = seen.expand(*slots.shape, -1).gather(-1, last)[..., 0]
        return torch.where(slots > 0, before, 0)
    start, _ = context.bounds()
    flat = slots.clamp(min=0).flatten(1)  # [B, H·Tq]
    return _real_keys_before(context, flat).view(slots.shape) - _real_keys_before(context, start)[:, None]


def first_slots(context: Context, count: int) -> tuple[Tensor, Tensor]:
    """Slots [B|1, H|1, Tq|1, count] of the first visible keys of each row, and whether each of them exists.

    The row axis is 1 if all rows have the same first keys.
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
        # The first True, or 0 if there is none.
        found.append((left.to(torch.uint8).argmax(-1), left.any(-1)))
        left = left & (slot > found[-1][0][..., None])
    slots, seen = (torch.stack(parts, dim=-1) for parts in zip(*found, strict=True))
    return slots, seen


def same_for_every_row(context: Context) -> int | None:
    """n as an int if the host can determine that all rows have the same n (such as one-token decoding), else None."""
    if context.visible is not None or not context.is_plain:
        return None
    if context.queries != 1 and (context.left is not None or context.right is not None):
        return None
    start, stop = context.key_range()
    return stop - start


def find_positions(context: Context) -> Tensor | None:
    """Absolute position [B|1, 1, Tq] of each query, or None if unknown. Policies then use n − 1.

    Under causality, the position is the rank of the row's own slot among the unpadded keys of its document. A window
    reduces n, but not the position.
    """
    if context.positions is not None:
        return context.positions[:, None]
    if context.visible is not None or not context.causal:
        return None
    if context.mask is not None:
        # A mask may hide padding, so the rank is counted through the mask; without a window this is n itself.
        return None if context.left is None else count_visible(replace(context, window=(None, None))) - 1
    own = context.slots()
    if context.padding is None and context.first is None:
        return own.clamp(max=max(0, context.keys - 1))[:, None]
    before = _real_keys_before(context, (own + 1).clamp(0, context.keys))
    if context.first is not None:
        before = before - _real_keys_before(context, context.first.clamp(0, context.keys))
    return (before - 1).clamp(min=0)[:, None]


def _real_keys_before(context: Context, slot: Tensor) -> Tensor:
    """Number of unpadded keys before each slot, [B|1, Tq]."""
    if context.padding is None:
        return slot
    count = pad((~context.padding).cumsum(-1), (1, 0))  # [B|1, Tk + 1]
    batch = max(count.shape[0], slot.shape[0])
    return count.expand(batch, -1).gather(-1, slot.expand(batch, -1))


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
