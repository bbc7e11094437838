"""State of torch that affects new tensors: tracing, transforms, autocast, DTensors."""

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
    """Whether new tensors may be fake, traced or transformed, so that they must be neither cached nor read.

    True under torch.compile, `torch.jit.trace`, a dispatch mode (FakeTensorMode, make_fx), a functional transform,
    forward-mode AD (dual numbers do not support `out=`), or a function mode other than a default device.
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
    """Return the dtype in which torch's SDPA computes with a floating tensor here; autocast does not affect fp64."""
    if x.dtype == torch.float64 or not has_autocast(x.device):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def autocast_off(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast: products have the dtype of their factors."""
    return torch.autocast(device.type, enabled=False) if has_autocast(device) else nullcontext()


def without_autocast(function: Callable[..., Found]) -> Callable[..., Found]:
    """Decorator: disable autocast on the device of the first argument."""

    @wraps(function)
    def run(first: Tensor, *others: Any) -> Found:
        with autocast_off(first.device):
            return function(first, *others)

    return run


def has_autocast(device: torch.device) -> bool:
    """Whether autocast is enabled for a device."""
    if not torch._C._is_any_autocast_enabled():  # much cheaper than the rest
        return False
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def is_dtensor(x: Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing the class."""
    return type(x) is not Tensor and hasattr(x, "placements")


def refuse_dtensor(query: Tensor) -> None:
    """Raise for DTensor queries: a process computes only its local heads."""
    if is_dtensor(query):
        raise BackendError(
            "query as a DTensor is not accepted: expected the local heads, as from ColwiseParallel with "
            "use_local_output=True, or a module with attnscale.distributed.HeadParallel() in its plan"
        )
