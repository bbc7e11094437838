"""Quantities that a monitor records per row: in the forward pass, and with score gradients in the backward pass.

All quantities are fp32. Rows without visible keys are NaN and excluded from aggregates.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import NamedTuple, cast

import torch
from torch import Tensor

from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import Context, count_visible, count_visible_before, first_slots
from attnscale.statistics.gaps import HIDDEN
from attnscale.statistics.request import StatsRequest
from attnscale.statistics.row_stats import RowStats
from attnscale.statistics.rows.attend import add_call_shares, measure_rows
from attnscale.statistics.rows.measures import RowMeasures
from attnscale.statistics.rows.tiles import LOG2E, Block, CallRows

# Thresholds t of the gap counts N(t), in units of raw scores.
THRESHOLDS = (0.5, 1.0, 2.0, 4.0, 8.0)
MIN_RANK = 2
FIRST_KEYS = 4  # the usual place of attention sinks
REST_ROWS = 16  # rows per call whose criticality is also measured without the first keys, because it takes another pass
REQUEST = StatsRequest(
    gap_thresholds=THRESHOLDS, accumulation="bracket", min_rank=MIN_RANK, winner=True, first_share=FIRST_KEYS
)
REST = StatsRequest(w_max=False, entropy=False, lse=False, max_logit=False, accumulation="bracket", min_rank=MIN_RANK)


def gap_name(threshold: float) -> str:
    """The quantity name of N(t)."""
    return f"gap_count_{threshold:g}"


# Compared between forward and backward pass, to detect a recomputation that differs.
COMPARED = ("w_max", "entropy", *map(gap_name, THRESHOLDS))
FORWARD = (
    *COMPARED,
    "visible",
    "beta",
    "relative_entropy",
    "max_logit",
    "accumulation",
    "criticality",
    "prominence",
    "winner",
    "first_share",
    "criticality_rest",
)
BACKWARD = (*COMPARED, "score_gradient", "beta_gradient")


class MeasuredQuantities(NamedTuple):
    """Measures of rows, and values that depend on the visible keys; all [B, H, R]."""

    measures: RowMeasures
    visible: Tensor  # number of visible keys, floating
    winner: Tensor  # number of visible keys before the key with the largest weight
    first_share: Tensor  # weight of the first visible keys
    rest: Tensor  # Λ of the other keys; NaN in all rows but the first REST_ROWS


def measure_quantities(call: AttentionCall) -> MeasuredQuantities:
    """Measure all rows of a call."""
    measures = measure_rows(call, REQUEST, prominence=True)
    visible = count_visible(call.context).expand(call.query.shape[:3]).to(measures.lse.dtype)
    winner = count_visible_before(call.context, measures.winner)
    stats = add_call_shares(RowStats(visible, lse=measures.lse), REQUEST, call)
    return MeasuredQuantities(measures, visible, winner, cast("Tensor", stats.first_share), _rest_accumulation(call))


def _rest_accumulation(call: AttentionCall) -> Tensor:
    """Λ [B, H, R] over all visible keys but the first ones, for some rows. A sink among the first keys hides it."""
    found = torch.full(call.query.shape[:3], math.nan, dtype=torch.float32, device=call.query.device)
    rows = min(REST_ROWS, found.shape[-1])
    part = call.select(torch.arange(rows, device=found.device))
    rest = replace(part, context=_without_first(part.context, rows))
    found[..., :rows] = measure_rows(rest, REST).accumulation.middle
    return found


def _without_first(context: Context, rows: int) -> Context:
    """The same visible keys but the first FIRST_KEYS of each row."""
    if context.mask is None and context.padding is None:
        low, high = context.bounds()
        return replace(context, first=torch.minimum(low + FIRST_KEYS, high), last=high)
    slots, seen = first_slots(context, FIRST_KEYS)
    number = torch.arange(context.keys, device=context.device)
    first = ((number == slots[..., None]) & seen[..., None]).any(-2).expand(-1, -1, rows, -1)
    visible = context.dense()
    hidden = first if visible is None else first | ~visible
    bias = context.mask
    mask = ~hidden if bias is None or bias.dtype == torch.bool else torch.where(hidden, -math.inf, bias)
    return Context(rows, context.keys, context.device, mask=mask)


def forward_quantities(measured: MeasuredQuantities, beta: Tensor) -> Tensor:
    """The quantities of `FORWARD`, [Q, ...], for rows [...]."""
    measures, visible = measured.measures, measured.visible
    accumulation = measures.accumulation.middle
    # Λ is 0 for a single key and infinite for a tie at the top. NaN keeps these rows out of means.
    accumulation = torch.where((accumulation < math.inf) & (accumulation > 0), accumulation, math.nan)
    relative = measures.entropy / torch.where(visible > 1, visible, math.nan).log()
    rest = torch.where((measured.rest < math.inf) & (measured.rest > 0), measured.rest, math.nan)
    scales = measures.max_logit, accumulation, beta / accumulation, measures.prominence
    keys = torch.where(measures.winner < 0, math.nan, measured.winner), measured.first_share, beta / rest
    return _stacked(measured, [*_compared(measures), visible, beta, relative, *scales, *keys])


def compared_quantities(measured: MeasuredQuantities) -> Tensor:
    """The quantities of `COMPARED`, [Q, ...], for rows [...]."""
    return _stacked(measured, _compared(measured.measures))


class ScoreGradients(NamedTuple):
    """Gradients of each row, [B, H, R]."""

    norm: Tensor  # norm of the gradient of the logits
    beta: Tensor  # gradient of β


def backward_quantities(measured: MeasuredQuantities, beta: Tensor, gradients: ScoreGradients) -> Tensor:
    """The quantities of `BACKWARD`, [Q, ...], for rows [...]."""
    return _stacked(measured, [*_compared(measured.measures), gradients.norm * beta.abs(), gradients.beta])


def score_gradients(call: AttentionCall, upstream: Tensor, measured: MeasuredQuantities) -> ScoreGradients:
    """Gradients of scores and β, from the gradient of the output [B, H, R, Dv] and the measures of the same rows.

    With weights w and p = ⟨dO, v⟩ of each key, dℓ = w·(p − Σ w·p). Dropout is not replayed: the gradients are those of
    the weights before dropout.
    """
    rows, measures = CallRows(call), measured.measures
    gradient = upstream.to(rows.dtype)
    top = measures.max_logit.masked_fill(measures.max_logit == -math.inf, 0.0) * LOG2E
    found = rows.query.new_zeros(*rows.query.shape[:3], 2)

    def tile(piece: Block) -> GradientTile:
        scores = rows.scores(piece)
        logits = rows.logits_of(scores, piece).sub_(rows.rows_of(top, piece)[..., None])
        weights = logits.exp2_().mul_(rows.rows_of(measures.w_max, piece)[..., None])
        pull = rows.products(gradient, call.value, piece, "powers")
        # On other devices, reading the sum back would synchronise.
        if pull.device.type != "cpu" or not math.isfinite(float(pull.sum())):
            pull.masked_fill_(scores <= HIDDEN / 2, 0.0)  # 0·NaN would be NaN
        return GradientTile(scores, weights, pull)

    for block in rows.blocks(whole=True):
        pieces = list(block.pieces())
        tiles = [tile(piece) for piece in pieces] if len(pieces) == 1 else None  # several tiles are computed twice
        centre = reduce(torch.add, (one.centre() for one in tiles or map(tile, pieces)))
        rows.store(found, block, reduce(torch.add, (one.gradients(centre) for one in tiles or map(tile, pieces))))
    squares, beta = found.unbind(-1)
    return ScoreGradients(squares.sqrt(), beta)


class GradientTile(NamedTuple):
    """Terms of the logit gradient of a tile, each [n, g·r, K]."""

    scores: Tensor
    weights: Tensor  # 0 for hidden keys
    pull: Tensor  # ⟨dO, v⟩, the gradient of the weight of each key

    def centre(self) -> Tensor:
        """Σ w·p of each row."""
        return torch.linalg.vecdot(self.weights, self.pull)  # type: ignore[no-any-return]

    def gradients(self, centre: Tensor) -> Tensor:
        """Σ dℓ² and Σ dℓ·s of each row, [..., 2]. Overwrites the tile."""
        dlogits = self.pull.sub_(centre[..., None]).mul_(self.weights)
        squares = torch.linalg.vector_norm(dlogits, dim=-1).square_()
        return torch.stack([squares, torch.linalg.vecdot(dlogits, self.scores)], dim=-1)


def angle_parts(call: AttentionCall, out: Tensor, seeing: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of 1 − cosine over pairs of rows: of the values in the rows' own slots, and of the outputs [B, H, R, Dv].

    Both results are [B, H]. Only rows with a visible key count (`seeing` [B, H, R]). The ratio of the two is the angle
    ratio, an indicator of rank collapse: 1 if attention preserves angles, 0 if all rows become parallel. Both are NaN
    for fewer than two rows, or if a row has no own slot among the keys (cross-attention).
    """
    shared = seeing.unflatten(1, (-1, call.group)).any(2)  # type: ignore[no-untyped-call]  # per key head
    before, after = _spread(_own_values(call), shared).repeat_interleave(call.group, dim=1), _spread(out, seeing)
    known = ~(before.isnan() | after.isnan())
    return torch.where(known, before, math.nan), torch.where(known, after, math.nan)


def _own_values(call: AttentionCall) -> Tensor:
    """The values [B, Hkv, R, Dv] in the rows' own slots; all NaN if a row has no own slot."""
    slots, keys = call.context.slots(), call.key.shape[2]
    own = slots.clamp(0, max(keys - 1, 0))
    if own.shape[0] == 1:
        value = call.value.index_select(2, own[0])
    else:
        value = torch.take_along_dim(call.value, own[:, None, :, None], dim=2)
    return torch.where((own == slots).all(), value, math.nan)


def _spread(x: Tensor, seeing: Tensor) -> Tensor:
    """1 − mean cosine over pairs of rows [..., R, D], from the norm of the sum of unit vectors."""
    x = x.to(torch.float32)
    lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=1e-12)
    together: Tensor = torch.where(seeing[..., None], x / lengths, 0.0).sum(-2).square().sum(-1)
    rows = seeing.sum(-1)
    return torch.where(rows > 1, 1 - (together - rows) / (rows * (rows - 1)), math.nan)


def _compared(measures: RowMeasures) -> list[Tensor]:
    return [measures.w_max, measures.entropy, *measures.gap_counts.unbind(-1)]


def _stacked(measured: MeasuredQuantities, quantities: list[Tensor]) -> Tensor:
    stacked = torch.stack([quantity.to(torch.float32) for quantity in quantities])
    return torch.where(measured.visible > 0, stacked, math.nan)
