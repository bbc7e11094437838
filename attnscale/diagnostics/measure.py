"""A look at the rows of one attention call: their sums, forward, and the gradients of their scores, backward."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnscale.backends.call import AttentionCall
from attnscale.backends.tiles import HIDDEN, LOG2E, keys_of, rows_of, store
from attnscale.diagnostics.blocks import Block, blocks, buffers, hide, products, raw_scores
from attnscale.diagnostics.rows import BEST, MIN_RANK, THRESHOLDS, TOTAL, Sums
from attnscale.gaps import TOP, empty_spectrum, largest, spectrum_of

# Smaller powers of two are taken for this one: those of −10³⁰ are several times slower on the CPU, and no sum can tell.
FLOOR = -90.0


def look(call: AttentionCall, gradient: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The sums [B, H, R, C] of every row of a call, which has been cut down to the rows of interest.

    With the gradient of the output [B, H, R, Dv] also what `look_back` says of them.
    """
    scores, gaps, exponents, spare, pulls = buffers(call, 5)
    keys, beta = call.key.shape[2], call.row_beta()
    width = 7 + len(THRESHOLDS) + sum(part.shape[-1] for part in empty_spectrum(scores[:0], MIN_RANK, keys))
    found = scores.new_zeros(*call.query.shape[:3], width)
    answers = None if gradient is None else scores.new_full((*call.query.shape[:3], 2), math.nan)
    for block in blocks(call):
        raw, size = raw_scores(call, block, scores)
        behind, powers, other = _like(raw, gaps), _like(raw, spare), _like(raw, exponents)
        squares = _dot(raw, raw, other)
        torch.add(_by_row(raw, call.group), block.seen.hidden, out=_by_row(behind, call.group))
        best = largest(behind, TOP)
        torch.sub(best[..., :1], behind, out=behind)
        # Ones and zeros as numbers like the scores: on the CPU, adding up bools is several times slower.
        counts = tuple(torch.le(behind, threshold, out=other).sum(-1) for threshold in THRESHOLDS)
        softmax = _softmax(call, block, best[..., :1], behind, other, powers)
        if answers is not None and gradient is not None:
            store(answers, block.tile, _gradients(call, block, gradient, raw, powers, softmax[1], other, pulls))
        number = block.seen.number.expand(raw.shape[0], call.group, -1).reshape(raw.shape[:2])
        spectrum = spectrum_of(best, behind, MIN_RANK, keys)
        sums = Sums(*softmax, size, squares, number, rows_of(beta, block.tile, call.group), counts, spectrum)
        store(found, block.tile, sums.packed())
    return found, answers


def look_back(call: AttentionCall, gradient: Tensor, seen: Tensor) -> Tensor:
    """Given the gradient of the output [B, H, R, Dv] and the sums of the same rows, the norm of the gradient of each
    row's logits, and the gradient of its β: [B, H, R, 2].

    Dropout is not replayed: these are the gradients of the weights as they were before it.
    """
    scores, exponents, spare, pulls = buffers(call, 4)
    found = scores.new_full((*call.query.shape[:3], 2), math.nan)
    for block in blocks(call):
        raw, _ = raw_scores(call, block, scores)
        other, powers = _like(raw, exponents), _like(raw, spare)
        sums = rows_of(seen, block.tile, call.group)
        best = sums[..., BEST : BEST + 1]
        _exponents(call, block, best, torch.sub(best, raw, out=other), other)
        torch.exp2(other, out=powers)
        store(found, block.tile, _gradients(call, block, gradient, raw, powers, sums[..., TOTAL], other, pulls))
    return found


def _gradients(
    call: AttentionCall,
    block: Block,
    gradient: Tensor,
    raw: Tensor,
    powers: Tensor,
    total: Tensor,
    room: Tensor,
    pulls: Tensor,
) -> Tensor:
    """‖dℓ‖ and dβ of each row, [h, g·r, 2], from raw scores, 2^((ℓ − top)/ln 2) and the sum of these; uses the room."""
    pull = products(rows_of(gradient, block.tile, call.group), keys_of(call.value, block.tile), pulls)
    centre = _dot(powers, pull, room)
    if pull.device.type != "cpu" or not math.isfinite(float(centre.sum())):
        hide(_by_row(pull, call.group), block)  # a value that is NaN, where nobody sees it
        centre = _dot(powers, pull, room)
    dlogits = pull.sub_((centre / total)[..., None]).mul_(powers)
    both = torch.stack([_dot(dlogits, dlogits, room).sqrt_(), _dot(dlogits, raw, room)], dim=-1)
    return both.div_(total[..., None])


def _softmax(
    call: AttentionCall, block: Block, best: Tensor, behind: Tensor, exponents: Tensor, powers: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row [h, g·r] the largest logit of a key, Σ e^(ℓ − top) and Σ e^(ℓ − top)·(ℓ − top), with a sink in both.

    Overwrites the last two arguments.
    """
    top = _exponents(call, block, best, behind, exponents)
    torch.exp2(exponents, out=powers)
    total, moment = powers.sum(-1), _dot(powers, exponents, exponents) / LOG2E
    if call.sinks is not None:
        sinks = call.sinks.to(total.dtype)[None, :, None].expand(call.query.shape[:3])
        beyond = rows_of(sinks, block.tile, call.group) - top
        total, moment = total + beyond.exp(), moment + beyond.exp() * beyond
    return top, total, moment


def _exponents(call: AttentionCall, block: Block, best: Tensor, behind: Tensor, out: Tensor) -> Tensor:
    """(ℓ − top)/ln 2 of each key, not below the floor, and top, the largest logit of a key [h, g·r].

    From the best raw score [h, g·r, 1] and how far each lies behind it, [h, g·r, K]: unless β is negative, the best has
    the largest logit.
    """
    beta = rows_of(call.row_beta(), block.tile, call.group)[..., None].to(behind.dtype)
    top = best * beta
    by_row, unit = _by_row(out, call.group), _by_row(beta * -LOG2E, call.group)
    if behind.device.type == "cpu" and float(beta.min()) >= 0.0:
        torch.addcmul(block.seen.hidden, _by_row(behind, call.group), unit, out=by_row)
    else:
        logits = torch.where(block.seen.visible > 0, _by_row((best - behind) * beta, call.group), HIDDEN)
        top = torch.where(beta < 0.0, logits.flatten(1, 2).amax(-1, keepdim=True), top)
        torch.mul(logits - _by_row(top, call.group), LOG2E, out=by_row)
    out.clamp_(min=FLOOR)
    return top[..., 0]


def _dot(x: Tensor, y: Tensor, room: Tensor) -> Tensor:
    """⟨x, y⟩ of rows [..., K]; torch's own would make memory for the products."""
    return torch.mul(x, y, out=room).sum(-1)


def _like(x: Tensor, room: Tensor) -> Tensor:
    """As many numbers of a buffer, in the shape of a tensor."""
    return room[: x.numel()].view(x.shape)


def _by_row(x: Tensor, group: int) -> Tensor:
    """[h, g·r, K] as [h, g, r, K]."""
    return x.view(x.shape[0], group, -1, x.shape[-1])
