"""One attention call in canonical form: what every backend is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attnscale.context import Context


@dataclass(frozen=True)
class AttentionCall:
    """Logits are β·(softcap(scale·q·k) + bias); a sink adds one logit per head that β does not touch.

    `beta` is a float where all rows share it, else fp32 [B|1, H|1, Tq]; `peak` is a β that rows of ordinary length do
    not exceed. Key and value may have fewer heads than the query (grouped-query attention).
    """

    query: Tensor  # [B, H, Tq, D]
    key: Tensor  # [B, Hkv, Tk, D]
    value: Tensor  # [B, Hkv, Tk, Dv]
    context: Context
    beta: float | Tensor
    peak: float
    scale: float
    dropout_p: float
    softcap: float | None
    sinks: Tensor | None  # [H]

    @property
    def bias(self) -> Tensor | None:
        """The additive mask, if that is what the mask is."""
        mask = self.context.mask
        return None if mask is None or mask.dtype == torch.bool else mask


class Backend(Protocol):
    """A way to compute attention."""

    name: str

    def why_not(self, call: AttentionCall) -> str | None:
        """Why this call cannot be computed here, or None if it can."""
        ...

    def run(self, call: AttentionCall) -> Tensor:
        """The output [B, H, Tq, Dv]."""
        ...
