"""Tiling: scores of some rows of a call against their visible keys. The full Tq × Tk matrix is never materialised.

All users share this tiling: forward and backward pass of the blockwise backend, sampled rows, the monitor, the ring and
the lab.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale._util import state
from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import shown
from attnscale.statistics.gaps import HIDDEN

# Rows of a block over all its heads, and per head: enough for a fast matrix product, few enough for the cache.
ROWS = 1024
ROWS_PER_HEAD = 128
LEAST_ROWS = 16  # per head, in a block with several heads
# Scores per tile, and per tile of a call with few rows. Sampled rows have very different lengths, and a block is as
# wide as its widest row.
SCORES = 2**21
SAMPLED_SCORES = 2**18
LOG2E = 1 / math.log(2)


class Block(NamedTuple):
    """Rows [top, bottom) of key heads [first, last) of sequences [begin, end), against slots [left, right).

    Slots in [clear_left, clear_right) are within the bounds of every row.
    """

    begin: int
    end: int
    first: int
    last: int
    top: int
    bottom: int
    left: int
    right: int
    clear_left: int
    clear_right: int
    width: int  # of a piece

    def pieces(self) -> Iterator[Block]:
        """The block split into tiles of `width` slots."""
        for left in range(self.left, self.right, self.width):
            right = min(left + self.width, self.right)
            yield self._replace(
                left=left,
                right=right,
                clear_left=min(max(self.clear_left, left), right),
                clear_right=min(max(self.clear_right, left), right),
            )

    def of_sequences(self, x: Tensor) -> Tensor:
        """The slice of a tensor [B|1, ...] for the sequences of the block."""
        return x if x.shape[0] == 1 else x[self.begin : self.end]


class CallRows:
    """The rows of a call in the dtype of the scores: fp32, or fp64 for fp64 inputs.

    Tiles are [n, g·r, K]: n key heads over all sequences of a block, g query heads per key head, r rows, K slots. Tiles
    live in per-thread buffers and are valid until the next tile with the same purpose. `small` tiles take less memory.
    """

    def __init__(self, call: AttentionCall, *, small: bool = False) -> None:
        self.call, self.group = call, call.group
        # Maximum number of scores in a tile; exceeded only if a single row is longer.
        self._scores = SAMPLED_SCORES if small or call.query.shape[2] < ROWS_PER_HEAD else SCORES
        self.dtype = torch.promote_types(call.query.dtype, torch.float32)
        self.query, self.beta = call.query.to(self.dtype), call.row_beta().to(self.dtype)
        self.key, self.value = call.key, call.value
        self.broken: Tensor | None = None  # [B, Hkv, Tk], True for a non-finite key or value
        self._start, self._stop = (bound.to(torch.int32) for bound in call.context.bounds())
        self._folded: Tensor | None = None
        self._scaled: Tensor | None = None
        self._buffers: dict[str, Tensor] = {}

    @property
    def linear(self) -> bool:
        """Whether logits are linear in the query. β can then be folded into q: r·D products instead of r·K."""
        return self.call.softcap is None and self.call.bias is None

    def drop_broken(self, *, keys: bool) -> None:
        """Replace non-finite values (with `keys`, also keys) by 0 and mark them as `broken`, because 0·NaN is NaN.

        The forward pass can keep the keys: hidden scores are overwritten, and a visible NaN affects only its row.
        """
        if not keys and not self.value.shape[-1]:
            return
        total = self.value.sum(dtype=self.dtype)
        total = total + self.key.sum(dtype=self.dtype) if keys else total
        if bool(torch.isfinite(total)):
            return  # the usual case, for the cost of one or two sums
        self.broken = ~(torch.isfinite(self.key).all(-1) & torch.isfinite(self.value).all(-1))
        self.key, self.value = (x.masked_fill(self.broken[..., None], 0.0) for x in (self.key, self.value))

    def drop_unseeing(self, lse: Tensor) -> None:
        """Replace non-finite query and β of rows without visible keys by 0: 0·NaN would reach every key's gradient.

        The lse of these rows is that of the sink, or −∞. They do not contribute to gradients.
        """
        if bool(torch.isfinite(self.query.sum() + self.beta.sum())):
            return
        sinks = self.call.sinks
        alone = lse == (-math.inf if sinks is None else sinks.to(lse.dtype)[:, None])
        self.query, self.beta = self.query.masked_fill(alone[..., None], 0.0), self.beta.masked_fill(alone, 0.0)

    def blocks(self, *, whole: bool, by_sequence: bool = False) -> Iterator[Block]:
        """Blocks that cover all rows, excluding slots that are hidden from the whole block.

        A `whole` block is a single tile, unless one row exceeds the tile size. The tiling of a sequence depends on its
        bounds and on shapes, not on other sequences, so the order of sums is independent of the batch. With
        `by_sequence`, a block has one sequence only.
        """
        batch, queries, kv_heads, keys = self.query.shape[0], self.query.shape[2], *self.key.shape[1:3]
        if not self.beta.numel() or not keys:
            return
        on_host = self._start.device.type == "cpu"  # on other devices, reading bounds would synchronise
        if on_host:
            starts, stops = self._start.tolist(), self._stop.tolist()
        else:
            starts, stops = ([[end] * queries] for end in self.call.context.key_range())
        heads, rows = self._extent(whole)
        width = max(1, self._scores // (heads * self.group * rows))
        sequences = 1
        if not by_sequence and heads == kv_heads and len(starts) == len(stops) == 1:
            sequences = max(1, self._scores // (heads * self.group * rows * min(width, keys)))
        for begin in range(0, batch, sequences):
            end = min(begin + sequences, batch)
            start, stop = (bounds[begin if len(bounds) > 1 else 0] for bounds in (starts, stops))
            for top in range(0, queries, rows):
                low, high = start[top : top + rows], stop[top : top + rows]
                left, right = min(low), max(high)
                if left >= right:
                    continue
                clear = (min(max(low), right), max(left, min(*high, right))) if on_host else (right, right)
                for first in range(0, kv_heads, heads):
                    last = min(first + heads, kv_heads)
                    yield Block(begin, end, first, last, top, min(top + rows, queries), left, right, *clear, width)

    def _extent(self, whole: bool) -> tuple[int, int]:
        """Key heads of a block, and rows per query head."""
        queries, kv_heads, keys = self.query.shape[2], *self.key.shape[1:3]
        if whole:
            room = max(1, self._scores // (keys * self.group))  # rows × key heads that fit
            most = max(room // kv_heads, min(LEAST_ROWS, room))
            most = max(1, min(queries, ROWS_PER_HEAD // self.group or 1, most))
            rows = -(-queries // -(-queries // most))  # of even size
            return max(1, min(kv_heads, room // rows)), rows
        # Fewer rows if the lengths of neighbouring rows may differ widely.
        apart = keys / queries
        per_head = ROWS_PER_HEAD if apart < 8 else max(64, int(4 * ROWS_PER_HEAD / apart))
        rows = max(1, min(queries, per_head // self.group))
        return max(1, min(kv_heads, ROWS // (self.group * rows))), rows

    def scores(self, block: Block) -> Tensor:
        """Raw scores softcap(scale·q·k) + bias of a tile; hidden entries are `HIDDEN`."""
        if self._scaled is None:
            self._scaled = torch.mul(self.query, self.call.scale, out=self._whole("scaled"))
        scores = self._capped(self.products(self._scaled, self.key, block, "scores"))
        if self.call.bias is not None:
            bias = self.mask_place(self.call.bias, block)
            self._by_row(scores, block).add_(bias.to(self.dtype).clamp(min=HIDDEN))
        self._hide(scores, block)
        return scores

    def logits(self, block: Block) -> Tensor:
        """Logits β·s of a tile in units of ln 2; hidden entries are `HIDDEN`."""
        if not self.linear:
            return self.logits_of(self.scores(block), block)
        if self._folded is None:
            factor = (self.beta * (self.call.scale * LOG2E))[..., None]
            self._folded = torch.mul(self.query, factor, out=self._whole("folded"))
        logits = self.products(self._folded, self.key, block, "logits")
        self._hide(logits, block)
        return logits

    def logits_of(self, scores: Tensor, block: Block) -> Tensor:
        """Logits from the scores of a tile. The scores are not modified."""
        factor = (self.rows_of(self.beta, block) * LOG2E)[..., None]
        logits = torch.mul(scores, factor, out=self.room("logits", scores.shape))
        self._hide(logits, block)  # β may be 0 or negative
        return logits

    def score_gradient(self, block: Block, dlogits: Tensor) -> ScoreGradient:
        """Gradient contributions of a tile, from the gradient of its logits in nats (0 for hidden keys).

        ℓ = β·y, y = c·tanh(x/c) + bias, x = scale·q·k: so dβ = Σ dℓ·y, dbias = β·dℓ, dx = β·dℓ·(1 − tanh²). If ℓ is
        linear, Σ dℓ·y = scale·⟨q, dℓ·K⟩, and y is not needed.
        """
        call, query, beta = self.call, self.rows_of(self.query, block), self.rows_of(self.beta, block)
        dbeta = dbias = None
        if not self.linear:
            capped = torch.bmm(query * call.scale, self.keys_of(self.key, block).mT)
            slope = None
            if call.softcap is not None:
                tanh = torch.tanh(capped / call.softcap)
                capped, slope = call.softcap * tanh, 1 - tanh.square()
            if call.bias is not None:
                # A non-finite bias is replaced by 0, because 0·∞ and 0·NaN are NaN. The gradient of a hidden key is 0
                # anyway, and a row with a visible NaN or +∞ has NaN gradients anyway.
                bias = self.mask_place(call.bias, block).to(self.dtype).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
                self._by_row(capped, block).add_(bias)
            dbeta = (dlogits * capped).sum(-1)
            dlogits = dlogits * beta[..., None]
            if call.bias is not None:
                dbias = self._by_row(dlogits, block)
            if slope is not None:
                dlogits = dlogits * slope
        factor = call.scale if not self.linear else (beta * call.scale)[..., None]
        mixed = torch.bmm(dlogits, self.keys_of(self.key, block))
        if dbeta is None:
            dbeta = (mixed * query).sum(-1) * call.scale
        return ScoreGradient(mixed * factor, torch.bmm(dlogits.mT, query * factor), dbeta, dbias)

    def products(self, rows: Tensor, keys: Tensor, block: Block, purpose: str) -> Tensor:
        """⟨row, key⟩ of rows [B, H, Tq, D] and keys (or values) [B, Hkv, Tk, D] of a block."""
        part, of_keys = self.rows_of(rows, block), self.key_place(keys, block)
        out = self.room(purpose, (*part.shape[:2], of_keys.shape[2]))
        if of_keys.shape[0] == 1:
            _multiply(part, of_keys[0], out)
            return out
        # One sequence at a time: the heads of several sequences may not be evenly strided.
        for of_rows, its_keys, of_out in zip(*(x.chunk(of_keys.shape[0]) for x in (part, of_keys, out)), strict=True):
            _multiply(of_rows, its_keys[0], of_out)
        return out

    def room(self, purpose: str, shape: tuple[int, ...]) -> Tensor:
        """Scratch memory for a tile [n, g·r, K], valid until the next request with the same purpose."""
        heads, rows, keys = shape
        numel = heads * rows * keys
        buffer = self._buffers.get(purpose)
        if buffer is None or buffer.numel() < numel:
            most = max(self._scores, numel)
            buffer = self._buffers[purpose] = state.SCRATCH.room(f"tile {purpose} {most}", (most,), self.query)
        return buffer.as_strided(shape, (rows * keys, keys, 1))

    def _whole(self, purpose: str) -> Tensor:
        """Scratch memory in the shape of the query."""
        return state.SCRATCH.room(purpose, self.query.shape, self.query)

    def rows_of(self, x: Tensor, block: Block) -> Tensor:
        """The rows of a block in a tensor [B, H, Tq, ...], as [n, g·r, ...]."""
        part = self.place(x, block)
        heads, rows = (block.end - block.begin) * (block.last - block.first), self.group * part.shape[2]
        return part.reshape(heads, rows, *part.shape[3:])

    def keys_of(self, x: Tensor, block: Block) -> Tensor:
        """The keys or values of a block in a tensor [B, Hkv, Tk, D], as [n, K, D]."""
        return self.key_place(x, block).flatten(0, 1).to(self.dtype)

    def place(self, x: Tensor, block: Block) -> Tensor:
        """View of the rows of a block in a tensor [B, H, Tq, ...], as [b, h·g, r, ...]."""
        heads = block.first * self.group, block.last * self.group
        return _window(x, block.begin, block.end, *heads, block.top, block.bottom)

    def key_place(self, x: Tensor, block: Block) -> Tensor:
        """View of the keys of a block in a tensor [B, Hkv, Tk, ...], as [b, h, K, ...]."""
        return _window(x, block.begin, block.end, block.first, block.last, block.left, block.right)

    def store(self, target: Tensor, block: Block, rows: Tensor) -> None:
        """Write the rows [n, g·r, ...] of a block into a tensor [B, H, Tq, ...]."""
        part = self.place(target, block)
        part.copy_(rows.reshape(part.shape))

    def add(self, target: Tensor, block: Block, rows: Tensor) -> None:
        """Add the rows [n, g·r, ...] of a block to a tensor [B, H, Tq, ...]."""
        part = self.place(target, block)
        part.add_(rows.reshape(part.shape))

    def _capped(self, x: Tensor) -> Tensor:
        cap = self.call.softcap
        return x if cap is None else x.div_(cap).tanh_().mul_(cap)

    def _by_row(self, x: Tensor, block: Block) -> Tensor:
        """[n, g·r, K] as [b, h, g, r, K]."""
        rows = block.bottom - block.top
        return x.view(block.end - block.begin, block.last - block.first, self.group, rows, x.shape[-1])

    def mask_place(self, mask: Tensor, block: Block) -> Tensor:
        """View of the entries of a block in a mask [B|1, H|1, Tq, Tk], broadcastable to [b, h, g, r, K]."""
        part = block.of_sequences(mask)[:, :, block.top : block.bottom, block.left : block.right]
        if mask.shape[1] == 1:
            return part[:, :, None]
        part = part[:, block.first * self.group : block.last * self.group]
        return part.unflatten(1, (-1, self.group))  # type: ignore[no-any-return, no-untyped-call]

    def _hide(self, x: Tensor, block: Block) -> None:
        """Overwrite the hidden entries of [n, g·r, K]."""
        by_row, context = self._by_row(x, block), self.call.context
        for left, right in ((block.left, block.clear_left), (max(block.clear_left, block.clear_right), block.right)):
            if left < right:
                slot = torch.arange(left, right, dtype=torch.int32, device=x.device)
                seen = slot < _of_rows(self._stop, block)
                if left < block.clear_left:  # else all rows have started
                    seen &= slot >= _of_rows(self._start, block)
                _keep(by_row[..., left - block.left : right - block.left], seen)
        if context.padding is not None:
            _keep(by_row, ~block.of_sequences(context.padding)[:, None, None, None, block.left : block.right])
        if context.mask is not None:
            _keep(by_row, shown(self.mask_place(context.mask, block)))
        if self.broken is not None:
            broken = self.key_place(self.broken, block)[:, :, None, None]
            by_row.masked_fill_(broken & (by_row > HIDDEN / 2), math.nan)


def whole_row_scores(call: AttentionCall) -> Iterator[tuple[CallRows, Block, Tensor]]:
    """Raw scores [n, g·r, K] of all rows, block by block. Hidden entries are `HIDDEN`. Callers may overwrite them."""
    rows = CallRows(call)
    for block in rows.blocks(whole=True):
        yield rows, block, rows.scores(block)


class ScoreGradient(NamedTuple):
    """Contributions of a tile to the gradients of a call."""

    query: Tensor  # [n, g·r, D]
    key: Tensor  # [n, K, D]
    beta: Tensor  # [n, g·r]
    bias: Tensor | None  # [b, h, g, r, K]


def _multiply(rows: Tensor, keys: Tensor, out: Tensor) -> None:
    """⟨row, key⟩ of rows [h, r, D] and keys [h, K, D]. Keys are converted to the rows' dtype in chunks."""
    if keys.dtype == rows.dtype:
        torch.bmm(rows, keys.mT, out=out)
        return
    step = max(1, SAMPLED_SCORES // max(1, keys.shape[0] * keys.shape[2]))
    for left in range(0, keys.shape[1], step):
        torch.bmm(rows, keys[:, left : left + step].to(rows.dtype).mT, out=out[..., left : left + step])


def _window(x: Tensor, begin: int, end: int, first: int, last: int, top: int, bottom: int) -> Tensor:
    """x[begin:end, first:last, top:bottom] as one operator; three would cost several microseconds on cold caches."""
    a, b, c, *others = x.stride()
    at = x.storage_offset() + begin * a + first * b + top * c
    return x.as_strided((end - begin, last - first, bottom - top, *x.shape[3:]), (a, b, c, *others), at)


def _of_rows(bound: Tensor, block: Block) -> Tensor:
    """The rows of a block in a bound [B|1, Tq], as [b, 1, 1, r, 1]; one operator, as in `_window`."""
    sequences, first = (1, 0) if bound.shape[0] == 1 else (block.end - block.begin, block.begin)
    of_sequence, of_row = bound.stride()
    at = bound.storage_offset() + first * of_sequence + block.top * of_row
    return bound.as_strided((sequences, 1, 1, block.bottom - block.top, 1), (of_sequence, 0, 0, of_row, 0), at)


# Bit pattern of `HIDDEN` in the dtypes of tiles.
_PATTERNS = {
    torch.float32: (torch.int32, *struct.unpack("=i", struct.pack("=f", HIDDEN))),
    torch.float64: (torch.int64, *struct.unpack("=q", struct.pack("=d", HIDDEN))),
}


def _keep(x: Tensor, seen: Tensor) -> None:
    """Write `HIDDEN` for hidden keys, also over NaN. On the CPU several times faster than masked_fill."""
    integer, pattern = _PATTERNS[x.dtype]
    kept = seen.to(integer).neg_()  # all bits set for a visible key, none for a hidden key
    x.view(integer).bitwise_and_(kept).bitwise_or_(kept.bitwise_not_().bitwise_and_(pattern))
