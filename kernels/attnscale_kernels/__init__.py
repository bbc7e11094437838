"""GPU kernels of attnscale. Needs torch and triton only; importing it loads neither triton nor a driver."""

from .availability import why_unavailable

__all__ = ["why_unavailable"]
