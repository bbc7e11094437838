"""Whether torch traces or transforms what is computed now."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


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
