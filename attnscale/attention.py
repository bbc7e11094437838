"""Public attention functions: scaled-dot-product attention with a temperature that depends on the visible keys."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from attnscale._util.processes import OwnHeads
from attnscale._util.tracing import refuse_dtensor
from attnscale.backends import dispatch, reference
from attnscale.backends.dispatch import Dispatch
from attnscale.backends.sdpa import attend, attend_in_one_call, attend_with_lse
from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import Window
from attnscale.call.parse import KeyRules, Packing, describe
from attnscale.call.tap import Attended, Run, Tap
from attnscale.call.torch_arguments import (
    TORCH_ATTENTION,
    Layout,
    attend_nested,
    check_sinks,
    default_scale,
    read_layout,
    read_numbers,
)
from attnscale.errors import ArgumentTypeError, AttnScaleError
from attnscale.policies import Policy, PolicySpec
from attnscale.policies.base import LengthPolicy, reads_scores, refuse_unknown_length
from attnscale.policies.build import resolve
from attnscale.policies.temperature import temperature
from attnscale.statistics import AttentionOutput, RowStats, Span, StatsRequest, checked_request, find_places


class ScoreRules(KeyRules, total=False):
    """Keywords of `scaled_dot_product_attention` that torch lacks, except `policy` and `backend`."""

    softcap: float | None
    sinks: Tensor | None


class AttentionRules(ScoreRules, total=False):
    """`ScoreRules` plus `backend`."""

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
    """Scaled-dot-product attention with logits β(n)·(softcap(scale·q·k) + mask).

    The positional arguments are those of `torch.nn.functional.scaled_dot_product_attention`. n is the number of keys
    visible to a query row after all masks and restrictions. The default policy is standard attention, at no extra cost.

    Args:
        query: [..., H, Tq, D]. A tensor without the head axis has one head.
        key: [..., Hkv, Tk, D].
        value: [..., Hkv, Tk, Dv].
        attn_mask: broadcasts to [..., H, Tq, Tk]. Bool (True: visible) or additive (≤ −10⁴: hidden). The finite part of
            an additive mask belongs to the score: β multiplies it.
        dropout_p: as in torch.
        is_causal: row i sees the keys up to its own slot. Slots start at the top left, as in torch, unless
            `cache_offset`, `positions` or `cu_seqlens` set them. Can be combined with every other restriction.
        scale: as in torch; default 1/√D.
        enable_gqa: as in torch; H must then be a multiple of Hkv.
        policy: a name, a mapping, a YAML file or a policy object. Build a learned policy once with `build_policy(...)`.
        window: w for keys less than w slots away (with `is_causal`: the last w, own slot included), or (left, right).
        softcap: c replaces the score by c·tanh(score / c), before the mask is added.
        sinks: [H], logits of a key with value zero. β does not scale them, and n does not count them.
        positions: [Tq] or [..., Tq], 0-based position of each query in its sequence.
        key_padding: [Tk] or [..., Tk], True for padding (as torch's `key_padding_mask`).
        document_ids: [Tk] or [..., Tk]. A run of equal ids is one packed document.
        cu_seqlens: [documents + 1], boundaries of packed documents. A pair if queries and keys are packed differently;
            the queries of a document are then its last tokens.
        cache_offset: int or [B], number of cached keys before the first query: query i is in slot `cache_offset + i`.
            [B|1, Tq] gives the slot of each query, if the queries are a subset of the tokens.
        visible: n itself, [Tq], [B, Tq] or [B, H, Tq], if this process does not hold all keys (context parallelism).
        backend: "auto", "sdpa", "triton", "blockwise" or "reference". An explicit backend never falls back.

    Returns:
        The output [..., H, Tq, Dv] in the dtype of the query, or of autocast. Rows without visible keys are zero.

    Raises:
        ArgumentError: a shape or value is not accepted (also a `ValueError`).
        ArgumentTypeError: a type, dtype or keyword is not accepted (also a `TypeError`).
        BackendError: the explicit backend cannot compute this call, or no backend can (also a `RuntimeError`).

    Example:
        >>> import torch
        >>> q = k = v = torch.randn(1, 2, 16, 8)
        >>> scaled_dot_product_attention(q, k, v, is_causal=True, policy="log").shape
        torch.Size([1, 2, 16, 8])
    """
    chosen = policy if isinstance(policy, LengthPolicy) else resolve(policy)
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


# Prevents infinite recursion if a user assigns this function to `torch.nn.functional` (see `torch_attention`).
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
    """`scaled_dot_product_attention` with statistics per query row.

    The output carries gradients; so do the statistics of `StatsRequest(differentiable=True)`, otherwise they are
    detached. Neither pass stores a Tq × Tk matrix. With `StatsRequest(rows=R)` the output is computed as without
    statistics, and R sampled rows are measured separately.

    Args:
        query: [..., H, Tq, D].
        key: [..., Hkv, Tk, D].
        value: [..., Hkv, Tk, Dv].
        attn_mask: as in `scaled_dot_product_attention`; so are `dropout_p`, `is_causal`, `scale` and `enable_gqa`.
        policy: a name, a mapping, a YAML file or a policy object.
        request: the statistics to compute. Default: `w_max`, `entropy`, `lse` and `max_logit` of all rows.
        **rules: the other keywords of `scaled_dot_product_attention`, such as `window`, `key_padding` and `backend`.

    Returns:
        `AttentionOutput(output, stats)`: the output [..., H, Tq, Dv], and `RowStats` with tensors [..., H, Tq], or
        [..., H, R] for sampled rows.

    Raises:
        ArgumentError: a shape or value is not accepted.
        ArgumentTypeError: a type, dtype or keyword is not accepted.
        BackendError: the explicit backend cannot compute this call or these statistics.

    Example:
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
    """The result of a call, in the shape of its arguments.

    Adds `at_ceiling` if the policy has a ceiling, and `heads` if the policy covers a part of a layer's heads.
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
    """Report the backend that `scaled_dot_product_attention` would use, with a reason for every backend.

    Attention is not computed, but the first use on a GPU may run the self-check of the Triton kernels. With a request,
    the report is for `attention_with_stats`; for sampled rows it names the backend of the output.

    Args:
        query: [..., H, Tq, D].
        key: [..., Hkv, Tk, D].
        value: [..., Hkv, Tk, Dv].
        attn_mask: as in `scaled_dot_product_attention`; so are `dropout_p`, `is_causal`, `scale` and `enable_gqa`.
        policy: a name, a mapping, a YAML file or a policy object.
        request: the statistics of `attention_with_stats`, or None for the output alone.
        **rules: the other keywords of `scaled_dot_product_attention`.

    Returns:
        A `Dispatch`. `chosen` is the name of the backend; `print` shows the table.

    Raises:
        ArgumentError: a shape or value is not accepted.
        ArgumentTypeError: a type, dtype or keyword is not accepted.

    Example:
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
    """The attention weights of `scaled_dot_product_attention`, before dropout.

    For small inputs: the full Tq × Tk matrix is materialised.

    Args:
        query: [..., H, Tq, D].
        key: [..., Hkv, Tk, D].
        attn_mask: as in `scaled_dot_product_attention`; so are `is_causal`, `scale` and `enable_gqa`.
        dropout_p: checked, but not applied.
        policy: a name, a mapping, a YAML file or a policy object.
        **rules: the other keywords of `scaled_dot_product_attention`, except `backend`.

    Returns:
        The weights [..., H, Tq, Tk]. Rows without visible keys are zero.

    Raises:
        ArgumentError: a shape or value is not accepted.
        ArgumentTypeError: a type, dtype or keyword is not accepted.

    Example:
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
    """`scaled_dot_product_attention`, reported to the tap if it measures or tracks calls. Nested tensors are not.

    `own_keys`: queries and keys come from the same tokens; None if unknown.
    """
    if tap is None or not tap.tracking:
        return scaled_dot_product_attention

    def reported(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.is_nested:
            return scaled_dot_product_attention(query, *args, **kwargs)
        layout, call, backend, policy = bind(query, *args, **kwargs)
        call, chosen, _ = dispatch.prepare(call, policy, backend)
        return layout.restore(_listen(tap, call, own_keys, lambda call: dispatch.run_bounded(call, chosen)))

    return reported


def report_attention(
    tap: Tap,
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    **options: Any,
) -> Tensor:
    """Return `attend(...)` of these arguments, and report the call to the tap as standard attention.

    `attend` is torch's function. It gets the same values in the same layout, so its output is bit-identical. If torch
    would run its fused CPU kernel, that kernel is called, which also returns the lse.
    """
    rest = attn_mask, dropout_p, is_causal
    try:
        layout, call, _, _ = bind(query, key, value, *rest, **options)
    except AttnScaleError as error:
        if not torch.compiler.is_compiling():
            tap.listener.skip(None, str(error))
        return attend(query, key, value, *rest, **options)
    if any(flat.numel() != x.numel() for flat, x in ((call.query, query), (call.key, key), (call.value, value))):
        if not torch.compiler.is_compiling():
            tap.listener.skip(None, "query, key and value broadcast against each other; expand them first")
        return attend(query, key, value, *rest, **options)

    def run(passed: AttentionCall) -> Attended:
        given = (_shaped(passed.query, query.shape), _shaped(passed.key, key.shape), _shaped(passed.value, value.shape))
        if attend is TORCH_ATTENTION:
            scale, grouped = options.get("scale"), options.get("enable_gqa", False)
            found = attend_with_lse(*given, *rest, scale, grouped)
            if found is not None:
                return found
        out = attend(*given, *rest, **options)
        return Attended(_shaped(out, (*passed.query.shape[:3], out.shape[-1])))

    return layout.restore(_listen(tap, call, None, run))


def _shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x if x.shape == tuple(shape) else x.reshape(shape)


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
    """Output, and its weights [..., H, Tq, Tk] after dropout. Reported to the tap if it measures or tracks calls."""
    layout, call, backend, policy = bind(query, key, value, **arguments)
    call = dispatch.prepare(call, policy, backend).call
    weights = F.dropout(reference.attention_weights(call).to(call.query.dtype), dropout_p)
    output = _listen(tap, call, own_keys, lambda call: Attended(reference.mix(weights, call)))
    return layout.restore(output), layout.restore(weights)


def _listen(tap: Tap | None, call: AttentionCall, own_keys: bool | None, run: Run) -> Tensor:
    """The output of `run(call)`. The tap receives the call with the slot of each row's own key."""
    if tap is None or not tap.tracking:
        return run(call).out
    reported = replace(call, context=call.context.with_own_slots(own_keys))
    return tap.report(tap.id, reported, lambda passed: run(replace(passed, context=call.context)))


class Bound(NamedTuple):
    """Parsed and checked arguments of an attention call."""

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
    """Parse and check the arguments of `scaled_dot_product_attention`.

    `tokens` is the total number of keys if several processes hold parts of them. The rules then describe all keys.
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
    chosen = policy if isinstance(policy, LengthPolicy) else resolve(policy)
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
