"""A simulated second device, for tests of tensor placement in a separate process.

Its tensors wrap CPU tensors but report the device `other:0`, and raise when combined with a CPU tensor, as GPU tensors
do. Synchronising operations are recorded. `register` affects the whole process, which then has an accelerator, so it
must not be called in the test process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

# Synchronising operators; `bincount` needs the maximum.
WAITING = {
    f"aten::{name}"
    for name in ("_local_scalar_dense", "bincount", "equal", "is_nonzero", "masked_select", "nonzero", "unique")
}
MOVING = {"aten::_to_copy", "aten::copy_"}

waits: list[str] = []


CPU, PLACE = torch.device("cpu"), "other:0"


class Elsewhere(Tensor):
    """A tensor on the other device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, inner.shape, **layout, dtype=inner.dtype, device=torch.device(PLACE))

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        given, spec = tree_flatten((args, kwargs))
        strangers = [x for x in given if isinstance(x, Tensor) and not isinstance(x, Elsewhere) and x.dim() > 0]
        if strangers and name not in MOVING:
            raise RuntimeError(f"{func} has tensors on two devices")
        leaves = name == "aten::_to_copy" and kwargs.get("device") == CPU
        if name in WAITING or leaves:
            waits.append(name)
        inner = [_inside(x) for x in given]
        inner_args, inner_kwargs = tree_unflatten(inner, spec)
        out = func(*inner_args, **inner_kwargs)
        for x, tensor in zip(given, inner, strict=True):
            if tensor is out and isinstance(x, Tensor):
                return x  # changed in place
        return out if leaves else tree_map_only(Tensor, Elsewhere, out)


def _inside(x: Any) -> Any:
    if isinstance(x, Elsewhere):
        return x.inner
    return CPU if isinstance(x, torch.device) else x


def _empty(size: list[int], dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return Elsewhere(torch.empty(size, dtype=dtype, device=CPU))


def _empty_strided(size: list[int], stride: list[int], dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return Elsewhere(torch.empty_strided(size, stride, dtype=dtype, device=CPU))


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:  # read by torch's checkpointing
        return [torch.bfloat16, torch.float16]


def register() -> torch.library.Library:
    """Register the device for as long as the returned object is alive."""
    _setup_privateuseone_for_python_backend("other", backend_module=_Module())
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")  # all other factories use these two
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    return library


def leave() -> None:
    """Exit the process successfully at once: torch may abort exits while the device's autograd thread is running."""
    sys.stdout.flush()
    os._exit(0)
