"""Descriptors of tensors, by which sm_90 and sm_100 copy boxes of them."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import Resources


class Box(TensorDescriptor):  # type: ignore[misc]
    """A descriptor of triton without its checks, which take longer than a launch: `fits_box` was asked before."""

    def __post_init__(self) -> None:
        pass


def fits_box(x: Tensor, resources: Resources) -> bool:
    """Whether a descriptor can tell where [B, H, T, D] lies: in half precision, in steps of 16 bytes."""
    aligned = all(stride > 0 and stride % 8 == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return resources.copies_boxes and x.element_size() == 2 and x.numel() > 0 and aligned


def box(x: Tensor, block: list[int]) -> Box:
    """A descriptor of [B, H, T, D], by which a block of [1, 1, rows, columns] is copied at once."""
    return Box(x, x.shape, x.stride(), block)
