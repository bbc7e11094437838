"""One attention call in canonical form, as passed to every backend, and its flat form for operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscale._util.schema import operator_schema
from attnscale._util.tracing import autocast_dtype, has_autocast
from attnscale.call.context import Context, padding_rows
from attnscale.errors import ArgumentTypeError


@dataclass(frozen=True)
class AttentionCall:
    """A call with logits β·s and raw scores s = softcap(scale·q·k) + bias.

    Key and value may have fewer heads than the query (grouped-query attention).
    """

    query: Tensor  # [B, H, Tq, D]
    key: Tensor  # [B, Hkv, Tk, D]
    value: Tensor  # [B, Hkv, Tk, Dv]
    context: Context
    scale: float
    dropout_p: float
    softcap: float | None
    sinks: Tensor | None  # [H], one extra logit per head, not scaled by β
    beta: float | Tensor = 1.0  # a float if shared by all rows, else [B|1, H|1, Tq], fp32 or fp64

    @property
    def group(self) -> int:
        """Query heads per key head; 1 without key heads."""
        return self.query.shape[1] // self.key.shape[1] if self.key.shape[1] else 1

    @property
    def bias(self) -> Tensor | None:
        """The mask, if it is additive."""
        mask = self.context.mask
        return None if mask is None or mask.dtype == torch.bool else mask

    def row_beta(self) -> Tensor:
        """β as a tensor [B, H, Tq]."""
        beta = self.beta
        if isinstance(beta, float):
            beta = torch.full((1, 1, 1), beta, device=self.query.device, dtype=torch.float32)
        return beta.expand(self.query.shape[:3])

    def autocast(self) -> AttentionCall:
        """The call with query, key and value in the autocast dtype, if autocast is on. fp64 is kept, as in torch."""
        if not has_autocast(self.query.device):
            return self
        query, key, value = (x.to(autocast_dtype(x)) for x in (self.query, self.key, self.value))
        if not query.dtype == key.dtype == value.dtype:
            raise ArgumentTypeError(
                f"dtypes {query.dtype}, {key.dtype}, {value.dtype} of query, key and value under autocast are not "
                "accepted: expected one dtype (autocast does not convert float64)"
            )
        return replace(self, query=query, key=key, value=value)

    def detached(self) -> AttentionCall:
        """The call without gradients and dropout, for measurements."""
        beta = self.beta.detach() if isinstance(self.beta, Tensor) else self.beta
        query, key, value = (x.detach() for x in (self.query, self.key, self.value))
        sinks = None if self.sinks is None else self.sinks.detach()
        context = self.context if self.bias is None else replace(self.context, mask=self.bias.detach())
        return replace(self, query=query, key=key, value=value, context=context, beta=beta, sinks=sinks, dropout_p=0.0)

    def select(self, rows: Tensor) -> AttentionCall:
        """The call for some of its rows [R]."""
        beta = self.beta
        if isinstance(beta, Tensor) and beta.shape[-1] > 1:
            beta = beta.index_select(-1, rows)
        return replace(self, query=self.query.index_select(2, rows), context=self.context.select(rows), beta=beta)

    def without_padding(self) -> tuple[AttentionCall, Tensor | None]:
        """The call without visible keys for padding rows, which excludes them from sums; and its `padding_rows`."""
        context = self.context
        rows = padding_rows(context)
        if rows is None:
            return self, None
        first = torch.zeros_like(rows, dtype=torch.int64) if context.first is None else context.first
        last = torch.where(rows, first, context.keys if context.last is None else context.last)
        return replace(self, context=replace(context, first=first.expand_as(last), last=last)), rows


class FlatCall(NamedTuple):
    """A call as operator arguments: tensors first, then constants.

    The schemas of all operators are generated from these fields. `positions` and `visible` are omitted: they only
    affect β.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    slots: Tensor | None
    first: Tensor | None
    last: Tensor | None
    padding: Tensor | None
    mask: Tensor | None
    sinks: Tensor | None
    slot: int  # used if `slots` is None
    causal: bool
    left: int | None
    right: int | None
    scale: float
    softcap: float | None
    dropout_p: float

    @classmethod
    def of(cls, call: AttentionCall) -> FlatCall:
        """The flat form of a call."""
        context, beta = call.context, call.beta
        if not isinstance(beta, Tensor):
            beta = torch.full((1, 1, 1), beta, device=call.query.device)
        slots, slot = (context.slot, 0) if isinstance(context.slot, Tensor) else (None, context.slot)
        tensors = slots, context.first, context.last, context.padding, context.mask, call.sinks
        rules, numbers = (slot, context.causal, *context.window), (call.scale, call.softcap, call.dropout_p)
        return cls(call.query, call.key, call.value, beta, *tensors, *rules, *numbers)

    @classmethod
    def split(cls, arguments: Sequence[Any]) -> tuple[FlatCall, Sequence[Any]]:
        """Split operator arguments into the call and the remaining arguments."""
        return cls(*arguments[: len(cls._fields)]), arguments[len(cls._fields) :]

    @classmethod
    def gradients(cls, **of_tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients in field order for the backward pass of an operator; None for fields not passed."""
        return tuple(of_tensors.get(name) for name in cls._fields)

    def to_call(self) -> AttentionCall:
        """Inverse of `of`."""
        slot = self.slot if self.slots is None else self.slots
        rules = self.causal, slot, (self.left, self.right), self.first, self.last, self.padding, self.mask
        context = Context(self.query.shape[2], self.key.shape[2], self.query.device, *rules)
        numbers = self.scale, self.dropout_p, self.softcap
        return AttentionCall(self.query, self.key, self.value, context, *numbers, self.sinks, self.beta)


FLAT_CALL = operator_schema(FlatCall)
TENSORS = FlatCall._fields.index("slot")  # number of tensor fields
