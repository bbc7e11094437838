"""The short way for the calls that models make: one call of torch's function, with a β that is 1 or remembered."""

from __future__ import annotations

import torch
from torch import Tensor

from attnscale._util.processes import is_dtensor
from attnscale._util.tracing import autocast_dtype, is_watched
from attnscale.backends.sdpa import attend, attend_by_row
from attnscale.call.causal_bias import read_causal_bias
from attnscale.call.layout import Layout, read_layout
from attnscale.call.parse import check_mask, per_row
from attnscale.call.score_options import default_scale, read_numbers
from attnscale.policies import FormulaPolicy, Policy
from attnscale.policies.temperature import recurring_temperature, refuse_unknown_length


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
    """The output of a call with the arguments of torch's function; None where one call of that does not suffice."""
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
    # Other devices have a better backend for half precision: dispatch decides.
    if beta is None or (query.device.type != "cpu" and autocast_dtype(query).itemsize == 2):
        return None
    return attend_by_row(query, key, value, beta, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _is_torchs_mask(layout: Layout, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Whether torch's function takes the mask as it is; a mask that cannot be used at all is refused."""
    if mask is None:
        return True
    if is_causal:
        return False
    check_mask(layout, mask, query.shape[-2], key.shape[-2], query.device)
    return mask.dim() >= 2 and mask.dtype in (torch.bool, query.dtype, torch.float32)
