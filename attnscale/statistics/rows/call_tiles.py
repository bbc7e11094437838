"""The rows of a call, cut into blocks and these into tiles, so that memory does not grow with rows or keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import shown
from attnscale.statistics.gaps import HIDDEN
from attnscale.statistics.rows import score_tile
from attnscale.statistics.rows.score_tile import ScoreTile, tile_room

# Rows of a block: at most, since sampled rows end far apart and a block is as wide as its widest; and, where there are
# several heads, at least, so that products of matrices are fast.
MOST_ROWS = 64
LEAST_ROWS = 16
# Widths of products in steps that processors like, where there are as many slots.
STEP = 16

T = TypeVar("T")


class Block(NamedTuple):
    """Some rows of some sequences and heads of k, and the slots that one of them or another may see."""

    batch: slice
    heads: slice
    rows: slice
    slots: slice
    width: int  # of its tiles

    def of(self, x: Tensor) -> Tensor:
        """The part of a tensor over rows [B, Hkv, g, R, ...], as [b, h, g, r, ...]."""
        return x[self.batch, self.heads, :, self.rows]

    def of_sequences(self, x: Tensor) -> Tensor:
        """The part of a tensor [B|1, ...] for its sequences."""
        return x if x.shape[0] == 1 else x[self.batch]

    def passes(self, make: Callable[[Block], T]) -> Callable[[], Iterable[T]]:
        """What `make` makes of each tile, for several passes over all of them: once if there is only one tile."""
        left, right = self.slots.start, self.slots.stop
        if right - left <= self.width:
            only = [make(self)]
            return lambda: only
        starts = range(left, right, self.width)
        return lambda: (make(self._replace(slots=slice(at, min(at + self.width, right)))) for at in starts)


class CallRows:
    """All rows of a call; query and β as [B, Hkv, g, R, ...] in the dtype in which scores are computed."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        self.keys, self.group = call.key.shape[2], call.group
        self.dtype = torch.promote_types(call.query.dtype, torch.float32)
        self.query = self.by_key_head(call.query) * call.scale
        self.beta = self.by_key_head(call.row_beta())
        self.start, self.stop = call.context.bounds()

    def by_key_head(self, x: Tensor) -> Tensor:
        """[B, H, R, ...] as [B, Hkv, g, R, ...]."""
        return split_heads(x.to(self.dtype), self.group)

    def blocks(self) -> Iterator[Block]:
        """Blocks that hold all rows; slots that no row of a block may see are not in it."""
        batch, heads, _, rows = self.query.shape[:4]
        if not self.beta.numel():
            return
        room = score_tile.NUMBERS // max(1, self.keys * self.group)  # for rows of heads of k
        most = max(1, min(rows, MOST_ROWS, max(room // (batch * heads), min(LEAST_ROWS, room))))
        together = -(-rows // -(-rows // most))  # of even size
        lanes = max(1, room // together)
        for row_range in _ranges(rows, together):
            slots = self._slots(row_range)
            for sequences in _ranges(batch, max(1, lanes // heads)):
                for head_range in _ranges(heads, min(lanes, heads)):
                    yield Block(sequences, head_range, row_range, slots, max(1, score_tile.NUMBERS // self.group))

    def _slots(self, rows: slice) -> slice:
        """The slots that some of the rows may see; on other devices than the CPU reading them would synchronise."""
        if self.start.device.type != "cpu":
            return slice(0, self.keys)
        left = min(int(self.start[:, rows].min()), max(0, self.keys - 1))
        width = max(1, int(self.stop[:, rows].max()) - left)
        return slice(left, min(left - (-width // STEP) * STEP, self.keys))

    def tile(self, block: Block) -> ScoreTile:
        """The raw scores of a block that is narrow enough."""
        beta, call = block.of(self.beta), self.call
        if not self.keys:
            return ScoreTile.without_keys(beta)
        visible = self.visible(block)
        raw = self.products(self.query, call.key, block, "scores")
        if call.softcap is not None:
            raw.div_(call.softcap).tanh_().mul_(call.softcap)
        if call.bias is not None:
            raw.add_(self._mask(call.bias, block).to(self.dtype).clamp(min=HIDDEN))
        clear_broken(raw.mul_(visible), visible)
        return ScoreTile(raw, visible, beta)

    def visible(self, block: Block) -> Tensor:
        """1 and 0, broadcasting to [b, h, g, r, K]: which slots the rows may see."""
        # Half the memory of int64, which counts where a row has many slots.
        slots = torch.arange(block.slots.start, block.slots.stop, dtype=torch.int32, device=self.start.device)
        start, stop = (
            block.of_sequences(bound)[:, None, None, block.rows, None].to(torch.int32)
            for bound in (self.start, self.stop)
        )
        inside = (slots >= start).logical_and_(slots < stop)
        context = self.call.context
        if context.padding is not None:
            inside = inside & ~block.of_sequences(context.padding)[:, None, None, None, block.slots]
        if context.mask is not None:
            inside = inside & shown(self._mask(context.mask, block))
        return inside.to(self.dtype)

    def products(self, rows: Tensor, keys: Tensor, block: Block, purpose: str) -> Tensor:
        """⟨row, key⟩ [b, h, g, r, K] of rows [B, Hkv, g, R, D] and keys (or values) [B, Hkv, Tk, D] of a block."""
        part, keys = block.of(rows), keys[block.batch, block.heads, block.slots]
        shape = *part.shape[:4], keys.shape[2]
        out = tile_room(purpose, shape, part)
        for of_rows, of_keys, of_out in zip(part.flatten(2, 3), keys, out.flatten(2, 3), strict=True):
            _multiply(of_rows, of_keys, of_out)
        return out

    def _mask(self, mask: Tensor, block: Block) -> Tensor:
        """The part of a mask [B|1, H|1, R, Tk] for a block, broadcasting to [b, h, g, r, K]."""
        by_head = mask[:, :, None] if mask.shape[1] == 1 else split_heads(mask, self.group)[:, block.heads]
        return block.of_sequences(by_head)[..., block.rows, block.slots]


def split_heads(x: Tensor, group: int) -> Tensor:
    """[B, H, ...] as [B, Hkv, g, ...]."""
    parts: Tensor = x.unflatten(1, (x.shape[1] // group, group))  # type: ignore[no-untyped-call]
    return parts


def clear_broken(x: Tensor, visible: Tensor) -> None:
    """Put 0 over what is hidden, if some of x is not finite: 0·NaN would be NaN.

    Filling by a mask is several times slower than a product, so it is done on the CPU only where it has to be; on other
    devices reading the sum back would synchronise.
    """
    if x.device.type != "cpu" or not math.isfinite(float(x.sum())):
        x.masked_fill_(visible == 0, 0.0)


def _ranges(extent: int, step: int) -> Iterator[slice]:
    return (slice(at, min(at + step, extent)) for at in range(0, extent, step))


def _multiply(rows: Tensor, keys: Tensor, out: Tensor) -> None:
    """⟨row, key⟩ of rows [h, r, D] and keys [h, K, D]; keys are widened to the rows' dtype a tile's worth at a time."""
    if keys.dtype == rows.dtype:
        torch.bmm(rows, keys.mT, out=out)
        return
    step = max(1, score_tile.NUMBERS // (keys.shape[0] * keys.shape[2]))
    for part in _ranges(keys.shape[1], step):
        torch.bmm(rows, keys[:, part].to(rows.dtype).mT, out=out[..., part])
