"""Calls whose rows are looked at together, cut into blocks so small that memory does not grow with rows or keys."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.backends.blockwise.tiles import Tile
from attnscale.call.attention_call import AttentionCall

# Scores of a block, for one call and for several: few enough that they and what is made of them stay in a cache, and
# enough that operators are not all overhead. A row of more is taken in pieces.
NUMBERS = 2**18
SHARES = 3
# Rows of a block: at most, since sampled rows end far apart and a block is as wide as its widest; and, where heads can
# be taken one after the other instead, at least, so that products of matrices are fast.
ROWS = 64
LEAST_ROWS = 8
# Widths of products in steps that processors like, where there are as many slots.
STEP = 16


class Block(NamedTuple):
    """Rows [top, bottom) of some sequences' heads [first, last) of k, and the slots [left, right) they may see.

    Sequences are counted through all calls. Long rows are taken `width` slots at a time.
    """

    sequences: slice
    first: int
    last: int
    top: int
    bottom: int
    left: int
    right: int
    width: int

    def of(self, x: Tensor) -> Tensor:
        """The part of a tensor over rows [S, Hkv, g, R, ...] as [l, g·r, ...]: a lane for every head."""
        part = x[self.sequences, self.first : self.last, :, self.top : self.bottom]
        return part.reshape(part.shape[0] * part.shape[1], -1, *part.shape[4:])

    def put(self, x: Tensor, part: Tensor) -> None:
        """The way back."""
        whole = x[self.sequences, self.first : self.last, :, self.top : self.bottom]
        whole.copy_(part.view(whole.shape))

    def tile(self, batch: int) -> Tile:
        """The same as a tile of one call of so many sequences; only where it is of a single one."""
        rows = self.first, self.last, self.top, self.bottom, self.left, self.right
        return Tile(self.sequences.start % batch, *rows, self.left, self.left, None, self.right - self.left)


class Stack:
    """Calls that differ in their tensors only, one behind the other; keys and values stay where they are."""

    def __init__(self, calls: Sequence[AttentionCall]) -> None:
        self.calls = calls
        self.like = calls[0]
        self.dtype = torch.promote_types(self.like.query.dtype, torch.float32)
        self.batch, heads, self.rows = shape = self.like.query.shape[:3]
        self.heads, self.keys = self.like.key.shape[1:3]
        self.group = heads // self.heads
        self.numbers = max(NUMBERS * min(len(calls), SHARES), self.group)  # of a block, at most
        self.query = self.over_rows([call.query for call in calls]) * self.like.scale
        self.beta = self.over_rows([call.row_beta() for call in calls])
        sinks = [call.sinks[None, :, None].expand(shape) for call in calls if call.sinks is not None]
        self.sinks = self.over_rows(sinks) if sinks else None
        self.start, self.stop = self.like.context.bounds()
        # A sequence's rows see what those of the others see, and so can be in one block with them.
        lonely = self.like.context.padding is not None or self.like.context.mask is not None
        self.alike = not lonely and self.start.shape[0] == 1

    def over_rows(self, parts: Sequence[Tensor]) -> Tensor:
        """[B, H, R, ...] of all calls as [S, Hkv, g, R, ...]."""
        whole = torch.cat([x.contiguous() for x in parts]).to(self.dtype)
        return whole.view(whole.shape[0], self.heads, self.group, *whole.shape[2:])

    def empty(self, *others: int, fill: float = 0.0) -> Tensor:
        """Room for something of every row, [S, Hkv, g, R, ...]."""
        return torch.full((*self.query.shape[:4], *others), fill, dtype=self.dtype, device=self.query.device)

    def by_call(self, x: Tensor) -> Tensor:
        """Something of every row [S, Hkv, g, R, ...] as [N, B, H, R, ...]."""
        return x.view(-1, self.batch, self.heads * self.group, *x.shape[3:])

    def blocks(self) -> Iterator[Block]:
        """All rows, block by block; slots that no row of a block may see are not in it."""
        sequences = len(self.calls) * self.batch
        step = 1 if self.alike else self.batch if self.like.context.mask is None else sequences
        rows, lanes = self._extent(len(range(0, sequences, step)) * self.heads)
        together, heads = max(1, lanes // self.heads) * step, min(lanes, self.heads)
        width = self.numbers // self.group
        for top, bottom, left, right in self._strips(rows):
            for begin in (begin for b in range(step) for begin in range(b, sequences, together)):
                chosen = slice(begin, min(begin + together, sequences), step)
                for first in range(0, self.heads, heads):
                    yield Block(chosen, first, min(first + heads, self.heads), top, bottom, left, right, width)

    def _extent(self, lanes: int) -> tuple[int, int]:
        """How many rows of each head a block has, and how many heads there are in it, of all its sequences."""
        room = self.numbers // max(1, self.keys * self.group)  # for rows of heads of k
        rows = max(1, min(self.rows, ROWS, max(room // lanes, min(LEAST_ROWS, room))))
        rows = -(-self.rows // -(-self.rows // rows))  # of even size
        return rows, max(1, min(lanes, room // rows))

    def _strips(self, rows: int) -> Iterator[tuple[int, int, int, int]]:
        """So many rows at a time, and the slots that some may see; all where asking a device would be waiting."""
        starts, stops = ([], []) if self.start.device.type != "cpu" else (self.start.tolist(), self.stop.tolist())
        for top in range(0, self.rows, rows):
            bottom, left, right = min(top + rows, self.rows), 0, self.keys
            if starts:
                left = min(self.keys, *(low for of_one in starts for low in of_one[top:bottom]))
                last = max(left, *(high for of_one in stops for high in of_one[top:bottom]))
                right = min(left - (left - last) // STEP * STEP, self.keys)
            if left < right:
                yield top, bottom, left, right


def kin(call: AttentionCall) -> Hashable:
    """What is the same for calls on the CPU that can be stacked."""
    if call.context.mask is not None:
        return object()
    start, stop = (tuple(map(tuple, bound.tolist())) for bound in call.context.bounds())
    tensors = call.query, call.key, call.value
    layout = tuple((x.shape, x.dtype, x.device) for x in tensors)
    return layout, call.scale, call.softcap, call.sinks is None, id(call.context.padding), start, stop
