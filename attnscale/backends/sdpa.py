"""torch's own scaled-dot-product attention, with β folded into the query."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnscale._util import state
from attnscale._util.tracing import autocast_dtype, autocast_off, is_dtensor, is_watched
from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import shown
from attnscale.call.parse import check_mask, per_row
from attnscale.call.torch_arguments import (
    Layout,
    default_scale,
    read_causal_bias,
    read_layout,
    read_numbers,
    torch_attention,
)
from attnscale.policies import FormulaPolicy, Policy
from attnscale.policies.base import refuse_unknown_length
from attnscale.policies.temperature import recurring_temperature


class SdpaBackend:
    """A β shared by all rows is passed through `scale` without rounding; a β per row multiplies q in fp32.

    In float16 and bfloat16, β·q is not rounded to the dtype of q: the logits would amplify the rounding error, and
    float16 may overflow. Attention is computed in float32 and its output rounded. On devices other than the CPU,
    bfloat16 keeps torch's fused kernels, with β·q split into three bfloat16 terms (the 24 bits of float32); "auto"
    prefers the triton backend there. The precision never depends on values, so the output of a row does not depend on
    other rows.
    """

    name = "sdpa"
    automatic = True
    plain = True
    why_unsupported = None

    def why_not(self, call: AttentionCall) -> str | None:
        if call.softcap is not None:
            return "torch's SDPA has no softcap"
        if call.sinks is not None:
            return "torch's SDPA has no attention sinks"
        return None

    def run(self, call: AttentionCall) -> Tensor:
        key, value = call.key, call.value
        start, stop = call.context.key_range()
        if stop - start != call.context.keys:
            key, value = key[..., start:stop, :], value[..., start:stop, :]
        query, beta = call.query, call.beta
        mask, is_causal = torch_mask(call, start, stop)
        grouped = key.shape[1] != query.shape[1] or value.shape[1] != query.shape[1]
        if isinstance(beta, Tensor):
            return attend_by_row(query, key, value, beta, mask, call.dropout_p, is_causal, call.scale, grouped)
        return attend(query, key, value, mask, call.dropout_p, is_causal, call.scale * beta, grouped)


def attend_by_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    grouped: bool,
) -> Tensor:
    """Compute torch's attention with the query [B, H, Tq, D] times β [B|1, H|1, Tq]; precision as in `SdpaBackend`."""
    dtype, options = autocast_dtype(query), (mask, dropout_p, is_causal, scale, grouped)
    if dtype.itemsize > 2:
        return attend(_multiply(query, beta.unsqueeze(-1)), key, value, *options)
    if dtype == torch.bfloat16 and query.device.type != "cpu":
        return _attend_in_parts(query, key, value, beta, *options)
    with autocast_off(query.device):
        product = query * beta.unsqueeze(-1)  # in fp32, the dtype of β
        return attend(product, key.float(), value.float(), *options).to(dtype)


def _multiply(query: Tensor, beta: Tensor) -> Tensor:
    """Return β·q, computed in the wider dtype and rounded once to that of q; in scratch memory without autograd."""
    if torch.is_grad_enabled() or query.device.type != "cpu" or is_watched():
        product = query * beta
        return product if product.dtype == query.dtype else product.to(query.dtype)
    return torch.mul(query, beta, out=state.SCRATCH.room("product", query.shape, query))


def _attend_in_parts(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, *options: Any) -> Tensor:
    """Compute attention in bfloat16 with β·q split into three bfloat16 terms, which hold the 24 bits of float32."""
    dtype, value_dim = torch.bfloat16, value.shape[-1]
    product = query.float() * beta.unsqueeze(-1)
    high = product.to(dtype)
    middle = (product - high).to(dtype)
    low = (product - high - middle).to(dtype)
    keys = torch.cat(3 * [key.to(dtype)], -1)
    # torch's fused kernels require equal head dimensions of keys and values.
    value = F.pad(value.to(dtype), (0, max(0, keys.shape[-1] - value_dim)))
    return attend(torch.cat([high, middle, low], -1), keys, value, *options)[..., :value_dim]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    """Compute torch's attention, with NaN and rows without visible keys handled as in the other backends.

    Its fused CUDA kernels support a mask or grouped heads, but not both.
    """
    if grouped and mask is not None and query.is_cuda:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
        grouped = False

    def run(query: Tensor) -> Tensor:
        return torch_attention()(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            # With symbolic shapes `grouped` is a comparison, which torch rejects; the branch makes it a bool.
            enable_gqa=True if grouped else False,  # noqa: SIM210
        )

    if query.device.type != "cpu" or query.is_nested or is_dtensor(query):
        return run(query)
    if is_watched():
        query = query if mask is None else query.masked_fill(_sees_nothing(mask, key), 0.0)
        out = run(query)
    else:
        out = run(query)
        if bool((out.detach()[..., :1].abs() > 0).all()):  # no row is zero or NaN
            return out
        broken = _is_broken(query.detach())
        if not bool(broken.any() | _is_broken(key.detach()).any()):
            return out  # zero rows have no visible keys
        if mask is not None and bool((broken[..., None] & _sees_nothing(mask, key)).any()):
            # In a row without visible keys, 0·NaN would reach the gradient of every key.
            out = run(query.masked_fill(_sees_nothing(mask, key), 0.0))
    return out + _lost_nan(out.detach(), query.detach(), key.detach(), mask)


def _lost_nan(out: Tensor, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Return NaN [..., Tq, 1] for rows whose scores are all NaN, else 0.

    torch's CPU kernel treats these rows as rows without visible keys and returns zeros. In these rows, the query or
    every visible key is non-finite, so checking the first visible key is sufficient.
    """
    broken = F.pad(_is_broken(key), (0, 1))  # extra slot for rows without visible keys
    if key.dim() > 2 and key.shape[-3] != query.shape[-3]:
        broken = broken.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-2)
    if mask is None:
        lost = _is_broken(query) | broken[..., :1]
    else:
        first = _first_seen(mask, key.shape[-2]).expand(out.shape[:-1])
        sees = first < key.shape[-2]
        lost = (_is_broken(query) | broken.expand(*out.shape[:-2], -1).gather(-1, first)) & sees
    return torch.where((lost & (out == 0).all(-1)).unsqueeze(-1), math.nan, 0.0).to(out.dtype)


def _sees_nothing(mask: Tensor, key: Tensor) -> Tensor:
    """Return which rows have no visible key, [..., Tq, 1]."""
    return (_first_seen(mask, key.shape[-2]) == key.shape[-2]).unsqueeze(-1)


def _first_seen(mask: Tensor, keys: int) -> Tensor:
    """Return the first slot [..., Tq] that the mask does not set to −∞; `keys` if there is none.

    Computed as a minimum, because torch.compile does not vectorise a search for the first True.
    """
    seen = mask if mask.dtype == torch.bool else mask.detach() > -math.inf
    slots = torch.arange(mask.shape[-1], dtype=torch.int32, device=mask.device)
    return F.pad(torch.where(seen, slots, keys), (0, 1), value=keys).amin(-1).to(torch.int64)


def _is_broken(x: Tensor) -> Tensor:
    """Return which vectors along the last axis are not finite."""
    return (x * 0).sum(-1).isnan()


def torch_mask(call: AttentionCall, start: int, stop: int) -> tuple[Tensor | None, bool]:
    """Return torch's `attn_mask` and `is_causal` for the slots [start, stop); a mask is built only if needed."""
    context = call.context
    if context.is_plain and context.left is None:
        if context.right is None or context.queries == 1:
            return None, False  # [start, stop) already excludes all hidden keys
        if context.right == 0 and context.slot == 0:
            return None, True
    visible = context.dense(start, stop)
    bias = call.bias
    if bias is None:
        return visible, False
    bias = bias[..., start:stop]
    if isinstance(call.beta, Tensor) or call.beta != 1.0:
        beta = call.beta[..., None] if isinstance(call.beta, Tensor) else call.beta
        # Hidden entries are excluded, as −∞·β may be NaN. fp32, so that the bias is not rounded twice.
        bias = torch.where(shown(bias), bias.to(torch.promote_types(bias.dtype, torch.float32)), 0.0) * beta
    else:
        bias = bias.to(torch.promote_types(bias.dtype, call.query.dtype))
    if call.query.dtype == torch.float64:
        bias = bias.to(torch.float64)
    elif bias.dtype != call.query.dtype:
        bias = bias.to(torch.float32)
    return bias if visible is None else torch.where(visible, bias, -math.inf), False


def attend_in_one_call(
    policy: Policy,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    visible: Tensor | None,
) -> Tensor | None:
    """Fast path for torch's own arguments: return the output, or None if one torch call does not suffice."""
    uniform = policy.uniform
    if uniform != 1.0 and (uniform is not None or not isinstance(policy, FormulaPolicy)):
        return None
    layout = read_layout(query, key, value, enable_gqa)
    scale, dropout_p, _ = read_numbers(scale, dropout_p, None, is_causal, enable_gqa)
    queries, keys = query.shape[-2], key.shape[-2]
    rule = read_causal_bias(attn_mask, queries, keys, query.device, is_causal=is_causal, aligned=False)
    if rule is not None:
        if not isinstance(rule.slot, int) or rule.slot != 0:
            return None
        attn_mask, is_causal = None, True
    if not _is_torchs_mask(layout, query, key, attn_mask, is_causal):
        return None
    if visible is not None:
        visible = per_row(layout, visible, queries, query.device)
    if uniform == 1.0:
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    refuse_unknown_length(policy, query, known=visible is not None)
    if not isinstance(policy, FormulaPolicy) or query.dim() != 4 or is_watched() or is_dtensor(query):
        return None
    scale = default_scale(query) if scale is None else scale
    beta = recurring_temperature(policy, query, key, attn_mask, is_causal, visible)
    if isinstance(beta, float):
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale * beta, enable_gqa)
    # On other devices dispatch chooses the backend for half precision.
    if beta is None or (query.device.type != "cpu" and autocast_dtype(query).itemsize == 2):
        return None
    return attend_by_row(query, key, value, beta, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _is_torchs_mask(layout: Layout, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Whether torch's function accepts the mask unchanged; invalid masks raise."""
    if mask is None:
        return True
    if is_causal:
        return False
    check_mask(layout, mask, query.shape[-2], key.shape[-2], query.device)
    return mask.dim() >= 2 and mask.dtype in (torch.bool, query.dtype, torch.float32)
