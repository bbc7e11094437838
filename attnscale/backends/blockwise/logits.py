"""The logits of a tile, with hidden ones overwritten, and their gradients."""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.backends.blockwise.tiles import HIDDEN, Scores, Tile, Workspace, keys_of, mask_of, rows_of
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
    """The logits of a tile, [h, g·r, K], in its workspace; hidden ones are `HIDDEN`. Multiplied by `unit` here unless
    `Scores.folded` has done it.
    """
    query, key, beta, bias = leaves_of(scores, tile)
    factor = _factor(scores, beta)
    query = query if factor is None else query * factor
    logits = room.of("logits", (query.shape[0], query.shape[1], key.shape[1]))
    torch.bmm(query, key.transpose(-1, -2), out=logits)
    if scores.softcap is not None:
        logits.div_(scores.softcap).tanh_().mul_(scores.softcap)
    by_row = _by_row(logits, scores.group)
    if bias is not None:
        by_row.add_(bias.to(by_row.dtype).clamp(min=HIDDEN))
    if not scores.linear and (beta is not None or unit != 1.0):
        by_row.mul_(unit if beta is None else unit * beta.view(beta.shape[0], scores.group, -1)[..., None])
    _hide(by_row, scores, tile, room)
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
    factor = _factor(scores, beta)
    factor = 1.0 if factor is None else factor
    mixed = torch.bmm(upstream, key)
    if beta is not None and dbeta is None:
        dbeta = (mixed * query).sum(-1) * scores.scale
    return Leaves(mixed * factor, torch.bmm(upstream.transpose(-1, -2), query * factor), dbeta, dbias)


def _factor(scores: Scores, beta: Tensor | None) -> Tensor | float | None:
    """What the query of a tile is still to be multiplied by."""
    if beta is not None and scores.linear:
        return (beta * scores.scale)[..., None]
    return None if scores.scale == 1.0 else scores.scale


def _add_bias(capped: Tensor, bias: Tensor, group: int) -> Tensor:
    """The scores, for a product with gradients: a bias that is not finite is left out, as 0·∞ and 0·NaN would be NaN.

    Where −∞ or another rule hides the key, its gradient is 0; where a NaN or +∞ is seen, that of its row is NaN.
    """
    finite = bias.to(capped.dtype).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return (_by_row(capped, group) + finite).flatten(1, 2)


def _by_row(x: Tensor, group: int) -> Tensor:
    """[h, g·r, K] as [h, g, r, K]."""
    return x.view(x.shape[0], group, -1, x.shape[-1])


def _hide(by_row: Tensor, scores: Scores, tile: Tile, room: Workspace) -> None:
    """Overwrite what a row of [h, g, r, K] may not see."""
    for left, right in ((tile.left, tile.clear_left), (max(tile.clear_left, tile.clear_right), tile.right)):
        if left < right:
            kept = _inside_bounds(scores, tile, left, right, room)
            _overwrite(by_row[..., left - tile.left : right - tile.left], kept)
    if scores.padding is not None:
        padding = scores.padding[tile.batch if scores.padding.shape[0] > 1 else 0, tile.left : tile.right]
        _overwrite(by_row, _bits(~padding, by_row.dtype))
    if scores.mask is not None:
        _overwrite(by_row, _bits(shown(mask_of(scores.mask, tile, scores.group)), by_row.dtype))
    if scores.broken is not None:
        broken = scores.broken[tile.batch, tile.first : tile.last, tile.left : tile.right]
        by_row.masked_fill_(broken[:, None, None] & (by_row > HIDDEN / 2), math.nan)


# How `HIDDEN` is written in the dtypes that tiles are computed in.
_PATTERNS = {
    torch.float32: (torch.int32, *struct.unpack("=i", struct.pack("=f", HIDDEN))),
    torch.float64: (torch.int64, *struct.unpack("=q", struct.pack("=d", HIDDEN))),
}


def _bits(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """All bits of an integer as wide as the dtype where a key is seen, else none."""
    return seen.to(_PATTERNS[dtype][0]).neg_()


def _overwrite(x: Tensor, kept: Tensor) -> None:
    """Write `HIDDEN` where no bit is kept, also over a NaN; on the CPU several times faster than masked_fill."""
    x.view(kept.dtype).bitwise_and_(kept).bitwise_or_(kept.bitwise_not().bitwise_and_(_PATTERNS[x.dtype][1]))


def _inside_bounds(scores: Scores, tile: Tile, left: int, right: int, room: Workspace) -> Tensor:
    """The bits to keep in the slots [left, right) of a tile: those inside its rows' bounds. Shared by tiles alike."""
    only_stop = left >= tile.clear_left
    alike = (
        (left - tile.rising, right - left, tile.bottom - tile.top) if only_stop and tile.rising is not None else None
    )
    if alike is not None and alike in room.bounds:
        return room.bounds[alike]
    integer, sign = _PATTERNS[scores.query.dtype][0], 8 * scores.query.element_size() - 1
    slot = torch.arange(left, right, dtype=integer, device=scores.query.device)
    start, stop = (
        bound[tile.batch if bound.shape[0] > 1 else 0, tile.top : tile.bottom, None].to(integer)
        for bound in (scores.start, scores.stop)
    )
    kept = (slot - stop).bitwise_right_shift_(sign)  # the sign of a difference, in every bit
    if not only_stop:
        kept &= (start - 1 - slot).bitwise_right_shift_(sign)
    if alike is not None:
        room.bounds[alike] = kept
    return kept
