"""Tiles of attention: a few query rows against the keys they may see, so that nothing of size Tq × Tk ever exists."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale._util.scratch import room
from attnscale.statistics.gaps import HIDDEN as HIDDEN

# Rows of a tile, counted over the heads it covers: enough for a matrix product to be fast, few enough for a cache.
ROWS = 1024
ROWS_PER_HEAD = 128
# Longer rows are taken in pieces, of this many keys if there are as many rows: the scores of larger ones do not stay in
# a cache. Where rows must be whole, fewer of them are taken at a time.
KEYS = 2048
WHOLE = 2**22
LOG2E = 1 / math.log(2)


class Scores(NamedTuple):
    """All that logits ℓ = β·(softcap(scale·q·k) + bias) depend on; `start`, `stop` bound the slots a row may see."""

    query: Tensor  # [B, H, Tq, D]
    key: Tensor  # [B, Hkv, Tk, D]
    beta: Tensor | None  # [B, H, Tq]; None: raw scores
    start: Tensor  # [B|1, Tq]
    stop: Tensor  # [B|1, Tq]
    padding: Tensor | None  # [B|1, Tk], True: hidden
    mask: Tensor | None  # [B|1, H|1, Tq, Tk], bool or additive
    scale: float
    softcap: float | None
    broken: Tensor | None = None  # [B, Hkv, Tk], True: the key or its value is not finite

    @property
    def group(self) -> int:
        """Query heads per key head; 1 where there are none."""
        return self.query.shape[1] // self.key.shape[1] if self.key.shape[1] else 1

    def wide(self) -> Scores:
        """Scores with query, key and β in the dtype that tiles are computed in: fp32, or fp64 where given."""
        dtype = torch.promote_types(self.query.dtype, torch.float32)
        beta = None if self.beta is None else self.beta.to(dtype)
        return self._replace(query=self.query.to(dtype), key=self.key.to(dtype), beta=beta)

    def folded(self, unit: float) -> Scores:
        """Scores with β, scale and unit multiplied into the query once, where logits are linear in it.

        Elsewhere unchanged: `logit_tile` multiplies tile by tile.
        """
        if not self.linear:
            return self
        factor = self.scale * unit if self.beta is None else (self.beta * (self.scale * unit))[..., None]
        query = torch.mul(self.query, factor, out=room("folded", self.query.shape, self.query))
        return self._replace(query=query, beta=None, scale=1.0)

    @property
    def linear(self) -> bool:
        """Whether logits are linear in the query, so that β may be folded into it: r·D products instead of r·K."""
        return self.softcap is None and (self.mask is None or self.mask.dtype == torch.bool)

    def without_broken(self, value: Tensor, *, keys: bool = True) -> tuple[Scores, Tensor]:
        """Scores and values with 0 for keys and values that are not finite, marked in `broken`: 0·NaN is NaN.

        A forward may leave the keys: a hidden score is overwritten, and a visible NaN affects its own row only.
        """
        if not keys and not value.shape[-1]:
            return self, value
        total = value.sum() + self.key.sum() if keys else value.sum()
        if bool(torch.isfinite(total)):
            return self, value  # the usual case, at the price of a sum or two
        broken = ~(torch.isfinite(self.key).all(-1) & torch.isfinite(value).all(-1))
        key, value = (x.masked_fill(broken[..., None], 0.0) for x in (self.key, value))
        return self._replace(key=key, broken=broken), value

    def without_unseeing(self, lse: Tensor, sinks: Tensor | None) -> Scores:
        """Scores with a query and β of 0 in rows that see no key, if any is not finite: 0·NaN would reach every key.

        Such a row has the lse of its sink alone, or −∞, and takes no part in any gradient.
        """
        total = self.query.sum() if self.beta is None else self.query.sum() + self.beta.sum()
        if bool(torch.isfinite(total)):
            return self
        alone = lse == (-math.inf if sinks is None else sinks.to(lse.dtype)[:, None])
        beta = None if self.beta is None else self.beta.masked_fill(alone, 0.0)
        return self._replace(query=self.query.masked_fill(alone[..., None], 0.0), beta=beta)


class Tile(NamedTuple):
    """Rows [top, bottom) of one sequence's heads [first, last) of k against the slots [left, right) they may see.

    Slots in [clear_left, clear_right) are inside the bounds of every row.
    """

    batch: int
    first: int
    last: int
    top: int
    bottom: int
    left: int
    right: int
    clear_left: int
    clear_right: int
    width: int  # of a piece

    def pieces(self) -> Iterator[Tile]:
        """The same rows against some of the slots at a time."""
        for left in range(self.left, self.right, self.width):
            right = min(left + self.width, self.right)
            yield self._replace(
                left=left,
                right=right,
                clear_left=min(max(self.clear_left, left), right),
                clear_right=min(max(self.clear_right, left), right),
            )


def cut(scores: Scores, *, whole_rows: bool = False) -> Iterator[Tile]:
    """The tiles of a call, each with all that its rows may see; what none of them can see is outside of it.

    They are taken whole, or in `pieces`.
    """
    batch, _, queries, _ = scores.query.shape
    if queries == 0:
        return
    kv_heads, keys, group = scores.key.shape[1], scores.key.shape[2], scores.group
    starts, stops = scores.start.tolist(), scores.stop.tolist()
    together, rows = _extent(scores, stops[0], whole_rows)
    width = ROWS * KEYS // min(ROWS, together * group * rows)
    for b in range(batch):
        start, stop = (bound[b if len(bound) > 1 else 0] for bound in (starts, stops))
        for first in range(0, kv_heads, together):
            for top in range(0, queries, rows):
                low, high = start[top : top + rows], stop[top : top + rows]
                left, right = min(*low, keys), max(*high, *low)
                if left < right:
                    yield Tile(
                        b,
                        first,
                        min(first + together, kv_heads),
                        top,
                        top + len(high),
                        left,
                        right,
                        min(max(low), right),
                        max(left, min(*high, right)),
                        width,
                    )


def _extent(scores: Scores, stop: list[int], whole_rows: bool) -> tuple[int, int]:
    """How many heads of k a tile has, and how many rows of each head of q.

    Fewer rows where neighbours end far apart, as sampled ones do: a tile is as wide as its widest row.
    """
    most = max(1, min(ROWS, WHOLE // max(1, scores.key.shape[2]))) if whole_rows else ROWS
    apart = abs(stop[-1] - stop[0]) / len(stop)
    per_head = ROWS_PER_HEAD if apart < 8 else max(64, int(4 * ROWS_PER_HEAD / apart))
    rows = max(1, min(len(stop), min(most, per_head) // scores.group))
    return max(1, min(scores.key.shape[1], most // (scores.group * rows))), rows


def rows_of(x: Tensor, tile: Tile, group: int) -> Tensor:
    """The rows of a per-query tensor [B, H, Tq, ...] that belong to a tile, as [h, g·r, ...]."""
    part = _window(x, tile.batch, tile.first * group, tile.last * group, tile.top, tile.bottom)
    return part if group == 1 else part.reshape(tile.last - tile.first, -1, *part.shape[2:])


def store(target: Tensor, tile: Tile, rows: Tensor) -> None:
    """Write the rows [h, g·r, ...] of a tile into a per-query tensor [B, H, Tq, ...]; inverse of `rows_of`."""
    part = place(target, tile, rows)
    part.copy_(rows.view(part.shape))


def add(target: Tensor, tile: Tile, rows: Tensor) -> None:
    """Add the rows [h, g·r, ...] of a tile to a per-query tensor [B, H, Tq, ...]."""
    part = place(target, tile, rows)
    part.add_(rows.view(part.shape))


def place(target: Tensor, tile: Tile, rows: Tensor) -> Tensor:
    """Where the rows [h, g·r, ...] of a tile belong in a per-query tensor [B, H, Tq, ...], as [h·g, r, ...]."""
    group = rows.shape[1] // (tile.bottom - tile.top)
    return _window(target, tile.batch, tile.first * group, tile.last * group, tile.top, tile.bottom)


def keys_of(x: Tensor, tile: Tile) -> Tensor:
    """The keys or values [B, Hkv, Tk, D] of a tile, as [h, K, D]."""
    return _window(x, tile.batch, tile.first, tile.last, tile.left, tile.right)


def _window(x: Tensor, batch: int, first: int, last: int, top: int, bottom: int) -> Tensor:
    """x[batch, first:last, top:bottom] as one operator: three would cost several microseconds each on cold caches."""
    (a, b, *others), c = x.stride(), x.storage_offset()
    at = c + batch * a + first * b + top * others[0]
    return x.as_strided((last - first, bottom - top, *x.shape[3:]), (b, *others), at)


def mask_of(mask: Tensor, tile: Tile, group: int) -> Tensor:
    """The part of a mask [B|1, H|1, Tq, Tk] for a tile, broadcasting to [h, g, r, K]."""
    part = mask[tile.batch if mask.shape[0] > 1 else 0, :, tile.top : tile.bottom, tile.left : tile.right]
    if mask.shape[1] == 1:
        return part[None]
    part = part[tile.first * group : tile.last * group]
    return part.reshape(-1, group, *part.shape[1:])


class Workspace(dict[str, Tensor]):
    """Buffers that the tiles of a call share, by purpose: allocating for each would cost more than the tile."""

    def of(self, purpose: str, shape: tuple[int, ...]) -> Tensor:
        """An uninitialised tensor of that shape."""
        _, b, c = shape
        return self[purpose].as_strided(shape, (b * c, c, 1))


def workspace_for(scores: Scores, *, whole_rows: bool = False) -> Workspace:
    """Buffers large enough for every tile of a call; for powers only where tiles are taken in pieces."""
    (_, heads, queries, _), keys = scores.query.shape, scores.key.shape[2]
    most = max(scores.group, ROWS) * KEYS
    if whole_rows:
        most = max(scores.group * keys, min(WHOLE, ROWS * keys))
    numel = min(most, heads * queries * keys)
    purposes = ["logits"] if whole_rows else ["logits", "powers"]
    return Workspace({purpose: room(purpose, (numel,), scores.query) for purpose in purposes})
