"""From every tensor shape that torch's attention accepts to [B, H, T, D], and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscale.errors import ArgumentError, ArgumentTypeError, reject, reject_type
from attnscale.statistics import RowStats


class Layout(NamedTuple):
    """The leading dimensions of a call: `batch` is what flattens into B, `heads` is H, `ndim` that of the query."""

    batch: tuple[int, ...]
    heads: int
    ndim: int
    head_axis: bool

    @property
    def size(self) -> int:
        """B."""
        size = 1
        for extent in self.batch:
            size *= extent
        return size

    def flatten(self, x: Tensor) -> Tensor:
        """[..., H, T, D] to [B, H, T, D]."""
        if x.dim() == 4 and len(self.batch) == 1:
            return x if x.shape[0] == self.batch[0] else x.expand(self.batch[0], -1, -1, -1)
        heads = x.shape[-3] if self.head_axis else 1
        x = x if self.head_axis else x[..., None, :, :]
        return x.expand(*self.batch, *x.shape[-3:]).reshape(self.size, heads, *x.shape[-2:])

    def restore(self, out: Tensor) -> Tensor:
        """[B, H, Tq, D] to the leading dimensions of the query."""
        if self.ndim == 4:
            return out
        out = out if self.head_axis else out.squeeze(1)
        return out.reshape(*self.batch, *out.shape[1:])

    def restore_stats(self, stats: RowStats) -> RowStats:
        """Statistics [B, H, Tq, ...] with the leading dimensions of the query."""

        def shaped(x: Any) -> Any:
            if x is None or x is stats.rows or isinstance(x, bool):
                return x
            if isinstance(x, Tensor):
                # `restore` expects one axis behind the rows, which gap counts have and the others do not.
                return self.restore(x) if x.dim() == 4 else self.restore(x[..., None])[..., 0]
            return type(x)(*(shaped(part) for part in x))

        return stats if self.ndim == 4 else RowStats(*(shaped(x) for x in stats))

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
        full = (*self.batch, self.heads, queries, keys) if self.head_axis else (*self.batch, queries, keys)
        if not _fits(mask.shape, full):
            raise ArgumentError(
                f"attn_mask of shape {list(mask.shape)} is not accepted: expected one that broadcasts to {list(full)}"
            )
        mask = mask[(None,) * (len(full) - mask.dim())]
        if not self.head_axis:
            mask = mask[..., None, :, :]
        heads = mask.shape[-3]
        mask = mask.expand(*mask.shape[:-2], queries, keys)
        if all(extent == 1 for extent in mask.shape[:-3]):
            return mask.reshape(1, heads, queries, keys)
        return mask.expand(*self.batch, heads, queries, keys).reshape(self.size, heads, queries, keys)


def read_layout(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> Layout:
    """Check that the three tensors fit each other, by torch's rules, and say how their dimensions are to be read.

    [T, D] is one head of one sequence, [N, T, D] is one head of N sequences (with `enable_gqa`: N heads of one
    sequence, as in torch), [..., H, T, D] has any number of batch dimensions.
    """
    _check_tensors(query, key, value)
    ndim = query.dim()
    head_axis = ndim >= 4 or (ndim == 3 and enable_gqa)
    lead = -3 if head_axis else -2
    if ndim == 4 and query.shape[0] == key.shape[0] == value.shape[0]:
        batch: tuple[int, ...] = (query.shape[0],)
    else:
        shared = _broadcast(query.shape[:lead], key.shape[:lead], value.shape[:lead])
        if shared is None:
            raise ArgumentError(
                f"batch dimensions {[list(x.shape[:lead]) for x in (query, key, value)]} of query, key and value are "
                "not accepted: expected ones that broadcast"
            )
        batch = shared
    heads = query.shape[-3] if head_axis else 1
    if head_axis:
        _check_heads(heads, key.shape[-3], value.shape[-3], enable_gqa)
    return Layout(batch, heads, ndim, head_axis)


def _fits(shape: Sequence[int], full: tuple[int, ...]) -> bool:
    """Whether a shape broadcasts to another as it is; quick for the usual one."""
    if len(shape) == len(full):
        return all(extent in (1, other) for extent, other in zip(shape, full, strict=True))
    return _broadcast(shape, full) == full


def _broadcast(*shapes: Sequence[int]) -> tuple[int, ...] | None:
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not (query.dim() == key.dim() == value.dim() and query.dim() >= 2):
        raise ArgumentError(
            f"query, key, value of shapes {list(query.shape)}, {list(key.shape)}, {list(value.shape)} are not "
            "accepted: expected the same number of dimensions, at least 2"
        )
    if not query.dtype.is_floating_point:
        reject_type("query", query.dtype, "a floating dtype")
    # Under autocast torch casts all three itself, so mixed dtypes are fine there.
    if not (query.dtype == key.dtype == value.dtype) and not torch.is_autocast_enabled(query.device.type):
        raise ArgumentTypeError(
            f"dtypes {query.dtype}, {key.dtype}, {value.dtype} of query, key and value are not accepted: expected one"
        )
    if not (query.device == key.device == value.device):
        raise ArgumentError(
            f"devices {query.device}, {key.device}, {value.device} of query, key and value are not accepted: "
            "expected one device"
        )
    if query.shape[-1] != key.shape[-1]:
        reject("key.shape[-1]", key.shape[-1], f"the head dimension of query, {query.shape[-1]}")
    if key.shape[-2] != value.shape[-2]:
        reject("value.shape[-2]", value.shape[-2], f"the number of keys, {key.shape[-2]}")


def _check_heads(query: int, key: int, value: int, enable_gqa: bool) -> None:
    if query == key == value:
        return
    if not enable_gqa:
        reject("key heads, value heads", (key, value), f"{query}, as the query; or pass enable_gqa=True")
    if key == 0 or value == 0 or query % key or query % value:
        reject("key heads, value heads", (key, value), f"divisors of the {query} query heads")
