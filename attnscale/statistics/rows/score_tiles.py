"""Raw scores of a block, a piece at a time, and which of them may be seen."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnscale._util.scratch import room
from attnscale._util.tracing import is_watched
from attnscale.backends.blockwise.tiles import HIDDEN, mask_of
from attnscale.call.context import shown
from attnscale.statistics.rows.stacked_calls import Block, Stack

# Slots times rows of a block up to which it is remembered what may be seen, and for how many blocks.
MEMORABLE = 2**16
REMEMBERED = 4


class Seen(NamedTuple):
    """Which slots rows may see, as numbers that broadcast to [l, g, r, K]."""

    visible: Tensor  # 1 and 0
    hidden: Tensor  # 0 and HIDDEN
    number: Tensor  # how many, [..., r]


class Pulled(NamedTuple):
    """What backward makes of a piece: 2^x of each key, x = (ℓ − top)/ln 2, its product with ⟨dO, v⟩, and their sum."""

    powers: Tensor
    products: Tensor
    centre: Tensor


class Piece:
    """Raw scores [l, g·r, K] of a block's rows and some of the slots they may see: 0 where hidden, `size` their sums.

    `masked` are the same with HIDDEN there, in room that may be used for something else; there is more of it.
    """

    def __init__(self, stack: Stack, block: Block) -> None:
        self._stack = stack
        self._block = block
        self._rooms = [room(f"block {index}", (stack.numbers,), stack.query) for index in range(4)]
        self.seen = _seen(stack, block)
        self.raw = self.products(stack.query, "key", 0)
        if stack.like.softcap is not None:
            self.raw.div_(stack.like.softcap).tanh_().mul_(stack.like.softcap)
        if stack.like.bias is not None:
            bias = mask_of(stack.like.bias, block.tile(stack.batch), stack.group)
            self.by_row(self.raw).add_(bias.to(self.raw.dtype).clamp(min=HIDDEN))
        self.size = self.hide(self.raw)
        self.masked = self.room(1)
        torch.add(self.by_row(self.raw), self.seen.hidden, out=self.by_row(self.masked))
        self.pulled: Pulled | None = None  # once it has been made, in the other rooms

    def room(self, index: int) -> Tensor:
        """Room for a tensor like the scores, in one of four places: the first two are those of `raw` and `masked`."""
        return self._rooms[index][: self.raw.numel()].view(self.raw.shape)

    def by_row(self, x: Tensor) -> Tensor:
        """[l, g·r, ·] as [l, g, r, ·]."""
        return x.view(x.shape[0], self._stack.group, -1, x.shape[-1])

    def hide(self, x: Tensor) -> Tensor:
        """Set what may not be seen of [l, g·r, K] to 0, in place, and give the sum of each row [l, g·r]."""
        sums = self.by_row(x).mul_(self.seen.visible).sum(-1)
        # 0·NaN is NaN. Filling by a mask is several times slower than the product, so on the CPU only where there is
        # one; elsewhere it would have to wait for the answer.
        if x.device.type != "cpu" or not math.isfinite(float(sums.sum())):
            sums = self.by_row(x).masked_fill_(self.seen.visible == 0, 0.0).sum(-1)
        return sums.flatten(1)

    def products(self, rows: Tensor, side: Literal["key", "value"], index: int) -> Tensor:
        """⟨row, key⟩ of the block's part of rows [S, Hkv, g, R, D], or the same with values; in one of the rooms."""
        block, stack = self._block, self._stack
        part = block.of(rows)
        shape = *part.shape[:2], block.right - block.left
        out = self._rooms[index][: math.prod(shape)].view(shape)
        heads = block.last - block.first
        for lane, sequence in enumerate(range(*block.sequences.indices(rows.shape[0]))):
            keys = getattr(stack.calls[sequence // stack.batch], side)[sequence % stack.batch]
            keys = keys[block.first : block.last, block.left : block.right]
            lanes = slice(lane * heads, (lane + 1) * heads)
            _product(part[lanes], keys, out[lanes], stack.numbers)
        return out


class Pieces:
    """Those of a block, as often as they are asked for: computed each time, but where there is only one."""

    def __init__(self, stack: Stack, block: Block) -> None:
        self._stack = stack
        self._block = block
        self._only: Piece | None = None

    def __iter__(self) -> Iterator[Piece]:
        block = self._block
        if block.right - block.left <= block.width:
            self._only = Piece(self._stack, block) if self._only is None else self._only
            yield self._only
            return
        for left in range(block.left, block.right, block.width):
            yield Piece(self._stack, block._replace(left=left, right=min(left + block.width, block.right)))


def _product(rows: Tensor, keys: Tensor, out: Tensor, most: int) -> None:
    """⟨row, key⟩ of rows [h, r, D] and keys [h, K, D]; at most so many at a time are made as wide as the rows."""
    if keys.dtype == rows.dtype:
        torch.bmm(rows, keys.mT, out=out)
        return
    piece = max(1, most // (keys.shape[0] * keys.shape[2]))
    for at in range(0, keys.shape[1], piece):
        out[..., at : at + piece] = torch.bmm(rows, keys[:, at : at + piece].to(rows.dtype).mT)


def _seen(stack: Stack, block: Block) -> Seen:
    """What the rows of a block may see: the same in all layers, in forward and backward, and so remembered."""
    rows = slice(block.top, block.bottom)
    small = (block.bottom - block.top) * (block.right - block.left) <= MEMORABLE
    if not (stack.alike and small and stack.start.device.type == "cpu") or is_watched():
        return _look_up(stack, block)
    lists = (tuple(bound[0, rows].tolist()) for bound in (stack.start, stack.stop))
    key = *lists, block.left, block.right, stack.dtype
    if key not in _memory:
        _memory[key] = _look_up(stack, block)
        if len(_memory) > REMEMBERED:
            _memory.popitem(last=False)
    return _memory[key]


def _look_up(stack: Stack, block: Block) -> Seen:
    context, sequence = stack.like.context, block.sequences.start % stack.batch

    def of_sequence(x: Tensor) -> Tensor:
        return x[sequence if x.shape[0] > 1 else 0]

    # Half the memory of int64, which counts where a row has many slots.
    slots = torch.arange(block.left, block.right, dtype=torch.int32, device=stack.start.device)
    start, stop = (
        of_sequence(bound)[block.top : block.bottom, None].to(torch.int32) for bound in (stack.start, stack.stop)
    )
    inside = (slots >= start).logical_and_(slots < stop)[None, None]
    if context.padding is not None:
        inside = inside & ~of_sequence(context.padding)[block.left : block.right]
    if context.mask is not None:
        inside = inside & shown(mask_of(context.mask, block.tile(stack.batch), stack.group))
    visible = inside.to(stack.dtype)
    return Seen(visible, (visible - 1).mul_(-HIDDEN), visible.sum(-1))


_memory: OrderedDict[Hashable, Seen] = OrderedDict()
