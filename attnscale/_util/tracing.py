"""What torch does with the tensors that are computed now: tracing, transforms, autocast, DTensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from attnscale.errors import BackendError

Found = TypeVar("Found")


def is_watched() -> bool:
    """Whether tensors made now may be fake, traced or transformed, so that they must neither be kept nor read.

    True under torch.compile, `torch.jit.trace`, a dispatch mode (FakeTensorMode, make_fx), a functional transform,
    forward-mode differentiation (dual numbers do not follow `out=`), or a function mode other than a default device.
    """
    return (
        torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or (
            torch._C._len_torch_function_stack() > 0
            and not all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]
        )
    )


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which torch's SDPA computes with a floating tensor here; autocast leaves fp64 alone."""
    if x.dtype == torch.float64 or not has_autocast(x.device):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def autocast_off(device: torch.device) -> AbstractContextManager[object]:
    """A context in which products have the dtype of their factors."""
    return torch.autocast(device.type, enabled=False) if has_autocast(device) else nullcontext()


def without_autocast(function: Callable[..., Found]) -> Callable[..., Found]:
    """The same function with autocast off, on the device of its first argument."""

    @wraps(function)
    def run(first: Tensor, *others: Any) -> Found:
        with autocast_off(first.device):
            return function(first, *others)

    return run


def has_autocast(device: torch.device) -> bool:
    """Whether autocast is on for a device."""
    if not torch._C._is_any_autocast_enabled():  # much cheaper than the rest
        return False
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def is_dtensor(x: Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing the class."""
    return type(x) is not Tensor and hasattr(x, "placements")


def refuse_dtensor(query: Tensor) -> None:
    """Refuse queries that are a DTensor: a process computes the heads that it has."""
    if is_dtensor(query):
        raise BackendError(
            "query as a DTensor is not accepted: expected the heads of this process, which ColwiseParallel gives "
            "without use_local_output=False, or a module with attnscale.distributed.HeadParallel() in the plan"
        )
