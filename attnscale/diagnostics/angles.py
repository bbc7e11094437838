"""How far apart rows point, before attention and after: the sign of a rank collapse."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnscale.backends.call import AttentionCall


def angle_parts(call: AttentionCall, out: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of 1 − cosine over pairs of rows, of the values at their own slots and of the outputs; each [B, H].

    The ratio of the two is the angle ratio: 1 where attention leaves angles as they are, 0 where all rows become one.
    NaN where a row has no slot of its own among the keys, as across sequences.
    """
    slots, keys = call.context.slots(), call.key.shape[2]
    own = slots.clamp(0, max(keys - 1, 0))
    if own.shape[0] == 1:
        value = call.value.index_select(2, own[0])
    else:
        value = torch.take_along_dim(call.value, own[:, None, :, None], dim=2)
    group = call.query.shape[1] // call.value.shape[1]
    if group == 1 and value.shape == out.shape:
        before, after = _spread(torch.stack([value, out]))
    else:
        before, after = _spread(value).repeat_interleave(group, dim=1), _spread(out)
    return torch.where((own == slots).all(), before, math.nan), after


def _spread(x: Tensor) -> Tensor:
    """1 − the mean cosine of pairs among rows [..., R, D], from the length of the sum of their directions."""
    rows = x.shape[-2]
    if rows < 2:
        return torch.full(x.shape[:-2], math.nan, device=x.device)
    x = x.to(torch.float32)
    lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=1e-12)
    together: Tensor = (x / lengths).sum(-2).square().sum(-1)
    return 1 - (together - rows) / (rows * (rows - 1))
