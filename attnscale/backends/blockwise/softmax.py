"""Online softmax: row sums over tiles of keys, one tile after another."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Rows of attention over some of their keys, logits ℓ in units of ln 2: m, Σ 2^(ℓ − m), Σ 2^(ℓ − m)·(ℓ − m) and
    Σ 2^(ℓ − m)·v.
    """

    top: Tensor  # [h, r, 1], as the next two
    total: Tensor
    moment: Tensor  # 0 where not asked for
    mixed: Tensor  # [h, r, Dv]


def add_keys(
    seen: Partial | None, logits: Tensor, values: Tensor, powers: Tensor, *, moment: bool, kept: Tensor | None = None
) -> Partial:
    """Add the keys of a tile [h, r, K] to the sums of its rows.

    Overwrites `seen`, the logits, and `powers` with 2^(ℓ − m). `kept`, the dropout mask, multiplies the powers before
    the product with the values.
    """
    top = logits.amax(-1, keepdim=True)
    if seen is not None:
        torch.maximum(top, seen.top, out=top)
    centred = logits.sub_(top)
    torch.exp2(centred, out=powers)  # half the price of exp
    total = powers.sum(-1, keepdim=True)
    moments = centred.mul_(powers).sum(-1, keepdim=True) if moment else torch.zeros_like(total)
    if kept is not None:
        powers.mul_(kept)
    mixing = values.shape[-1] > 0  # without values, statistics alone are asked for
    if seen is None:
        return Partial(top, total, moments, torch.bmm(powers, values) if mixing else top[..., :0])
    down = seen.top - top
    fade = torch.exp2(down)
    moments += seen.moment.addcmul_(down, seen.total).mul_(fade)
    total += seen.total.mul_(fade)
    return Partial(top, total, moments, seen.mixed.mul_(fade).baddbmm_(powers, values) if mixing else seen.mixed)
