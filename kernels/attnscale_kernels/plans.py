"""What calls that look the same have in common, worked out once for all of them: a plan.

Whether arguments are accepted, the tile, what a kernel is compiled for and what triton made of it follow from dtype,
shape, strides, device and alignment of each tensor and from what is asked for: the signature of a call. The layers of a
model share it, and the steps of a training. The length of a cache is left out where nothing depends on it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import state

MOST_PLANS = 1024  # of a few kilobytes; all are dropped when there are more, since what comes back is soon made


def layout(x: Tensor | None) -> Any:
    """What can be told of a tensor without looking into it.

    What has no strides, such as a sparse tensor, has a layout that is equal to no other.

    >>> import torch
    >>> layout(torch.zeros(2, 3))
    (torch.float32, torch.Size([2, 3]), (3, 1), device(type='cpu'), True)
    """
    if x is None:
        return None
    try:
        return x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % 16 == 0
    except (AttributeError, RuntimeError):
        return object()


def layout_of_any_length(x: Tensor) -> Any:
    """The same of keys or values [B, H, T, D], without shape and strides where triton compiles the same for all T.

    That is where strides are multiples of 16 within 32 bits. B, H and D are to be told besides.

    >>> import torch
    >>> x = torch.zeros(1, 2, 20, 16)
    >>> layout_of_any_length(x) == layout_of_any_length(x[:, :, :7]) == layout_of_any_length(x[:, :, :7].contiguous())
    True
    """
    try:
        batch, head, row, column = x.stride()
    except RuntimeError:
        return layout(x)
    strides = batch | head | row
    if strides & 15 or strides >> 31 or column != 1:
        return layout(x)
    return x.dtype, x.device, x.data_ptr() % 16 == 0


def remember(signature: Any, plan: Any) -> Any:
    """The plan, which further calls of the signature will find in `state.PLANS`."""
    if len(state.PLANS) >= MOST_PLANS:
        state.PLANS.clear()
    state.PLANS[signature] = plan
    return plan
