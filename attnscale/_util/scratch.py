"""Memory for what is dead when a call returns, so that the CPU does not page it in each time.

Fresh memory costs the CPU more in page faults than the arithmetic done in it: a copy of q, at 2048 keys and 8 heads of
64, a tenth of the whole attention. Where nothing can hold on to it (no autograd, no tracing, no transform), a few
buffers a thread serve every call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnscale._util import state
from attnscale._util.tracing import is_watched

# What is larger is made afresh: attention over it takes so long that this does not show.
MOST_BYTES = 32 * 2**20


def room(purpose: str, shape: torch.Size | tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor of unknown content, in `like`'s dtype; valid until this thread asks for the same purpose again."""
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
    """Give back what this thread has kept."""
    state.SCRATCH.__dict__.clear()


def multiply(x: Tensor, factor: Tensor) -> Tensor:
    """x·factor in the wider of the two dtypes, rounded once to x's; without autograd, in the room for products."""
    if torch.is_grad_enabled() or x.device.type != "cpu" or is_watched():
        product = x * factor
        return product if product.dtype == x.dtype else product.to(x.dtype)
    return torch.mul(x, factor, out=room("product", x.shape, x))
