"""What is tracked of every call: the largest logit of each head over all rows, and the first NaN or infinity.

Many backends compute a bound of each row's largest logit anyway. An exact pass over all scores is made only where the
bound does not suffice.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale._util.handles import Uncopied
from attnscale.call.attention_call import AttentionCall
from attnscale.call.tap import CallEvent
from attnscale.statistics.rows.attend import largest_row_logits

ORIGINS = ("query", "key", "value", "scores", "output gradient", "gradients")
ORDER = 1 << len(ORIGINS)
# The numbers of a fault per head: steps since the last report; ORDER · passes of the step before it + bits of ORIGINS;
# its row. Infinite if there is none.
FAULT = ("fault_offset", "fault", "fault_row")
# Elements per chunk when norms are computed, because a chunk may be upcast.
NUMBERS = 2**20


class MaxLogits(NamedTuple):
    """Bounds of the largest logit of each head, after temperature, over visible keys and all rows but padding.

    Rows with NaN do not count; `finite` reports them. Without bounds from the backend, `lower` is −∞ and `upper` +∞.

    Args:
        lower: [H], the largest logit is at least this.
        upper: [H], and at most this.
        finite: [H], False if the output of the head contained NaN or infinity.

    Example:
        >>> found = MaxLogits(torch.tensor([3.0, 1.0]), torch.tensor([3.0, 2.5]), torch.tensor([True, True]))
        >>> found.exact
        tensor([3., nan])
    """

    lower: Tensor
    upper: Tensor
    finite: Tensor

    @property
    def exact(self) -> Tensor:
        """The largest logit [H]; NaN where only bounds are known."""
        return torch.where(self.lower == self.upper, self.lower, math.nan)


class LogitTracker(Uncopied):
    """Collects the largest logits of a layer between two resets.

    Calls have a rank: 2 for training calls, 1 for other calls with gradients, 0 without gradients. Only calls of the
    highest rank count. A maximum does not change if a call is added twice, as by activation checkpointing.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit  # logits above it must be known exactly
        self.reset()

    def reset(self) -> None:
        """Discard all calls."""
        self._rank = -1
        self._largest: Tensor | None = None  # [3, H]: lower, upper, and 1 for an output that is not finite

    def add(self, rank: int, found: Tensor) -> None:
        """Add the numbers [3, H] of a call."""
        if rank > self._rank or self._largest is None:
            self._rank, self._largest = rank, found
        elif rank == self._rank:
            self._largest = torch.maximum(self._largest, found)

    def read(self) -> MaxLogits | None:
        """The largest logits since the last reset, or None without calls."""
        if self._largest is None:
            return None
        lower, upper, broken = self._largest.unbind()
        return MaxLogits(lower, upper, broken == 0)


def bound_largest(event: CallEvent, limit: float, *, everything: bool) -> Tensor:
    """Bounds of the largest logit of each head of a call, [2, H]: lower and upper; equal where they are exact.

    An exact pass is made over the scores of heads that may exceed the limit, or of all heads with `everything`, unless
    the bound of the backend is exact. On devices other than the CPU, comparing with the limit would synchronise, so any
    limit stands for `everything`.
    """
    bound, heads = event.result.bound, event.call.query.shape[1]
    call, padding = event.call.without_padding()
    on_host = call.query.device.type == "cpu"
    if event.result.exact or (bound is None and (everything or limit < math.inf)):
        exact = _largest_of_heads(largest_row_logits(call) if bound is None else bound, padding)
        return torch.stack([exact, exact])
    if bound is None:
        upper = torch.full((heads,), math.inf, device=call.query.device)
        return torch.stack([-upper, upper])
    upper = _largest_of_heads(bound, padding)
    found = torch.stack([upper - math.log(event.call.key.shape[2]), upper])
    if everything or (limit < math.inf and not on_host):
        return _largest_of_heads(largest_row_logits(call), padding).expand(2, heads)
    if limit < math.inf and bool((upper > limit).any()):
        above = (upper > limit).nonzero()[:, 0]
        found[:, above] = _largest_of_heads(largest_row_logits(select_heads(call, above)), padding)
    return found


def _largest_of_heads(rows: Tensor, padding: Tensor | None) -> Tensor:
    """The largest value [H] of rows [B, H, Tq], without NaN and padding rows [B|1, Tq]."""
    rows = torch.where(rows.isnan(), -math.inf, rows)
    rows = rows if padding is None else rows.masked_fill(padding[:, None], -math.inf)
    return rows.amax((0, 2)).to(torch.float32)


def select_heads(call: AttentionCall, heads: Tensor) -> AttentionCall:
    """The call for some of its query heads [N], each with its own key head."""
    context, beta = call.context, call.beta
    if context.mask is not None and context.mask.shape[1] > 1:
        context = replace(context, mask=context.mask[:, heads])
    if isinstance(beta, Tensor) and beta.shape[1] > 1:
        beta = beta[:, heads]
    key, value = (x[:, heads // (call.query.shape[1] // x.shape[1])] for x in (call.key, call.value))
    sinks = None if call.sinks is None else call.sinks[heads]
    return replace(call, query=call.query[:, heads], key=key, value=value, context=context, beta=beta, sinks=sinks)


class Faults(Uncopied):
    """The first fault of each head since the last reset. Stays on the device."""

    def __init__(self) -> None:
        self.first: Tensor | None = None  # [FAULT, H]

    def add(self, x: Tensor, origin: AttentionCall | str, offset: int, order: int) -> Tensor:
        """Search [B, H, T, D] for NaN and infinity. Returns 1 [H] for heads that contain one, else 0.

        Args:
            x: output of a call or a gradient.
            origin: a name of ORIGINS. If x is the output of a call, the call: query, key and value are searched too.
                Scores that overflow are found in none of them.
            offset: number of steps since the last report.
            order: number of passes of all layers before this one in the step.
        """
        heads = _broken_heads(x)
        if x.device.type == "cpu" and not heads.any():  # on other devices, reading it back would synchronise
            return heads
        broken = (~torch.isfinite(x.sum(-1, dtype=torch.promote_types(x.dtype, torch.float32)))).any(0)  # [H, T]
        if isinstance(origin, str):
            bits = torch.full(x.shape[1:2], 1 << ORIGINS.index(origin), device=x.device)
        else:
            group = x.shape[1] // origin.key.shape[1]
            spoiled = [~torch.isfinite(squares(source)) for source in (origin.query, origin.key, origin.value)]
            spoiled[1:] = [heads.repeat_interleave(group) for heads in spoiled[1:]]
            bits = torch.stack([heads << place for place, heads in enumerate(spoiled)]).sum(0)
            bits = torch.where(bits == 0, 1 << ORIGINS.index("scores"), bits)
        found = torch.stack([torch.full_like(bits, offset), ORDER * order + bits, broken.to(torch.uint8).argmax(-1)])
        found = torch.where(broken.any(-1), found.to(torch.float32), math.inf)
        self.first = found if self.first is None else earliest(torch.stack([self.first, found]))
        return heads


def _broken_heads(x: Tensor) -> Tensor:
    """1 [H] for heads of [B, H, T, D] that contain NaN or infinity, else 0. Does not synchronise."""
    # A sum in float16 would overflow.
    wide = torch.float32 if x.dtype == torch.float16 else x.dtype
    total = x.sum((0, 2, 3), dtype=wide)
    return (total - total != 0).to(torch.float32)  # NaN for NaN and infinity; cheaper than isfinite


def earliest(faults: Tensor) -> Tensor:
    """The first fault of each head, [FAULT, H], of several [N, FAULT, H]."""
    offset, fault, _ = faults.to(torch.float64).unbind(1)
    first = (offset * 2**24 + fault).argmin(0)
    return torch.take_along_dim(faults, first[None, None].expand(1, len(FAULT), -1), dim=0)[0]


def squares(x: Tensor) -> Tensor:
    """Return the sum of squares per head of [B, H, T, D]. Row norms come first, because they need no copy."""
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = torch.split(x, max(1, NUMBERS // max(1, x[:, :, :1].numel())), dim=2)
    norms = (torch.linalg.vector_norm(part, dim=-1, dtype=wide) for part in parts)
    total: Tensor = reduce(torch.add, (of_part.square_().sum((0, 2)) for of_part in norms))
    return total
