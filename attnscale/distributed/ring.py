"""Ring attention: keys and values are passed from process to process, and partial results are merged.

A process holds at most two shards of keys. The exception is an exact Λ, which needs whole rows: the keys, without
values, are then gathered. The blockwise backend computes each shard, on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import _functional_collectives as collectives

from attnscale._util.processes import wait
from attnscale.backends import dispatch
from attnscale.backends.blockwise import BlockwiseBackend
from attnscale.call.attention_call import AttentionCall, FlatCall
from attnscale.call.context import Context
from attnscale.distributed.gather import gather_keys
from attnscale.distributed.ring_statistics import add_gaps, add_shard_shares
from attnscale.distributed.shards import TokenShards, take_tokens
from attnscale.errors import BackendError
from attnscale.policies.base import ScorePolicy
from attnscale.statistics import AttentionOutput, RowStats, StatsRequest, sample_rows
from attnscale.statistics.request import DIFFERENTIABLE
from attnscale.statistics.rows.attend import attend_rows, measure_statistics, rows_backward
from attnscale.statistics.rows.gradients import RowTerms, row_terms

BLOCKWISE = BlockwiseBackend()


class Ring:
    """Local rows against the keys and values of one shard after another."""

    def __init__(
        self, call: AttentionCall, shards: TokenShards, backend: str, held: tuple[Tensor, Tensor] | None = None
    ) -> None:
        if backend not in ("auto", BLOCKWISE.name):
            raise BackendError(
                f"backend={backend!r} cannot compute method='ring': expected 'auto' or {BLOCKWISE.name!r}"
            )
        self._given = call
        # Keys of a shard are sorted by position, so an interval of slots is also an interval of the shard.
        order = shards.own.argsort(-1)
        self._call = replace(call, key=take_tokens(call.key, order), value=take_tokens(call.value, order))
        self._rotation = Rotation(shards, held)

    def score_statistics(self, policy: ScorePolicy, request: StatsRequest | None) -> tuple[RowStats, Tensor | None]:
        """Return the statistics of the local rows at β = 1, and Λ with a gradient if the policy needs it."""
        if policy.gradient == "through":
            return dispatch.score_statistics(policy, self._with_all_keys(self._given), BLOCKWISE, request)
        return self._statistics(replace(self._call, sinks=None), dispatch.gaps_for(policy, request)), None

    def measure(self, beta: float | Tensor, request: StatsRequest | None) -> AttentionOutput:
        """Return output and statistics of the local rows."""
        call = replace(self._call, beta=beta)
        if request is None:
            return AttentionOutput(self._attend(call, partial_request(None)).output, RowStats.counted(call))
        queries = call.query.shape[2]
        if request.rows is not None and request.rows < queries:
            output = self._attend(call, partial_request(None)).output
            rows = sample_rows(queries, request.rows, request.seed, output.device)
            return AttentionOutput(output, self._statistics(call.select(rows), request)._replace(rows=rows))
        output, stats = self._attend(call, partial_request(request))
        return AttentionOutput(output, self._finish(call, request, stats))

    def _attend(self, call: AttentionCall, request: StatsRequest) -> AttentionOutput:
        """Return output and merged statistics of some rows, which carry gradients if requested."""
        found: list[RowStats] = []
        rotation, dropout = self._rotation, call.dropout_p > 0.0
        seeds = torch.randint(2**62, (rotation.shards.size,), device="cpu") if dropout else None
        tensors = call.query, call.key, call.value, call.row_beta(), call.sinks, call.bias
        output, floats = _RingAttention.apply(call, rotation, seeds, request, found, *tensors)  # type: ignore[no-untyped-call]
        carried = dict(zip(DIFFERENTIABLE, floats.unbind(-1), strict=False))
        return AttentionOutput(output, found[0]._replace(**{name: carried[name] for name in request.with_gradients}))

    def _statistics(self, call: AttentionCall, request: StatsRequest) -> RowStats:
        """Return the statistics without the output; only keys are passed around."""
        call = replace(call if request.differentiable else call.detached(), dropout_p=0.0, value=call.value[..., :0])
        if not request.softmax:
            return self._finish(call, request, RowStats.counted(call))
        return self._finish(call, request, self._attend(call, partial_request(request)).stats)

    @torch.no_grad()
    def _finish(self, call: AttentionCall, request: StatsRequest, stats: RowStats) -> RowStats:
        """Keep the requested statistics, and add those that need further passes of the keys, without gradients."""
        call, shards = call.detached(), self._rotation.keys
        stats = stats._replace(with_sink=call.sinks is not None and request.softmax)
        stats = add_shard_shares(call, request, shards, self._rotation.local_slots, stats).only(request)
        if request.accumulation == "exact":
            found = measure_statistics(self._with_all_keys(call), request.gaps_alone())
            names = ("gap_counts", "accumulation", "criticality")
            return stats._replace(**{name: getattr(found, name) for name in names})
        return add_gaps(call, request, shards, stats) if request.gaps else stats

    def _with_all_keys(self, call: AttentionCall) -> AttentionCall:
        """Return the call with the keys of all processes in sequence order and no values, to compute its scores."""
        held = self._rotation.held
        if held is None or torch.is_grad_enabled():
            held = gather_keys(self._given.key, self._given.value[..., :0], self._rotation.shards)
        return replace(call, key=held[0], value=held[1][..., :0])


class Rotation:
    """Passes tensors around the ring and tracks their source rank.

    With `held`, the keys and values of all processes in sequence order, the forward pass sends nothing.
    """

    def __init__(self, shards: TokenShards, held: tuple[Tensor, Tensor] | None = None) -> None:
        self.shards, self.held = shards, held
        self.places = shards.slots.sort(-1).values  # [P, B|1, L], in the key order of the shards

    def keys(self, call: AttentionCall) -> Iterator[tuple[int, AttentionCall]]:
        """Yield each rank and the call against its keys, local shard first."""
        for source, (key, value) in self.forward(call, values=False):
            yield source, self.part(call, source, key, value)

    def local_slots(self, source: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Convert slots [B|1, ...] of the sequence to slots of a shard; also return whether they are in the shard."""
        places = self.places[source]
        batch = max(places.shape[0], slots.shape[0])
        places, flat = places.expand(batch, -1).contiguous(), slots.expand(batch, *slots.shape[1:]).flatten(1)
        local = torch.searchsorted(places, flat.contiguous()).clamp_(max=places.shape[1] - 1)
        shape = batch, *slots.shape[1:]
        return local.view(shape), (places.gather(-1, local) == flat).view(shape)

    def global_slots(self, source: int, slots: Tensor) -> Tensor:
        """Convert slots [B, H, Tq] of a shard to slots of the sequence; negative slots are unchanged."""
        places = self.places[source].expand(slots.shape[0], -1)
        found = places.gather(-1, slots.clamp(min=0).flatten(1)).view(slots.shape)
        return torch.where(slots < 0, slots, found)

    def local_winner(self, source: int, winner: Tensor) -> Tensor:
        """Convert slots [B, H, Tq] of the sequence to slots of a shard; −1 if they are not in the shard."""
        local, held = self.local_slots(source, winner)
        return torch.where(held, local, -1)

    def forward(self, call: AttentionCall, *, values: bool) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield each rank with its keys and values (empty without `values`), local shard first."""
        if self.held is None:
            yield from self.turn(call.key, call.value if values else call.value[..., :0])
            return
        key, value = self.held[0], self.held[1] if values else self.held[1][..., :0]
        for step in range(self.shards.size):
            source = (self.shards.rank - step) % self.shards.size
            yield source, [take_tokens(x, self.places[source]) for x in (key, value)]

    def turn(self, *tensors: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield each rank with its tensors. The next transfer overlaps with their use."""
        flat = torch.cat([x.reshape(-1) for x in tensors])
        for step in range(self.shards.size):
            coming = self.send(flat) if step + 1 < self.shards.size else None
            parts = torch.split(flat, [x.numel() for x in tensors])
            shaped = [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]
            yield (self.shards.rank - step) % self.shards.size, shaped
            if coming is not None:
                flat = wait(coming)

    def send(self, flat: Tensor) -> Tensor:
        """Send a tensor to the next rank; `wait` returns the tensor of the previous rank."""
        size = self.shards.size
        return collectives.permute_tensor(
            flat.contiguous(), [(rank + 1) % size for rank in range(size)], self.shards.group
        )

    def part(self, call: AttentionCall, source: int, key: Tensor, value: Tensor) -> AttentionCall:
        """Return the call against the shard of one rank; attention sinks are part of the local shard only."""
        sinks = call.sinks if source == self.shards.rank else None
        return replace(call, key=key, value=value, context=self._context(call.context, source), sinks=sinks)

    def _context(self, context: Context, source: int) -> Context:
        """Return the visibility within a shard; an interval of slots stays an interval there."""
        places = self.places[source]  # [B|1, L]
        bounds = [bound.expand(max(bound.shape[0], places.shape[0]), -1) for bound in context.bounds()]
        sorted_places = places.expand(bounds[0].shape[0], -1).contiguous()
        first, last = (torch.searchsorted(sorted_places, bound.contiguous()) for bound in bounds)
        padding, mask = context.padding, context.mask
        if padding is not None:
            batch = max(padding.shape[0], places.shape[0])
            padding = padding.expand(batch, -1).gather(-1, places.expand(batch, -1))
        if mask is not None:
            mask = mask.expand(max(mask.shape[0], places.shape[0]), -1, -1, -1)
            mask = mask.gather(-1, self._columns(source, mask))
        keys = places.shape[1]
        return Context(context.queries, keys, context.device, first=first, last=last, padding=padding, mask=mask)

    def spread_mask(self, part: Tensor, source: int, keys: int) -> Tensor:
        """Scatter the mask gradient [B|1, H|1, Tq, L] of a shard into zeros for all keys."""
        whole = part.new_zeros(*part.shape[:-1], keys)
        return whole.scatter_(-1, self._columns(source, part), part)

    def _columns(self, source: int, mask: Tensor) -> Tensor:
        """Return the columns of a mask [B, H|1, Tq, T] that belong to a shard."""
        return self.places[source][:, None, None].expand(mask.shape[0], *mask.shape[1:3], -1)


def partial_request(request: StatsRequest | None) -> StatsRequest:
    """Return the statistics needed from each shard to merge the parts."""
    if request is None:
        return StatsRequest(entropy=False)
    logits = replace(request.with_lse(), gap_thresholds=None, accumulation=None, rows=None)
    return replace(logits, lse=True, max_logit=True, w_max=True)


def reduce_outputs(
    call: AttentionCall, rotation: Rotation, request: StatsRequest, *, values: bool, seeds: Tensor | None = None
) -> AttentionOutput:
    """Return the merged output and statistics of all shards, in at least fp32; `seeds` are per-shard dropout seeds."""
    # fp32, so that the output is rounded once and not once per shard.
    call = replace(call, query=call.query.to(torch.promote_types(call.query.dtype, torch.float32)))
    total: AttentionOutput | None = None
    for source, (key, value) in rotation.forward(call, values=values):
        part = rotation.part(call, source, key, value)
        output, measures = attend_rows(part, request, seed=None if seeds is None else seeds[source])
        measures = measures.renumbered(partial(rotation.global_slots, source))
        stats = measures.to_stats(request, RowStats.counted(part, with_sink=True), part.row_beta())
        found = AttentionOutput(output, stats)
        total = found if total is None else total.merge(found)
    return cast("AttentionOutput", total)  # a process group has at least one process


def _as_stats(floats: Tensor, lse: Tensor, winner: Tensor | None) -> RowStats:
    named: dict[str, Any] = dict(zip(DIFFERENTIABLE, floats.unbind(-1), strict=True))
    return RowStats(lse, winner=winner, **named)


class _RingAttention(torch.autograd.Function):
    """Forward and backward pass of the ring, with the statistics that may carry gradients as a second output.

    All statistics are appended to `found`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: AttentionCall,
        rotation: Rotation,
        seeds: Tensor | None,
        request: StatsRequest,
        found: list[RowStats],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        plain = replace(call.detached(), dropout_p=call.dropout_p)
        total = reduce_outputs(plain, rotation, request, values=call.value.shape[-1] > 0, seeds=seeds)
        found.append(total.stats)
        stats, nothing = total.stats, torch.zeros_like(total.stats.lse)
        floats = (getattr(stats, name) for name in DIFFERENTIABLE) if request.differentiable else ()
        packed = torch.stack([nothing if x is None else x for x in floats] or [nothing], dim=-1)
        ctx.call, ctx.rotation, ctx.seeds, ctx.request = plain, rotation, seeds, request
        ctx.save_for_backward(*tensors, total.output, stats.lse, packed, stats.winner)
        if not request.differentiable:
            ctx.mark_non_differentiable(packed)
        return total.output.to(call.query.dtype), packed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, of_stats: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, beta, sinks, bias, output, lse, packed, winner = ctx.saved_tensors
        call = replace(ctx.call, query=query, key=key, value=value, sinks=sinks)
        rotation: Rotation = ctx.rotation
        wide = torch.promote_types(query.dtype, torch.float32)
        dquery, dbeta = (torch.zeros_like(x, dtype=wide) for x in (query, beta))
        dsinks: Tensor | None = None
        dbias = torch.zeros_like(bias) if ctx.needs_input_grad[-1] else None
        terms = RowTerms()
        if ctx.request.differentiable:
            terms = row_terms(ctx.request, *(_as_stats(x, lse, winner) for x in (of_stats, packed)))
        # Gradients follow their shard one step behind, and one last step returns them to its rank.
        travelling = key.new_zeros(key.numel() + value.numel(), dtype=wide)
        for source, (its_key, its_value) in rotation.turn(key, value):
            if source != rotation.shards.rank:
                travelling = wait(rotation.send(travelling))
            part = rotation.part(call, source, its_key.to(wide), its_value.to(wide))
            part = replace(part, query=query.to(wide), beta=beta.to(wide))
            seed = None if ctx.seeds is None else ctx.seeds[source]
            arguments = gradient.to(wide), output, lse, seed, False, dbias is not None
            here = terms if winner is None else terms._replace(winner=rotation.local_winner(source, winner))
            dq, dk, dv, db, of_mask, ds = rows_backward(*FlatCall.of(part), *here, *arguments)
            dquery += dq
            dbeta += db
            dsinks = dsinks if part.sinks is None else ds
            if dbias is not None:
                dbias += rotation.spread_mask(of_mask, source, bias.shape[-1]).sum_to_size(bias.shape)
            travelling = travelling + torch.cat([dk.reshape(-1), dv.reshape(-1)])
        if rotation.shards.size > 1:
            travelling = wait(rotation.send(travelling))
        dkey, dvalue = torch.split(travelling, [key.numel(), value.numel()])
        dkey, dvalue = dkey.view_as(key).to(key.dtype), dvalue.view_as(value).to(value.dtype)
        nothing = (None,) * 5
        return *nothing, dquery.to(query.dtype), dkey, dvalue, dbeta.to(beta.dtype), dsinks, dbias
