"""What every measurement on the CPU shares: one causal attention step, and how its row is labelled."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def causal_step(
    attention: Callable[..., Tensor],
    *,
    heads: int,
    length: int,
    head_dim: int,
    backward: bool,
    beta: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Callable[[], object]:
    """A function that runs attention once on fixed random inputs, with backward or without gradients at all.

    β [Tq], where given, multiplies the queries beforehand.
    """
    shape = (1, heads, length, head_dim)
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(shape, generator=generator, device=generator.device) for _ in range(3))
    q = q if beta is None else q * beta[:, None]
    q, k, v = (x.to(dtype).requires_grad_(backward) for x in (q, k, v))
    gradient = torch.randn(shape, generator=generator, device=generator.device).to(dtype)

    def step() -> None:
        with torch.set_grad_enabled(backward):
            out = attention(q, k, v, is_causal=True)
        if backward:
            torch.autograd.grad(out, (q, k, v), gradient)

    return step


def label(heads: int, head_dim: int, dtype: str = "fp32") -> tuple[str, str, str]:
    """Configuration, device and version of a row."""
    version: Any = torch.__version__
    config = f"H={heads} D={head_dim} {dtype} causal threads={torch.get_num_threads()}"
    return config, f"cpu {platform.machine()}", f"torch {version}"
