"""Tiles of attention: a few query rows against the keys they may see, so that nothing of size Tq × Tk ever exists."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.backends.scratch import room
from attnscale.context import shown

# Rows of a tile, counted over the heads it covers: enough for a matrix product to be fast, few enough for a cache.
ROWS = 512
ROWS_PER_HEAD = 128
KEYS = 32768  # longer rows are taken in pieces, so that memory does not grow with them; shorter pieces are slower
LOG2E = 1 / math.log(2)
HIDDEN = -1e30  # finite, so that a weight of 0 times its logit is 0 and not NaN


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
        """Query heads per key head."""
        return self.query.shape[1] // self.key.shape[1]

    def wide(self) -> Scores:
        """The same with query and key in the dtype that tiles are computed in: fp32, or fp64 where given."""
        dtype = torch.promote_types(self.query.dtype, torch.float32)
        beta = None if self.beta is None else self.beta.to(dtype)
        return self._replace(query=self.query.to(dtype), key=self.key.to(dtype), beta=beta)

    def folded(self, unit: float) -> Scores:
        """The same in a unit of logits, with β and scale in the query at once instead of tile by tile, if they can be.

        They can where logits are linear in the query; elsewhere `unit` is left to `logit_tile`.
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
        """The same, and the values, with 0 for what is not finite and a note of where: 0·NaN would reach every row.

        A forward need not look at the keys: a hidden score is overwritten, and a visible one spoils its own row only.
        """
        total = value.sum() + self.key.sum() if keys else value.sum()
        if bool(torch.isfinite(total)):
            return self, value  # the usual case, at the price of a sum or two
        broken = ~(torch.isfinite(self.key).all(-1) & torch.isfinite(value).all(-1))
        key, value = (x.masked_fill(broken[..., None], 0.0) for x in (self.key, value))
        return self._replace(key=key, broken=broken), value


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
    continues: bool = False  # a tile of the same rows came before

    def split(self, keys: int) -> Iterator[Tile]:
        """The same rows against at most `keys` slots at a time."""
        for left in range(self.left, self.right, keys):
            right = min(left + keys, self.right)
            yield self._replace(
                left=left,
                right=right,
                clear_left=min(max(self.clear_left, left), right),
                clear_right=min(max(self.clear_right, left), right),
                continues=left > self.left,
            )


def cut(scores: Scores, *, whole_rows: bool = False) -> Iterator[Tile]:
    """The tiles of a call; what no row of a tile can see is outside of it."""
    for tile in _row_tiles(scores):
        if tile.left < tile.right:
            yield from [tile] if whole_rows else tile.split(KEYS)


def _row_tiles(scores: Scores) -> Iterator[Tile]:
    batch, _, queries, _ = scores.query.shape
    if queries == 0:
        return
    kv_heads, keys, group = scores.key.shape[1], scores.key.shape[2], scores.group
    rows = max(1, min(queries, min(ROWS, _rows_per_head(scores)) // group))
    together = max(1, min(kv_heads, ROWS // (group * rows)))
    edges = list(range(0, queries, rows))
    bounds = [[_extremes(bound[b], rows) for b in range(bound.shape[0])] for bound in (scores.start, scores.stop)]
    for b in range(batch):
        low, high = (bound[b if len(bound) > 1 else 0] for bound in bounds)
        for first in range(0, kv_heads, together):
            for top, (least, most), (fewest, furthest) in zip(edges, low, high, strict=True):
                left, right = min(least, keys), max(furthest, least)
                yield Tile(
                    b,
                    first,
                    min(first + together, kv_heads),
                    top,
                    min(top + rows, queries),
                    left,
                    right,
                    min(most, right),
                    max(left, min(fewest, right)),
                )


def _rows_per_head(scores: Scores) -> int:
    """Fewer rows to a tile where neighbours end far apart, as sampled ones do: a tile is as wide as its widest row."""
    ends = scores.stop[0, :: max(1, scores.stop.shape[1] - 1)].tolist()  # of the first and the last row
    apart = abs(ends[-1] - ends[0]) / scores.stop.shape[1]
    return ROWS_PER_HEAD if apart < 8 else max(16, int(4 * ROWS_PER_HEAD / apart))


def _extremes(bound: Tensor, rows: int) -> list[tuple[int, int]]:
    """Smallest and largest value of a bound [Tq] in each run of so many rows, on the host."""
    whole = bound.shape[0] // rows * rows
    runs = [torch.stack(torch.aminmax(bound[:whole].view(-1, rows), dim=-1), dim=-1)]
    if whole < bound.shape[0]:
        runs.append(torch.stack(torch.aminmax(bound[whole:]))[None])
    return [(low, high) for low, high in torch.cat(runs).tolist()]


class Leaves(NamedTuple):
    """The pieces of a tile that a gradient flows to."""

    query: Tensor  # [h, g·r, D]
    key: Tensor  # [h, K, D]
    beta: Tensor | None  # [h, g·r]
    bias: Tensor | None  # broadcasts to [h, g, r, K]


def rows_of(x: Tensor, tile: Tile, group: int) -> Tensor:
    """The rows of a per-query tensor [B, H, Tq, ...] that belong to a tile, as [h, g·r, ...]."""
    part = x[tile.batch, tile.first * group : tile.last * group, tile.top : tile.bottom]
    return part.reshape(tile.last - tile.first, group * (tile.bottom - tile.top), *part.shape[2:])


def store(target: Tensor, tile: Tile, rows: Tensor) -> None:
    """Write the rows [h, g·r, ...] of a tile into a per-query tensor [B, H, Tq, ...]: the way back from `rows_of`."""
    part = _place(target, tile, rows)
    part.copy_(rows.reshape(part.shape))


def add(target: Tensor, tile: Tile, rows: Tensor) -> None:
    """Add the rows [h, g·r, ...] of a tile to a per-query tensor [B, H, Tq, ...]."""
    part = _place(target, tile, rows)
    part.add_(rows.reshape(part.shape))


def _place(target: Tensor, tile: Tile, rows: Tensor) -> Tensor:
    group = rows.shape[1] // (tile.bottom - tile.top)
    return target[tile.batch, tile.first * group : tile.last * group, tile.top : tile.bottom]


def keys_of(x: Tensor, tile: Tile) -> Tensor:
    """The keys or values [B, Hkv, Tk, D] of a tile, as [h, K, D]."""
    return x[tile.batch, tile.first : tile.last, tile.left : tile.right]


def mask_of(mask: Tensor, tile: Tile, group: int) -> Tensor:
    """The part of a mask [B|1, H|1, Tq, Tk] for a tile, broadcasting to [h, g, r, K]."""
    part = mask[tile.batch if mask.shape[0] > 1 else 0, :, tile.top : tile.bottom, tile.left : tile.right]
    if mask.shape[1] == 1:
        return part[None]
    part = part[tile.first * group : tile.last * group]
    return part.reshape(-1, group, *part.shape[1:])


def leaves_of(scores: Scores, tile: Tile) -> Leaves:
    """Query, key, β and bias of a tile."""
    beta = None if scores.beta is None else rows_of(scores.beta, tile, scores.group)
    bias = None
    if scores.mask is not None and scores.mask.dtype != torch.bool:
        bias = mask_of(scores.mask, tile, scores.group)
    return Leaves(rows_of(scores.query, tile, scores.group), keys_of(scores.key, tile), beta, bias)


def logit_tile(
    scores: Scores, leaves: Leaves, tile: Tile, workspace: Tensor | None = None, unit: float = 1.0
) -> Tensor:
    """The logits of a tile, [h, g·r, K]; hidden ones are `HIDDEN`. Those that could not be folded come times `unit`.

    They may be written to a workspace: fresh memory for each tile would cost more than the tile.
    """
    query, key, beta, bias = leaves
    factor = _factor(scores, leaves)
    query = query if factor is None else query * factor
    logits = torch.bmm(query, key.transpose(-1, -2), out=_view(workspace, *query.shape[:2], key.shape[1]))
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    by_row = _by_row(logits, scores.group)
    if bias is not None:
        by_row = by_row + bias.to(by_row.dtype).clamp(min=HIDDEN)
    if not scores.linear and (beta is not None or unit != 1.0):
        by_row = by_row * (unit if beta is None else unit * beta.view(beta.shape[0], scores.group, -1)[..., None])
    _hide(by_row, scores, tile)
    return by_row.flatten(1, 2)


def logit_tile_backward(scores: Scores, leaves: Leaves, upstream: Tensor) -> Leaves:
    """The gradients of a tile's leaves for those of its logits [h, g·r, K], which are 0 where hidden.

    ℓ = β·y, y = c·tanh(x/c) + bias, x = scale·q·k: so dβ = Σ dℓ·y, dbias = β·dℓ, dx = β·dℓ·(1 − tanh²). Where ℓ is
    linear, Σ dℓ·y is scale·⟨q, dℓ·K⟩ and no y is needed.
    """
    query, key, beta, bias = leaves
    dbeta = dbias = None
    if not scores.linear:
        capped = torch.bmm(query * scores.scale, key.transpose(-1, -2))
        slope = None
        if scores.softcap is not None:
            tanh = torch.tanh(capped / scores.softcap)
            capped, slope = scores.softcap * tanh, 1 - tanh.square()
        if beta is not None:
            score = capped if bias is None else _add_bias(capped, bias, scores.group)
            dbeta = (upstream * score).sum(-1)
            upstream = upstream * beta[..., None]
        if bias is not None:
            dbias = _by_row(upstream, scores.group)
        if slope is not None:
            upstream = upstream * slope
    factor = _factor(scores, leaves)
    factor = 1.0 if factor is None else factor
    mixed = torch.bmm(upstream, key)
    if beta is not None and dbeta is None:
        dbeta = (mixed * query).sum(-1) * scores.scale
    return Leaves(mixed * factor, torch.bmm(upstream.transpose(-1, -2), query * factor), dbeta, dbias)


def _factor(scores: Scores, leaves: Leaves) -> Tensor | float | None:
    """What the query is still to be multiplied by."""
    if leaves.beta is not None and scores.linear:
        return (leaves.beta * scores.scale)[..., None]
    return None if scores.scale == 1.0 else scores.scale


def _add_bias(capped: Tensor, bias: Tensor, group: int) -> Tensor:
    return (_by_row(capped, group) + bias.to(capped.dtype).clamp(min=HIDDEN)).flatten(1, 2)


def _by_row(x: Tensor, group: int) -> Tensor:
    """[h, g·r, K] as [h, g, r, K]."""
    return x.view(x.shape[0], group, -1, x.shape[-1])


def _hide(by_row: Tensor, scores: Scores, tile: Tile) -> None:
    """Overwrite what a row of [h, g, r, K] may not see."""
    for left, right in ((tile.left, tile.clear_left), (max(tile.clear_left, tile.clear_right), tile.right)):
        if left < right:
            outside = _out_of_bounds(scores, tile, left, right)
            by_row[..., left - tile.left : right - tile.left].masked_fill_(outside, HIDDEN)
    if scores.padding is not None:
        padding = scores.padding[tile.batch if scores.padding.shape[0] > 1 else 0, tile.left : tile.right]
        by_row.masked_fill_(padding, HIDDEN)
    if scores.mask is not None:
        by_row.masked_fill_(~shown(mask_of(scores.mask, tile, scores.group)), HIDDEN)
    if scores.broken is not None:
        broken = scores.broken[tile.batch, tile.first : tile.last, tile.left : tile.right]
        by_row.masked_fill_(broken[:, None, None] & (by_row > HIDDEN / 2), math.nan)


def _out_of_bounds(scores: Scores, tile: Tile, left: int, right: int) -> Tensor:
    slot = torch.arange(left, right, device=scores.query.device)
    start, stop = (
        bound[tile.batch if bound.shape[0] > 1 else 0, tile.top : tile.bottom, None]
        for bound in (scores.start, scores.stop)
    )
    beyond = slot >= stop
    return beyond if left >= tile.clear_left else beyond | (slot < start)


def _view(workspace: Tensor | None, *shape: int) -> Tensor | None:
    return None if workspace is None else workspace[: math.prod(shape)].view(shape)


class Workspace(NamedTuple):
    """Room for the logits and the powers of one tile."""

    logits: Tensor
    powers: Tensor

    def view(self, shape: torch.Size) -> Tensor:
        """The second half, as a tensor of that shape."""
        return self.powers[: math.prod(shape)].view(shape)


def workspace_for(scores: Scores, *, whole_rows: bool = False) -> Workspace:
    """Room enough for every tile of a call."""
    group, queries, keys = scores.group, scores.query.shape[2], scores.key.shape[2]
    keys = keys if whole_rows else min(KEYS, keys)
    numel = max(group, min(ROWS, scores.query.shape[1] * queries)) * keys
    return Workspace(*(room(purpose, (numel,), scores.query) for purpose in ("logits", "powers")))
