"""Whether torch traces or transforms what is computed now."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


def is_watched() -> bool:
    """Whether something stands between us and the kernels, so that tensors made now are not what they are elsewhere.

    That is torch.compile, `torch.jit.trace`, a dispatch mode (FakeTensorMode, make_fx), a functional transform,
    forward-mode differentiation (dual numbers have no part in what is written with `out=`), or a function mode. A
    default device, which torch sets by a function mode too, is not: whoever keeps a tensor names the device of it.
    """
    return (
        torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or (torch._C._len_torch_function_stack() > 0 and not _only_default_devices())
    )


def _only_default_devices() -> bool:
    return all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]
