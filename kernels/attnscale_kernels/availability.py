"""Whether Triton kernels can run here, and if not, why."""

from __future__ import annotations

import importlib.util
import os

import torch

from .arguments import DTYPES

# Triton reads the variable once, when it is imported.
_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def interpreting() -> bool:
    """Whether kernels run in triton's interpreter, on the CPU."""
    return _INTERPRETING


def _installed() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except (ImportError, ValueError):
        return False


# Looked up once, at import: a lookup in each call would be slow, and torch.compile could not trace it.
INSTALLED = _installed()


def why_unavailable(device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> str | None:
    """Why Triton kernels cannot run on a device (by default: on any device of this machine), or None if they can.

    Triton's interpreter, if chosen by TRITON_INTERPRET=1 before triton is imported, runs them on the CPU, slowly.

    >>> why_unavailable(torch.device("meta"))
    'triton kernels need a CUDA or ROCm device, not meta'
    """
    if not INSTALLED:
        return "triton is not installed (pip install triton)"
    if not (interpreting() and (device is None or device.type == "cpu")):
        if device is not None and device.type != "cuda":
            return f"triton kernels need a CUDA or ROCm device, not {device.type}"
        if not torch.cuda.is_available():
            return "no CUDA or ROCm device is visible to torch"
    if dtype not in DTYPES:
        return f"triton kernels take float32, float16 and bfloat16, not {dtype}"
    return None
