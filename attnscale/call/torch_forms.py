"""What torch's function takes or does beyond dense tensors: causal biases, nested tensors, context parallelism."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from attnscale.errors import ArgumentTypeError, BackendError, TensorError, reject


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


# Where torch keeps its context parallelism: a module that few programs import.
_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"


def sequence_is_split() -> bool:
    """Whether torch's `context_parallel`, which Trainer and accelerate use too, is active in this process."""
    module = sys.modules.get(_CONTEXT_PARALLEL)
    return module is not None and F.scaled_dot_product_attention in getattr(module, "_replaced_functions", ())


def active_mesh() -> Any | None:
    """The DeviceMesh of torch's `context_parallel` where it is active, else None.

    torch has no name for it; the function that replaces attention holds it.
    """
    cells = F.scaled_dot_product_attention.__closure__ or () if sequence_is_split() else ()
    held = (cell.cell_contents for cell in cells)
    return next((value for value in held if type(value).__name__ == "DeviceMesh"), None)


def rotates_keys() -> bool:
    """Whether keys are to be passed on from process to process (`set_rotate_method("alltoall")`), or gathered."""
    options = getattr(sys.modules.get(_CONTEXT_PARALLEL), "_cp_options", None)
    return getattr(getattr(options, "rotate_method", None), "name", "") == "ALL_TO_ALL"


def refuse_context_parallel(query: Tensor, what_to_do: str) -> None:
    """Refuse a call in which each process holds a part of the sequence; `what_to_do` ends the message."""
    if sequence_is_split() or (type(query) is not Tensor and _is_sharded_by_row(query)):
        raise BackendError(
            "under context parallelism each process would count the keys of its own part of the sequence, and so use a "
            f"wrong β; {what_to_do}"
        )


def _is_sharded_by_row(query: Tensor) -> bool:
    """Whether queries [..., Tq, D] are a DTensor of which each process holds some rows."""
    return any(placement.is_shard(query.dim() - 2) for placement in getattr(query, "placements", ()))
