"""The oracle: attention written out in plain torch, differentiable, in the precision of its inputs (at least fp32)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from attnscale.backends.call import AttentionCall
from attnscale.statistics import AttentionOutput, RowStats, StatsRequest, row_statistics


class ReferenceBackend:
    """Materialises all weights [B, H, Tq, Tk]. A hidden key or value cannot reach a row, whatever it holds."""

    name = "reference"
    automatic = False

    def why_not(self, call: AttentionCall) -> str | None:
        return None

    def run(self, call: AttentionCall) -> Tensor:
        weights, visible = attention_weights(call), call.context.dense()
        value, broken = _without_nonfinite(_grouped(call.value, call).to(weights.dtype))
        if call.dropout_p > 0.0:
            weights = F.dropout(weights, call.dropout_p)
        out = weights @ value
        return _spoil(out, _reaches(visible, broken, like=out)).to(call.query.dtype)

    def measure(self, call: AttentionCall, request: StatsRequest) -> AttentionOutput:
        visible = call.context.dense()
        scores = raw_scores(call)
        stats = row_statistics(scores, call.row_beta(), visible, request, sinks=call.sinks)
        return AttentionOutput(self.run(call), stats)

    def statistics(self, call: AttentionCall, request: StatsRequest) -> RowStats:
        return self.measure(call, request).stats


def attention_weights(call: AttentionCall) -> Tensor:
    """softmax of the logits over the visible keys, [B, H, Tq, Tk]; a row without a visible key is zero."""
    logits = raw_scores(call) * (call.beta[..., None] if isinstance(call.beta, Tensor) else call.beta)
    visible = call.context.dense()
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


def raw_scores(call: AttentionCall) -> Tensor:
    """softcap(scale·q·k) + bias, [B, H, Tq, Tk]."""
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    key, broken = _without_nonfinite(_grouped(call.key, call).to(dtype))
    scores = call.query.to(dtype) @ key.transpose(-1, -2) * call.scale
    scores = scores.masked_fill(broken.any(-1)[..., None, :], math.nan)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.bias is not None:
        scores = scores + call.bias.to(dtype)
    return scores


def _grouped(x: Tensor, call: AttentionCall) -> Tensor:
    """Keys or values [B, Hkv, Tk, D] repeated to the query's heads."""
    heads = call.query.shape[1]
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _without_nonfinite(x: Tensor) -> tuple[Tensor, Tensor]:
    """x with NaN and ±∞ replaced by 0, and where they were: 0·NaN must not carry a hidden token into a product."""
    broken = ~torch.isfinite(x)
    return torch.where(broken, 0.0, x), broken


def _reaches(visible: Tensor | None, broken: Tensor, *, like: Tensor) -> Tensor:
    """[B, H, Tq, Dv]: which outputs a visible non-finite value contributes to."""
    if visible is None:
        return broken.any(-2, keepdim=True).expand_as(like)
    return (visible.to(like.dtype) @ broken.to(like.dtype)) > 0


def _spoil(out: Tensor, where: Tensor) -> Tensor:
    return out.masked_fill(where, math.nan)
