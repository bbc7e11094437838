"""The first NaN or infinity of a layer: step, head, row, and the tensor in which it appeared."""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

from attnscale._util.handles import Uncopied
from attnscale.call.attention_call import AttentionCall

ORIGINS = ("query", "key", "value", "scores", "output gradient", "gradients")
ORDER = 1 << len(ORIGINS)
# The numbers of a fault per head: steps since the last report; ORDER · passes of the step before it + bits of ORIGINS;
# its row. Infinite if there is none.
FAULT = ("fault_offset", "fault", "fault_row")
# Elements per chunk when norms are computed, because a chunk may be upcast.
NUMBERS = 2**20


class Faults(Uncopied):
    """The first fault of each head since the last reset. Stays on the device."""

    def __init__(self) -> None:
        self.first: Tensor | None = None  # [FAULT, H]

    def add(self, x: Tensor, origin: AttentionCall | str, offset: int, order: int) -> None:
        """Search [B, H, T, D] for NaN and infinity.

        Args:
            x: output of a call or a gradient.
            origin: a name of ORIGINS. If x is the output of a call, the call: query, key and value are searched too.
                Scores that overflow are found in none of them.
            offset: number of steps since the last report.
            order: number of passes of all layers before this one in the step.
        """
        # Fast path without an upcast copy. On other devices, reading the sum back would synchronise.
        if x.device.type == "cpu" and math.isfinite(float(x.sum())):
            return
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
