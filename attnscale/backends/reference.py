"""The oracle: eager, differentiable attention in plain torch, in the precision of its inputs (at least fp32)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from attnscale._util.tracing import autocast_off, is_watched
from attnscale.call.attention_call import AttentionCall
from attnscale.call.tap import Attended
from attnscale.statistics import AttentionOutput, RowStats, StatsRequest, row_statistics


class ReferenceBackend:
    """Materialises all weights [B, H, Tq, Tk]. A hidden key or value does not reach a row, even if it is NaN."""

    name = "reference"
    automatic = False
    plain = True
    why_unsupported = None

    def why_not(self, call: AttentionCall) -> str | None:
        return None

    def run(self, call: AttentionCall) -> Tensor:
        weights = attention_weights(call)
        if call.dropout_p > 0.0:
            weights = F.dropout(weights, call.dropout_p)
        return mix(weights, call).to(call.query.dtype)

    def run_bounded(self, call: AttentionCall) -> Attended:
        return Attended(self.run(call))

    def measure(self, call: AttentionCall, request: StatsRequest) -> AttentionOutput:
        return AttentionOutput(self.run(call), self.statistics(call, request))

    def statistics(self, call: AttentionCall, request: StatsRequest) -> RowStats:
        call = call if request.differentiable else call.detached()
        stats = row_statistics(raw_scores(call), call.row_beta(), call.context.dense(), request, sinks=call.sinks)
        known = RowStats.counted(call)
        return stats._replace(visible=known.visible, visible_given=known.visible_given)


def attention_weights(call: AttentionCall) -> Tensor:
    """Return the softmax over the visible keys, [B, H, Tq, Tk]; rows without visible keys are zero."""
    visible = call.context.dense()
    logits = raw_scores(call) * (call.beta[..., None] if isinstance(call.beta, Tensor) else call.beta)
    if visible is not None:
        logits = logits.masked_fill(~visible, -math.inf)
    if call.sinks is not None:
        sinks = call.sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    top = logits.detach().amax(-1, keepdim=True) if logits.shape[-1] else logits.new_zeros(*logits.shape[:-1], 1)
    powers = torch.exp(logits - top.masked_fill(top == -math.inf, 0.0))
    total = powers.sum(-1, keepdim=True)
    weights = powers / total.masked_fill(total == 0.0, 1.0)
    return weights if call.sinks is None else weights[..., :-1]


def mix(weights: Tensor, call: AttentionCall) -> Tensor:
    """Return weights [B, H, Tq, Tk] times the values, [B, H, Tq, Dv], in the dtype of the weights.

    Since 0·NaN is NaN, non-finite values are excluded from the product, and rows that see them are set to NaN after it.
    """
    value, broken = _without_nonfinite(_grouped(call.value, call).to(weights.dtype))
    with autocast_off(weights.device):
        out = weights @ value
        if broken is None:
            return out
        return out.masked_fill(_reaches(call.context.dense(), broken, like=out), math.nan)


def raw_scores(call: AttentionCall) -> Tensor:
    """Return softcap(scale·q·k) + bias, [B, H, Tq, Tk], and 0 for hidden keys.

    Hidden keys are excluded from all products and gradients, where 0·∞ and 0·NaN would be NaN.
    """
    dtype, visible = torch.promote_types(call.query.dtype, torch.float32), call.context.dense()
    key, broken = _without_nonfinite(_grouped(call.key, call).to(dtype))
    query = call.query.to(dtype)
    if visible is not None:
        query = query.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    with autocast_off(query.device):
        scores = query @ key.transpose(-1, -2) * call.scale
    if broken is not None:
        scores = scores.masked_fill(broken.any(-1)[..., None, :], math.nan)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.bias is not None:
        scores = scores + call.bias.to(dtype)
    return scores if visible is None else scores.masked_fill(~visible, 0.0)


def _grouped(x: Tensor, call: AttentionCall) -> Tensor:
    """Repeat keys or values [B, Hkv, Tk, D] to the number of query heads."""
    heads = call.query.shape[1]
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _without_nonfinite(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Replace NaN and ±∞ by 0. Also return a mask of the replaced elements; None if x is known to be finite."""
    may_look = x.device.type == "cpu" and type(x) is Tensor and not is_watched()
    if may_look and bool(torch.isfinite(x.detach().sum())):
        return x, None
    broken = ~torch.isfinite(x)
    return torch.where(broken, 0.0, x), broken


def _reaches(visible: Tensor | None, broken: Tensor, *, like: Tensor) -> Tensor:
    """Return which outputs [B, H, Tq, Dv] depend on a visible non-finite value."""
    if visible is None:
        return broken.any(-2, keepdim=True).expand_as(like)
    return (visible.to(like.dtype) @ broken.to(like.dtype)) > 0
