"""torch's own scaled-dot-product attention, with β folded into the query."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from attnscale.backends.call import AttentionCall
from attnscale.context import shown
from attnscale.scratch import multiply

# torch's own function, whatever `torch.nn.functional.scaled_dot_product_attention` is at the moment.
TORCH_ATTENTION: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention


class SdpaBackend:
    """β goes into q, in fp32 and rounded once; a β shared by all rows goes through `scale` and is not rounded."""

    name = "sdpa"
    automatic = True
    plain = True

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
        query, scale = call.query, call.scale
        if isinstance(call.beta, Tensor):
            query, scale = fold(query, call.beta, scale, call.peak)
        else:
            scale *= call.beta
        mask, is_causal = torch_mask(call, start, stop)
        grouped = key.shape[1] != query.shape[1] or value.shape[1] != query.shape[1]
        return attend(query, key, value, mask, call.dropout_p, is_causal, scale, grouped)


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
    """torch's attention; on CUDA its fused kernels take a mask or grouped heads, but not both."""
    if grouped and mask is not None and query.is_cuda:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
        grouped = False
    return torch_attention()(
        query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


def torch_attention() -> Callable[..., Tensor]:
    """torch's function, or what others have put in its place (context parallelism does); ours would call itself."""
    function: Callable[..., Tensor] = F.scaled_dot_product_attention
    while function is not TORCH_ATTENTION and hasattr(function, "replaces"):
        function = function.replaces
    return function


def fold(query: Tensor, beta: Tensor, scale: float, peak: float) -> tuple[Tensor, float]:
    """The query [B, H, Tq, D] times β [B|1, H|1, Tq] and the scale that goes with it: their product is q·β·scale.

    In fp16 the query is also divided by a power of two that covers the policy's β, and the scale multiplied by it,
    both exactly: so β·q overflows only where q does.
    """
    if query.dtype != torch.float16:
        return multiply(query, beta.unsqueeze(-1)), scale
    cover = 2.0 ** math.ceil(math.log2(max(1.0, peak)))
    return multiply(query, (beta / cover).unsqueeze(-1)), scale * cover


def torch_mask(call: AttentionCall, start: int, stop: int) -> tuple[Tensor | None, bool]:
    """`attn_mask` and `is_causal` for torch over the slots [start, stop); no mask is built where torch needs none."""
    context = call.context
    if context.is_plain and context.left is None:
        if context.right is None or context.queries == 1:
            return None, False  # every key outside the range is already cut off
        if context.right == 0 and context.slot == 0:
            return None, True
    visible = context.dense(start, stop)
    bias = call.bias
    if bias is None:
        return visible, False
    bias = bias[..., start:stop]
    if isinstance(call.beta, Tensor) or call.beta != 1.0:
        beta = call.beta[..., None] if isinstance(call.beta, Tensor) else call.beta
        # Hidden entries stay out of the product: −∞·β is −∞ at best. fp32, so that the bias is not rounded twice.
        bias = torch.where(shown(bias), bias.to(torch.promote_types(bias.dtype, torch.float32)), 0.0) * beta
    else:
        bias = bias.to(torch.promote_types(bias.dtype, call.query.dtype))
    if call.query.dtype == torch.float64:
        bias = bias.to(torch.float64)
    elif bias.dtype != call.query.dtype:
        bias = bias.to(torch.float32)
    return bias if visible is None else torch.where(visible, bias, -math.inf), False
