"""Launching kernels that triton has compiled before, without its search for them.

In each launch triton binds and classifies all arguments anew and asks its settings, which for the arguments of
attention takes three times as long as everything here (`scripts/launch_cost.py`). What it compiles for is dtypes,
alignment of pointers, and of integers their width, divisibility by 16 and whether they are 1: the key here has all of
that, for every argument, and is never coarser than triton's own. Where a call is known to be like an earlier one in all
of that, by the plan of a launch, not even a key is made.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from . import state


def launch(
    device: int,
    kernel: Any,
    grid: int,
    arguments: dict[str, Any],
    constants: dict[str, Any],
    warps: int,
    stages: int,
    alike: dict[int, Any] | None,
) -> None:
    """Launch a kernel on the current device.

    `alike` holds by device what launches are run by that are alike in all that triton compiles for; it is filled here.
    """
    known = None if alike is None else alike.get(device)
    if known is None:
        # The interpreter compiles nothing; for AMD triton also compiles for the size of tensors.
        if not hasattr(kernel, "device_caches") or torch.version.hip is not None:
            kernel[(grid,)](**arguments, **constants, num_warps=warps, num_stages=stages)
            return
        key = (id(kernel), device, warps, stages, *constants.values(), *map(class_of, arguments.values()))
        known = state.COMPILED.get(key)
        if known is None:
            compiled = kernel[(grid,)](**arguments, **constants, num_warps=warps, num_stages=stages)
            if hasattr(compiled, "packed_metadata"):  # not one that is still being compiled
                names = kernel.arg_names
                pick = operator.itemgetter(*names[: len(arguments)])
                state.COMPILED[key] = compiled, pick, [constants[name] for name in names[len(arguments) :]]
            return
        if alike is not None:
            alike[device] = known
    compiled, in_order, constexprs = known
    compiled[grid, 1, 1](*in_order(arguments), *constexprs)


def class_of(value: Any) -> Any:
    """What triton compiles for, of one argument: a tensor, a descriptor, a number, None, or a tuple of them.

    >>> class_of(1), class_of(48), class_of(5), class_of(2**40), class_of((5, None, 48))
    (1, 16, 0, 80, (0, None, 16))
    """
    if type(value) in PLAIN:
        return _class(value)
    if isinstance(value, tuple):
        if len(value) == 2 and type(value[0]) not in PLAIN and type(value[1]) is tuple:  # a tensor and its strides
            return value[0].dtype, value[0].data_ptr() % 16 == 0, _classes(value[1])
        # Not isinstance(x, Tensor), which takes longer than all the rest.
        tensors = [x for x in value if type(x) not in PLAIN]
        numbers = value if not tensors else tuple([x if type(x) in PLAIN else x.dtype for x in value])
        return _classes(numbers), *[x.data_ptr() % 16 == 0 for x in tensors]
    if hasattr(value, "block_shape"):
        return value.base.dtype, tuple(value.block_shape), value.padding, value.round_f32_to_tf32
    return value.dtype, value.data_ptr() % 16 == 0


PLAIN = frozenset((int, float, bool, tuple, type(None)))


# Strides and the like, most of which are the same in the next launch.
@functools.lru_cache(maxsize=4096)
def _classes(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(map(_class, values))


def _class(value: Any) -> Any:
    """Of anything but a tensor; a dtype stands for itself."""
    if type(value) is int:
        return (1 if value == 1 else 0 if value % 16 else 16) + (0 if -(2**31) <= value < 2**31 else 64)
    if type(value) is tuple:
        return _classes(value)
    return value if value is None or isinstance(value, torch.dtype) else type(value)
