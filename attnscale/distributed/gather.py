"""Context parallelism by all-gather: each process computes its rows against the keys and values of all processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from attnscale._util.processes import wait
from attnscale.backends import dispatch
from attnscale.call.attention_call import AttentionCall
from attnscale.distributed.shards import TokenShards, take_tokens
from attnscale.policies.base import ScorePolicy
from attnscale.statistics import AttentionOutput, RowStats, StatsRequest


class Gather:
    """Local rows against gathered keys and values. The backward pass reduce-scatters their gradients."""

    def __init__(
        self, call: AttentionCall, shards: TokenShards, backend: str, held: tuple[Tensor, Tensor] | None = None
    ) -> None:
        if held is None:
            key, value = gather_keys(call.key, call.value, shards)
        else:
            key, value = _Held.apply(call.key, call.value, *held, shards)  # type: ignore[no-untyped-call]
        self._call = replace(call, key=key, value=value)
        self._backend = backend

    def score_statistics(self, policy: ScorePolicy, request: StatsRequest | None) -> tuple[RowStats, Tensor | None]:
        """Return the statistics of the local rows at β = 1, and Λ with a gradient if the policy needs it."""
        chosen = dispatch.choose(self._call, self._backend, by_row=True)
        return dispatch.score_statistics(policy, self._call, chosen, request)

    def measure(self, beta: float | Tensor, request: StatsRequest | None) -> AttentionOutput:
        """Return output and statistics of the local rows."""
        call = replace(self._call, beta=beta)
        if request is None:
            return AttentionOutput(dispatch.run(call, dispatch.choose(call, self._backend)), RowStats.counted(call))
        return dispatch.measure(call, request, dispatch.choose(call, self._backend, request))


def gather_keys(key: Tensor, value: Tensor, shards: TokenShards) -> tuple[Tensor, Tensor]:
    """Gather keys and values [B, Hkv, L, ·] of all processes in sequence order, with one collective."""
    both = torch.cat([key, value], dim=-1)[None].contiguous()
    everywhere = collectives.all_gather_single_autograd(both, 0, shards.group)  # [P, B, Hkv, L, D + Dv]
    in_order = take_tokens(everywhere.movedim(0, 2).flatten(2, 3), shards.in_turn().argsort(-1))
    found_key, found_value = torch.split(in_order, [key.shape[-1], value.shape[-1]], dim=-1)
    return found_key, found_value


class _Held(torch.autograd.Function):
    """Keys and values gathered earlier, as a differentiable function of the local keys and values."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, all_keys: Tensor, all_values: Tensor, shards: TokenShards
    ) -> tuple[Tensor, Tensor]:
        ctx.shards, ctx.sizes = shards, (key.shape[-1], value.shape[-1])
        return all_keys.view_as(all_keys), all_values.view_as(all_values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shards: TokenShards = ctx.shards
        in_turn = take_tokens(torch.cat(gradients, dim=-1), shards.in_turn())
        parts = in_turn.unflatten(2, (shards.size, -1)).movedim(2, 0).contiguous()  # type: ignore[no-untyped-call]
        own = wait(collectives.reduce_scatter_single(parts, "sum", 0, shards.group))[0]
        return *torch.split(own, ctx.sizes, dim=-1), None, None, None
