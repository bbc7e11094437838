"""Launch cache in front of Triton's own: call signature → launch plan or compiled kernel.

For forward, backward and decode calls an entry is a plan. Argument validity, tile, constants and compiled kernel depend
only on the options and on the dtype, shape, strides, device and alignment of each tensor. These form the signature of
the call, which the layers of a model and the steps of a training run share. The length of a KV cache is excluded where
nothing depends on it.

For other launches an entry is the compiled kernel, and the signature is Triton's specialisation key: dtypes, pointer
alignment, and for integers the width, divisibility by 16 and equality to 1. Triton itself binds and specialises all
arguments and reads its settings on every launch, which takes three times as long (`scripts/launch_cost.py`). No
signature is coarser than Triton's own key.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from . import state

MOST_ENTRIES = 1024  # entries of a few kilobytes; when full, the cache is cleared, as plans are cheap to rebuild


def remember(signature: Any, entry: Any) -> Any:
    """Store an entry in `state.LAUNCHES` under the signature, and return it."""
    if len(state.LAUNCHES) >= MOST_ENTRIES:
        state.LAUNCHES.clear()
    state.LAUNCHES[signature] = entry
    return entry


def layout(x: Tensor | None) -> Any:
    """Return the properties of a tensor that can be read without synchronising.

    A tensor without strides, such as a sparse one, gets a key that equals no other.

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
    """`layout` of keys or values [B, H, T, D], independent of T where Triton compiles the same kernel for all T.

    This holds if the strides are multiples of 16 that fit into 32 bits. B, H and D are not covered: the caller adds
    them to its signature.

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
    """Launch a kernel on the current device. `compiled` belongs to a plan and is empty until its first launch."""
    if not compiled:
        # The interpreter compiles nothing. On AMD, Triton also specialises on tensor sizes.
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
        if hasattr(found, "packed_metadata"):  # False while the kernel is still being compiled
            names = kernel.arg_names
            pick = operator.itemgetter(*names[: len(arguments)])
            compiled[:] = found, pick, [constants[name] for name in names[len(arguments) :]]
        return
    found, in_order, constexprs = compiled
    found[grid, 1, 1](*in_order(arguments), *constexprs)


def class_of(value: Any) -> Any:
    """Return Triton's specialisation key for one argument: a tensor, descriptor, number, None, or a tuple of these.

    An integer is represented by its bits above 31, whether it equals 1, and whether 16 divides it.

    >>> class_of(1), class_of(48), class_of((5, None, 2**40))
    ((0, True, False), (0, False, True), ((0, False, False), None, (512, False, True)))
    """
    if isinstance(value, tuple):
        # Inlined for integers, the common case: a function call per element takes twice as long.
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
