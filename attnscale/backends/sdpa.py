"""torch's own scaled-dot-product attention, with β folded into the query."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from attnscale._util import state
from attnscale._util.tracing import autocast_dtype, autocast_off, has_autocast, is_dtensor, is_watched
from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import shown
from attnscale.call.parse import check_mask, per_row
from attnscale.call.tap import Attended
from attnscale.call.torch_arguments import (
    TORCH_ATTENTION,
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

FUSED = int(SDPBackend.FLASH_ATTENTION.value)  # what `torch._fused_sdp_choice` calls the fused CPU kernel


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
        return self._attend(call, bounded=False).out

    def run_bounded(self, call: AttentionCall) -> Attended:
        """The lse, if torch runs its fused CPU kernel. On other devices there is none."""
        return self._attend(call, bounded=True)

    def _attend(self, call: AttentionCall, *, bounded: bool) -> Attended:
        key, value = call.key, call.value
        start, stop = call.context.key_range()
        if stop - start != call.context.keys:
            key, value = key[..., start:stop, :], value[..., start:stop, :]
        query, beta = call.query, call.beta
        mask, is_causal = torch_mask(call, start, stop)
        grouped = key.shape[1] != query.shape[1] or value.shape[1] != query.shape[1]
        options = mask, call.dropout_p, is_causal
        if isinstance(beta, Tensor):
            return attend_by_row(query, key, value, beta, *options, call.scale, grouped, bounded)
        return attend_bounded(query, key, value, *options, call.scale * beta, grouped, bounded)


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
    bounded: bool = False,
) -> Attended:
    """Compute torch's attention with the query [B, H, Tq, D] times β [B|1, H|1, Tq]; precision as in `SdpaBackend`."""
    dtype, options = autocast_dtype(query), (mask, dropout_p, is_causal, scale, grouped, bounded)
    if dtype.itemsize > 2:
        return attend_bounded(_multiply(query, beta.unsqueeze(-1)), key, value, *options)
    if dtype == torch.bfloat16 and query.device.type != "cpu":
        return _attend_in_parts(query, key, value, beta, *options)
    with autocast_off(query.device):
        product = query * beta.unsqueeze(-1)  # in fp32, the dtype of β
        attended = attend_bounded(product, key.float(), value.float(), *options)
        return attended._replace(out=attended.out.to(dtype))


def _multiply(query: Tensor, beta: Tensor) -> Tensor:
    """Return β·q, computed in the wider dtype and rounded once to that of q; in scratch memory without autograd."""
    if torch.is_grad_enabled() or query.device.type != "cpu" or is_watched():
        product = query * beta
        return product if product.dtype == query.dtype else product.to(query.dtype)
    return torch.mul(query, beta, out=state.SCRATCH.room("product", query.shape, query))


def _attend_in_parts(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, *options: Any) -> Attended:
    """Compute attention in bfloat16 with β·q split into three bfloat16 terms, which hold the 24 bits of float32."""
    dtype, value_dim = torch.bfloat16, value.shape[-1]
    product = query.float() * beta.unsqueeze(-1)
    high = product.to(dtype)
    middle = (product - high).to(dtype)
    low = (product - high - middle).to(dtype)
    keys = torch.cat(3 * [key.to(dtype)], -1)
    # torch's fused kernels require equal head dimensions of keys and values.
    value = F.pad(value.to(dtype), (0, max(0, keys.shape[-1] - value_dim)))
    attended = attend_bounded(torch.cat([high, middle, low], -1), keys, value, *options)
    return attended._replace(out=attended.out[..., :value_dim])


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
    """The output of `attend_bounded`."""
    return attend_bounded(query, key, value, mask, dropout_p, is_causal, scale, grouped).out


def attend_bounded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
    bounded: bool = False,
) -> Attended:
    """Compute torch's attention, with NaN and rows without visible keys handled as in the other backends.

    `bounded` adds the lse, if known.

    Its fused CUDA kernels support a mask or grouped heads, but not both.
    """
    if grouped and mask is not None and query.is_cuda:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
        grouped = False

    def run(query: Tensor) -> Attended:
        if bounded:
            found = attend_with_lse(query, key, value, mask, dropout_p, is_causal, scale, grouped)
            if found is not None:
                return found
        out = torch_attention()(
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
        return Attended(out)

    if query.device.type != "cpu" or query.is_nested or is_dtensor(query):
        return run(query)
    if is_watched():
        query = query if mask is None else query.masked_fill(_sees_nothing(mask, key), 0.0)
        out, lse, _ = run(query)
    else:
        out, lse, _ = run(query)
        if bool((out.detach()[..., :1].abs() > 0).all()):  # no row is zero or NaN
            return Attended(out, lse)
        broken = _is_broken(query.detach())
        if not bool(broken.any() | _is_broken(key.detach()).any()):
            return Attended(out, _hide_unseeing(lse, mask, key))  # zero rows have no visible keys
        if mask is not None and bool((broken[..., None] & _sees_nothing(mask, key)).any()):
            # In a row without visible keys, 0·NaN would reach the gradient of every key.
            out, lse, _ = run(query.masked_fill(_sees_nothing(mask, key), 0.0))
    lost, lse = _lost_nan(out.detach(), query.detach(), key.detach(), mask), _hide_unseeing(lse, mask, key)
    return Attended(out + lost, None if lse is None else lse + lost[..., 0])


def attend_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
) -> Attended | None:
    """Output and lse of torch's fused CPU kernel, if torch's function would run this kernel: the same bits."""
    if query.device.type != "cpu" or torch_attention() is not TORCH_ATTENTION:
        return None
    if has_autocast(query.device):
        query, key, value = (x.to(autocast_dtype(x)) for x in (query, key, value))
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(autocast_dtype(mask))
    if torch.compiler.is_compiling():
        fused = _is_fused(query, key, value, mask, dropout_p)
    elif is_watched() or any(type(x) not in (Tensor, Parameter) for x in (query, key, value)):
        return None
    else:
        choice = torch._fused_sdp_choice(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped)
        fused = choice == FUSED
    if not fused:
        return None
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, -math.inf)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)
    return Attended(out, lse.detach())


def _is_fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float) -> bool:
    """What `torch._fused_sdp_choice` checks on the CPU; torch.compile cannot trace that function."""
    tensors = query, key, value
    return (
        torch._C._get_flash_sdp_enabled()
        and dropout_p == 0.0
        and all(x.dim() == 4 and x.dtype == query.dtype and x.stride(-1) == 1 for x in tensors)
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and key.shape[1] == value.shape[1]
        and 0 not in (*query.shape[:3], key.shape[2])
        and (mask is None or (mask.dim() == 4 and not mask.requires_grad))
    )


def _hide_unseeing(lse: Tensor | None, mask: Tensor | None, key: Tensor) -> Tensor | None:
    """The lse with −∞, in place of torch's 0, in rows that see nothing."""
    return lse if lse is None or mask is None else lse.masked_fill(_sees_nothing(mask, key)[..., 0], -math.inf)


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
    # Counted from `keys`, so that the value of the padding is a constant: torch.export would specialise on a length.
    slots = torch.arange(mask.shape[-1], dtype=torch.int32, device=mask.device) - keys
    return F.pad(torch.where(seen, slots, 0), (0, 1)).amin(-1).to(torch.int64) + keys


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
    scaled = isinstance(call.beta, Tensor) or call.beta != 1.0
    if scaled:
        beta = call.beta[..., None] if isinstance(call.beta, Tensor) else call.beta
        # Hidden entries are excluded, as −∞·β may be NaN. fp32, so that the bias is not rounded twice.
        bias = torch.where(shown(bias), bias.to(torch.promote_types(bias.dtype, torch.float32)), 0.0) * beta
    elif bias.dtype != torch.float32:  # which torch takes as it is
        bias = bias.to(torch.promote_types(bias.dtype, call.query.dtype))
    if call.query.dtype == torch.float64 and scaled:
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
    return attend_by_row(query, key, value, beta, attn_mask, dropout_p, is_causal, scale, enable_gqa).out


def _is_torchs_mask(layout: Layout, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Whether torch's function accepts the mask unchanged; invalid masks raise."""
    if mask is None:
        return True
    if is_causal:
        return False
    check_mask(layout, mask, query.shape[-2], key.shape[-2], query.device)
    return mask.dim() >= 2 and mask.dtype in (torch.bool, query.dtype, torch.float32)
