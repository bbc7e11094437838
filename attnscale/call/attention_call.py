"""One attention call in canonical form: what every backend is given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from attnscale.call.context import Context
from attnscale.call.lengths import count_visible
from attnscale.statistics import AttentionOutput, RowStats, StatsRequest


@dataclass(frozen=True)
class AttentionCall:
    """Logits are β·(softcap(scale·q·k) + bias); a sink adds one logit per head that β does not touch.

    `beta` is a float where all rows share it, else fp32 [B|1, H|1, Tq]. Key and value may have fewer heads than the
    query (grouped-query attention).
    """

    query: Tensor  # [B, H, Tq, D]
    key: Tensor  # [B, Hkv, Tk, D]
    value: Tensor  # [B, Hkv, Tk, Dv]
    context: Context
    beta: float | Tensor
    scale: float
    dropout_p: float
    softcap: float | None
    sinks: Tensor | None  # [H]

    @property
    def group(self) -> int:
        """Query heads per key head; 1 where there are none."""
        return self.query.shape[1] // self.key.shape[1] if self.key.shape[1] else 1

    def row_beta(self) -> Tensor:
        """β as a tensor [B, H, Tq]."""
        beta = self.beta
        if isinstance(beta, float):
            beta = torch.full((1, 1, 1), beta, device=self.query.device, dtype=torch.float32)
        return beta.expand(self.query.shape[:3])

    def count(self) -> RowStats:
        """n of every row [B, H, Tq], which is what statistics begin with."""
        visible = count_visible(self.context).expand(self.query.shape[:3])
        return RowStats(visible=visible, visible_given=self.context.visible is not None)

    def detached(self) -> AttentionCall:
        """The same call without a gradient or dropout, for looking at it."""
        beta = self.beta.detach() if isinstance(self.beta, Tensor) else self.beta
        query, key, value = (x.detach() for x in (self.query, self.key, self.value))
        sinks = None if self.sinks is None else self.sinks.detach()
        context = self.context if self.bias is None else replace(self.context, mask=self.bias.detach())
        return replace(self, query=query, key=key, value=value, context=context, beta=beta, sinks=sinks, dropout_p=0.0)

    def select(self, rows: Tensor) -> AttentionCall:
        """The same call for some of its rows [R]."""
        beta = (
            self.beta.index_select(-1, rows) if isinstance(self.beta, Tensor) and self.beta.shape[-1] > 1 else self.beta
        )
        return replace(self, query=self.query.index_select(2, rows), context=self.context.select(rows), beta=beta)

    @property
    def bias(self) -> Tensor | None:
        """The additive mask, if that is what the mask is."""
        mask = self.context.mask
        return None if mask is None or mask.dtype == torch.bool else mask


def no_derivative(derivative: str) -> str:
    """Why a backend with a forward and a backward of its own cannot be used where another derivative is taken."""
    return f"it has one backward pass, and no {derivative}; backend='reference' has, in memory of Tq × Tk"


class Backend(Protocol):
    """A way to compute attention. One that is not `automatic` runs only where it is asked for by name.

    One that is `plain` is made of torch's own operators, with whatever derivatives these have; any other has a forward
    and a backward of its own, and no further derivative.
    """

    name: str
    plain: bool

    @property
    def automatic(self) -> bool:
        """Whether "auto" may choose it."""
        ...

    def why_not(self, call: AttentionCall) -> str | None:
        """Why this call cannot be computed here, or None if it can."""
        ...

    def run(self, call: AttentionCall) -> Tensor:
        """The output [B, H, Tq, Dv]."""
        ...


@runtime_checkable
class MeasuringBackend(Backend, Protocol):
    """A backend that gives row statistics too."""

    def measure(self, call: AttentionCall, request: StatsRequest) -> AttentionOutput:
        """The output and the statistics of all rows."""
        ...

    def statistics(self, call: AttentionCall, request: StatsRequest) -> RowStats:
        """The statistics alone, for whoever has no use for the output."""
        ...
