"""GPU kernels of attnscale. Needs torch and triton only; importing it loads neither triton nor a driver."""

from __future__ import annotations

import importlib

from .availability import why_unavailable
from .launch import interpreting
from .visibility import Visibility

# The rest is imported when first asked for, and triton with it.
_HOME = {
    "flash_attention": "ops_flash",
    "flash_backward": "flash_backward",
    "flash_forward": "flash_forward",
}

__all__ = ["Visibility", "flash_attention", "flash_backward", "flash_forward", "interpreting", "why_unavailable"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
