"""Memory for a product that is dead when the call returns, so that inference on the CPU does not page it in each time.

A fresh copy of q costs the CPU more in page faults than in arithmetic: at 2048 keys and 8 heads of 64, a tenth of the
whole attention. Where nothing can hold on to the product (no autograd, no tracing, no transform), one buffer a thread
serves.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

# A longer query is copied afresh: attention over it takes so long that the copy does not show.
MOST_BYTES = 32 * 2**20

_kept = threading.local()


def multiply(x: Tensor, factor: Tensor) -> Tensor:
    """x·factor in the wider of the two dtypes, rounded once to x's dtype; valid until this thread's next call."""
    size = x.numel() * x.element_size()
    if size > MOST_BYTES or x.device.type != "cpu" or torch.is_grad_enabled() or _is_watched():
        product = x * factor
        return product if product.dtype == x.dtype else product.to(x.dtype)
    key = (x.shape, x.dtype, torch.is_inference_mode_enabled())
    if getattr(_kept, "key", None) != key:
        _kept.key, _kept.buffer = key, torch.empty(x.shape, dtype=x.dtype)
    return torch.mul(x, factor, out=_kept.buffer)


def _is_watched() -> bool:
    """Whether torch.compile, a dispatch mode or a functional transform stands between us and the kernels."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
    )
