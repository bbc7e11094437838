"""GPU kernels of attnscale. Needs torch and triton only; importing it loads neither triton nor a driver."""

from __future__ import annotations

import importlib

from .availability import why_unavailable
from .launch import interpreting
from .visibility import Visibility

# The rest is imported when first asked for, and triton with it: where it is, and its name there. None is called like a
# module of this package, which Python would put in its place.
_HOME = {
    "accumulation_bracket": ("gaps.op", "accumulation_bracket"),
    "accumulation_lower_bound": ("gaps.accumulation", "accumulation_lower_bound"),
    "adaptive_attention": ("gaps.op", "adaptive_attention"),
    "decode_attention": ("decode.op", "decode_attention"),
    "flash_attention": ("flash.op", "flash_attention"),
    "gap_counts": ("gaps.op", "gap_counts"),
    "merge_parts": ("decode.merge", "merge"),
    "paged_decode_attention": ("decode.op", "paged_decode_attention"),
    "row_softmax": ("softmax.op", "softmax"),
}

__all__ = ["Visibility", "interpreting", "why_unavailable", *_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(importlib.import_module(f".{module}", __name__), attribute)
