"""What flash attention returns, and the memory for it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..launch import empty_like_layout


class Forward(NamedTuple):
    """The output of attention, and statistics per row in fp32 and nats."""

    out: Tensor  # [B, H, Tq, DV]
    lse: Tensor  # [B, H, Tq]
    max_logit: Tensor  # [B, H, Tq]
    entropy: Tensor | None  # [B, H, Tq]; None: not asked for

    def outputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What an operator returns, none of which can be None: an entropy that was not asked for is empty."""
        return self.out, self.lse, self.max_logit, self.lse.new_empty(0) if self.entropy is None else self.entropy


class Backward(NamedTuple):
    """What `flash_backward` returns; None where not asked for."""

    query: Tensor  # [B, H, Tq, D]
    key: Tensor  # [B, Hkv, Tk, D]
    value: Tensor  # [B, Hkv, Tk, DV]
    beta: Tensor | None  # [B, H, Tq] fp32
    sinks: Tensor | None  # [H] fp32


def new_forward(query: Tensor, width: int, entropy: bool) -> Forward:
    """Memory for the result of a forward with values as wide; the output in the layout of the query."""
    batch, heads, queries, _ = query.shape
    rows = query.new_empty(batch, heads, queries, dtype=torch.float32)
    top = torch.empty_like(rows)
    return Forward(empty_like_layout(query, width), rows, top, torch.empty_like(rows) if entropy else None)
