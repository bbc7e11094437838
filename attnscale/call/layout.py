"""The shapes of an attention call, and the numbers that shape its scores: scale, dropout, softcap, flags and sinks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale._util.checks import check_dense, check_flag, check_floating, is_floating, read_number
from attnscale.errors import ArgumentError, DtypeError, TensorError, reject, reject_type


class Layout(NamedTuple):
    """How the dimensions of a call are read.

    `lead` are the leading dimensions of the result: query, key and value broadcast to them. The last of them is the
    head axis, if there is one; the rest flattens into B. `key_heads` is 1 or a divisor of the heads.
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
        """[..., Hkv|1, Tk, D] to [B, Hkv, Tk, D], for keys and values; a single head serves as many as there are."""
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
        """A mask that broadcasts against [..., H, Tq, Tk] to [B|1, H|1, Tq, Tk], without copying where possible."""
        mask = mask[(None,) * (len(self.lead) + 2 - mask.dim())]
        if not self.head_axis:
            mask = mask[..., None, :, :]
        heads = mask.shape[-3]
        mask = mask.expand(*mask.shape[:-2], queries, keys)
        if all(extent == 1 for extent in mask.shape[:-3]):
            return mask.reshape(1, heads, queries, keys)
        return mask.expand(*self.batch, heads, queries, keys).reshape(self.size, heads, queries, keys)


def read_layout(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> Layout:
    """Check by torch's rules that the three tensors fit each other, and read their dimensions.

    Leading dimensions broadcast, as in torch: [T, D] is one head of one sequence, [N, T, D] is one head of N
    sequences, [..., H, T, D] has any number of batch dimensions, and the three may have different numbers of them.
    With `enable_gqa` the third dimension from the end is always that of heads, and does not broadcast but group.
    """
    _check_tensors(query, key, value)
    if query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]:
        heads, key_heads = query.shape[1], key.shape[1]
        grouped = enable_gqa and key_heads > 0 and heads % key_heads == 0
        if key_heads == value.shape[1] and (heads == key_heads or grouped):
            return Layout((query.shape[0], heads), True, key_heads)
    if enable_gqa:
        return _grouped_layout(query, key, value)
    hint = " (for fewer heads of keys than of queries: enable_gqa=True)"
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
    """The shape to which those of query, key and value broadcast."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        given = [list(shape) for shape in shapes]
    reject(f"{dimensions} dimensions of query, key, value", given, f"ones that broadcast{hint}", TensorError)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            reject_type(name, x, "a tensor [..., heads, tokens, dimension]")
        if x.is_nested:
            raise DtypeError(f"{name} as a nested tensor is not accepted here: expected a dense one, and cu_seqlens")
        check_dense(name, x)
        if x.dim() < 2:
            reject(f"{name}.shape", list(x.shape), "at least [tokens, dimension]", TensorError)
    check_floating("query", query)
    # Under autocast torch casts all three itself, so mixed dtypes are fine there.
    if not (query.dtype == key.dtype == value.dtype) and not torch.is_autocast_enabled(query.device.type):
        raise DtypeError(
            f"dtypes {query.dtype}, {key.dtype}, {value.dtype} of query, key and value are not accepted: expected one"
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
    """`scale`, `dropout_p` and `softcap` as plain floats; refuses what cannot be used, the flags included."""
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
    """1/√D, and 1 for heads without a dimension, whose scores are all 0."""
    return 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0


def check_sinks(layout: Layout, sinks: Tensor | None, device: torch.device) -> None:
    """Refuse sinks that are not one floating logit per head, on the query's device."""
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
