"""torch's `causal_upper_left` and `causal_lower_right` masks as rules."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscale.errors import TensorError, reject


class CausalRule(NamedTuple):
    """A causal bias as `is_causal` and the slot of the first query, or as a dense mask where slots are given."""

    mask: Tensor | None
    is_causal: bool
    slot: int | Tensor


def is_causal_bias(mask: object) -> bool:
    """Whether a mask is a `torch.nn.attention.bias.CausalBias`: a tensor that holds no values, only its shape.

    Imports torch's module only where a tensor of a subclass is passed.
    """
    if mask is None or type(mask) is Tensor or not isinstance(mask, Tensor):
        return False
    from torch.nn.attention.bias import CausalBias

    return isinstance(mask, CausalBias)


def read_causal_bias(
    mask: Any, queries: int, keys: int, device: torch.device, *, is_causal: bool, aligned: bool
) -> CausalRule | None:
    """The rule of a causal bias; None for any other mask.

    A lower-right one says that the queries are the last tokens. Where another argument gives their slots (`aligned`),
    it becomes a dense mask, since it counts from the corners of the matrix.
    """
    if not is_causal_bias(mask):
        return None
    from torch.nn.attention.bias import CausalVariant

    if (mask.seq_len_q, mask.seq_len_kv) != (queries, keys):
        reject("attn_mask", f"a causal bias of {[mask.seq_len_q, mask.seq_len_kv]}", f"{[queries, keys]}", TensorError)
    if is_causal:
        # Ends in the words of torch's own error, which its tests look for.
        accepted = "False beside a causal bias as attn_mask: CausalBias should not be used with causal=True"
        reject("is_causal", True, accepted)
    offset = keys - queries if mask.variant == CausalVariant.LOWER_RIGHT else 0
    if aligned:
        return CausalRule(torch.ones(queries, keys, dtype=torch.bool, device=device).tril(offset), False, 0)
    if offset >= 0:
        return CausalRule(None, True, offset)
    # Queries before the first key see nothing; kernels take a slot as an int only where it is not negative.
    return CausalRule(None, True, torch.arange(offset, offset + queries, device=device)[None])
