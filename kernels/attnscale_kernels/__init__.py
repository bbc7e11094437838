"""Triton kernels of attnscale. Requires torch and triton; importing the package loads neither triton nor a driver."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .availability import interpreting, why_unavailable
from .errors import KernelArgumentError, KernelError, KernelTypeError, KernelUnavailableError
from .visibility import Visibility

if TYPE_CHECKING:
    from .decode.op import decode_attention as decode_attention
    from .flash.op import flash_attention as flash_attention
    from .gaps.op import accumulation_bracket as accumulation_bracket
    from .gaps.op import adaptive_attention as adaptive_attention
    from .gaps.op import gap_counts as gap_counts
    from .softmax.op import row_softmax as row_softmax

# Operators, and triton with them, are imported on first access: name → module.
_MODULES = {
    "accumulation_bracket": "gaps.op",
    "adaptive_attention": "gaps.op",
    "decode_attention": "decode.op",
    "flash_attention": "flash.op",
    "gap_counts": "gaps.op",
    "row_softmax": "softmax.op",
}

__all__ = [
    "KernelArgumentError",
    "KernelError",
    "KernelTypeError",
    "KernelUnavailableError",
    "Visibility",
    "interpreting",
    "why_unavailable",
    *_MODULES,
]


def __getattr__(name: str) -> object:
    if name == "layers":  # HuggingFace's `kernels` reads this attribute
        return importlib.import_module(".layers", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
