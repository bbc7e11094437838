"""What is measured of one attention call: statistics of sampled rows, forward and as backward sees them.

Everything is per row, [B, H, R], in fp32, and NaN for a row that sees nothing: such rows are in no aggregate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from attnscale.backends import dispatch
from attnscale.backends.call import AttentionCall
from attnscale.backends.tiles import (
    HIDDEN,
    KEYS,
    Scores,
    Tile,
    add,
    cut,
    keys_of,
    leaves_of,
    logit_tile,
    rows_of,
    workspace_for,
)
from attnscale.statistics import StatsRequest, finite

Rows = Mapping[str, Tensor]

# Gaps at which N(t) is counted: in units of raw scores, from a tie to the whole row.
THRESHOLDS = (0.5, 1.0, 2.0, 4.0, 8.0)
REQUEST = StatsRequest(gap_thresholds=THRESHOLDS, accumulation="bracket")


@torch.no_grad()
def forward_rows(call: AttentionCall) -> dict[str, Tensor]:
    """Statistics of every row of a call, which has been cut down to the rows of interest."""
    stats = dispatch.statistics(call, REQUEST)
    visible = stats.visible.to(torch.float32)
    seen = stats.visible > 0
    found: dict[str, Tensor | None] = {
        "visible": visible,
        "beta": call.row_beta(),
        "w_max": stats.w_max,
        "entropy": stats.entropy,
        "relative_entropy": _relative(stats.entropy, visible),
        "max_logit": stats.max_logit,
        "accumulation": _where_finite(None if stats.accumulation is None else stats.accumulation.middle),
        "criticality": _where_finite(stats.criticality),
        "prominence": _prominence(call, stats.max_logit, visible),
    }
    if stats.gap_counts is not None:
        for index, threshold in enumerate(THRESHOLDS):
            found[gap_name(threshold)] = stats.gap_counts[..., index]
    return {
        name: torch.where(seen, x.to(torch.float32), math.nan).expand(call.query.shape[:3])
        for name, x in found.items()
        if x is not None
    }


@torch.no_grad()
def backward_rows(call: AttentionCall, gradient: Tensor) -> dict[str, Tensor]:
    """The norm of each row's gradient of raw scores, and the gradient of its β, given that of its output.

    Dropout is not replayed: these are the gradients of the weights as they were before it.
    """
    lse = dispatch.statistics(call, StatsRequest(w_max=False, entropy=False, max_logit=False)).lse
    if lse is None:
        raise RuntimeError("statistics without the lse that was asked for")
    beta = call.row_beta()
    start, stop = call.context.bounds()
    rules = call.context.padding, call.context.mask, call.scale, call.softcap
    scores = Scores(call.query, call.key, beta, start, stop, *rules).wide()
    scores, value = scores.without_broken(call.value.to(scores.query.dtype))
    upstream, anchor = gradient.to(value.dtype), finite(lse)
    delta, squares, product = (torch.zeros_like(lse) for _ in range(3))
    folded, room = scores.folded(1.0), workspace_for(scores)

    def parts(tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        logits = logit_tile(folded, leaves_of(folded, tile), tile, room.logits)
        weights = torch.exp(logits - rows_of(anchor, tile, scores.group)[..., None])
        return logits, weights, torch.bmm(rows_of(upstream, tile, scores.group), keys_of(value, tile).mT)

    in_pieces = call.key.shape[2] > KEYS  # then Σ w·dP needs a pass of its own
    if in_pieces:
        for tile in cut(scores):
            _, weights, pull = parts(tile)
            add(delta, tile, (weights * pull).sum(-1))
    for tile in cut(scores):
        logits, weights, pull = parts(tile)
        centre = rows_of(delta, tile, scores.group) if in_pieces else (weights * pull).sum(-1)
        dlogits = weights * (pull - centre[..., None])
        add(squares, tile, dlogits.square().sum(-1))
        add(product, tile, torch.where(weights > 0, dlogits * logits, 0.0).sum(-1))
    return {
        "score_gradient": squares.sqrt() * beta.abs(),
        "beta_gradient": torch.where(beta == 0, 0.0, product / beta),
    }


def angle_parts(call: AttentionCall, out: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of 1 − cosine over pairs of rows, of the values at their own slots and of the outputs; each [B, H].

    The ratio of the two is the angle ratio: 1 where attention leaves angles as they are, 0 where all rows become one.
    NaN where a row has no slot of its own among the keys, as across sequences.
    """
    slots = call.context.slots()
    inside = ((slots >= 0) & (slots < call.key.shape[2])).all()
    own = slots.clamp(0, max(call.key.shape[2] - 1, 0)).expand(call.query.shape[0], -1)
    group = call.query.shape[1] // call.value.shape[1]
    value = call.value.gather(2, own[:, None, :, None].expand(-1, call.value.shape[1], -1, call.value.shape[3]))
    spread_in = torch.where(inside, _spread(value), math.nan).repeat_interleave(group, dim=1)
    return spread_in, _spread(out)


def gap_name(threshold: float) -> str:
    """The name of N(t)."""
    return f"gap_count_{threshold:g}"


def _spread(x: Tensor) -> Tensor:
    """1 − the mean cosine of pairs among rows [B, H, R, D], from the length of the sum of their directions."""
    rows = x.shape[2]
    if rows < 2:
        return torch.full(x.shape[:2], math.nan, device=x.device)
    directions = torch.nn.functional.normalize(x.to(torch.float32), dim=-1)
    together = directions.sum(2).square().sum(-1)
    return 1 - (together - rows) / (rows * (rows - 1))


def _prominence(call: AttentionCall, max_logit: Tensor | None, visible: Tensor) -> Tensor | None:
    """How far the best raw score lies above the mean, over what the largest of n draws of noise reaches, σ·√(2 ln n).

    At most 1: the winner may be noise. NaN for fewer than three keys, or where all scores are the same.
    """
    if max_logit is None:
        return None
    start, stop = call.context.bounds()
    rules = call.context.padding, call.context.mask, call.scale, call.softcap
    scores = Scores(call.query, call.key, None, start, stop, *rules).wide().folded(1.0)
    total, squares = (torch.zeros_like(max_logit) for _ in range(2))
    room = workspace_for(scores)
    for tile in cut(scores):
        raw = logit_tile(scores, leaves_of(scores, tile), tile, room.logits)
        raw = raw.masked_fill_(raw <= HIDDEN / 2, 0.0)
        add(total, tile, raw.sum(-1))
        add(squares, tile, torch.linalg.vecdot(raw, raw))
    mean = total / visible
    deviation = (squares / visible - mean.square()).clamp(min=0.0).sqrt()
    height = max_logit / call.row_beta() - mean
    reach = deviation * (2 * visible.clamp(min=2).log()).sqrt()
    return torch.where((visible > 2) & (reach > 0), height / reach, math.nan)


def _where_finite(x: Tensor | None) -> Tensor | None:
    """Without rows of one key or a tie at the top: Λ is 0 or infinite there, and would spoil any mean."""
    return None if x is None else torch.where(torch.isfinite(x) & (x > 0), x, math.nan)


def _relative(entropy: Tensor | None, visible: Tensor) -> Tensor | None:
    """Entropy over ln n; NaN for a single key, whose entropy says nothing."""
    return None if entropy is None else torch.where(visible > 1, entropy / visible.clamp(min=2).log(), math.nan)
