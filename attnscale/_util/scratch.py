"""Memory for what is dead when a call returns, so that the CPU does not page it in each time.

Fresh memory costs the CPU more in page faults than the arithmetic done in it: a copy of q, at 2048 keys and 8 heads of
64, a tenth of the whole attention. Where nothing can hold on to it (no autograd, no tracing, no transform), a few
buffers a thread serve every call.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

# What is larger is made afresh: attention over it takes so long that this does not show.
MOST_BYTES = 32 * 2**20

_kept = threading.local()


def room(purpose: str, shape: torch.Size | tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor of unknown content, in `like`'s dtype; valid until this thread asks for the same purpose again."""
    size = like.element_size()
    for extent in shape:
        size *= extent
    if size > MOST_BYTES or like.device.type != "cpu" or is_watched():
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    buffers = _kept.__dict__
    key = (shape, like.dtype, torch.is_inference_mode_enabled())
    found = buffers.get(purpose)
    if found is None or found[0] != key:
        found = buffers[purpose] = (key, torch.empty(shape, dtype=like.dtype, device="cpu"))
    buffer: Tensor = found[1]
    return buffer


def forget() -> None:
    """Give back what this thread has kept."""
    _kept.__dict__.clear()


def multiply(x: Tensor, factor: Tensor) -> Tensor:
    """x·factor in the wider of the two dtypes, rounded once to x's; without autograd, in the room for products."""
    if torch.is_grad_enabled() or x.device.type != "cpu" or is_watched():
        product = x * factor
        return product if product.dtype == x.dtype else product.to(x.dtype)
    return torch.mul(x, factor, out=room("product", x.shape, x))


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
