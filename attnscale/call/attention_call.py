"""One attention call in canonical form: what every backend is given."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnscale.call.context import Context

# `AttentionCall.score_tensors` in the schema of an operator.
SCORE_TENSORS = "Tensor query, Tensor key, Tensor? beta, Tensor start, Tensor stop, Tensor? padding, Tensor? mask"


@dataclass(frozen=True)
class AttentionCall:
    """A call with logits β·s, and raw scores s = softcap(scale·q·k) + bias.

    Key and value may have fewer heads than the query (grouped-query attention).
    """

    query: Tensor  # [B, H, Tq, D]
    key: Tensor  # [B, Hkv, Tk, D]
    value: Tensor  # [B, Hkv, Tk, Dv]
    context: Context
    scale: float
    dropout_p: float
    softcap: float | None
    sinks: Tensor | None  # [H]: one more logit per head, which β does not scale
    beta: float | Tensor = 1.0  # a float where all rows share it, else [B|1, H|1, Tq], fp32 or fp64

    @property
    def group(self) -> int:
        """Query heads per key head; 1 where there are none."""
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

    def score_tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that logits depend on, with β [B, H, Tq] and the bounds [B|1, Tq] of the slots a row may see."""
        context = self.context
        return self.query, self.key, self.row_beta(), *context.bounds(), context.padding, context.mask

    def detached(self) -> AttentionCall:
        """The same call without gradients or dropout, for measuring."""
        beta = self.beta.detach() if isinstance(self.beta, Tensor) else self.beta
        query, key, value = (x.detach() for x in (self.query, self.key, self.value))
        sinks = None if self.sinks is None else self.sinks.detach()
        context = self.context if self.bias is None else replace(self.context, mask=self.bias.detach())
        return replace(self, query=query, key=key, value=value, context=context, beta=beta, sinks=sinks, dropout_p=0.0)

    def select(self, rows: Tensor) -> AttentionCall:
        """The same call for some of its rows [R]."""
        beta = self.beta
        if isinstance(beta, Tensor) and beta.shape[-1] > 1:
            beta = beta.index_select(-1, rows)
        return replace(self, query=self.query.index_select(2, rows), context=self.context.select(rows), beta=beta)
