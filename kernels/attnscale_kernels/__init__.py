"""GPU kernels of attnscale. Needs torch and triton only; importing it loads neither triton nor a driver."""

from __future__ import annotations

import importlib

from .availability import why_unavailable
from .launch import interpreting
from .visibility import Visibility

# The rest is imported when first asked for, and triton with it.
_HOME = {
    "accumulation_bracket": "ops_gap",
    "accumulation_lower_bound": "accumulation",
    "adaptive_attention": "ops_gap",
    "decode_attention": "ops_decode",
    "flash_attention": "ops_flash",
    "flash_backward": "flash_backward",
    "flash_forward": "flash_forward",
    "gap_counts": "ops_gap",
    "merge": "merge",
    "paged_decode_attention": "ops_decode",
    "softmax": "ops_softmax",
}

__all__ = ["Visibility", "interpreting", "why_unavailable", *_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
