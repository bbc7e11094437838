"""Nested tensors as packed documents (for attention) and as padded batches (for modules)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnscale.errors import ArgumentTypeError, reject

ACCEPTED = "jagged nested tensors [B, H, tokens, D] without holes, as torch.nested makes them with layout=torch.jagged"
DENSE_ONLY = ("attn_mask", "positions", "key_padding", "document_ids", "cu_seqlens", "cache_offset", "visible")


def attend_nested(
    attend: Callable[..., Tensor], query: Any, key: Any, value: Any, *, is_causal: bool, **arguments: Any
) -> Tensor:
    """Attention within each sequence of jagged tensors [B, H, tokens, D], as a jagged tensor.

    `attend` is given dense tensors, `cu_seqlens` and the other arguments.
    """
    for name in DENSE_ONLY:
        if arguments[name] is not None:
            raise ArgumentTypeError(f"{name} is not accepted beside nested tensors: expected dense ones and cu_seqlens")
    packed = [_packed(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    edges = [x.offsets() for x in (query, key, value)]
    if edges[1] is not edges[2] and not torch.equal(edges[1], edges[2]):
        reject("value.offsets()", edges[2].tolist(), f"the sequences of key, {edges[1].tolist()}")
    alike = edges[0] is edges[1] or torch.equal(edges[0], edges[1])
    if is_causal and not alike:
        reject(
            "is_causal",
            True,
            "False for nested queries and keys of different lengths, whose alignment is not known: pass dense tensors, "
            "and cu_seqlens as a pair",
        )
    arguments["cu_seqlens"] = edges[0] if alike else (edges[0], edges[1])
    out = attend(*packed, is_causal=is_causal, **arguments)
    tokens = out[0].transpose(0, 1)  # [tokens, H, Dv]
    return torch.nested.nested_tensor_from_jagged(tokens, edges[0]).transpose(1, 2)


def pad_nested(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences [N, tokens, E] padded with zeros to [N, T, E], and which tokens [N, T] are padding."""
    sequences = list(x.unbind())
    padded = pad_sequence(sequences, batch_first=True)
    lengths = torch.tensor([sequence.shape[0] for sequence in sequences], device=padded.device)
    return padded, torch.arange(padded.shape[1], device=padded.device) >= lengths[:, None]


def nest_like(x: Tensor, padded: Tensor) -> Tensor:
    """A padded batch [N, T, E] as a nested tensor with the lengths and the layout of another."""
    sequences = [row[: like.shape[0]] for row, like in zip(padded.unbind(), x.unbind(), strict=True)]
    return torch.nested.as_nested_tensor(sequences, layout=x.layout)


def _packed(name: str, x: Any) -> Tensor:
    """[1, H, tokens of all sequences, D]."""
    if not isinstance(x, Tensor) or not x.is_nested or x.layout != torch.jagged:
        kind = f"{x.layout} tensor" if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentTypeError(f"{name} as a {kind} is not accepted beside nested tensors: expected {ACCEPTED}")
    by_token: Any = x.transpose(1, 2)  # [B, tokens, H, D]
    if x.dim() != 4 or by_token._ragged_idx != 1 or by_token.lengths() is not None:
        raise ArgumentTypeError(f"{name} of shape {tuple(x.shape)} is not accepted: expected {ACCEPTED}")
    packed: Tensor = by_token.values().transpose(0, 1)[None]
    return packed
