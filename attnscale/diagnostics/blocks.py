"""Raw scores of a few rows at a time: whole rows, in blocks so small that memory does not grow with their number."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.backends.call import AttentionCall
from attnscale.backends.tiles import HIDDEN, Tile, keys_of, mask_of, rows_of
from attnscale.context import shown
from attnscale.scratch import is_watched, room

# Scores of a block: few enough that they and what is made of them stay in a cache. A single row may have more.
NUMBERS = 2**18
# Rows of a block: sampled rows end far apart, and a block is as wide as its widest row.
ROWS = 64
# Slots times rows of a block up to which it is remembered what may be seen.
MEMORABLE = 2**17


class Seen(NamedTuple):
    """Which slots rows may see, as numbers that broadcast to [h, g, r, K]."""

    visible: Tensor  # 1 and 0
    hidden: Tensor  # 0 and HIDDEN
    number: Tensor  # how many, [..., r]


class Block(NamedTuple):
    """Some rows of some heads, and what they may see."""

    tile: Tile
    seen: Seen


def blocks(call: AttentionCall) -> Iterator[Block]:
    """The rows of a call, block by block; slots that no row of a block may see are not in it."""
    (batch, _, queries, _), (_, heads, keys, _) = call.query.shape, call.key.shape
    rows = max(1, min(queries, ROWS, NUMBERS // max(1, keys * call.group)))
    together = max(1, min(heads, NUMBERS // max(1, keys * call.group * rows)))
    mask, dtype = call.context.mask, torch.promote_types(call.query.dtype, torch.float32)
    bounds = call.context.bounds()
    for top in range(0, queries, rows):
        start, stop = (bound[:, top : top + rows, None] for bound in bounds)
        left, right = _span(start, stop, keys)
        inside = _inside(start, stop, left, right, call.context.padding) if mask is not None else None
        seen = [] if mask is not None else _remembered(start, stop, left, right, call.context.padding, dtype)
        for b in range(batch if right > left else 0):
            for first in range(0, heads, together):
                last, bottom = min(first + together, heads), min(top + rows, queries)
                tile = Tile(b, first, last, top, bottom, left, right, left, left, None, right - left)
                if mask is None or inside is None:
                    yield Block(tile, seen[b % len(seen)])
                else:
                    within = inside[b % inside.shape[0]] & shown(mask_of(mask, tile, call.group))
                    yield Block(tile, _as_numbers(within, dtype))


def raw_scores(call: AttentionCall, block: Block, out: Tensor) -> tuple[Tensor, Tensor]:
    """The raw scores of a block, [h, g·r, K], 0 where hidden, and the sum of each row.

    They are written to a buffer that holds at least as many.
    """
    tile = block.tile
    scores = products(rows_of(call.query, tile, call.group), keys_of(call.key, tile), out, call.scale)
    if call.softcap is not None:
        scores.div_(call.softcap).tanh_().mul_(call.softcap)
    by_row = scores.view(scores.shape[0], call.group, -1, scores.shape[-1])
    if call.bias is not None:
        by_row.add_(mask_of(call.bias, tile, call.group).to(by_row.dtype).clamp(min=HIDDEN))
    return scores, hide(by_row, block).flatten(1)


def hide(by_row: Tensor, block: Block) -> Tensor:
    """Set what may not be seen of [h, g, r, K] to 0, in place, and give the sum of each row."""
    sums = by_row.mul_(block.seen.visible).sum(-1)
    # 0·NaN is NaN. Filling by a mask is several times slower than the product, so on the CPU only where there is one;
    # elsewhere it would have to wait for the answer.
    if by_row.device.type != "cpu" or not math.isfinite(float(sums.sum())):
        sums = by_row.masked_fill_(block.seen.visible == 0, 0.0).sum(-1)
    return sums


def products(rows: Tensor, keys: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
    """scale·⟨row, key⟩ of rows [h, r, D] and keys [h, K, D], in the dtype of the buffer they are written to."""
    rows = rows.to(out.dtype) * scale
    shape = *rows.shape[:2], keys.shape[1]
    found = out[: shape[0] * shape[1] * shape[2]].view(shape)
    if keys.dtype == out.dtype:
        return torch.bmm(rows, keys.mT, out=found)
    piece = max(1, NUMBERS // (keys.shape[0] * keys.shape[2]))  # widened keys take memory too
    for at in range(0, shape[2], piece):
        found[..., at : at + piece] = torch.bmm(rows, keys[:, at : at + piece].to(out.dtype).mT)
    return found


def buffers(call: AttentionCall, number: int) -> list[Tensor]:
    """Memory for so many tensors of a block's size, kept from call to call."""
    like = torch.empty(0, dtype=torch.promote_types(call.query.dtype, torch.float32), device=call.query.device)
    numbers = max(NUMBERS, call.group * call.key.shape[2])
    return [room(f"block {index}", (numbers,), like) for index in range(number)]


def _span(start: Tensor, stop: Tensor, keys: int) -> tuple[int, int]:
    """The slots that some row may see; all of them where finding out would mean waiting for a device."""
    if start.device.type != "cpu" or not start.numel():
        return 0, keys
    return min(int(start.min()), keys), int(stop.max())


def _inside(start: Tensor, stop: Tensor, left: int, right: int, padding: Tensor | None) -> Tensor:
    """Which of the slots lie within each row's bounds and are no padding, [B|1, r, K]."""
    # Half the memory of int64, which counts where a row has a million slots.
    slots = torch.arange(left, right, dtype=torch.int32, device=start.device)
    inside = (slots >= start.to(torch.int32)).logical_and_(slots < stop.to(torch.int32))
    return inside if padding is None else inside & ~padding[:, None, left:right]  # which may be of more sequences


def _as_numbers(inside: Tensor, dtype: torch.dtype) -> Seen:
    visible = inside.to(dtype)
    return Seen(visible, (visible - 1).mul_(-HIDDEN), visible.sum(-1))


def _remembered(
    start: Tensor, stop: Tensor, left: int, right: int, padding: Tensor | None, dtype: torch.dtype
) -> list[Seen]:
    """What the rows of each sequence may see: the same in all layers, in forward and backward, and so remembered."""
    small = start.shape[0] == 1 and start.shape[1] * (right - left) <= MEMORABLE
    if not small or padding is not None or start.device.type != "cpu" or is_watched():
        inside = _inside(start, stop, left, right, padding)
        return [_as_numbers(of_one, dtype) for of_one in inside[:, None, None]]
    key = (tuple(start.flatten().tolist()), tuple(stop.flatten().tolist()), dtype, torch.is_inference_mode_enabled())
    if key not in _memory:
        inside = _inside(start, stop, left, right, None)
        _memory[key] = [_as_numbers(inside[:, None], dtype)]
        if len(_memory) > 2:
            _memory.popitem(last=False)
    return _memory[key]


_memory: OrderedDict[Hashable, list[Seen]] = OrderedDict()
