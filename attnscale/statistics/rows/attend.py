"""Attention and row statistics of a call, tile by tile, with a backward pass. Memory is linear in length.

The forward pass saves output and measures only; the backward pass recomputes each tile. Both are custom operators,
opaque to torch.compile. Higher derivatives are not supported.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from attnscale._util.tracing import autocast_off, is_watched, without_autocast
from attnscale.call.attention_call import FLAT_CALL, AttentionCall, FlatCall
from attnscale.errors import BackendError
from attnscale.statistics.gaps import HIDDEN
from attnscale.statistics.request import FLAT_REQUEST, StatsRequest, sample_rows
from attnscale.statistics.row_stats import RowStats
from attnscale.statistics.rows.gradients import ROW_TERMS, RowTerms, add_push, row_terms
from attnscale.statistics.rows.measures import (
    FLOATS,
    GapMeasures,
    RowMeasures,
    RowSums,
    add_keys,
    add_shares,
    best_scores,
    measure_gaps,
    row_measures,
    weight_at,
)
from attnscale.statistics.rows.tiles import LOG2E, Block, CallRows
from attnscale_kernels.availability import other_derivative

LSE = RowMeasures._fields.index("lse")
ROWS_AT_ONCE = 1024  # in a pass over all rows
NOTHING = StatsRequest(w_max=False, entropy=False, lse=False, max_logit=False)


class MeasuredRows(NamedTuple):
    """Output [B, H, Tq, Dv] of a call, and measures [B, H, Tq] of its rows; detached unless requested otherwise."""

    out: Tensor
    measures: RowMeasures


def attend_rows(
    call: AttentionCall, request: StatsRequest = NOTHING, *, seed: Tensor | None = None, prominence: bool = False
) -> MeasuredRows:
    """Output and measures of all rows of a call. `seed` is the dropout seed; None draws a new one."""
    if call.dropout_p > 0.0 and seed is None:
        seed = torch.randint(2**62, (), device="cpu")
    # A direct call saves the operator overhead of 0.1 ms. Meta tensors and tensor subclasses need the operator.
    direct = type(call.query) in (Tensor, torch.nn.Parameter) and not call.query.is_meta
    if direct and not torch.is_grad_enabled() and not is_watched():
        with autocast_off(call.query.device):
            return _attend_tiles(call, request, prominence, seed)
    flat = FlatCall.of(replace(call, beta=call.row_beta()))
    out, floats, integers = rows_forward(*flat, *request.flat(), prominence, seed)
    measures = RowMeasures.unpacked(floats.detach(), integers)
    if request.differentiable:
        carried = RowMeasures.unpacked(floats, integers)
        measures = measures._replace(**{name: getattr(carried, name) for name in request.with_gradients})
    return MeasuredRows(out, measures)


def measure_rows(call: AttentionCall, request: StatsRequest, *, prominence: bool = False) -> RowMeasures:
    """Measures of all rows of a call, without the output."""
    value = call.value.detach()
    nothing = value.as_strided((*value.shape[:3], 0), (0, 0, 0, 0))  # skips the product with the values
    if request.differentiable:
        return attend_rows(replace(call, value=nothing, dropout_p=0.0), request, prominence=prominence).measures
    with torch.no_grad():
        return attend_rows(replace(call.detached(), value=nothing), request, prominence=prominence).measures


def largest_row_logits(call: AttentionCall) -> Tensor:
    """The largest logit [B, H, Tq] of each row of a detached call, −∞ without visible keys: a maximum, no softmax.

    Rows are taken in parts, because β times their queries is a copy.
    """
    queries, device = call.query.shape[2], call.query.device
    wide = torch.promote_types(call.query.dtype, torch.float32)
    found = torch.full(call.query.shape[:3], HIDDEN, dtype=wide, device=device)
    for start in range(0, queries, ROWS_AT_ONCE):
        part = call
        if queries > ROWS_AT_ONCE:
            part = call.select(torch.arange(start, min(start + ROWS_AT_ONCE, queries), device=device))
        rows = CallRows(part, small=True)
        tops = found.narrow(2, start, part.query.shape[2])
        for block in rows.blocks(whole=False):
            rows.store(tops, block, reduce(torch.maximum, (rows.logits(piece).amax(-1) for piece in block.pieces())))
    return (found / LOG2E).masked_fill(found <= HIDDEN / 2, -math.inf)


def measure_sampled_rows(call: AttentionCall, request: StatsRequest) -> RowStats:
    """Statistics [B, H, R] of the rows sampled by a request."""
    queries = call.query.shape[2]
    rows = sample_rows(queries, queries if request.rows is None else request.rows, request.seed, call.query.device)
    call = call if request.differentiable else call.detached()
    return measure_statistics(call.select(rows), request)._replace(rows=rows.clone())


def measure_statistics(call: AttentionCall, request: StatsRequest) -> RowStats:
    """Statistics [B, H, Tq] of all rows of a call, without the output."""
    known = RowStats.counted(call, with_sink=request.softmax)
    request, asked = request.with_lse(), request
    stats = measure_rows(call, request).to_stats(request, known, call.row_beta().detach())
    return add_call_shares(stats, asked, call).only(asked)


def add_call_shares(stats: RowStats, request: StatsRequest, call: AttentionCall) -> RowStats:
    """Add the requested weights of selected keys of a call. `stats` must contain the lse."""
    if request.first_share is None:
        return stats
    call, lse = call.detached(), stats.lse.detach()
    return add_shares(stats, request, call.context, lambda slots, seen: weight_at(call, slots, seen, lse))


@without_autocast
def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    flat, (*asked, prominence, seed) = FlatCall.split(arguments)
    out, measures = _attend_tiles(flat.to_call(), StatsRequest(*asked), prominence, seed)
    return out, *measures.packed()


def _attend_tiles(call: AttentionCall, request: StatsRequest, prominence: bool, seed: Tensor | None) -> MeasuredRows:
    rows = CallRows(call)
    rows.drop_broken(keys=False)
    shape, thresholds = call.query.shape[:3], len(request.gap_thresholds or ())
    mixing = call.value.shape[-1] > 0
    out = call.query.new_zeros(*shape, call.value.shape[-1])
    # m, Σ 2^(ℓ − m), Σ 2^(ℓ − m)·(ℓ − m), the bounds of Λ, and the prominence (NaN in rows without keys).
    sums = rows.query.new_zeros(*shape, 6)
    sums[..., 0] = HIDDEN
    if prominence:
        sums[..., 5] = math.nan
    integers = torch.zeros(*shape, 1 + thresholds, dtype=torch.int64, device=out.device)
    gaps, softmax = request.gaps or prominence, request.softmax or mixing
    number = itertools.count()
    for block in rows.blocks(whole=gaps, by_sequence=mixing):
        found: RowSums | None = None
        best: Tensor | None = None
        scores: Tensor | None = None
        for piece in block.pieces():
            if gaps:
                scores = rows.scores(piece)
                best = best_scores(best, scores, request)
            if softmax:
                logits = rows.logits(piece) if scores is None else rows.logits_of(scores, piece)
                kept = None if seed is None else _kept(logits, seed, next(number), call.dropout_p)
                values = rows.keys_of(rows.value, piece) if mixing else None
                found = add_keys(found, logits, request, room=rows.room, values=values, kept=kept, left=piece.left)
        if found is not None:
            _store(rows, block, found, sums, integers)
            if found.mixed is not None:
                _divide(rows, block, found, out)
        if best is not None and scores is not None:
            pieces = list(block.pieces())
            tiles = [lambda scores=scores: scores] if len(pieces) == 1 else [partial(rows.scores, x) for x in pieces]
            measured = measure_gaps(tiles, best, request, prominence=prominence, room=rows.room)
            rows.store(integers[..., 1:], block, measured.counts)
            rows.store(sums[..., 3:], block, torch.stack(measured[1:], dim=-1))
    top, total, moment, *of_gaps = sums.unbind(-1)
    winner, counts = integers[..., 0], integers[..., 1:]
    of_keys = RowSums(top, total, moment if request.entropy else None, None, winner)
    sinks = None if call.sinks is None else call.sinks[:, None]
    return MeasuredRows(out, row_measures(of_keys, GapMeasures(counts, *of_gaps), sinks))


def _store(rows: CallRows, block: Block, found: RowSums, sums: Tensor, integers: Tensor) -> None:
    columns = [found.top, found.total, *([] if found.moment is None else [found.moment])]
    rows.store(sums[..., : len(columns)], block, torch.cat(columns, dim=-1))
    if found.winner is not None:
        rows.store(integers[..., :1], block, found.winner)


def _divide(rows: CallRows, block: Block, found: RowSums, out: Tensor) -> None:
    """Write the output of a block: Σ 2^(ℓ − m)·v / Σ 2^(ℓ − m)."""
    whole, context, sinks = found.total, rows.call.context, rows.call.sinks
    if sinks is not None:
        sink = (sinks.to(rows.dtype) * LOG2E)[None, :, None, None].expand(*out.shape[:3], 1)
        whole = whole + torch.exp2(rows.rows_of(sink, block) - found.top)
    if block.clear_left >= block.clear_right or context.padding is not None or context.mask is not None:
        # A row without visible keys has summed the powers of hidden keys. NaN rows are not affected.
        whole = whole.masked_fill(found.top <= HIDDEN / 2, math.inf)
    part = rows.place(out, block)
    mixed = found.mixed if found.mixed is not None else part
    torch.div(mixed.view(part.shape), whole.view(*part.shape[:3], 1), out=part)


def _kept(like: Tensor, seed: Tensor, number: int, dropout_p: float) -> Tensor:
    """The scaled dropout mask of a tile, reproducible from the seed and the tile number."""
    generator = torch.Generator(device=like.device).manual_seed(int(seed) + number)
    kept = torch.rand(like.shape, generator=generator, device=like.device) >= dropout_p
    return kept.to(like.dtype) / (1 - dropout_p) if dropout_p < 1.0 else torch.zeros_like(like)


rows_forward = torch.library.custom_op(
    "attnscale::rows_forward",
    _forward,
    mutates_args=(),
    schema=f"({FLAT_CALL}, {FLAT_REQUEST}, bool prominence, Tensor? dropout_seed) -> (Tensor, Tensor, Tensor)",
)


@rows_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    flat, others = FlatCall.split(arguments)
    query, shape = flat.query, flat.query.shape[:3]
    floats = query.new_empty(*shape, FLOATS, dtype=torch.promote_types(query.dtype, torch.float32))
    thresholds = len(StatsRequest(*others[:-2]).gap_thresholds or ())
    integers = query.new_empty(*shape, 1 + thresholds, dtype=torch.int64)
    return query.new_empty(*shape, flat.value.shape[-1]), floats, integers


@torch.library.custom_op(
    "attnscale::rows_backward",
    mutates_args=(),
    schema=f"({FLAT_CALL}, {ROW_TERMS}, Tensor gradient, Tensor out, Tensor lse, Tensor? dropout_seed, bool whole, "
    "bool wants_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
@without_autocast
def rows_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, β, mask and sinks; the last two are empty if not needed.

    `whole` is the tiling mode of the forward pass. The dropout mask depends on the tiling.
    """
    flat, (shift, slope, push, winner, gradient, out, lse, seed, whole, wants_mask) = FlatCall.split(arguments)
    call = flat.to_call()
    rows = CallRows(call)
    rows.drop_broken(keys=True)
    rows.drop_unseeing(lse)
    gradient = gradient.to(rows.dtype)
    delta = (gradient * out.to(rows.dtype)).sum(-1)  # [B, H, Tq], the softmax correction of each row
    delta = delta if shift is None else delta.add_(shift)
    slope_in_bits = None if slope is None else slope / LOG2E
    lse_in_bits = lse.masked_fill(lse == -math.inf, 0.0) * LOG2E
    dq, dk, dv = (torch.zeros(x.shape, dtype=rows.dtype, device=x.device) for x in (rows.query, rows.key, rows.value))
    dbeta = torch.zeros_like(delta)
    bias = call.bias if wants_mask else None
    dmask = rows.query.new_zeros(0 if bias is None else bias.shape)
    pieces = (piece for block in rows.blocks(whole=whole, by_sequence=True) for piece in block.pieces())
    for number, piece in enumerate(pieces):
        log_weights = rows.logits(piece).sub_(rows.rows_of(lse_in_bits, piece)[..., None])
        weights = torch.exp2(log_weights, out=log_weights if slope is None else rows.room("weights", log_weights.shape))
        upstream = rows.rows_of(gradient, piece)
        dweights = rows.products(gradient, rows.value, piece, "powers")
        kept = weights
        if seed is not None:
            scaled = _kept(weights, seed, number, call.dropout_p)
            kept, dweights = weights * scaled, dweights * scaled
        _add_keys(rows, dv, piece, kept.mT @ upstream)
        dlogits = dweights.sub_(rows.rows_of(delta, piece)[..., None])
        if slope_in_bits is not None:
            dlogits.addcmul_(log_weights, rows.rows_of(slope_in_bits, piece)[..., None], value=-1.0)
        dlogits.mul_(weights)
        if push is not None:
            add_push(dlogits, rows.rows_of(push, piece), rows.rows_of(winner, piece), piece.left)
        found = rows.score_gradient(piece, dlogits)
        rows.add(dq, piece, found.query)
        _add_keys(rows, dk, piece, found.key)
        rows.add(dbeta, piece, found.beta)
        if bias is not None and found.bias is not None:
            part = rows.mask_place(dmask, piece)
            part.add_(found.bias.sum_to_size(part.shape))
    dsinks = rows.query.new_zeros(0)
    if call.sinks is not None:
        share = torch.exp(call.sinks.to(lse.dtype)[:, None] - lse)
        of_row = -share * delta if slope is None else torch.special.entr(share) * slope - share * delta
        dsinks = of_row.sum((0, 2)).to(call.sinks.dtype)
    dmask = dmask if bias is None else dmask.to(bias.dtype)
    return (
        dq.to(flat.query.dtype),
        dk.to(flat.key.dtype),
        dv.to(flat.value.dtype),
        dbeta.to(flat.beta.dtype),
        dmask,
        dsinks,
    )


def _add_keys(rows: CallRows, target: Tensor, block: Block, found: Tensor) -> None:
    """Add [n, K, D] to the keys or values of a block."""
    part = rows.key_place(target, block)
    part.add_(found.view(part.shape))


@rows_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    flat, (*_, wants_mask) = FlatCall.split(arguments)
    query, mask, sinks = flat.query, flat.mask, flat.sinks
    nothing = query.new_empty(0, dtype=torch.promote_types(query.dtype, torch.float32))
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, flat.key, flat.value))
    dmask = mask.new_empty(mask.shape) if wants_mask and mask is not None else nothing
    dsinks = nothing if sinks is None else torch.empty_like(sinks)
    return dq, dk, dv, flat.beta.new_empty(query.shape[:3]), dmask, dsinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    flat, others = FlatCall.split(inputs)
    *asked, prominence, seed = others
    ctx.request = StatsRequest(*asked)
    ctx.whole = ctx.request.gaps or prominence
    ctx.others = len(others)
    ctx.constants = flat[flat._fields.index("slot") :]
    out, floats, integers = output
    carried = ctx.request.differentiable
    saved = *flat[: flat._fields.index("slot")], seed, out, floats, integers if carried else None
    ctx.save_for_backward(*saved)
    ctx.mark_non_differentiable(*(integers,) if carried else (floats, integers))


def _backward(ctx: Any, gradient: Tensor, of_floats: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, seed, out, floats, integers = ctx.saved_tensors
    flat, terms = FlatCall(*tensors, *ctx.constants), RowTerms()
    if integers is not None:
        terms = row_terms(ctx.request, *(RowMeasures.unpacked(x, integers) for x in (of_floats, floats)))
    given = gradient, of_floats, flat.query, flat.key, flat.value, flat.beta, flat.mask, flat.sinks
    derivative = other_derivative(*given)
    if derivative is not None:
        raise BackendError(f"backend='blockwise' cannot compute this backward pass: {no_derivative(derivative)}")
    wants_mask = ctx.needs_input_grad[flat._fields.index("mask")]
    arguments = gradient, out, floats[..., LSE], seed, ctx.whole, wants_mask
    dq, dk, dv, dbeta, dmask, dsinks = rows_backward(*flat, *terms, *arguments)
    dmask, dsinks = dmask if wants_mask else None, None if flat.sinks is None else dsinks
    of_call = FlatCall.gradients(query=dq, key=dk, value=dv, beta=dbeta, mask=dmask, sinks=dsinks)
    return *of_call, *(None,) * ctx.others


def _refuse_second(*_: Any) -> NoReturn:
    raise BackendError(
        "backend='blockwise' has no second derivative: use backend='reference', which supports all derivatives"
    )


rows_forward.register_autograd(_backward, setup_context=_save)
rows_backward.register_autograd(_refuse_second)


def no_derivative(derivative: str) -> str:
    """The reason why a backend with a custom backward pass does not support another derivative."""
    return f"it has a first-order backward pass only, no {derivative}; backend='reference' has, in Tq × Tk memory"
