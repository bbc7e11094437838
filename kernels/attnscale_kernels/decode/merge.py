"""Attention over two sets of keys, made one: what the splits of a decode do, for parts that lie on several devices.

Needs torch only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Decode(NamedTuple):
    """What decoding returns: the output, and statistics per row in fp32 and nats (None: not asked for)."""

    out: Tensor  # [B, H, Tq, DV]
    lse: Tensor  # [B, H, Tq]
    max_logit: Tensor  # [B, H, Tq]
    entropy: Tensor | None  # [B, H, Tq]
    gap_counts: Tensor | None = None  # [B, H, Tq, thresholds], int64


def merge(a: Decode, b: Decode) -> Decode:
    """Attention of the same rows over the keys of both, which must be disjoint; associative, and blind to order.

    A part that sees nothing changes nothing. A sink is one more logit, so it goes to one of the parts only. Gap counts
    refer to the largest score of their own part and cannot be merged.

    >>> one = Decode(torch.tensor([1.0]), torch.tensor(0.0), torch.tensor(0.0), torch.tensor(0.0))
    >>> merge(one, one._replace(out=torch.tensor([3.0]))).out
    tensor([2.])
    """
    if (a.entropy is None) != (b.entropy is None):
        raise ValueError("entropy is not accepted on one side only: expected it on both or on none")
    lse = torch.logaddexp(a.lse, b.lse)
    pivot = lse.masked_fill(lse == -math.inf, 0.0)
    share_a, share_b = torch.exp(a.lse - pivot), torch.exp(b.lse - pivot)  # of the weight
    out = a.out.to(lse.dtype) * share_a[..., None] + b.out.to(lse.dtype) * share_b[..., None]
    entropy = None
    if a.entropy is not None and b.entropy is not None:
        entropy = (share_a * a.entropy + torch.special.entr(share_a)) + (
            share_b * b.entropy + torch.special.entr(share_b)
        )
        entropy = entropy.clamp(min=0.0)
    return Decode(out.to(a.out.dtype), lse, torch.maximum(a.max_logit, b.max_logit), entropy)
