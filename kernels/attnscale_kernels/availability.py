"""Whether Triton kernels can run here, and if not, why."""

from __future__ import annotations

import importlib.util

import torch


def why_unavailable(device: torch.device | None = None) -> str | None:
    """Why Triton kernels cannot run on a device (by default: on any device of this machine), or None if they can.

    >>> why_unavailable(torch.device("cpu"))
    'triton kernels need a CUDA or ROCm device, not cpu'
    """
    if device is not None and device.type != "cuda":
        return f"triton kernels need a CUDA or ROCm device, not {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'attnscale[triton]')"
    if not torch.cuda.is_available():
        return "no CUDA or ROCm device is visible to torch"
    return None
