"""Reused CPU buffers for what is dead when a call returns.

On the CPU the page faults of fresh memory cost more than the arithmetic: a copy of q at 2048 keys and 8 heads of 64
costs a tenth of the whole attention. Where nothing can keep a reference (no autograd, tracing or transform), a few
buffers per thread serve every call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnscale._util import state
from attnscale._util.tracing import is_watched

# Larger tensors are allocated afresh: the cost is negligible beside attention over them.
MOST_BYTES = 32 * 2**20


def room(purpose: str, shape: torch.Size | tuple[int, ...], like: Tensor) -> Tensor:
    """An uninitialised tensor in `like`'s dtype, valid until this thread asks for the same purpose again."""
    size = like.element_size()
    for extent in shape:
        size *= extent
    if size > MOST_BYTES or like.device.type != "cpu" or is_watched():
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    buffers = state.SCRATCH.__dict__
    key = (shape, like.dtype, torch.is_inference_mode_enabled())
    found = buffers.get(purpose)
    if found is None or found[0] != key:
        found = buffers[purpose] = (key, torch.empty(shape, dtype=like.dtype, device="cpu"))
    buffer: Tensor = found[1]
    return buffer


def forget() -> None:
    """Free this thread's buffers."""
    state.SCRATCH.__dict__.clear()


def multiply(x: Tensor, factor: Tensor) -> Tensor:
    """x·factor in the wider of the two dtypes, rounded once to x's; in a scratch buffer where autograd is off."""
    if torch.is_grad_enabled() or x.device.type != "cpu" or is_watched():
        product = x * factor
        return product if product.dtype == x.dtype else product.to(x.dtype)
    return torch.mul(x, factor, out=room("product", x.shape, x))
