"""The logits of a tile, with hidden ones overwritten, and their gradients."""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.backends.tiles import HIDDEN, Scores, Tile, Workspace, keys_of, mask_of, rows_of
from attnscale.call.context import shown


class Leaves(NamedTuple):
    """The pieces of a tile that a gradient flows to."""

    query: Tensor  # [h, g·r, D]
    key: Tensor  # [h, K, D]
    beta: Tensor | None  # [h, g·r]
    bias: Tensor | None  # broadcasts to [h, g, r, K]


def leaves_of(scores: Scores, tile: Tile) -> Leaves:
    """Query, key, β and bias of a tile."""
    beta = None if scores.beta is None else rows_of(scores.beta, tile, scores.group)
    bias = None
    if scores.mask is not None and scores.mask.dtype != torch.bool:
        bias = mask_of(scores.mask, tile, scores.group)
    return Leaves(rows_of(scores.query, tile, scores.group), keys_of(scores.key, tile), beta, bias)


def logit_tile(scores: Scores, tile: Tile, room: Workspace, unit: float = 1.0) -> Tensor:
    """The logits of a tile of `folded` scores, [h, g·r, K], in its workspace; hidden ones are `HIDDEN`.

    They are multiplied by `unit` here where `folded` could not do it.
    """
    query, key, beta, bias = leaves_of(scores, tile)
    query = query if scores.scale == 1.0 else query * scores.scale
    logits = room.of("logits", (query.shape[0], query.shape[1], key.shape[1]))
    torch.bmm(query, key.transpose(-1, -2), out=logits)
    if scores.softcap is not None:
        logits.div_(scores.softcap).tanh_().mul_(scores.softcap)
    by_row = _by_row(logits, scores.group)
    if bias is not None:
        by_row.add_(bias.to(by_row.dtype).clamp(min=HIDDEN))
    if not scores.linear and (beta is not None or unit != 1.0):
        by_row.mul_(unit if beta is None else unit * beta.view(beta.shape[0], scores.group, -1)[..., None])
    _hide(by_row, scores, tile)
    return logits


def logit_tile_backward(scores: Scores, tile: Tile, upstream: Tensor) -> Leaves:
    """The gradients of a tile's leaves for those of its logits [h, g·r, K], which are 0 where hidden.

    ℓ = β·y, y = c·tanh(x/c) + bias, x = scale·q·k: so dβ = Σ dℓ·y, dbias = β·dℓ, dx = β·dℓ·(1 − tanh²). Where ℓ is
    linear, Σ dℓ·y is scale·⟨q, dℓ·K⟩ and no y is needed.
    """
    query, key, beta, bias = leaves_of(scores, tile)
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
    factor = scores.scale if beta is None or not scores.linear else (beta * scores.scale)[..., None]
    mixed = torch.bmm(upstream, key)
    if beta is not None and dbeta is None:
        dbeta = (mixed * query).sum(-1) * scores.scale
    return Leaves(mixed * factor, torch.bmm(upstream.transpose(-1, -2), query * factor), dbeta, dbias)


def _add_bias(capped: Tensor, bias: Tensor, group: int) -> Tensor:
    """The scores, for a product with gradients: a bias that is not finite is left out, as 0·∞ and 0·NaN would be NaN.

    Where −∞ or another rule hides the key, its gradient is 0; where a NaN or +∞ is seen, that of its row is NaN.
    """
    finite = bias.to(capped.dtype).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return (_by_row(capped, group) + finite).flatten(1, 2)


def _by_row(x: Tensor, group: int) -> Tensor:
    """[h, g·r, K] as [h, g, r, K]."""
    return x.view(x.shape[0], group, -1, x.shape[-1])


def _hide(by_row: Tensor, scores: Scores, tile: Tile) -> None:
    """Overwrite what a row of [h, g, r, K] may not see."""
    for left, right in ((tile.left, tile.clear_left), (max(tile.clear_left, tile.clear_right), tile.right)):
        if left < right:
            slot = torch.arange(left, right, dtype=torch.int32, device=by_row.device)
            start, stop = (
                bound[tile.batch if bound.shape[0] > 1 else 0, tile.top : tile.bottom, None].to(torch.int32)
                for bound in (scores.start, scores.stop)
            )
            _keep(by_row[..., left - tile.left : right - tile.left], (slot >= start) & (slot < stop))
    if scores.padding is not None:
        _keep(by_row, ~scores.padding[tile.batch if scores.padding.shape[0] > 1 else 0, tile.left : tile.right])
    if scores.mask is not None:
        _keep(by_row, shown(mask_of(scores.mask, tile, scores.group)))
    if scores.broken is not None:
        broken = scores.broken[tile.batch, tile.first : tile.last, tile.left : tile.right]
        by_row.masked_fill_(broken[:, None, None] & (by_row > HIDDEN / 2), math.nan)


# How `HIDDEN` is written in the dtypes that tiles are computed in.
_PATTERNS = {
    torch.float32: (torch.int32, *struct.unpack("=i", struct.pack("=f", HIDDEN))),
    torch.float64: (torch.int64, *struct.unpack("=q", struct.pack("=d", HIDDEN))),
}


def _keep(x: Tensor, seen: Tensor) -> None:
    """Write `HIDDEN` where a key is not seen, also over a NaN; on the CPU several times faster than masked_fill."""
    integer, pattern = _PATTERNS[x.dtype]
    kept = seen.to(integer).neg_()  # all bits where a key is seen, else none
    x.view(integer).bitwise_and_(kept).bitwise_or_(kept.bitwise_not_().bitwise_and_(pattern))
