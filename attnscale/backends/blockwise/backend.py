"""Attention in tiles, in pure torch: any device, memory linear in length, statistics along the way.

The forward keeps output and lse only; the backward computes each tile again. torch.compile takes both as they are.
There is no further derivative: forward mode, torch.func and a second backward are for the `reference` backend.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from attnscale._util.tracing import is_watched
from attnscale.backends import autocast
from attnscale.backends.backend import no_derivative
from attnscale.backends.blockwise.softmax import Partial, add_keys
from attnscale.backends.call_stats import counted, softmax_stats
from attnscale.backends.gaps import add_gaps
from attnscale.backends.tile_logits import logit_tile, logit_tile_backward
from attnscale.backends.tiles import (
    HIDDEN,
    LOG2E,
    Scores,
    add,
    cut,
    keys_of,
    mask_of,
    place,
    rows_of,
    store,
    workspace_for,
)
from attnscale.call.attention_call import SCORE_TENSORS, AttentionCall
from attnscale.errors import BackendError
from attnscale.statistics import AttentionOutput, RowStats, StatsRequest
from attnscale_kernels.derivatives import other_derivative


class BlockwiseBackend:
    """Takes every call that has one set of heads for keys and values; β acts inside, in fp32, and is never rounded."""

    name = "blockwise"
    automatic = True
    plain = False

    def why_not(self, call: AttentionCall) -> str | None:
        if call.key.shape[1] != call.value.shape[1]:
            return "key and value have different numbers of heads"
        return None

    def run(self, call: AttentionCall) -> Tensor:
        return attend(call, entropy=False)[0]

    def measure(self, call: AttentionCall, request: StatsRequest) -> AttentionOutput:
        out, *sums = attend(call, entropy=request.entropy)
        return AttentionOutput(out, add_gaps(call, request, softmax_stats(call, request, *sums)))

    @torch.no_grad()
    def statistics(self, call: AttentionCall, request: StatsRequest) -> RowStats:
        if not request.softmax:
            return add_gaps(call, request, counted(call))
        nothing = call.value.as_strided((*call.value.shape[:3], 0), (0, 0, 0, 0))  # no product with the values
        found = attend(replace(call.detached(), value=nothing), entropy=request.entropy)
        return add_gaps(call, request, softmax_stats(call, request, *found[1:]))


def attend(
    call: AttentionCall, *, entropy: bool, seed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output [B, H, Tq, Dv]; lse, largest logit, entropy (if asked for) and largest weight, [B, H, Tq], detached.

    The seed is that of dropout, where there is any; None: a new one.
    """
    if call.dropout_p > 0.0 and seed is None:
        seed = torch.randint(2**62, (), device="cpu")
    # Without gradients and graphs the function itself, as an operator costs a tenth of a millisecond; but not for meta
    # tensors, which have no values to read, nor for subclasses, which compute by themselves.
    direct = type(call.query) in (Tensor, torch.nn.Parameter) and not call.query.is_meta
    forward = _forward if direct and not torch.is_grad_enabled() and not is_watched() else blockwise_forward
    tensors, numbers = (*call.score_tensors(), call.value, call.sinks, seed), (call.scale, call.softcap, call.dropout_p)
    out, lse, top, entropies, w_max = forward(*tensors, *numbers, entropy)
    return out, lse.detach(), top.detach(), entropies.detach(), w_max.detach()


# What forward and backward are given, before and after what only one of them needs.
TENSORS = f"{SCORE_TENSORS}, Tensor value, Tensor? sinks, Tensor? seed"
NUMBERS = "float scale, float? softcap, float dropout_p"


@autocast.without
def _forward(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output in the query's dtype; lse, largest logit, entropy (or nothing) and largest weight, in fp32 at least."""
    key, beta, start, stop, padding, mask, value, sinks, seed, scale, softcap, dropout_p, entropy = arguments
    scores = Scores(query, key, beta, start, stop, padding, mask, scale, softcap).wide()
    scores, value = scores.without_broken(value.to(scores.query.dtype), keys=False)
    scores = scores.folded(LOG2E)
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    sums = value.new_zeros(*query.shape[:3], 3)
    sums[..., 0] = HIDDEN
    sink_logits = None if sinks is None else (sinks.to(value.dtype) * LOG2E)[:, None, None].expand(*query.shape[:3], 1)
    room = workspace_for(scores)
    number = itertools.count()
    for tile in cut(scores):
        found: Partial | None = None
        for piece in tile.pieces():
            logits = logit_tile(scores, piece, room, LOG2E)
            kept = None if seed is None else _kept(logits, seed, next(number), dropout_p)
            powers = room.of("powers", logits.shape)
            found = add_keys(found, logits, keys_of(value, piece), powers, moment=entropy, kept=kept)
        if found is not None:
            store(sums, tile, torch.cat(found[:3], dim=-1))
        if found is not None and value.shape[-1]:
            whole = found.total
            if sink_logits is not None:
                whole = whole + torch.exp2(rows_of(sink_logits, tile, scores.group) - found.top)
            if tile.clear_left >= tile.clear_right or padding is not None or mask is not None:
                # A row that sees nothing has powers of hidden keys, as many as there are; a NaN has been seen.
                whole = whole.masked_fill(found.top <= HIDDEN / 2, math.inf)
            part = place(out, tile, found.mixed)
            torch.div(found.mixed.view(part.shape), whole.view(*part.shape[:2], 1), out=part)
    best, total, moment = sums.unbind(-1)
    unseen = best <= HIDDEN / 2
    total = total.masked_fill(unseen, 1.0)
    top = (best / LOG2E).masked_fill_(unseen, -math.inf)
    log = total.log()
    lse = top + log
    w_max = total.reciprocal()  # more exact than e^(top − lse), where these are large
    entropies = value.new_zeros(0)
    if entropy:
        entropies = (log - moment / (LOG2E * total)).masked_fill_(unseen, 0.0)
    if sinks is not None:
        keys, lse = lse, torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        share = torch.exp(keys - lse)  # of the weight that is left to the keys
        w_max = w_max * share
        if entropy:
            entropies = share * entropies + torch.special.entr(share) + torch.special.entr(1 - share)
    return out, lse, top, entropies.clamp_(min=0.0), w_max.masked_fill_(unseen, 0.0)


blockwise_forward = torch.library.custom_op(
    "attnscale::blockwise_forward",
    _forward,
    mutates_args=(),
    schema=f"({TENSORS}, {NUMBERS}, bool entropy) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@blockwise_forward.register_fake
def _(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    value, entropy = arguments[6], arguments[-1]
    lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    entropies = torch.empty_like(lse) if entropy else lse.new_empty(0)
    return out, lse, torch.empty_like(lse), entropies, torch.empty_like(lse)


@torch.library.custom_op(
    "attnscale::blockwise_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, {TENSORS}, Tensor out, Tensor lse, {NUMBERS}, bool wants_mask)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
@autocast.without
def blockwise_backward(gradient: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, β, value, mask and sinks; the last two empty where there is nothing to give."""
    query, key, beta, start, stop, padding, mask, value, sinks, seed, out, lse, *numbers, wants_mask = arguments
    scale, softcap, dropout_p = numbers
    scores = Scores(query, key, beta, start, stop, padding, mask, scale, softcap).wide()
    scores, value = scores.without_broken(value.to(scores.query.dtype))
    scores = scores.without_unseeing(lse, sinks)
    folded = scores.folded(LOG2E)
    gradient = gradient.to(scores.query.dtype)
    delta = (gradient * out.to(gradient.dtype)).sum(-1)  # [B, H, Tq]: what the softmax subtracts from each row
    lse_in_bits = lse.masked_fill(lse == -math.inf, 0.0) * LOG2E
    dq, dk, dv = (torch.zeros_like(x) for x in (scores.query, scores.key, value))
    dbeta = torch.zeros_like(delta)
    dmask = value.new_zeros(mask.shape if wants_mask and mask is not None else 0)
    room = workspace_for(scores)
    for number, tile in enumerate(piece for whole in cut(scores) for piece in whole.pieces()):
        weights = logit_tile(folded, tile, room, LOG2E)
        weights = weights.sub_(rows_of(lse_in_bits, tile, scores.group)[..., None]).exp2_()
        upstream = rows_of(gradient, tile, scores.group)
        dweights = torch.bmm(upstream, keys_of(value, tile).transpose(-1, -2), out=room.of("powers", weights.shape))
        kept = weights
        if seed is not None:
            scaled = _kept(weights, seed, number, dropout_p)
            kept, dweights = weights * scaled, dweights * scaled
        keys_of(dv, tile).add_(kept.transpose(-1, -2) @ upstream)
        dweights = dweights.sub_(rows_of(delta, tile, scores.group)[..., None]).mul_(weights)
        found = logit_tile_backward(scores, tile, dweights)
        add(dq, tile, found.query)
        keys_of(dk, tile).add_(found.key)
        if found.beta is not None:
            add(dbeta, tile, found.beta)
        if wants_mask and found.bias is not None:
            part = mask_of(dmask, tile, scores.group)
            part.add_(found.bias.sum_to_size(part.shape))
    dsinks = value.new_zeros(0)
    if sinks is not None:
        dsinks = -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)
    dmask = dmask.to(mask.dtype) if wants_mask and mask is not None else dmask
    return dq.to(query.dtype), dk.to(key.dtype), dbeta.to(beta.dtype), dv.to(query.dtype), dmask, dsinks


@blockwise_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, beta: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    mask, value, sinks, wants_mask = arguments[3], arguments[4], arguments[5], arguments[-1]
    nothing = query.new_empty(0, dtype=torch.promote_types(query.dtype, torch.float32))
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    dmask = mask.new_empty(mask.shape) if wants_mask else nothing
    return dq, dk, beta.new_empty(query.shape[:3]), dv, dmask, nothing if sinks is None else torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:10], output[0], output[1])
    ctx.numbers = inputs[10:13]
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    query, key, beta, _, _, _, mask, value, sinks, *_ = saved = ctx.saved_tensors
    derivative = other_derivative(gradient, query, key, value, beta, mask, sinks)
    if derivative is not None:
        raise BackendError(f"backend='blockwise' cannot compute this backward: {no_derivative(derivative)}")
    wants_mask = ctx.needs_input_grad[6]
    dq, dk, dbeta, dv, dmask, dsinks = blockwise_backward(gradient, *saved, *ctx.numbers, wants_mask)
    visibility = None, None, None, dmask if wants_mask else None
    return dq, dk, dbeta, *visibility, dv, None if sinks is None else dsinks, None, None, None, None, None


def _refuse_second(*_: Any) -> NoReturn:
    raise BackendError(
        "backend='blockwise' has no second derivative: ask for backend='reference', which has every derivative"
    )


blockwise_forward.register_autograd(_backward, setup_context=_save)
blockwise_backward.register_autograd(_refuse_second)


def _kept(like: Tensor, seed: Tensor, number: int, dropout_p: float) -> Tensor:
    """The dropout mask of a tile, scaled; the same again for the same seed and tile number."""
    generator = torch.Generator(device=like.device).manual_seed(int(seed) + number)
    kept = torch.rand(like.shape, generator=generator, device=like.device) >= dropout_p
    return kept.to(like.dtype) / (1 - dropout_p) if dropout_p < 1.0 else torch.zeros_like(like)
