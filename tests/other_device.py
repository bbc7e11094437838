"""A second device on a machine that has none: for tests of where tensors are, in a process of their own.

Its tensors hold ordinary ones and compute with them, but say that they are on `other:0`, and refuse to meet a tensor of
the CPU as those of a GPU do. What has the host wait for the device is noted. To `register` it is for the whole process,
which then has an accelerator: never in that of the tests.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

# Operators whose result the host needs to go on; `bincount` asks for the largest.
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
    def get_amp_supported_dtype(self) -> list[torch.dtype]:  # torch's checkpoints ask
        return [torch.bfloat16, torch.float16]


def register() -> torch.library.Library:
    """Make the device known for as long as what is returned is held."""
    _setup_privateuseone_for_python_backend("other", backend_module=_Module())
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")  # all other factories are made of these two
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    return library


def leave() -> None:
    """End the process at once, as successful: torch aborts some exits while the device's autograd thread is running."""
    sys.stdout.flush()
    os._exit(0)
