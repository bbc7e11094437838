"""From the arguments of one attention to the `AttentionCall` that backends compute: checked, flattened, with its β."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnscale._util.checks import check_flag, read_number
from attnscale.call.attention_call import AttentionCall
from attnscale.call.context_parallel import refuse_context_parallel
from attnscale.call.layout import Layout
from attnscale.call.parse import describe
from attnscale.errors import BackendError, TensorError, reject, reject_type
from attnscale.policies import STATELESS, LengthPolicy, Policy, PolicySpec, build_policy
from attnscale.policies.temperature import temperature

# Built ahead, so that a name costs a look-up, also under torch.compile.
_BY_NAME: dict[str, Policy] = {name: build_policy(name) for name in STATELESS}


def prepare(
    layout: Layout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    *,
    policy: Policy,
    softcap: float | None,
    sinks: Tensor | None,
    **rules: Any,
) -> AttentionCall:
    """The call of tensors whose layout was read and numbers that were read; `rules` are those of `describe`."""
    known = rules.get("visible") is not None or rules.get("positions") is not None
    refuse_unknown_length(policy, query, known=known)
    _check_sinks(layout, sinks, query.device)
    context = describe(
        layout, query.shape[-2], key.shape[-2], query.device, is_causal=is_causal, attn_mask=attn_mask, **rules
    )
    call = AttentionCall(
        query=layout.flatten_query(query),
        key=layout.flatten_key(key),
        value=layout.flatten_key(value),
        context=context,
        beta=1.0,
        scale=default_scale(query) if scale is None else scale,
        dropout_p=dropout_p,
        softcap=softcap,
        sinks=sinks,
    )
    return replace(call, beta=temperature(policy, call))


def default_scale(query: Tensor) -> float:
    """1/√D, and 1 for heads without a dimension, whose scores are all 0."""
    return 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0


def refuse_unknown_length(policy: Policy, query: Tensor, *, known: bool) -> None:
    """Refuse where n is not that of this call: recorded by `torch.jit.trace`, or of one process's part of the keys."""
    if policy.uniform is not None or torch.compiler.is_compiling():
        return
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        raise BackendError(
            f"policy {policy!r} cannot be recorded by torch.jit.trace, which would keep the β of this length for every "
            "other one: use torch.export or torch.compile"
        )
    if not known:
        refuse_context_parallel(query, "gather the keys and pass positions=, or pass n itself as visible=")


def resolve(policy: PolicySpec) -> Policy:
    """The policy that is meant by a name, a mapping, a file or a policy."""
    if isinstance(policy, LengthPolicy):
        return policy
    if not isinstance(policy, str):
        return build_policy(policy)
    return _BY_NAME[policy] if policy in _BY_NAME else build_policy(policy)


def read_numbers(
    scale: object, dropout_p: object, softcap: object, is_causal: object, enable_gqa: object
) -> tuple[float | None, float, float | None]:
    """`scale`, `dropout_p` and `softcap` as plain floats; refuses what cannot be used, the flags included."""
    if scale is not None:
        scale = read_number("scale", scale, "a number or None")
    dropout_p = read_number("dropout_p", dropout_p, "a probability in [0, 1]")
    if not 0.0 <= dropout_p <= 1.0:
        reject("dropout_p", dropout_p, "a probability in [0, 1]", TensorError)
    if softcap is not None:
        softcap = read_number("softcap", softcap, "a number > 0 or None")
        if not softcap > 0.0:
            reject("softcap", softcap, "a number > 0 or None")
    if is_causal is not True and is_causal is not False:
        check_flag("is_causal", is_causal)
    if enable_gqa is not True and enable_gqa is not False:
        check_flag("enable_gqa", enable_gqa)
    return scale, dropout_p, softcap


def _check_sinks(layout: Layout, sinks: Tensor | None, device: torch.device) -> None:
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        reject_type("sinks", sinks, "a floating tensor [H], one logit per head")
    if tuple(sinks.shape) != (layout.heads,) or not sinks.dtype.is_floating_point or sinks.device != device:
        raise TensorError(
            f"sinks of shape {list(sinks.shape)}, {sinks.dtype}, on {sinks.device} is not accepted: expected "
            f"a floating tensor [{layout.heads}] on {device}, one logit per head"
        )
