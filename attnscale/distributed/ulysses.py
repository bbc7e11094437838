"""Context parallelism by all-to-all (DeepSpeed-Ulysses): each process computes all rows of a subset of the heads."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.utils._pytree import tree_flatten, tree_unflatten

from attnscale.backends import dispatch
from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import Context
from attnscale.call.tap import Attended, Tap
from attnscale.distributed.shards import TokenShards, take_tokens
from attnscale.errors import reject
from attnscale.policies.base import ScorePolicy
from attnscale.statistics import AttentionOutput, RowStats, StatsRequest, sample_rows


class Ulysses:
    """Local heads over the whole sequence. Outputs and statistics are sent back to the processes of their rows.

    Calls are reported to a tap with these heads and all of their rows.
    """

    def __init__(
        self, call: AttentionCall, shards: TokenShards, backend: str, whole: Context, tap: Tap | None = None
    ) -> None:
        heads, size = call.query.shape[1], shards.size
        if heads % size:
            reject("heads", heads, f"a multiple of the {size} processes for method='ulysses'; use 'gather' or 'ring'")
        self._rows, self._shards, self._backend, self._tap = call, shards, backend, tap
        self._place = shards.in_turn()
        self._order = self._place.argsort(-1)
        key, value = (_repeated(x, heads, size) for x in (call.key, call.value))
        query, key, value = self._to_heads(call.query, key, value)
        own = slice(shards.rank * heads // size, (shards.rank + 1) * heads // size)
        sinks = None if call.sinks is None else call.sinks[own]
        self._call = replace(call, query=query, key=key, value=value, context=whole, sinks=sinks)

    def score_statistics(self, policy: ScorePolicy, request: StatsRequest | None) -> tuple[RowStats, Tensor | None]:
        """Return the statistics of the local rows at β = 1, and Λ with a gradient if the policy needs it."""
        chosen = dispatch.choose(self._call, self._backend, by_row=True)
        stats, through = dispatch.score_statistics(policy, self._call, chosen, request)
        return self._stats_of_rows(stats), None if through is None else self._to_rows(through[..., None])[..., 0]

    def measure(self, beta: float | Tensor, request: StatsRequest | None) -> AttentionOutput:
        """Return output and statistics of the local rows."""
        if isinstance(beta, Tensor):
            (beta,) = self._to_heads(beta.expand(self._rows.query.shape[:3])[..., None])
            beta = beta[..., 0]
        output, found = self._attend_heads(replace(self._call, beta=beta), request)
        if request is None or found is None:
            return AttentionOutput(self._to_rows(output), RowStats.counted(self._rows))
        stats, queries = self._stats_of_rows(found), self._rows.query.shape[2]
        if request.rows is not None and request.rows < queries:
            rows = sample_rows(queries, request.rows, request.seed, output.device)
            stats = stats.select(rows)
        return AttentionOutput(self._to_rows(output), stats)

    def _attend_heads(self, call: AttentionCall, request: StatsRequest | None) -> tuple[Tensor, RowStats | None]:
        """Return output and requested statistics of the local heads, and report the call to an open tap."""
        found: list[RowStats] = []

        def run(passed: AttentionCall) -> Attended:
            if request is None:
                return dispatch.run_bounded(passed, dispatch.choose(passed, self._backend))
            of_all = replace(request, rows=None)
            output, stats = dispatch.measure(passed, of_all, dispatch.choose(passed, self._backend, of_all))
            found.append(stats)
            return Attended(output)

        if self._tap is None or not self._tap.tracking:
            output = run(call).out
        else:
            output = self._tap.report(self._tap.id, replace(call, context=call.context.with_own_slots(True)), run)
        return output, found[0] if found else None

    def _to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """Convert [B, H, L, ·] of the local rows to [B, H/P, T, ·] of the local heads, with one collective."""
        size = self._shards.size
        parts = [x.unflatten(1, (size, -1)).movedim(1, 0) for x in tensors]  # type: ignore[no-untyped-call]
        sent = torch.cat([part.reshape(size, -1) for part in parts], dim=1)
        received = collectives.all_to_all_single_autograd(sent, None, None, self._shards.group)
        flats = torch.split(received, [part[0].numel() for part in parts], dim=1)
        blocks = (flat.reshape(part.shape) for flat, part in zip(flats, parts, strict=True))  # [P, B, H/P, L, ·]
        return [take_tokens(block.movedim(0, 2).flatten(2, 3), self._order) for block in blocks]

    def _to_rows(self, x: Tensor) -> Tensor:
        """Inverse of `_to_heads`, for one tensor."""
        size = self._shards.size
        in_turn = take_tokens(x, self._place)
        parts = in_turn.unflatten(2, (size, -1)).movedim(2, 0).contiguous()  # type: ignore[no-untyped-call]
        received = collectives.all_to_all_single_autograd(parts, None, None, self._shards.group)
        return torch.cat(received.unbind(0), dim=1)  # a copy: a view would still be an asynchronous tensor

    def _stats_of_rows(self, stats: RowStats) -> RowStats:
        """Convert statistics [B, H/P, T] of the local heads to [B, H, L] of the local rows, with one collective.

        Its backward pass returns the gradients of the statistics that carry them.
        """
        moved = RowStats.counted(self._rows)._replace(with_sink=stats.with_sink)
        found, structure = tree_flatten(stats._replace(rows=None, places=None))
        tensors = [x for x in found if isinstance(x, Tensor)]
        if not tensors:
            return moved
        # One column per value of a row, in fp64, which represents slots and key counts exactly.
        columns = [x.reshape(*x.shape[:3], -1).to(torch.float64) for x in tensors]
        parts = torch.split(self._to_rows(torch.cat(columns, dim=-1)), [x.shape[-1] for x in columns], dim=-1)
        shaped = iter(
            (part if x.requires_grad else part.detach()).to(x.dtype).reshape(*part.shape[:3], *x.shape[3:])
            for part, x in zip(parts, tensors, strict=True)
        )
        values: RowStats = tree_unflatten([next(shaped) if isinstance(x, Tensor) else x for x in found], structure)
        return values._replace(visible=moved.visible, visible_given=moved.visible_given)


def _repeated(x: Tensor, heads: int, size: int) -> Tensor:
    """Repeat the heads of keys or values [B, Hkv, L, ·] until they can be split evenly over the processes."""
    times = size // math.gcd(x.shape[1], size)
    if heads % (x.shape[1] * times):
        reject("key heads", x.shape[1], f"a number divisible among {size} processes; use method='gather' or 'ring'")
    return x if times == 1 else x.repeat_interleave(times, dim=1)
