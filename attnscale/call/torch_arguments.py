"""Arguments shared with torch's attention: shapes, numbers, causal biases, nested tensors, context parallelism."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from attnscale._util import state
from attnscale._util.checks import check_dense, check_flag, check_floating, is_floating, read_number
from attnscale.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendError,
    DtypeError,
    TensorError,
    reject,
    reject_type,
)

# torch's original function, even if `torch.nn.functional.scaled_dot_product_attention` has been replaced.
TORCH_ATTENTION: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention


class Layout(NamedTuple):
    """Interpretation of the dimensions of a call.

    `lead` holds the leading dimensions of the result, to which query, key and value broadcast. The last one is the head
    axis, if `head_axis`; the others are flattened into B. `key_heads` is 1 or a divisor of the heads.
    """

    lead: tuple[int, ...]
    head_axis: bool
    key_heads: int

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading dimensions without the head axis."""
        return self.lead[:-1] if self.head_axis else self.lead

    @property
    def heads(self) -> int:
        """H."""
        return self.lead[-1] if self.head_axis else 1

    @property
    def size(self) -> int:
        """B."""
        size = 1
        for extent in self.batch:
            size *= extent
        return size

    def flatten_query(self, query: Tensor) -> Tensor:
        """[..., H|1, Tq, D] to [B, H, Tq, D]."""
        return self._flatten(query, self.heads)

    def flatten_key(self, key: Tensor) -> Tensor:
        """[..., Hkv|1, Tk, D] to [B, Hkv, Tk, D], for keys and values. A single head is broadcast."""
        own = key.shape[-3] if self.head_axis and key.dim() > 2 else 1
        return self._flatten(key, self.key_heads if own == 1 else own)

    def _flatten(self, x: Tensor, heads: int) -> Tensor:
        if x.dim() == 4 and x.shape[1] == heads and len(self.lead) == 2 and x.shape[0] == self.lead[0]:
            return x
        if not self.head_axis or x.dim() == 2:
            x = x[..., None, :, :]
        return x.expand(*self.batch, heads, *x.shape[-2:]).reshape(self.size, heads, *x.shape[-2:])

    def restore(self, out: Tensor) -> Tensor:
        """[B, H, Tq, D] to the leading dimensions of the result."""
        return out if len(self.lead) == 2 else out.reshape(*self.lead, *out.shape[2:])

    def rows(self, argument: str, x: Tensor, length: int, meaning: str) -> Tensor:
        """A per-token tensor [length] or [..., length] to [B|1, length]."""
        if x.shape == (length,):
            return x[None]
        if x.dim() == 2 and x.shape[0] in (1, self.size) and x.shape[1] == length:
            return x
        if tuple(x.shape) == (*self.batch, length):
            return x.reshape(self.size, length)
        accepted = f"[{length}] or {[*self.batch, length]} ({meaning})"
        raise ArgumentError(f"{argument} of shape {list(x.shape)} is not accepted: expected {accepted}")

    def mask(self, mask: Tensor, queries: int, keys: int) -> Tensor:
        """A mask that broadcasts to [..., H, Tq, Tk], as [B|1, H|1, Tq, Tk]; without a copy if possible."""
        mask = mask[(None,) * (len(self.lead) + 2 - mask.dim())]
        if not self.head_axis:
            mask = mask[..., None, :, :]
        heads = mask.shape[-3]
        mask = mask.expand(*mask.shape[:-2], queries, keys)
        if all(extent == 1 for extent in mask.shape[:-3]):
            return mask.reshape(1, heads, queries, keys)
        return mask.expand(*self.batch, heads, queries, keys).reshape(self.size, heads, queries, keys)


def read_layout(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> Layout:
    """Check the compatibility of the three tensors by torch's rules, and determine their layout.

    Leading dimensions broadcast, as in torch: [T, D] is one head of one sequence, [N, T, D] is one head of N sequences,
    [..., H, T, D] has any number of batch dimensions. The three tensors may have different numbers of dimensions. With
    `enable_gqa` the third dimension from the end is always the head axis, and heads are grouped instead of broadcast.
    """
    _check_tensors(query, key, value)
    if query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]:
        heads, key_heads = query.shape[1], key.shape[1]
        grouped = enable_gqa and key_heads > 0 and heads % key_heads == 0
        if key_heads == value.shape[1] and (heads == key_heads or grouped):
            return Layout((query.shape[0], heads), True, key_heads)
    if enable_gqa:
        return _grouped_layout(query, key, value)
    hint = " (for fewer key heads than query heads: enable_gqa=True)"
    lead = _broadcast("leading", [x.shape[:-2] for x in (query, key, value)], hint)
    head_axis = len(lead) >= 2
    shared = head_axis and all(x.dim() < 3 or x.shape[-3] == 1 for x in (key, value))
    return Layout(lead, head_axis, 1 if shared or not head_axis else lead[-1])


def _grouped_layout(query: Tensor, key: Tensor, value: Tensor) -> Layout:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 3:
            reject(f"{name}.shape", list(x.shape), "[..., heads, tokens, dimension] with enable_gqa=True", TensorError)
    batch = _broadcast("batch", [x.shape[:-3] for x in (query, key, value)])
    heads, of_key, of_value = (x.shape[-3] for x in (query, key, value))
    for extent in (of_key, of_value):
        if extent != heads and (extent == 0 or heads % extent):
            reject("key heads, value heads", (of_key, of_value), f"divisors of the {heads} query heads", TensorError)
    return Layout((*batch, heads), True, max(of_key, of_value))


def _broadcast(dimensions: str, shapes: list[torch.Size], hint: str = "") -> tuple[int, ...]:
    """The broadcast shape of query, key and value."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        given = [list(shape) for shape in shapes]
    reject(f"{dimensions} dimensions of query, key, value", given, f"shapes that broadcast{hint}", TensorError)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            reject_type(name, x, "a tensor [..., heads, tokens, dimension]")
        if x.is_nested:
            raise DtypeError(f"{name} as a nested tensor is not accepted here: expected a dense tensor and cu_seqlens")
        check_dense(name, x)
        if x.dim() < 2:
            reject(f"{name}.shape", list(x.shape), "at least [tokens, dimension]", TensorError)
    check_floating("query", query)
    # Mixed dtypes are allowed under autocast, which converts all three.
    if not (query.dtype == key.dtype == value.dtype) and not torch.is_autocast_enabled(query.device.type):
        raise DtypeError(
            f"dtypes {query.dtype}, {key.dtype}, {value.dtype} of query, key and value are not accepted: "
            "expected one dtype"
        )
    if not (query.device == key.device == value.device):
        raise TensorError(
            f"devices {query.device}, {key.device}, {value.device} of query, key and value are not accepted: "
            "expected one device"
        )
    if query.shape[-1] != key.shape[-1]:
        reject("key.shape[-1]", key.shape[-1], f"the head dimension of query, {query.shape[-1]}", TensorError)
    if key.shape[-2] != value.shape[-2]:
        reject("value.shape[-2]", value.shape[-2], f"the number of keys, {key.shape[-2]}", TensorError)


def read_numbers(
    scale: object, dropout_p: object, softcap: object, is_causal: object, enable_gqa: object
) -> tuple[float | None, float, float | None]:
    """`scale`, `dropout_p` and `softcap` as floats. Rejects unsupported values of these and of the flags."""
    if scale is not None:
        scale = read_number("scale", scale, "a finite number or None")
        if not -math.inf < scale < math.inf:
            reject("scale", scale, "a finite number or None")
    dropout_p = read_number("dropout_p", dropout_p, "a probability in [0, 1]")
    if not 0.0 <= dropout_p <= 1.0:
        reject("dropout_p", dropout_p, "a probability in [0, 1]", TensorError)
    if softcap is not None:
        softcap = read_number("softcap", softcap, "a finite number > 0 or None")
        if not 0.0 < softcap < math.inf:
            reject("softcap", softcap, "a finite number > 0, or None for no cap")
    if is_causal is not True and is_causal is not False:
        check_flag("is_causal", is_causal)
    if enable_gqa is not True and enable_gqa is not False:
        check_flag("enable_gqa", enable_gqa)
    return scale, dropout_p, softcap


def default_scale(query: Tensor) -> float:
    """1/√D; 1 for D = 0, where all scores are 0."""
    return 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0


def check_sinks(layout: Layout, sinks: Tensor | None, device: torch.device) -> None:
    """Reject sinks that are not one floating-point logit per head on the query's device."""
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        reject_type("sinks", sinks, "a floating tensor [H], one logit per head")
    check_dense("sinks", sinks)
    if tuple(sinks.shape) != (layout.heads,) or not is_floating(sinks.dtype) or sinks.device != device:
        raise TensorError(
            f"sinks of shape {list(sinks.shape)}, {sinks.dtype}, on {sinks.device} is not accepted: expected "
            f"a floating tensor [{layout.heads}] on {device}, one logit per head"
        )


class CausalRule(NamedTuple):
    """A causal bias as `is_causal` and the slot of the first query, or as a dense mask if slots are given."""

    mask: Tensor | None
    is_causal: bool
    slot: int | Tensor


def is_causal_bias(mask: object) -> bool:
    """Whether a mask is a `torch.nn.attention.bias.CausalBias`, a tensor subclass with a shape but no values.

    torch's module is imported only for tensor subclasses.
    """
    if mask is None or type(mask) is Tensor or not isinstance(mask, Tensor):
        return False
    from torch.nn.attention.bias import CausalBias

    return isinstance(mask, CausalBias)


def read_causal_bias(
    mask: Any, queries: int, keys: int, device: torch.device, *, is_causal: bool, aligned: bool
) -> CausalRule | None:
    """The rule of a causal bias; None for any other mask.

    Under a lower-right bias the queries are the last tokens. If another argument gives their slots (`aligned`), the
    bias becomes a dense mask, because it is aligned to the corners of the matrix.
    """
    if not is_causal_bias(mask):
        return None
    from torch.nn.attention.bias import CausalVariant

    if (mask.seq_len_q, mask.seq_len_kv) != (queries, keys):
        reject("attn_mask", f"a causal bias of {[mask.seq_len_q, mask.seq_len_kv]}", f"{[queries, keys]}", TensorError)
    if is_causal:
        # Ends in the wording of torch's error, which torch's tests match.
        accepted = "False with a causal bias as attn_mask: CausalBias should not be used with causal=True"
        reject("is_causal", True, accepted)
    offset = keys - queries if mask.variant == CausalVariant.LOWER_RIGHT else 0
    if aligned:
        return CausalRule(torch.ones(queries, keys, dtype=torch.bool, device=device).tril(offset), False, 0)
    if offset >= 0:
        return CausalRule(None, True, offset)
    # Queries before the first key see no keys. Kernels do not accept a negative int as slot.
    return CausalRule(None, True, torch.arange(offset, offset + queries, device=device)[None])


ACCEPTED = "jagged nested tensors [B, H, tokens, D] without holes (torch.nested with layout=torch.jagged)"
DENSE_ONLY = ("attn_mask", "positions", "key_padding", "document_ids", "cu_seqlens", "cache_offset", "visible")


def attend_nested(
    attend: Callable[..., Tensor], query: Any, key: Any, value: Any, *, is_causal: bool, **arguments: Any
) -> Tensor:
    """Attention within each sequence of jagged tensors [B, H, tokens, D], as a jagged tensor.

    `attend` receives dense tensors, `cu_seqlens` and the other arguments.
    """
    for name in DENSE_ONLY:
        if arguments[name] is not None:
            raise ArgumentTypeError(f"{name} is not accepted with nested tensors: expected dense ones and cu_seqlens")
    packed = [_packed(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    edges = [x.offsets() for x in (query, key, value)]
    if edges[1] is not edges[2] and not torch.equal(edges[1], edges[2]):
        reject("value.offsets()", edges[2].tolist(), f"the sequences of key, {edges[1].tolist()}")
    alike = edges[0] is edges[1] or torch.equal(edges[0], edges[1])
    if is_causal and not alike:
        reject(
            "is_causal",
            True,
            "False for nested queries and keys of different lengths, because their alignment is unknown: pass dense "
            "tensors and cu_seqlens as a pair",
        )
    arguments["cu_seqlens"] = edges[0] if alike else (edges[0], edges[1])
    out = attend(*packed, is_causal=is_causal, **arguments)
    tokens = out[0].transpose(0, 1)  # [tokens, H, Dv]
    return torch.nested.nested_tensor_from_jagged(tokens, edges[0]).transpose(1, 2)


def pad_nested(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences [N, tokens, E] padded with zeros to [N, T, E], and the padding mask [N, T]."""
    sequences = list(x.unbind())
    padded = pad_sequence(sequences, batch_first=True)
    lengths = torch.tensor([sequence.shape[0] for sequence in sequences], device=padded.device)
    return padded, torch.arange(padded.shape[1], device=padded.device) >= lengths[:, None]


def nest_like(x: Tensor, padded: Tensor) -> Tensor:
    """A padded batch [N, T, E] as a nested tensor with the lengths and layout of `x`."""
    sequences = [row[: like.shape[0]] for row, like in zip(padded.unbind(), x.unbind(), strict=True)]
    return torch.nested.as_nested_tensor(sequences, layout=x.layout)


def _packed(name: str, x: Any) -> Tensor:
    """[1, H, tokens of all sequences, D]."""
    if not isinstance(x, Tensor) or not x.is_nested or x.layout != torch.jagged:
        kind = f"{x.layout} tensor" if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentTypeError(f"{name} as a {kind} is not accepted with nested tensors: expected {ACCEPTED}")
    by_token: Any = x.transpose(1, 2)  # [B, tokens, H, D]
    if x.dim() != 4 or by_token._ragged_idx != 1 or by_token.lengths() is not None:
        raise ArgumentTypeError(f"{name} of shape {tuple(x.shape)} is not accepted: expected {ACCEPTED}")
    packed: Tensor = by_token.values().transpose(0, 1)[None]
    return packed


# torch's context parallelism. Looked up in sys.modules only, because few programs import it.
_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"


def sequence_is_split() -> bool:
    """Whether torch's `context_parallel` (also used by Trainer and accelerate) is active in this process."""
    module = sys.modules.get(_CONTEXT_PARALLEL)
    return module is not None and F.scaled_dot_product_attention in getattr(module, "_replaced_functions", ())


def active_mesh() -> Any | None:
    """The DeviceMesh of torch's `context_parallel` if active, else None.

    torch has no API for the mesh. It is read from the closure of the function that replaces attention.
    """
    cells = F.scaled_dot_product_attention.__closure__ or () if sequence_is_split() else ()
    held = (cell.cell_contents for cell in cells)
    return next((value for value in held if type(value).__name__ == "DeviceMesh"), None)


def rotates_keys() -> bool:
    """Whether keys rotate between processes (`set_rotate_method("alltoall")`) instead of being gathered."""
    options = getattr(sys.modules.get(_CONTEXT_PARALLEL), "_cp_options", None)
    return getattr(getattr(options, "rotate_method", None), "name", "") == "ALL_TO_ALL"


def refuse_context_parallel(query: Tensor, what_to_do: str) -> None:
    """Reject a call with a sequence sharded over processes. `what_to_do` ends the message."""
    if sequence_is_split() or (type(query) is not Tensor and _is_sharded_by_row(query)):
        raise BackendError(
            "under context parallelism each process would count only the keys of its own shard of the sequence and use "
            f"a wrong β; {what_to_do}"
        )


def _is_sharded_by_row(query: Tensor) -> bool:
    """Whether queries [..., Tq, D] are a DTensor sharded over rows."""
    return any(placement.is_shard(query.dim() - 2) for placement in getattr(query, "placements", ()))


@contextmanager
def beneath_context_parallel() -> Iterator[None]:
    """Use torch's original function inside `context_parallel`, for calls that hold all their visible keys."""
    state.TORCH_REPLACED.insert(0, TORCH_ATTENTION)
    try:
        yield
    finally:
        state.TORCH_REPLACED.remove(TORCH_ATTENTION)


def torch_attention() -> Callable[..., Tensor]:
    """torch's attention function, or a third-party replacement (such as context parallelism), but never ours.

    Under `patch_torch`, the function that the first patch replaced.
    """
    function = state.TORCH_REPLACED[0] if state.TORCH_REPLACED else F.scaled_dot_product_attention
    while function is not TORCH_ATTENTION and hasattr(function, "replaces"):
        function = function.replaces
    return function
