"""How far apart rows point, before attention and after: the sign of a rank collapse."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnscale.call.attention_call import AttentionCall
from attnscale.statistics.rows.call_tiles import split_heads


def angle_parts(call: AttentionCall, out: Tensor, seeing: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of 1 − cosine over pairs of rows, of the values at their own slots and of the outputs [B, H, R, Dv]; each
    [B, H]. Rows count where `seeing` [B, H, R] is True: those that see a key.

    The ratio of the two is the angle ratio: 1 where attention leaves angles as they are, 0 where all rows become one.
    Both are 0 where there are no two rows, or a row has no slot of its own among the keys, as across sequences.
    """
    shared = split_heads(seeing, call.group).any(2)  # by the rows of a head of k
    before, after = _spread(_own_values(call), shared).repeat_interleave(call.group, dim=1), _spread(out, seeing)
    known = ~(before.isnan() | after.isnan())
    return torch.where(known, before, 0.0), torch.where(known, after, 0.0)


def _own_values(call: AttentionCall) -> Tensor:
    """The values [B, Hkv, R, Dv] in the slots of the rows themselves; NaN where one has none."""
    slots, keys = call.context.slots(), call.key.shape[2]
    own = slots.clamp(0, max(keys - 1, 0))
    if own.shape[0] == 1:
        value = call.value.index_select(2, own[0])
    else:
        value = torch.take_along_dim(call.value, own[:, None, :, None], dim=2)
    return torch.where((own == slots).all(), value, math.nan)


def _spread(x: Tensor, seeing: Tensor) -> Tensor:
    """1 − the mean cosine of pairs among rows [..., R, D], from the length of the sum of their directions."""
    x = x.to(torch.float32)
    lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=1e-12)
    together: Tensor = torch.where(seeing[..., None], x / lengths, 0.0).sum(-2).square().sum(-1)
    rows = seeing.sum(-1)
    return torch.where(rows > 1, 1 - (together - rows) / (rows * (rows - 1)), math.nan)
