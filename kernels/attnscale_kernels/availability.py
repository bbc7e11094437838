"""Availability of the Triton kernels by device, dtype and kind of differentiation.

The operators have one backward pass and no other derivative. In forward-mode AD, torch treats a custom operator without
a JVP as a constant, so its tangent would silently be zero. The functions below detect such calls.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .arguments import DTYPES

# Triton reads this variable once, at import.
_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def interpreting() -> bool:
    """Return True if kernels run in Triton's interpreter, on the CPU.

    The interpreter is enabled by `TRITON_INTERPRET=1`, set before triton and this package are imported.

    Example:
        >>> isinstance(interpreting(), bool)
        True
    """
    return _INTERPRETING


def _installed() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except (ImportError, ValueError):
        return False


# Evaluated once at import: per-call lookups are slow and cannot be traced by torch.compile.
INSTALLED = _installed()


def why_unavailable(device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> str | None:
    """Return the reason why the kernels cannot run, or None if they can.

    Args:
        device: The device to check. None checks whether any device of this machine is usable.
        dtype: The dtype of query, key and value.

    Returns:
        A one-line reason, or None. With `TRITON_INTERPRET=1`, the CPU counts as a usable device.

    Example:
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
        return f"triton kernels support float32, float16 and bfloat16, not {dtype}"
    return None


# Transforms without differentiation: torch calls the operator once per batch element.
_HARMLESS = ("Vmap", "Functionalize")


def other_derivative(*tensors: object) -> str | None:
    """Name the derivative being taken of these tensors, None if it is at most a single backward pass.

    >>> x = torch.ones(2)
    >>> other_derivative(x) is None
    True
    >>> torch.func.grad(lambda x: (print(other_derivative(x)), x.sum())[1])(x)
    torch.func.grad
    tensor([1., 1.])
    """
    # Traced tensors cannot be inspected: any open transform or forward-AD level is assumed to apply to them.
    in_graph = torch.compiler.is_compiling()
    transform = _open_transform()
    if transform is not None and (in_graph or any(map(_is_transformed, tensors))):
        return transform
    if forward_ad._current_level >= 0 and (in_graph or any(map(_has_tangent, tensors))):
        return "forward-mode differentiation (torch.autograd.forward_ad)"
    return None


def refuse_others(*tensors: object) -> None:
    """Raise if a derivative other than a single backward pass is being taken of these tensors."""
    derivative = other_derivative(*tensors)
    if derivative is not None:
        raise RuntimeError(
            f"the Triton kernels have a single backward pass and no {derivative}; use a plain torch backend"
        )


def refuse_second(*_: Any) -> NoReturn:
    """Raise on double backward. Registered as the gradient of the backward operators."""
    raise RuntimeError("the Triton kernels have no second derivative; use a plain torch backend")


def _open_transform() -> str | None:
    """Return the name of the outermost differentiating torch.func transform, if one is active."""
    if torch._C._functorch.maybe_current_level() is None:
        return None
    names = (interpreter.key().name for interpreter in torch._C._functorch.get_interpreter_stack() or ())
    return next((f"torch.func.{name.lower()}" for name in names if name not in _HARMLESS), None)


# torch.compile cannot trace this function. It enters the same transforms while tracing and guards on them, so the
# result is a constant of the graph. The torch.compiler decorator that sets this flag would import dynamo.
_open_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_transformed(x: object) -> bool:
    return isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)


def _has_tangent(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and forward_ad.unpack_dual(x).tangent is not None
