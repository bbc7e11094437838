"""Visibility of keys as kernels take it: intervals of slots, padding, and a mask."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launch_cache import layout


class Rule(NamedTuple):
    """A `Visibility` as kernel argument: None fields are compiled out, and broadcast axes have stride 0."""

    start_ptr: Tensor | None  # [B|1, Tq], int32
    stop_ptr: Tensor | None  # [B|1, Tq], int32
    table_ptr: Tensor | None  # [B|1, tiles, 4], int32: `key_ranges` or `query_ranges`
    padding_ptr: Tensor | None  # [B|1, Tk], uint8
    mask_ptr: Tensor | None  # [B|1, H|1, Tq, Tk], uint8
    bias_ptr: Tensor | None  # [B|1, H|1, Tq, Tk], instead of the mask
    list_ptr: Tensor | None  # [B|1, H|1, tiles, steps + 2], int32: `tile_list` of flash/mask.py
    stride_bound: int  # batch stride, as are the next two
    stride_table: int
    stride_padding: int
    stride_mask: tuple[int, ...]  # the four strides of mask or bias
    stride_list: tuple[int, ...]  # the first three strides
    slot: int
    left: int | None
    right: int | None


class Visibility(NamedTuple):
    """The slots, or key indices, that each query row may see.

    Row i sees the slots [start, stop) without padded and masked keys. If the rule is the same for all sequences, row i
    has slot `slot + i` and sees `left` slots before and `right` slots after its own; nothing is loaded from memory.
    Otherwise `start` and `stop` hold one interval per row.

    Attributes:
        slot: The slot of the first query, for example the number of cached keys.
        left: Visible slots before the row's own slot; None means all.
        right: Visible slots after the row's own slot; None means all, 0 is causal.
        start: First visible slot, [B|1, Tq] in int32. Requires `stop`; excludes `left` and `right`.
        stop: End of the visible slots, [B|1, Tq] in int32.
        padding: [B|1, Tk] bool, True for hidden keys.
        mask: [B|1, H|1, Tq|1, Tk|1], bool (True: visible) or additive (at or below −10⁴: hidden).

    Example:
        >>> Visibility(slot=100, right=0).is_plain  # causal, with 100 cached keys
        True
    """

    slot: int = 0
    left: int | None = None
    right: int | None = None
    start: Tensor | None = None  # [B|1, Tq], int32
    stop: Tensor | None = None  # [B|1, Tq], int32
    padding: Tensor | None = None  # [B|1, Tk], bool, True: hidden
    mask: Tensor | None = None  # [B|1, H|1, Tq|1, Tk|1], bool (True: visible) or additive

    @property
    def is_plain(self) -> bool:
        """Whether the rule is the same for all sequences and heads, and therefore contains no tensors."""
        return self.start is None and self.padding is None and self.mask is None

    @property
    def biased(self) -> bool:
        """Whether the mask is additive."""
        return self.mask is not None and self.mask.dtype != torch.bool

    def linear_in_products(self, softcap: float | None) -> bool:
        """Whether raw scores are scale·q·k, without softcap or bias."""
        return softcap is None and not self.biased

    def layout(self) -> tuple[Any, ...]:
        """Return the part of a call signature that describes the visibility, without reading tensor elements."""
        slot, left, right, start, stop, padding, mask = self
        if (
            type(slot) is not int
            or (left is not None and type(left) is not int)
            or (right is not None and type(right) is not int)
        ):
            return object(), object()  # equal to no other: values may be unhashable, and 1.0 == 1
        if start is None and stop is None and padding is None and mask is None:
            return slot, left, right
        return slot, left, right, layout(start), layout(stop), layout(padding), layout(mask)

    def rule(self, table: Tensor | None = None, listed: Tensor | None = None, slot: int | None = None) -> Rule:
        """Return the kernel argument, given the range table, the tile lists and the slot of a launch."""
        slot = self.slot if slot is None else slot
        if self.is_plain:
            return _plain_rule(slot, self.left, self.right)
        start, stop = (None if bound is None else bound.contiguous() for bound in (self.start, self.stop))
        padding = None if self.padding is None else self.padding.view(torch.uint8).contiguous()
        mask = None if self.mask is None or self.biased else self.mask.view(torch.uint8)
        return Rule(
            start,
            stop,
            table,
            padding,
            mask,
            self.mask if self.biased else None,
            listed,
            _stride(start, 0),
            _stride(table, 0),
            _stride(padding, 0),
            tuple(_stride(self.mask, axis) for axis in range(4)),
            tuple(_stride(listed, axis) for axis in range(3)),
            slot,
            self.left,
            self.right,
        )


# The rule of most calls; building one takes as long as an allocation.
@functools.lru_cache(maxsize=64)
def _plain_rule(slot: int, left: int | None, right: int | None) -> Rule:
    return Rule(None, None, None, None, None, None, None, 0, 0, 0, (0, 0, 0, 0), (0, 0, 0), slot, left, right)


def key_ranges(visibility: Visibility, queries: int, keys: int, rows: int) -> Tensor | None:
    """For tiles of `rows` query rows: the slots visible to some row and to every row, from bounds and padding.

    Returns [B|1, tiles, 4] in int32 as (first, first clear, end of clear, end), or None where kernels compute the
    ranges themselves. A sequence with padding between its keys has no slots known to be visible to all rows. All
    entries are clamped to [0, keys], because fully visible tiles are loaded without bounds checks.
    """
    if visibility.start is not None and visibility.stop is not None:
        tiles = -(-queries // rows)
        start, stop = (_in_tiles(bound, tiles, rows) for bound in (visibility.start, visibility.stop))
        (first, clear_first), (clear_end, end) = torch.aminmax(start, dim=-1), torch.aminmax(stop, dim=-1)
    elif visibility.padding is not None and keys:
        top = torch.arange(0, queries, rows, device=visibility.padding.device)[None] + visibility.slot
        last = (top + rows).clamp(max=queries + visibility.slot) - 1
        first, clear_first = (_edge(row, visibility.left, -1, 0).clamp(0, keys) for row in (top, last))
        clear_end, end = (_edge(row, visibility.right, 1, keys - 1).add(1).clamp(0, keys) for row in (top, last))
    else:
        return None
    if visibility.padding is not None and keys:
        low, high, solid = _shown(visibility.padding)
        first, clear_first = torch.maximum(first, low), torch.maximum(clear_first, low)
        end, clear_end = torch.minimum(end, high), torch.where(solid, torch.minimum(clear_end, high), 0)
        end = torch.maximum(first, end)
        clear_first = torch.where(solid, clear_first, first)
    return _table(first, clear_first, torch.maximum(clear_first, clear_end), end).clamp_(0, keys)


def query_ranges(visibility: Visibility, queries: int, keys: int, columns: int) -> Tensor | None:
    """For tiles of `columns` keys: the rows that see some of the tile and those that see all of it.

    Returns [B|1, tiles, 4] in int32 as (first, first clear, end of clear, end), or None where kernels compute the
    ranges themselves. Rows in between that see nothing are included. Running extrema make the ranges correct for bounds
    in any order, and tight for non-decreasing bounds.
    """
    given = visibility.start if visibility.start is not None else visibility.padding
    if given is None:
        return None
    left = torch.arange(0, keys, columns, device=given.device, dtype=torch.int32)[None]
    right = (left + columns).clamp(max=keys)
    if visibility.start is not None and visibility.stop is not None:
        start, stop = visibility.start, visibility.stop
        left, right = (x.expand(start.shape[0], -1).contiguous() for x in (left, right))
        first = torch.searchsorted(stop.cummax(1).values, left, right=True)
        end = torch.maximum(first, torch.searchsorted(_least_to_come(start), right))
        clear_first = torch.searchsorted(_least_to_come(stop), right).clamp(first, end)
        clear_end = torch.searchsorted(start.cummax(1).values, left, right=True).clamp(clear_first, end)
    else:  # row + slot + right >= key, and row + slot - left <= key
        places = left - visibility.slot, right - 1 - visibility.slot
        first, clear_first = (_edge(key, visibility.right, -1, 0).clamp(0, queries) for key in places)
        clear_end, end = (_edge(key, visibility.left, 1, queries - 1).add(1).clamp(0, queries) for key in places)
        end = torch.maximum(first, end)
        clear_first = torch.minimum(clear_first, end)
        clear_end = torch.minimum(torch.maximum(clear_first, clear_end), end)
    if visibility.padding is not None:
        hidden = _in_tiles(visibility.padding, left.shape[1], columns)
        partly, wholly = hidden.any(-1), hidden.all(-1)
        first, end = (x.masked_fill(wholly, 0) for x in torch.broadcast_tensors(first, end, wholly)[:2])
        clear_first, clear_end = (torch.where(partly, first, x) for x in (clear_first, clear_end))
    return _table(first, clear_first, clear_end, end)


def _edge(place: Tensor, reach: int | None, sign: int, without: int) -> Tensor:
    """Return the end of visibility from each place in the direction `sign`, `without` if the reach is unlimited."""
    return torch.full_like(place, without) if reach is None else place + sign * reach


def _shown(padding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, per sequence [B, 1]: the first shown key, the end of shown keys, and whether they are contiguous."""
    place = torch.arange(padding.shape[1], device=padding.device)
    low = place.masked_fill(padding, padding.shape[1]).amin(1, keepdim=True)
    high = (place + 1).masked_fill(padding, 0).amax(1, keepdim=True)
    return low, high, high - low == (~padding).sum(1, keepdim=True)


def _table(*columns: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*columns), dim=-1).to(torch.int32).contiguous()


def _least_to_come(bound: Tensor) -> Tensor:
    """Return the running minimum from the end of each row of [B|1, Tq]; it never decreases."""
    return bound.flip(1).cummin(1).values.flip(1)


def _stride(x: Tensor | None, axis: int) -> int:
    """Return the stride along an axis, 0 if the axis is broadcast."""
    return 0 if x is None or x.shape[axis] == 1 else x.stride(axis)


def _in_tiles(bound: Tensor, tiles: int, rows: int) -> Tensor:
    """Reshape [B|1, T] to [B|1, tiles, rows], repeating the last element as padding."""
    missing = tiles * rows - bound.shape[1]
    padded = torch.cat([bound, bound[:, -1:].expand(-1, missing)], dim=1) if missing else bound
    return padded.reshape(bound.shape[0], tiles, rows)
