"""Which keys the rows of a launch may see, in the form kernels take it: intervals of slots, padding, and a mask."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

# The fields of `Visibility` in the schema of an operator.
SCHEMA = "SymInt slot, SymInt? left, SymInt? right, Tensor? start, Tensor? stop, Tensor? padding, Tensor? mask"


class Rule(NamedTuple):
    """A `Visibility` as kernels take it: what is None is compiled out, and broadcast axes have a stride of 0."""

    start_ptr: Tensor | None  # [B|1, Tq], int32
    stop_ptr: Tensor | None  # [B|1, Tq], int32
    table_ptr: Tensor | None  # [B|1, tiles, 4], int32: `key_ranges` or `query_ranges`
    padding_ptr: Tensor | None  # [B|1, Tk], uint8
    mask_ptr: Tensor | None  # [B|1, H|1, Tq, Tk], uint8
    bias_ptr: Tensor | None  # [B|1, H|1, Tq, Tk], in place of the mask
    stride_bound: int  # from sequence to sequence, and so the next two
    stride_table: int
    stride_padding: int
    stride_mask: tuple[int, ...]  # of the four axes of mask or bias
    slot: int
    left: int | None
    right: int | None


class Visibility(NamedTuple):
    """Row i may see the slots [start, stop) less the padded and the masked ones.

    Where the rule is the same for all sequences, row i lies at slot `slot + i`, sees `left` slots before its own and
    `right` after it (None: all), and nothing has to be loaded. Otherwise `start` and `stop` hold the intervals.
    """

    slot: int = 0
    left: int | None = None
    right: int | None = None
    start: Tensor | None = None  # [B|1, Tq], int32
    stop: Tensor | None = None  # [B|1, Tq], int32
    padding: Tensor | None = None  # [B|1, Tk], bool, True: hidden
    mask: Tensor | None = None  # [B|1, H|1, Tq, Tk], bool (True: visible) or additive

    @property
    def biased(self) -> bool:
        """Whether the mask is additive."""
        return self.mask is not None and self.mask.dtype != torch.bool

    def linear_in_products(self, softcap: float | None) -> bool:
        """Whether raw scores are the products q·k times the scale."""
        return softcap is None and not self.biased

    def rule(self, table: Tensor | None = None) -> Rule:
        """What kernels are given, with the `key_ranges` or `query_ranges` of the launch."""
        if self.start is None and self.padding is None and self.mask is None:
            return _plain_rule(self.slot, self.left, self.right)
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
            _stride(start, 0),
            _stride(table, 0),
            _stride(padding, 0),
            tuple(_stride(self.mask, axis) for axis in range(4)),
            self.slot,
            self.left,
            self.right,
        )


# Of most calls: to make one takes as long as an allocation.
@functools.lru_cache(maxsize=64)
def _plain_rule(slot: int, left: int | None, right: int | None) -> Rule:
    return Rule(None, None, None, None, None, None, 0, 0, 0, (0, 0, 0, 0), slot, left, right)


def key_ranges(visibility: Visibility, queries: int, rows: int) -> Tensor | None:
    """For tiles of `rows` query rows with a table of bounds: slots that some row and that every row may see.

    [B|1, tiles, 4] in int32, as (first, first clear, end of clear, end); None where kernels compute them.
    """
    if visibility.start is None or visibility.stop is None:
        return None
    tiles = -(-queries // rows)
    start, stop = (_in_tiles(bound, tiles, rows) for bound in (visibility.start, visibility.stop))
    (first, clear_first), (clear_end, end) = torch.aminmax(start, dim=-1), torch.aminmax(stop, dim=-1)
    return torch.stack([first, clear_first, torch.maximum(clear_first, clear_end), end], dim=-1).contiguous()


def query_ranges(visibility: Visibility, keys: int, columns: int) -> Tensor | None:
    """For tiles of `columns` keys with a table of bounds: rows that may see some of it, and rows that see all of it.

    [B|1, tiles, 4] in int32, as (first, first clear, end of clear, end). Rows in between that see none are included:
    running extremes make it right for bounds in any order, and tight for those that never decrease.
    """
    if visibility.start is None or visibility.stop is None:
        return None
    start, stop = visibility.start, visibility.stop
    left = (
        torch.arange(0, keys, columns, device=start.device, dtype=torch.int32).expand(start.shape[0], -1).contiguous()
    )
    right = (left + columns).clamp(max=keys)
    first = torch.searchsorted(stop.cummax(1).values, left, right=True)
    end = torch.maximum(first, torch.searchsorted(_least_to_come(start), right))
    clear_first = torch.searchsorted(_least_to_come(stop), right).clamp(first, end)
    clear_end = torch.searchsorted(start.cummax(1).values, left, right=True).clamp(clear_first, end)
    return torch.stack([first, clear_first, clear_end, end], dim=-1).to(torch.int32)


def _least_to_come(bound: Tensor) -> Tensor:
    """For each row of [B|1, Tq] the smallest value from there on; it never decreases."""
    return bound.flip(1).cummin(1).values.flip(1)


def _stride(x: Tensor | None, axis: int) -> int:
    """The stride along an axis, 0 where the axis is broadcast."""
    return 0 if x is None or x.shape[axis] == 1 else x.stride(axis)


def _in_tiles(bound: Tensor, tiles: int, rows: int) -> Tensor:
    """A bound [B|1, Tq] as [B|1, tiles, rows], the last row repeated."""
    missing = tiles * rows - bound.shape[1]
    padded = torch.cat([bound, bound[:, -1:].expand(-1, missing)], dim=1) if missing else bound
    return padded.reshape(bound.shape[0], tiles, rows)
