"""The cache in front of triton's own: signature → what calls of that signature share.

For a forward and a decoding step an entry is a plan. Whether arguments are accepted, the tile, the constants and the
compiled kernel follow from dtype, shape, strides, device and alignment of each tensor and from the options: the
signature of the call. The layers of a model share it, and the steps of a training. The length of a KV cache is left out
where nothing depends on it.

For other launches an entry is the compiled kernel alone, and the signature is what triton compiles for: dtypes,
alignment of pointers, and of integers their width, divisibility by 16 and whether they are 1. In each launch triton
binds and classifies all arguments anew and reads its settings, which takes three times as long
(`scripts/launch_cost.py`). No signature is coarser than triton's own key.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from . import state

MOST_ENTRIES = 1024  # of a few kilobytes; all are dropped when there are more, since what comes back is soon made


def remember(signature: Any, entry: Any) -> Any:
    """The entry, which further calls of the signature will find in `state.LAUNCHES`."""
    if len(state.LAUNCHES) >= MOST_ENTRIES:
        state.LAUNCHES.clear()
    state.LAUNCHES[signature] = entry
    return entry


def layout(x: Tensor | None) -> Any:
    """What can be told of a tensor without looking into it.

    What has no strides, such as a sparse tensor, has a layout that is equal to no other.

    >>> import torch
    >>> layout(torch.zeros(2, 3))
    (torch.float32, torch.Size([2, 3]), (3, 1), device(type='cpu'), True)
    """
    if x is None:
        return None
    try:
        return x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % 16 == 0
    except (AttributeError, RuntimeError):
        return object()


def layout_of_any_length(x: Tensor) -> Any:
    """The same of keys or values [B, H, T, D], without shape and strides where triton compiles the same for all T.

    That is where strides are multiples of 16 within 32 bits. B, H and D are to be told besides.

    >>> import torch
    >>> x = torch.zeros(1, 2, 20, 16)
    >>> layout_of_any_length(x) == layout_of_any_length(x[:, :, :7]) == layout_of_any_length(x[:, :, :7].contiguous())
    True
    """
    try:
        batch, head, row, column = x.stride()
    except RuntimeError:
        return layout(x)
    strides = batch | head | row
    if strides & 15 or strides >> 31 or column != 1:
        return layout(x)
    return x.dtype, x.device, x.data_ptr() % 16 == 0


def launch(
    device: int,
    kernel: Any,
    grid: int,
    arguments: dict[str, Any],
    constants: dict[str, Any],
    warps: int,
    stages: int,
    compiled: list[Any] | None,
) -> None:
    """Launch a kernel on the current device; `compiled` is that of a plan, empty until its first launch."""
    if not compiled:
        # The interpreter compiles nothing; for AMD triton also compiles for the size of tensors.
        if not hasattr(kernel, "device_caches") or torch.version.hip is not None:
            kernel[(grid,)](**arguments, **constants, num_warps=warps, num_stages=stages)
            return
        if compiled is None:
            key = (id(kernel), device, warps, stages, *constants.values(), *map(class_of, arguments.values()))
            compiled = state.LAUNCHES.get(key)
            if compiled is None:
                compiled = remember(key, [])
    if not compiled:
        found = kernel[(grid,)](**arguments, **constants, num_warps=warps, num_stages=stages)
        if hasattr(found, "packed_metadata"):  # not one that is still being compiled
            names = kernel.arg_names
            pick = operator.itemgetter(*names[: len(arguments)])
            compiled[:] = found, pick, [constants[name] for name in names[len(arguments) :]]
        return
    found, in_order, constexprs = compiled
    found[grid, 1, 1](*in_order(arguments), *constexprs)


def class_of(value: Any) -> Any:
    """What triton compiles for, of one argument: a tensor, a descriptor, a number, None, or a tuple of them.

    An integer is its part beyond 32 bits, whether it is 1, and whether 16 divides it.

    >>> class_of(1), class_of(48), class_of((5, None, 2**40))
    ((0, True, False), (0, False, True), ((0, False, False), None, (512, False, True)))
    """
    if isinstance(value, tuple):
        # Most are integers: a call for each takes twice as long.
        return tuple([(x >> 31, x == 1, x & 15 == 0) if type(x) is int else class_of(x) for x in value])
    if value is None:
        return None
    kind = type(value)
    if kind is int:
        return value >> 31, value == 1, value & 15 == 0
    if kind is float or kind is bool:
        return kind
    if hasattr(value, "block_shape"):
        return value.base.dtype, tuple(value.block_shape), value.padding, value.round_f32_to_tf32
    return value.dtype, value.data_ptr() & 15 == 0
