"""The front door: scaled-dot-product attention whose temperature depends on how many keys each row sees."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from attnscale._util.processes import OwnHeads
from attnscale._util.tracing import refuse_dtensor
from attnscale.backends import dispatch, reference
from attnscale.backends.dispatch import Dispatch
from attnscale.backends.sdpa import TORCH_ATTENTION, attend, attend_in_one_call
from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import Window
from attnscale.call.layout import Layout, check_sinks, default_scale, read_layout, read_numbers
from attnscale.call.parse import KeyRules, Packing, describe
from attnscale.call.tap import Tap
from attnscale.call.torch_forms import attend_nested
from attnscale.errors import ArgumentTypeError
from attnscale.policies import Policy, PolicySpec
from attnscale.policies.base import reads_scores
from attnscale.policies.build import resolve
from attnscale.policies.temperature import refuse_unknown_length, temperature
from attnscale.statistics import AttentionOutput, RowStats, Span, StatsRequest, checked_request, find_places


class ScoreRules(KeyRules, total=False):
    """Keywords of attention beyond torch's, but for `policy` and `backend`; see `scaled_dot_product_attention`."""

    softcap: float | None
    sinks: Tensor | None


class AttentionRules(ScoreRules, total=False):
    """The same with `backend`."""

    backend: str


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
        cache_offset: int or [B], keys in the cache before the first query: query i lies in slot `cache_offset + i`; or
            [B|1, Tq], the slot of each query, where the queries are some of the tokens whose keys are given.
        visible: n itself, [Tq], [B, Tq] or [B, H, Tq], where this process does not hold all keys (context parallel).
        backend: "auto", or a name that is then used or refused, never replaced.

    >>> import torch
    >>> q = k = v = torch.randn(1, 2, 16, 8)
    >>> scaled_dot_product_attention(q, k, v, is_causal=True, policy="log").shape
    torch.Size([1, 2, 16, 8])
    """
    chosen = resolve(policy)
    dispatch.check_backend(backend)
    rules: ScoreRules = {
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
        "positions": positions,
        "key_padding": key_padding,
        "document_ids": document_ids,
        "cu_seqlens": cu_seqlens,
        "cache_offset": cache_offset,
    }
    torchs = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    only_torchs = backend in ("auto", "sdpa") and all(rule is None for rule in rules.values())
    if getattr(query, "is_nested", False):
        if only_torchs and visible is None and chosen.uniform == 1.0:
            return attend(*torchs)
        options: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "scale": scale}
        options |= {"enable_gqa": enable_gqa, "policy": chosen, "backend": backend, "visible": visible, **rules}
        return attend_nested(scaled_dot_product_attention, query, key, value, is_causal=is_causal, **options)
    if only_torchs:
        out = attend_in_one_call(chosen, *torchs, visible)
        if out is not None:
            return out
    rules["visible"] = visible
    layout, call, _, _ = bind(*torchs, policy=chosen, backend=backend, **rules)
    prepared = dispatch.prepare(call, chosen, backend)
    return layout.restore(dispatch.run(prepared.call, prepared.backend))


# So that it does not call itself where a user assigns it to `torch.nn.functional` (see `sdpa.torch_attention`).
scaled_dot_product_attention.replaces = TORCH_ATTENTION  # type: ignore[attr-defined]


def attention_with_stats(
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
    request: StatsRequest | None = None,
    **rules: Unpack[AttentionRules],
) -> AttentionOutput:
    """`scaled_dot_product_attention`, same arguments, with statistics of its rows: `AttentionOutput(output, stats)`.

    The output carries gradients, the statistics do not. Nothing of size Tq × Tk is held, forward or backward. With
    `StatsRequest(rows=R)` the output is computed as without statistics, and R rows are measured besides.

    >>> import torch
    >>> q = torch.randn(1, 2, 16, 8)
    >>> output, stats = attention_with_stats(q, q, q, is_causal=True, policy="log")
    >>> stats.entropy.shape, bool((stats.w_max <= 1).all())
    (torch.Size([1, 2, 16]), True)
    """
    request = checked_request(request)
    layout, call, backend, chosen = bind(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, policy=policy, **rules
    )
    call, measuring, known = dispatch.prepare(call, chosen, backend, request)
    output, stats = dispatch.measure(call, request, measuring, known)
    return finished(layout, output, stats._replace(places=find_places(call.context)), call, chosen)


def finished(layout: Layout, output: Tensor, stats: RowStats, call: AttentionCall, policy: Policy) -> AttentionOutput:
    """What a call returns: in the shape of its arguments, with what its policy knows of the rows.

    That is `at_ceiling` where it has a ceiling, and `heads` where it is one for some of the heads of a layer.
    """
    ceiling = getattr(policy, "ceiling", None)
    if ceiling is not None and isinstance(call.beta, Tensor):
        beta = call.row_beta().detach()
        stats = stats._replace(at_ceiling=(beta if stats.rows is None else beta[..., stats.rows]) >= ceiling)
    own: OwnHeads | None = getattr(policy, "own_heads", None)
    if own is not None:
        heads = call.query.shape[1]
        stats = stats._replace(heads=Span(own.part * heads, (own.part + 1) * heads))
    stats = stats if len(layout.lead) == 2 else stats.restored(layout.restore)
    return AttentionOutput(layout.restore(output), stats)


def explain_dispatch(
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
    request: StatsRequest | None = None,
    **rules: Unpack[AttentionRules],
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
    reference  yes     usable, only on explicit request
    """
    _, call, backend, chosen = bind(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, policy=policy, **rules
    )
    by_row = reads_scores(chosen)
    if not by_row:
        call = replace(call, beta=temperature(chosen, call.context, call.query))
    return dispatch.explain(call, backend, None if request is None else checked_request(request), by_row=by_row)


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    policy: PolicySpec = "constant",
    **rules: Unpack[ScoreRules],
) -> Tensor:
    """The weights [..., H, Tq, Tk] that `scaled_dot_product_attention` would use, before dropout, for small cases.

    Takes its keywords but for `value` and `backend`. Memory is that of the result; rows that see nothing are zero.

    >>> import torch
    >>> q = torch.zeros(1, 1, 3, 4)
    >>> attention_weights(q, q, is_causal=True)[0, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    layout, call, backend, chosen = bind(
        query, key, key, attn_mask, dropout_p, is_causal, scale, enable_gqa, policy=policy, **rules
    )
    return layout.restore(reference.attention_weights(dispatch.prepare(call, chosen, backend).call))


def attention_through(tap: Tap | None, *, own_keys: bool | None = None) -> Callable[..., Tensor]:
    """`scaled_dot_product_attention`, reported to a tap if there is one and it is open.

    `own_keys` says whether queries and keys are made of the same tokens; None where the caller does not know.
    """
    if tap is None or not tap.open:
        return scaled_dot_product_attention

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        layout, call, backend, policy = bind(*args, **kwargs)
        prepared = dispatch.prepare(call, policy, backend)
        return layout.restore(_listen(tap, prepared.call, own_keys, lambda call: dispatch.run(call, prepared.backend)))

    return attend


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
    """Output and the weights [..., H, Tq, Tk], after dropout, that it is made of; reported to a tap that is open."""
    layout, call, backend, policy = bind(query, key, value, **arguments)
    call = dispatch.prepare(call, policy, backend).call
    weights = F.dropout(reference.attention_weights(call).to(call.query.dtype), dropout_p)
    output = _listen(tap, call, own_keys, lambda call: reference.mix(weights, call))
    return layout.restore(output), layout.restore(weights)


def _listen(
    tap: Tap | None, call: AttentionCall, own_keys: bool | None, run: Callable[[AttentionCall], Tensor]
) -> Tensor:
    """`run(call)`, reported to a tap that is open with the slots in which the rows' own keys lie."""
    if tap is None or not tap.open:
        return run(call)
    reported = replace(call, context=call.context.with_own_slots(own_keys))
    return tap.report(tap.id, reported, lambda passed: run(replace(passed, context=call.context)))


class Bound(NamedTuple):
    """Arguments of an attention call, read and checked."""

    layout: Layout
    call: AttentionCall  # at β = 1
    backend: str
    policy: Policy


def bind(
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
    backend: str = "auto",
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tokens: int | None = None,
    **rules: Unpack[KeyRules],
) -> Bound:
    """The arguments of `scaled_dot_product_attention` as a call at β = 1, the backend's name and the policy.

    `tokens` is the number of keys of all processes, where each holds some of them; the rules are then said of all.
    """
    unknown = rules.keys() - KeyRules.__optional_keys__
    if unknown:
        name, known = min(unknown), AttentionRules.__optional_keys__ | {"policy"}
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ArgumentTypeError(
            f"got an unexpected keyword argument {name!r}: expected one of {', '.join(sorted(known))}{hint}"
        )
    dispatch.check_backend(backend)
    chosen = resolve(policy)
    layout = read_layout(query, key, value, enable_gqa)
    scale, dropout_p, softcap = read_numbers(scale, dropout_p, softcap, is_causal, enable_gqa)
    given = tokens is not None or rules.get("visible") is not None or rules.get("positions") is not None
    refuse_unknown_length(chosen, query, known=given)
    refuse_dtensor(query)
    check_sinks(layout, sinks, query.device)
    keys = key.shape[-2] if tokens is None else tokens
    context = describe(layout, query.shape[-2], keys, query.device, is_causal=is_causal, attn_mask=attn_mask, **rules)
    call = AttentionCall(
        query=layout.flatten_query(query),
        key=layout.flatten_key(key),
        value=layout.flatten_key(value),
        context=context,
        scale=default_scale(query) if scale is None else scale,
        dropout_p=dropout_p,
        softcap=softcap,
        sinks=sinks,
    )
    return Bound(layout, call, backend, chosen)
