"""Whether Triton kernels can compute a call, and if not, why: device and dtype, and the derivatives that are taken.

An operator of torch.library has one backward pass and no others. In forward mode torch takes such an operator for a
constant: the tangent of its result would silently be zero.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

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


# Transforms that need no derivative of an operator: torch calls it once for each element of a batch.
_HARMLESS = ("Vmap", "Functionalize")


def other_derivative(*tensors: object) -> str | None:
    """The derivative that is being taken of these tensors and is not that of one backward pass, in words; None if none.

    >>> x = torch.ones(2)
    >>> other_derivative(x) is None
    True
    >>> torch.func.grad(lambda x: (print(other_derivative(x)), x.sum())[1])(x)
    torch.func.grad
    tensor([1., 1.])
    """
    # Tensors in a graph cannot be inspected: an open transform or level is assumed to apply to them.
    in_graph = torch.compiler.is_compiling()
    transform = _open_transform()
    if transform is not None and (in_graph or any(map(_is_transformed, tensors))):
        return transform
    if forward_ad._current_level >= 0 and (in_graph or any(map(_has_tangent, tensors))):
        return "forward-mode differentiation (torch.autograd.forward_ad)"
    return None


def refuse_others(*tensors: object) -> None:
    """Raise where a derivative is being taken of these tensors that is not that of one backward pass."""
    derivative = other_derivative(*tensors)
    if derivative is not None:
        raise RuntimeError(f"these kernels have one backward pass, and no {derivative}: use plain torch there")


def refuse_second(*_: Any) -> NoReturn:
    """Registered as the gradient of a backward pass."""
    raise RuntimeError("these kernels have no second derivative: use plain torch for it")


def _open_transform() -> str | None:
    """The outermost transform of torch.func that differentiates, if one is open."""
    if torch._C._functorch.maybe_current_level() is None:
        return None
    names = (interpreter.key().name for interpreter in torch._C._functorch.get_interpreter_stack() or ())
    return next((f"torch.func.{name.lower()}" for name in names if name not in _HARMLESS), None)


# torch.compile cannot trace this, but enters the same transforms while it traces and guards its graphs by them, so
# that the answer is a constant of the graph. The decorator of torch.compiler, which sets this flag, would load dynamo.
_open_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_transformed(x: object) -> bool:
    return isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)


def _has_tangent(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and forward_ad.unpack_dual(x).tangent is not None
