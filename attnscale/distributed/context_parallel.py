"""Attention over a sequence that is spread over processes; n is that of the whole sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Protocol, TypedDict

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from attnscale.attention import bind, finished
from attnscale.backends import dispatch
from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import Window
from attnscale.call.parse import describe
from attnscale.call.tap import Attended, Tap
from attnscale.call.torch_arguments import beneath_context_parallel
from attnscale.distributed.gather import Gather, gather_keys
from attnscale.distributed.ring import Ring
from attnscale.distributed.shards import TokenShards
from attnscale.distributed.ulysses import Ulysses
from attnscale.errors import ArgumentError, reject
from attnscale.policies import Policy, PolicySpec
from attnscale.policies.base import ScorePolicy, check_beta, reads_scores
from attnscale.policies.temperature import temperature
from attnscale.statistics import AttentionOutput, RowPlaces, RowStats, Span, StatsRequest, checked_request

Method = Literal["gather", "ulysses", "ring"]
METHODS: tuple[Method, ...] = ("gather", "ulysses", "ring")
# The methods in which a process keeps its rows.
BY_ROWS: dict[Method, type[Gather | Ring]] = {"gather": Gather, "ring": Ring}


class SequenceRules(TypedDict, total=False):
    """What rows may see, said of the whole sequence of T tokens, the same in every process; a mask is [..., L, T]."""

    attn_mask: Tensor | None
    window: int | Window | None
    key_padding: Tensor | None
    document_ids: Tensor | None
    cu_seqlens: Tensor | None


class Exchange(Protocol):
    """One of the three methods, with the tokens of a call."""

    def score_statistics(self, policy: ScorePolicy, request: StatsRequest | None) -> tuple[RowStats, Tensor | None]:
        """What `from_stats` of a policy is given for the rows of this process."""
        ...

    def measure(self, beta: float | Tensor, request: StatsRequest | None) -> AttentionOutput:
        """Output and statistics of the rows of this process."""
        ...


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mesh: DeviceMesh,
    positions: Tensor | TokenShards,
    is_causal: bool = False,
    policy: PolicySpec = "constant",
    request: StatsRequest | None = None,
    method: Method = "gather",
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
    tap: Tap | None = None,
    **rules: Unpack[SequenceRules],
) -> AttentionOutput:
    """Attention [..., H, L, Dv] of the L tokens of this process over the T tokens of all processes of a mesh.

    Every process calls it with its own tokens, as many as every other. β, statistics and the output are those of one
    process that holds the whole sequence; so are gradients, once those of parameters are summed over the mesh.

    Args:
        query, key, value: [..., H, L, D], [..., Hkv, L, D], [..., Hkv, L, Dv]: the tokens of this process.
        mesh: the processes that share the sequence; a DeviceMesh of one dimension, such as `mesh["cp"]`.
        positions: the place of each token in the whole sequence, 0 … T−1: [L] or [B|1, L] of this process, or [T] or
            [B|1, T] of all processes in turn, which is what torch's load balancers generate. `TokenShards.of(...)`
            makes either ready for several layers.
        method: "gather" (keys of all processes everywhere), "ulysses" (all rows of some heads) or "ring" (keys travel,
            and memory does not grow with the number of processes); attnscale/distributed/README.md says how to choose.
        request: which statistics of the rows to compute; None: none but n.
        is_causal, dropout_p, scale, enable_gqa, softcap, sinks, policy, backend: as in
            `attnscale.scaled_dot_product_attention`.
        tap: where a monitor listens; a module passes its own.
        rules: `window`, `key_padding`, `document_ids`, `cu_seqlens` of the whole sequence, and `attn_mask` [..., L, T].

    >>> import torch
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> q = torch.randn(1, 2, 16, 8)
    >>> output, stats = context_parallel_attention(
    ...     q, q, q, mesh=init_device_mesh("cpu", (1,)), positions=torch.arange(16), is_causal=True, policy="log"
    ... )
    >>> output.shape, stats.visible[0, 0, -1].item()
    (torch.Size([1, 2, 16, 8]), 16)
    >>> torch.distributed.destroy_process_group()
    """
    if method not in METHODS:
        reject("method", method, f"one of {', '.join(map(repr, METHODS))}")
    request = None if request is None else checked_request(request)
    _check_tokens(query, key, value, rules, method)
    if not isinstance(positions, TokenShards):
        positions = TokenShards.of(positions, mesh, query.shape[-2])
    shards, tokens = positions, positions.tokens
    layout, call, backend, chosen = bind(
        query,
        key,
        value,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        policy=policy,
        backend=backend,
        softcap=softcap,
        sinks=sinks,
        tokens=tokens,
        cache_offset=shards.own,
        **rules,
    )

    with beneath_context_parallel():
        if method == "ulysses":
            whole = describe(layout, tokens, tokens, query.device, is_causal=is_causal, **rules)
            output, stats, call = _attend_shards(Ulysses(call, shards, backend, whole, tap), call, chosen, request)
        elif tap is None or not tap.open:
            output, stats, call = _attend_shards(BY_ROWS[method](call, shards, backend), call, chosen, request)
        else:
            output, stats, call = _attend_reported(tap, BY_ROWS[method], call, chosen, request, shards, backend)
    stats = stats._replace(places=RowPlaces(shards.own, (Span(0, tokens),)))
    return finished(layout, output, stats, call, chosen)


def _attend_shards(
    exchange: Exchange, call: AttentionCall, policy: Policy, request: StatsRequest | None
) -> tuple[Tensor, RowStats, AttentionCall]:
    """Output, statistics, and the call with its β."""
    call, known = _prepared(exchange, call, policy, request)
    return *_measured(exchange, call, request, known), call


def _prepared(
    exchange: Exchange, call: AttentionCall, policy: Policy, request: StatsRequest | None
) -> tuple[AttentionCall, RowStats | None]:
    """The call with its β, and the requested statistics of raw scores where β was made of them."""
    if not reads_scores(policy):
        return replace(call, beta=temperature(policy, call.context, call.query)), None
    stats, through = exchange.score_statistics(policy, request)
    call = replace(call, beta=check_beta(policy.from_stats(stats, through), call.query))
    return call, stats if dispatch.shares_gaps(policy, request) else None


def _measured(
    exchange: Exchange, call: AttentionCall, request: StatsRequest | None, known: RowStats | None
) -> AttentionOutput:
    if request is None or known is None:
        return exchange.measure(call.beta, request)
    output, stats = exchange.measure(call.beta, replace(request, gap_thresholds=None, accumulation=None))
    return AttentionOutput(output, dispatch.with_known_gaps(stats, known, call.row_beta().detach()))


def _attend_reported(
    tap: Tap,
    method: type[Gather | Ring],
    call: AttentionCall,
    policy: Policy,
    request: StatsRequest | None,
    shards: TokenShards,
    backend: str,
) -> tuple[Tensor, RowStats, AttentionCall]:
    """The same, reported to a tap.

    The listener measures rows of this process against the keys of all. These are gathered before the method would send
    them, which then need not: the same bytes travel. The gradients it is told are those of this process's tokens.
    """
    held = gather_keys(call.key.detach(), call.value.detach(), shards)
    call, known = _prepared(method(call, shards, backend, held), call, policy, request)
    measured = replace(call, key=held[0], value=held[1], context=call.context.with_own_slots(True))
    found: list[RowStats] = []

    def run(passed: AttentionCall) -> Attended:
        output, stats = _measured(method(passed, shards, backend, held), passed, request, known)
        found.append(stats)
        return Attended(output)

    return tap.report(tap.id, call, run, measured), found[0], call


def _check_tokens(query: Tensor, key: Tensor, value: Tensor, rules: SequenceRules, method: Method) -> None:
    if query.shape[-2] != key.shape[-2]:
        reject("key.shape[-2]", key.shape[-2], f"as many tokens as queries, {query.shape[-2]}: those of this process")
    if key.dim() > 2 and key.shape[-3] != value.shape[-3]:
        reject("value heads", value.shape[-3], f"as many as of keys, {key.shape[-3]}")
    if isinstance(rules.get("cu_seqlens"), (tuple, list)):
        raise ArgumentError(
            "a pair of cu_seqlens is not accepted: expected one tensor, the edges in the whole sequence"
        )
    if method == "ulysses" and rules.get("attn_mask") is not None:
        raise ArgumentError("attn_mask is not accepted by method='ulysses': use 'gather' or 'ring', or rules")
