"""What is measured of one attention call: statistics of sampled rows, forward and as backward sees them.

Everything is per row, [B, H, R], in fp32, and NaN for a row that sees nothing: such rows are in no aggregate.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.backends.call import AttentionCall
from attnscale.backends.tiles import LOG2E, keys_of, rows_of, store
from attnscale.diagnostics.blocks import Block, blocks, buffers, hide, products, raw_scores
from attnscale.gaps import bracket, empty_spectrum, take_spectrum

# Gaps at which N(t) is counted: in units of raw scores, from a tie to the whole row.
THRESHOLDS = (0.5, 1.0, 2.0, 4.0, 8.0)
MIN_RANK = 2
# Smaller powers of two are taken for this one: those of −10³⁰ are several times slower on the CPU, and no sum can tell.
FLOOR = -90.0


def gap_name(threshold: float) -> str:
    """The name of N(t)."""
    return f"gap_count_{threshold:g}"


# What backward looks at again, to see whether it was recomputed as it had been.
AGAIN = ("w_max", "entropy", *map(gap_name, THRESHOLDS))
FORWARD = (*AGAIN, "visible", "beta", "relative_entropy", "max_logit", "accumulation", "criticality", "prominence")
BACKWARD = (*AGAIN, "score_gradient", "beta_gradient")


class Seen(NamedTuple):
    """What forward found that backward would find again."""

    again: Tensor  # [AGAIN, B, H, R]
    top: Tensor  # [B, H, R], the largest logit of a key, in powers of two
    total: Tensor  # of the powers of all logits over the top's


def forward_rows(call: AttentionCall) -> tuple[Tensor, Seen]:
    """Each quantity of `FORWARD` for every row of a call, which has been cut down to the rows of interest."""
    scores, logits, powers = buffers(call, 3)
    sums = scores.new_zeros(*call.query.shape[:3], 6 + len(THRESHOLDS))
    keys, beta = call.key.shape[2], call.row_beta()
    spectrum = empty_spectrum(sums[..., 0], MIN_RANK, keys)
    for block in blocks(call):
        raw = raw_scores(call, block, scores)
        sizes = raw.sum(-1), torch.linalg.vector_norm(raw, dim=-1).square()
        softmax = _softmax(call, block, raw, logits, powers)
        counts = _gap_counts(call, block, raw, logits, powers)
        store(sums, block.tile, torch.stack([*softmax, *sizes, _visible(call, block), *counts], dim=-1))
        found = take_spectrum(raw, MIN_RANK, keys)
        store(spectrum.best, block.tile, found.best)
        store(spectrum.counts, block.tile, found.counts)
    top, total, moment, size, squares, visible, *counts = sums.unbind(-1)
    again = [1 / total, total.log() - moment / total, *counts]
    accumulation = bracket(spectrum, MIN_RANK).middle
    # Rows of one key or a tie at the top have none: Λ is 0 or infinite there, and would spoil any mean.
    accumulation = torch.where((accumulation < math.inf) & (accumulation > 0), accumulation, math.nan)
    relative = again[1] / torch.where(visible > 1, visible, math.nan).log()
    prominence = _prominence(spectrum.best[..., 0], visible, size, squares)
    others = visible, beta, relative, top / LOG2E, accumulation, beta / accumulation, prominence
    found_rows = _where_seen(visible, [*again, *others])
    return found_rows, Seen(found_rows[: len(AGAIN)], top, total)


def backward_rows(call: AttentionCall, gradient: Tensor, seen: Seen | None) -> Tensor:
    """Each quantity of `BACKWARD`: the same again, and given the gradient of the output [B, H, R, Dv], per row the norm
    of that of its raw scores, and that of its β.

    With what forward has seen, if it is of the same tensors, only the gradients are new. Dropout is not replayed: these
    are the gradients of the weights as they were before it.
    """
    if seen is None:
        _, seen = forward_rows(call)
    scores, logits, powers, pulls = buffers(call, 4)
    sums = scores.new_full((*call.query.shape[:3], 2), math.nan)
    for block in blocks(call):
        raw = raw_scores(call, block, scores)
        top, total = (rows_of(x, block.tile, call.group) for x in seen[1:])
        exponents = _logits(call, block, raw, logits)
        weights = _powers(exponents, top, powers)
        pull = products(rows_of(gradient, block.tile, call.group), keys_of(call.value, block.tile), pulls)
        centre = _dot(weights, pull, exponents)
        if pull.device.type != "cpu" or not math.isfinite(float(centre.sum())):
            hide(_by_row(pull, call.group), block)  # a value that is NaN, where nobody sees it
            centre = _dot(weights, pull, exponents)
        dlogits = pull.sub_((centre / total)[..., None]).mul_(weights)
        norm, product = torch.linalg.vector_norm(dlogits, dim=-1), _dot(dlogits, raw, exponents)
        store(sums, block.tile, torch.stack([norm, product], dim=-1) / total[..., None])
    norm, product = sums.to(torch.float32).unbind(-1)
    new = torch.stack([norm * call.row_beta().abs(), product])
    return torch.cat([seen.again, torch.where(seen.again[0].isnan(), math.nan, new)])


def angle_parts(call: AttentionCall, out: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of 1 − cosine over pairs of rows, of the values at their own slots and of the outputs; each [B, H].

    The ratio of the two is the angle ratio: 1 where attention leaves angles as they are, 0 where all rows become one.
    NaN where a row has no slot of its own among the keys, as across sequences.
    """
    slots, keys = call.context.slots(), call.key.shape[2]
    own = slots.clamp(0, max(keys - 1, 0))
    if own.shape[0] == 1:
        value = call.value[:, :, own[0]]
    else:
        value = torch.take_along_dim(call.value, own[:, None, :, None], dim=2)
    spread_in = torch.where((own == slots).all(), _spread(value), math.nan)
    group = call.query.shape[1] // call.value.shape[1]
    return (spread_in if group == 1 else spread_in.repeat_interleave(group, dim=1)), _spread(out)


def _softmax(call: AttentionCall, block: Block, raw: Tensor, logits: Tensor, powers: Tensor) -> tuple[Tensor, ...]:
    """Of each row [h, g·r] the largest logit, the sum of powers over its own, and Σ power·(ℓ − top) in nats.

    The sink has a part in the sums.
    """
    logits = _logits(call, block, raw, logits)
    top = logits.amax(-1)
    powers = _powers(logits, top, powers)
    total, moment = powers.sum(-1), _dot(powers, logits, logits) / LOG2E
    if call.sinks is not None:
        sinks = call.sinks.to(raw.dtype)[None, :, None].expand(call.query.shape[:3])
        below = rows_of(sinks, block.tile, call.group) - top / LOG2E
        total, moment = total + below.exp(), moment + below.exp() * below
    return top, total, moment


def _logits(call: AttentionCall, block: Block, raw: Tensor, out: Tensor) -> Tensor:
    """From raw scores that are 0 where hidden: in powers of two, and `HIDDEN` there."""
    group, logits = call.group, _like(raw, out)
    beta = (rows_of(call.row_beta(), block.tile, group)[..., None] * LOG2E).to(raw.dtype)
    torch.addcmul(block.hidden, _by_row(raw, group), _by_row(beta, group), out=_by_row(logits, group))
    return logits


def _powers(logits: Tensor, top: Tensor, out: Tensor) -> Tensor:
    """2^(logits − top); the logits become the exponents."""
    return torch.exp2(logits.sub_(top[..., None]).clamp_(min=FLOOR), out=_like(logits, out))


def _gap_counts(call: AttentionCall, block: Block, raw: Tensor, gaps: Tensor, within: Tensor) -> list[Tensor]:
    """N(t) of each threshold, [h, g·r]; from here on the raw scores are `HIDDEN` where they were 0 for being hidden."""
    gaps, within = _like(raw, gaps), _like(raw, within)
    _by_row(raw, call.group).add_(block.hidden)
    torch.sub(raw.amax(-1, keepdim=True), raw, out=gaps)
    # Ones and zeros as numbers like the scores: on the CPU, adding up bools is several times slower.
    return [torch.le(gaps, threshold, out=within).sum(-1) for threshold in THRESHOLDS]


def _prominence(best: Tensor, visible: Tensor, size: Tensor, squares: Tensor) -> Tensor:
    """How far the best raw score lies above the mean, over what the largest of n draws of noise reaches, σ·√(2 ln n).

    At most 1: the winner may be noise. NaN for fewer than three keys, or where all scores are the same.
    """
    mean = size / visible
    deviation = (squares / visible - mean.square()).clamp(min=0.0).sqrt()
    reach = deviation * (2 * visible.clamp(min=2).log()).sqrt()
    return torch.where((visible > 2) & (reach > 0), (best - mean) / reach, math.nan)


def _spread(x: Tensor) -> Tensor:
    """1 − the mean cosine of pairs among rows [B, H, R, D], from the length of the sum of their directions."""
    rows = x.shape[2]
    if rows < 2:
        return torch.full(x.shape[:2], math.nan, device=x.device)
    x = x.to(torch.float32)
    lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=1e-12)
    together: Tensor = (x / lengths).sum(2).square().sum(-1)
    return 1 - (together - rows) / (rows * (rows - 1))


def _visible(call: AttentionCall, block: Block) -> Tensor:
    """How many keys each row sees, [h, g·r]."""
    heads, rows = block.tile.last - block.tile.first, block.tile.bottom - block.tile.top
    return block.visible.sum(-1).expand(heads, call.group, rows).reshape(heads, -1)


def _where_seen(visible: Tensor, quantities: list[Tensor]) -> Tensor:
    found = torch.stack([x.to(torch.float32) for x in quantities])
    return torch.where(visible > 0, found, math.nan)


def _dot(x: Tensor, y: Tensor, room: Tensor) -> Tensor:
    """⟨x, y⟩ of rows [..., K]; torch's own would make memory for the products."""
    return torch.mul(x, y, out=room).sum(-1)


def _like(rows: Tensor, buffer: Tensor) -> Tensor:
    return buffer[: rows.numel()].view(rows.shape)


def _by_row(x: Tensor, group: int) -> Tensor:
    """[h, g·r, ...] as [h, g, r, ...]."""
    return x.view(x.shape[0], group, -1, *x.shape[2:])
