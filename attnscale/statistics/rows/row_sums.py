"""A look at the rows of attention calls: their sums, forward, and the gradients of their scores, backward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.backends.blockwise.tiles import LOG2E
from attnscale.call.attention_call import AttentionCall
from attnscale.statistics.gaps import TOP, largest, spectrum_of
from attnscale.statistics.rows.quantities import MIN_RANK, THRESHOLDS, Sums, columns
from attnscale.statistics.rows.score_tiles import Piece, Pieces, Pulled
from attnscale.statistics.rows.stacked_calls import Block, Stack

# Smaller powers of two are taken for this one: those of −10³⁰ are several times slower on the CPU, and no sum can tell.
FLOOR = -90.0


def look(calls: Sequence[AttentionCall], gradients: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
    """The sums [N, B, H, R, C] of every row of calls of one kin, which have been cut down to the rows of interest.

    With the gradients of their outputs, each [B, H, R, Dv], also what `look_back` says of them, [N, B, H, R, 2].
    """
    stack = Stack(calls)
    upstream = None if gradients is None else stack.over_rows(gradients)
    found = stack.empty(columns(stack.keys))
    answers = stack.empty(2, fill=math.nan)
    for block in stack.blocks():
        pieces = Pieces(stack, block)
        level = _level(stack, block, pieces)
        of_pieces = [_part(stack, piece, level, upstream) for piece in pieces]
        *parts, centre = (_sum(part) for part in zip(*of_pieces, strict=True))
        sums = Sums(*level[:3], *parts)
        if stack.sinks is not None:
            sums = sums.with_sink(block.of(stack.sinks))
        block.put(found, sums.packed())
        if upstream is not None:
            block.put(answers, _answer(pieces, level, upstream, sums.total, centre))
    return stack.by_call(found), None if upstream is None else stack.by_call(answers)


def look_back(call: AttentionCall, gradient: Tensor, seen: Tensor) -> Tensor:
    """Given the gradient of the output [B, H, R, Dv] and the sums of the same rows, the norm of the gradient of each
    row's logits, and the gradient of its β: [B, H, R, 2].

    Dropout is not replayed: these are the gradients of the weights as they were before it.
    """
    stack = Stack([call])
    upstream = stack.over_rows([gradient])
    found, seen = stack.empty(2, fill=math.nan), seen.view(*stack.query.shape[:4], -1)
    for block in stack.blocks():
        sums, pieces = Sums.unpacked(block.of(seen)), Pieces(stack, block)
        level = Level(sums.best, sums.top, sums.beta, _may_fall(sums.beta))
        centre = _sum(_pulled(piece, level, upstream).centre for piece in pieces)
        block.put(found, _answer(pieces, level, upstream, sums.total, centre))
    return stack.by_call(found)[0]


class Level(NamedTuple):
    """What the scores of rows [l, g·r] are measured from."""

    best: Tensor  # the largest raw scores, [l, g·r, ranks]
    top: Tensor  # the largest logit
    beta: Tensor
    may_fall: bool  # whether β may be negative: then the best score has not the largest logit


def _may_fall(beta: Tensor) -> bool:
    """Elsewhere than on the CPU, asking would be waiting."""
    return beta.device.type != "cpu" or float(beta.min()) < 0.0


def _level(stack: Stack, block: Block, pieces: Pieces) -> Level:
    beta = block.of(stack.beta)
    may_fall, bests, lowest = _may_fall(beta), [], []
    for piece in pieces:
        bests.append(largest(piece.masked, TOP))
        if may_fall:
            visible = torch.sub(piece.by_row(piece.raw), piece.seen.hidden, out=piece.by_row(piece.room(2)))
            lowest.append(visible.flatten(1, 2).amin(-1))
    best = bests[0] if len(bests) == 1 else largest(torch.cat(bests, dim=-1), TOP)
    top = best[..., 0] * beta
    if may_fall:
        top = torch.where(beta < 0.0, torch.stack(lowest).amin(0) * beta, top)
    return Level(best, top, beta, may_fall)


def _part(stack: Stack, piece: Piece, level: Level, gradient: Tensor | None) -> tuple[Tensor, ...]:
    """What a piece adds to the sums of its rows: the additive fields of `Sums` and, with a gradient, Σ 2^x·⟨dO, v⟩."""
    squares = torch.linalg.vector_norm(piece.raw, dim=-1).square_()
    behind, other = torch.sub(level.best[..., :1], piece.masked, out=piece.masked), piece.room(2)
    # Ones and zeros as numbers like the scores: on the CPU, adding up bools is several times slower.
    counts = [torch.le(behind, threshold, out=other).sum(-1) for threshold in THRESHOLDS]
    exponents, powers = _powers(piece, level, behind)
    total, moment = powers.sum(-1), exponents.mul_(powers).sum(-1).div_(LOG2E)
    number = piece.seen.number.expand(total.shape[0], stack.group, -1).reshape(total.shape)
    histogram = spectrum_of(level.best, behind, MIN_RANK, stack.keys).counts
    centre = total if gradient is None else _pull(piece, powers, gradient).centre
    return total, moment, piece.size, squares, number, torch.stack(counts, dim=-1), histogram, centre


def _answer(pieces: Pieces, level: Level, gradient: Tensor, total: Tensor, centre: Tensor) -> Tensor:
    """‖dℓ‖ and dβ of each row, [l, g·r, 2], from Σ 2^x and Σ 2^x·⟨dO, v⟩ of it."""
    squares, products, share = [], [], (centre / total)[..., None]
    for piece in pieces:
        powers, pulled, _ = _pulled(piece, level, gradient)
        dlogits = torch.addcmul(pulled, powers, share, value=-1, out=pulled)
        squares.append(torch.linalg.vector_norm(dlogits, dim=-1).square_())
        products.append(torch.mul(dlogits, piece.raw, out=piece.room(1)).sum(-1))
    return torch.stack([_sum(squares).sqrt(), _sum(products)], dim=-1).div_(total[..., None])


def _pulled(piece: Piece, level: Level, gradient: Tensor) -> Pulled:
    if piece.pulled is not None:
        return piece.pulled
    behind = torch.sub(level.best[..., :1], piece.masked, out=piece.masked)
    return _pull(piece, _powers(piece, level, behind)[1], gradient)


def _pull(piece: Piece, powers: Tensor, gradient: Tensor) -> Pulled:
    pull = piece.products(gradient, "value", 1)
    products = torch.mul(powers, pull, out=piece.room(2))
    centre = products.sum(-1)
    if pull.device.type != "cpu" or not math.isfinite(float(centre.sum())):
        piece.hide(pull)  # a value that is NaN, where nobody sees it
        centre = torch.mul(powers, pull, out=products).sum(-1)
    piece.pulled = Pulled(powers, products, centre)
    return piece.pulled


def _powers(piece: Piece, level: Level, behind: Tensor) -> tuple[Tensor, Tensor]:
    """(ℓ − top)/ln 2 of each key, not below the floor, and two to the power of it.

    From how far each raw score lies behind the best: unless β is negative, that has the largest logit.
    """
    unit, exponents = level.beta * -LOG2E, piece.room(2)
    if level.may_fall:
        behind = torch.sub(level.best[..., :1], piece.raw, out=exponents)  # finite where hidden
    torch.addcmul(piece.seen.hidden, piece.by_row(behind), piece.by_row(unit[..., None]), out=piece.by_row(exponents))
    if level.may_fall:
        exponents.sub_((level.top * LOG2E + level.best[..., 0] * unit)[..., None])
    exponents.clamp_(min=FLOOR)
    return exponents, torch.exp2(exponents, out=piece.room(3))


def _sum(parts: Iterable[Tensor]) -> Tensor:
    """Of pieces; nothing is done where there is only one."""
    return reduce(torch.add, parts)
