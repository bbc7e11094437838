"""The drop-in function: scaled-dot-product attention whose temperature knows how many keys each row sees."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from attnscale.backends import dispatch, reference
from attnscale.backends.dispatch import Dispatch
from attnscale.backends.sdpa import TORCH_ATTENTION, attend
from attnscale.backends.torch_calls import short_attention
from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import Window
from attnscale.call.layout import Layout, read_layout
from attnscale.call.nested import attend_nested
from attnscale.call.parse import Packing
from attnscale.call.tap import Tap, listen
from attnscale.policies import Policy, PolicySpec
from attnscale.prepare import prepare, read_numbers, resolve
from attnscale.statistics import AttentionOutput, StatsRequest, checked_request


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    policy: PolicySpec = "constant",
    window: int | Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    positions: Tensor | None = None,
    key_padding: Tensor | None = None,
    document_ids: Tensor | None = None,
    cu_seqlens: Packing | None = None,
    cache_offset: int | Tensor | None = None,
    visible: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention with the positional signature of torch's, and logits β(n)·(softcap(scale·q·k) + mask).

    n is what each row may see, whatever hides the rest. With the default policy this is standard attention, at no cost.

    Args:
        query, key, value: [..., H, Tq, D], [..., Hkv, Tk, D], [..., Hkv, Tk, Dv]; without H it is one head.
        attn_mask: broadcasts to [..., H, Tq, Tk]; bool (True: visible) or additive (≤ −10⁴: hidden). The finite part of
            an additive mask is part of the score: β multiplies it.
        dropout_p, scale, enable_gqa: as in torch.
        is_causal: row i sees up to its own slot; slots are torch's top-left ones unless `cache_offset`, `positions` or
            `cu_seqlens` say otherwise. Goes together with every other restriction.
        policy: a name, a mapping, a YAML file or a policy. What learns must be built once: `build_policy(...)`.
        window: w for keys nearer than w slots (with `is_causal`: the last w, itself included), or (left, right).
        softcap: c for c·tanh(score / c), before the mask is added.
        sinks: [H] logits of a key with value zero, not scaled by β and not counted in n.
        positions: [Tq] or [..., Tq], 0-based position of each query in its sequence.
        key_padding: [Tk] or [..., Tk], True where the key is padding (as `key_padding_mask` of torch).
        document_ids: [Tk] or [..., Tk]; a run of equal ids is one packed document.
        cu_seqlens: [documents + 1] edges of packed documents; a pair if queries and keys are packed differently (the
            queries of a document are then its last tokens).
        cache_offset: int or [B], keys in the cache before the first query: query i lies in slot `cache_offset + i`.
        visible: n itself, [Tq], [B, Tq] or [B, H, Tq], where this process does not hold all keys (context parallel).
        backend: "auto", or a name that is then used or refused, never replaced.

    >>> import torch
    >>> q = k = v = torch.randn(1, 2, 16, 8)
    >>> scaled_dot_product_attention(q, k, v, is_causal=True, policy="log").shape
    torch.Size([1, 2, 16, 8])
    """
    chosen = resolve(policy)
    rules = (window, softcap, sinks, positions, key_padding, document_ids, cu_seqlens, cache_offset)
    dispatch.check_backend(backend)
    torchs = backend in ("auto", "sdpa") and all(rule is None for rule in rules)  # in the words of torch's function
    if getattr(query, "is_nested", False):
        if torchs and visible is None and chosen.uniform == 1.0:
            return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        dense_only = {
            "attn_mask": attn_mask,
            "positions": positions,
            "key_padding": key_padding,
            "document_ids": document_ids,
            "cu_seqlens": cu_seqlens,
            "cache_offset": cache_offset,
            "visible": visible,
        }
        same = functools.partial(
            scaled_dot_product_attention,
            dropout_p=dropout_p,
            scale=scale,
            enable_gqa=enable_gqa,
            policy=chosen,
            window=window,
            softcap=softcap,
            sinks=sinks,
            backend=backend,
        )
        return attend_nested(same, query, key, value, is_causal, dense_only)
    layout = read_layout(query, key, value, enable_gqa)
    scale, dropout_p, softcap = read_numbers(scale, dropout_p, softcap, is_causal, enable_gqa)
    if torchs:
        out = short_attention(
            layout, chosen, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, visible
        )
        if out is not None:
            return out
    call = prepare(
        layout,
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        policy=chosen,
        softcap=softcap,
        sinks=sinks,
        window=window,
        positions=positions,
        key_padding=key_padding,
        document_ids=document_ids,
        cu_seqlens=cu_seqlens,
        cache_offset=cache_offset,
        visible=visible,
    )
    return layout.restore(dispatch.run(call, backend))


def attention_with_stats(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    request: StatsRequest | None = None,
    **kwargs: Any,
) -> AttentionOutput:
    """`scaled_dot_product_attention`, same arguments, with statistics of its rows: `AttentionOutput(output, stats)`.

    The output carries gradients, the statistics do not. Nothing of size Tq × Tk is held, forward or backward. With
    `StatsRequest(rows=R)` the output is computed as without statistics, and R rows are looked at beside it.

    >>> import torch
    >>> q = torch.randn(1, 2, 16, 8)
    >>> output, stats = attention_with_stats(q, q, q, is_causal=True, policy="log")
    >>> stats.entropy.shape, bool((stats.w_max <= 1).all())
    (torch.Size([1, 2, 16]), True)
    """
    request = checked_request(request)
    layout, call, backend, policy = _bind(query, key, value, *args, **kwargs)
    output, stats = dispatch.measure(call, request, backend)
    ceiling = getattr(policy, "ceiling", None)
    if ceiling is not None and isinstance(call.beta, Tensor):
        rows = call.row_beta().detach()
        stats = stats._replace(at_ceiling=(rows if stats.rows is None else rows[..., stats.rows]) >= ceiling)
    return AttentionOutput(layout.restore(output), layout.restore_stats(stats))


def attention_through(tap: Tap | None, *, own_keys: bool | None = None) -> Callable[..., Tensor]:
    """`scaled_dot_product_attention`, heard by a tap if there is one and it is open.

    `own_keys` says whether queries and keys are made of the same tokens, which a listener asks; None where the caller
    does not know.
    """
    if tap is None or not tap.open:
        return scaled_dot_product_attention

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        layout, call, backend, _ = _bind(*args, **kwargs)
        return layout.restore(_listen(tap, call, own_keys, lambda call: dispatch.run(call, backend)))

    return attend


def _listen(tap: Tap, call: AttentionCall, own_keys: bool | None, run: Callable[[AttentionCall], Tensor]) -> Tensor:
    """`run(call)`, heard by a tap, which is told in which slots the rows' own keys lie."""
    told = replace(call, context=call.context.with_own_slots(own_keys))
    return listen(tap, told, lambda heard: run(replace(heard, context=call.context)))


def attention_and_weights(
    tap: Tap | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout_p: float,
    own_keys: bool | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """Output and, after dropout, the weights [..., H, Tq, Tk] that it is made of; heard by a tap that is open."""
    layout, call, _, _ = _bind(query, key, value, **arguments)
    weights = F.dropout(reference.attention_weights(call).to(call.query.dtype), dropout_p)
    if tap is None or not tap.open:
        output = reference.mix(weights, call)
    else:
        output = _listen(tap, call, own_keys, lambda call: reference.mix(weights, call))
    return layout.restore(output), layout.restore(weights)


def attention_weights(query: Tensor, key: Tensor, **arguments: Any) -> Tensor:
    """The weights [..., H, Tq, Tk] that `scaled_dot_product_attention` would use, for looking at small cases.

    Takes its keywords but for `value` and `backend`. Memory is that of the result; rows that see nothing are zero.

    >>> import torch
    >>> q = torch.zeros(1, 1, 3, 4)
    >>> attention_weights(q, q, is_causal=True)[0, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    layout, call, _, _ = _bind(query, key, key, **arguments)
    return layout.restore(reference.attention_weights(call))


def explain_dispatch(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, request: StatsRequest | None = None, **kwargs: Any
) -> Dispatch:
    """Which backend `scaled_dot_product_attention` would use for these arguments, and why not the others.

    With a request, what `attention_with_stats` would use; for sampled rows, to compute the output.

    >>> import torch
    >>> q = torch.randn(1, 2, 16, 8)
    >>> print(explain_dispatch(q, q, q, is_causal=True, policy="log", softcap=30.0))
    backend    usable  reason
    sdpa       no      torch's SDPA has no softcap
    triton     ...
    blockwise  yes     chosen: the first usable one
    reference  yes     usable, where asked for by name
    """
    _, call, backend, _ = _bind(query, key, value, *args, **kwargs)
    return dispatch.explain(call, backend, None if request is None else checked_request(request))


def _bind(*args: Any, **kwargs: Any) -> tuple[Layout, AttentionCall, str, Policy]:
    """The call that `scaled_dot_product_attention` would make of its arguments, with backend and policy."""
    given = _arguments(*args, **kwargs)
    backend, policy = given.pop("backend"), resolve(given.pop("policy"))
    dispatch.check_backend(backend)
    enable_gqa = given.pop("enable_gqa")
    layout = read_layout(given["query"], given["key"], given["value"], enable_gqa)
    numbers = (given.pop("scale"), given.pop("dropout_p"), given.pop("softcap"))
    scale, dropout_p, softcap = read_numbers(*numbers, given["is_causal"], enable_gqa)
    given |= {"scale": scale, "dropout_p": dropout_p, "softcap": softcap}
    return layout, prepare(layout, policy=policy, **given), backend, policy


def _arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Those of `scaled_dot_product_attention` by name; several times faster than binding its signature."""
    by_place = dict(zip(_DEFAULTS, args, strict=False))
    given = {**_DEFAULTS, **by_place, **kwargs}
    missing = any(given[name] is inspect.Parameter.empty for name in ("query", "key", "value"))
    unclear = len(given) > len(_DEFAULTS) or by_place.keys() & kwargs.keys()
    if missing or unclear or len(args) > _PLACES:
        _SIGNATURE.bind(*args, **kwargs)  # which says what is wrong
    return given


# Whoever replaces torch's function by ours (`attnscale.patch_torch` does it properly) does not make it call itself.
scaled_dot_product_attention.replaces = TORCH_ATTENTION  # type: ignore[attr-defined]

_SIGNATURE = inspect.signature(scaled_dot_product_attention)
_DEFAULTS = {name: parameter.default for name, parameter in _SIGNATURE.parameters.items()}
_PLACES = sum(parameter.kind == parameter.POSITIONAL_OR_KEYWORD for parameter in _SIGNATURE.parameters.values())
