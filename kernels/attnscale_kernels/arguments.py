"""Argument checks of the operators: types, shapes, dtypes, devices and numeric ranges.

Kernels receive raw pointers and strides, so a tensor of the wrong shape would cause out-of-bounds reads. The checks
never read tensor elements, because that would synchronise with the device. Planned launches (launch_cache.py) check
tensors once, when the plan is made: its signature covers every checked property.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from numbers import Real
from typing import NoReturn

import torch
from torch import Tensor

from .errors import KernelArgumentError, KernelTypeError, reject, reject_type
from .visibility import Visibility

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDEST_HEAD = 256
FARTHEST = 2**30  # keeps the sum of two distances and a row index within 32 bits
LARGEST = sys.float_info.max

_FLOATS = (*DTYPES, torch.float64)  # dtypes converted to fp32


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    visibility: Visibility,
    sinks: Tensor | None = None,
    seed: Tensor | None = None,
) -> None:
    """Raise if the tensors are not valid arguments of attention."""
    check_scores(query, key, visibility)
    check_values(query, key, value, sinks, seed)
    _check_tensor("beta", beta, _FLOATS, "query", query)
    _check_broadcasts("beta", beta, query.shape[:3])


def check_values(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, seed: Tensor | None) -> None:
    """Check value, sinks and seed against a query and a key that have already been checked."""
    _check_tensor("value", value, (query.dtype,), "query", query)
    of_keys = key.shape[:3]
    if value.dim() != 4 or value.shape[:3] != of_keys or value.shape[3] > WIDEST_HEAD:
        axes = f"[{', '.join(map(str, of_keys))}, DV]"
        _refuse_shape("value", value, f"{axes} for a key of shape {tuple(key.shape)}, with DV <= {WIDEST_HEAD}")
    if sinks is not None:
        _check_tensor("sinks", sinks, _FLOATS, "query", query)
        if sinks.dim() != 1 or sinks.shape[0] != query.shape[1]:
            _refuse_shape("sinks", sinks, f"({query.shape[1]},), one for each head of query")
    if seed is not None:
        _check_tensor("seed", seed, (torch.int64,), "query", query)
        if seed.dim() > 1 or seed.numel() != 1:
            _refuse_shape("seed", seed, "() or (1,)")


def check_scores(query: Tensor, key: Tensor, visibility: Visibility) -> None:
    """Raise if query, key and visibility do not define a score matrix."""
    check_query(query)
    batch, heads, _, dim = query.shape
    _check_tensor("key", key, (query.dtype,), "query", query)
    if key.dim() != 4 or key.shape[0] != batch or key.shape[3] != dim:
        _refuse_shape("key", key, f"[{batch}, Hkv, Tk, {dim}] for a query of shape {tuple(query.shape)}")
    kv_heads, keys = key.shape[1:3]
    if kv_heads == 0 or heads % kv_heads:
        _refuse_shape("key", key, f"a number of heads, its second axis, that divides the {heads} of query")
    _check_visibility(visibility, query, keys)


def _check_visibility(visibility: Visibility, query: Tensor, keys: int) -> None:
    """Raise if the visibility does not match these queries and this number of keys."""
    batch, heads, queries, _ = query.shape
    for name, x in zip(("slot", "left", "right"), visibility[:3], strict=True):
        _check_distance(f"visibility.{name}", x, name != "slot")
    if (visibility.start is None) != (visibility.stop is None):
        missing = "start" if visibility.start is None else "stop"
        reject(f"visibility.{missing}", None, "start and stop, or neither")
    if visibility.start is not None and visibility.stop is not None:
        for name, x in (("left", visibility.left), ("right", visibility.right)):
            if x is not None:
                reject(f"visibility.{name}", x, "None where start and stop are given")
        for name, bound in (("start", visibility.start), ("stop", visibility.stop)):
            _check_tensor(f"visibility.{name}", bound, (torch.int32,), "query", query)
            _check_axes(f"visibility.{name}", bound, (batch, queries), broadcast=1)
        if visibility.start.shape != visibility.stop.shape:
            _refuse_shape("visibility.stop", visibility.stop, f"{tuple(visibility.start.shape)}, the shape of start")
    if visibility.padding is not None:
        _check_tensor("visibility.padding", visibility.padding, (torch.bool,), "query", query)
        _check_axes("visibility.padding", visibility.padding, (batch, keys), broadcast=1)
    if visibility.mask is not None:
        _check_tensor("visibility.mask", visibility.mask, (torch.bool, *_FLOATS), "query", query)
        _check_axes("visibility.mask", visibility.mask, (batch, heads, queries, keys), broadcast=4)


def check_query(query: Tensor) -> None:
    """Raise unless query is [B, H, Tq, D] in a supported dtype."""
    _check_tensor("query", query, DTYPES)
    if query.dim() != 4 or query.shape[3] > WIDEST_HEAD:
        _refuse_shape("query", query, f"[B, H, Tq, D] with D <= {WIDEST_HEAD}")


def check_backward(gradient: Tensor, query: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> None:
    """Check the gradient, output and lse of a forward pass; query and value have already been checked."""
    for name, x in (("gradient", gradient), ("out", out)):
        _check_tensor(name, x, _FLOATS if x is gradient else (query.dtype,), "query", query)
        _check_axes(name, x, (*query.shape[:3], value.shape[3]))
    _check_tensor("lse", lse, (torch.float32,), "query", query)
    _check_axes("lse", lse, query.shape[:3])


def check_softmax(
    scores: Tensor, beta: Tensor, mask: Tensor | None, bias: Tensor | None, thresholds: Tensor | None = None
) -> None:
    """Raise if the tensors are not valid arguments of a softmax over scores [..., Tk]."""
    _check_matrix("scores", scores, beta, bias)
    if mask is not None:
        _check_tensor("mask", mask, (torch.bool,), "scores", scores)
        _check_broadcasts("mask", mask, scores.shape)
    if thresholds is not None:
        _check_tensor("thresholds", thresholds, (torch.float32,), "scores", scores)
        _check_axes("thresholds", thresholds, (thresholds.numel(),))


def check_softmax_backward(
    gradient: Tensor, weights: Tensor, beta: Tensor, scores: Tensor | None, bias: Tensor | None
) -> None:
    """Raise if the gradient, scores or bias do not match the weights [..., Tk]."""
    _check_matrix("weights", weights, beta, bias)
    for name, x in (("gradient", gradient), ("scores", scores)):
        if x is not None:
            _check_tensor(name, x, DTYPES, "weights", weights)
            _check_axes(name, x, weights.shape)


def _check_matrix(name: str, matrix: Tensor, beta: Tensor, bias: Tensor | None) -> None:
    """Check a matrix [..., Tk], and that β broadcasts to its rows and the bias to its elements."""
    _check_tensor(name, matrix, DTYPES)
    if matrix.dim() == 0:
        _refuse_shape(name, matrix, "[..., Tk]")
    _check_tensor("beta", beta, _FLOATS, name, matrix)
    _check_broadcasts("beta", beta, matrix.shape[:-1])
    if bias is not None:
        _check_tensor("bias", bias, _FLOATS, name, matrix)
        _check_broadcasts("bias", bias, matrix.shape)


def check_numbers(scale: object, softcap: object, dropout_p: object = 0.0) -> None:
    """Raise unless scale is finite, softcap positive and dropout_p in [0, 1)."""
    finite("scale", scale)
    probability("dropout_p", dropout_p)
    if softcap is not None:
        positive("softcap", softcap)


def check_splits(splits: object) -> None:
    """Raise unless splits is a positive int or None."""
    accepted = "an int >= 1 or None"
    if splits is None:
        return
    if not isinstance(splits, int) or isinstance(splits, bool):
        reject_type("splits", splits, accepted)
    if splits < 1:
        reject("splits", splits, accepted)


def check_beta_dtype(beta: object) -> None:
    """Raise unless β has a dtype that converts to fp32."""
    _check_tensor("beta", beta, _FLOATS)


def finite(name: str, value: object, accepted: str = "a finite number") -> float:
    """Return a finite number as a float, else raise.

    >>> finite("scale", 2)
    2.0
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        reject_type(name, value, accepted)
    # math.isfinite is not traceable by torch.compile.
    if not -LARGEST <= value <= LARGEST:  # type: ignore[operator]
        reject(name, value, accepted)
    return float(value)


def positive(name: str, value: object) -> float:
    """Return a finite number > 0 as a float, else raise."""
    accepted = "a finite number > 0"
    number = finite(name, value, accepted)
    return number if number > 0.0 else reject(name, value, accepted)


def probability(name: str, value: object) -> float:
    """Return a number in [0, 1) as a float, else raise."""
    accepted = "a number in [0, 1)"
    number = finite(name, value, accepted)
    return number if 0.0 <= number < 1.0 else reject(name, value, accepted)


def numbers(name: str, values: object) -> list[float]:
    """Return a sequence of numbers, infinities included, as a list of floats."""
    accepted = "a sequence of numbers"
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Tensor)):
        reject_type(name, values, accepted)
    found = list(values)
    for value in found:
        if not isinstance(value, Real) or isinstance(value, bool):
            reject_type(name, values, accepted)
        if value != value:
            reject(name, values, accepted)
    return [float(value) for value in found]


def _check_tensor(
    name: str, x: object, dtypes: tuple[torch.dtype, ...], of: str = "", like: Tensor | None = None
) -> None:
    """Raise unless x is a strided tensor of an accepted dtype, on the device of `like`."""
    if not isinstance(x, Tensor):
        reject_type(name, x, "a tensor")
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else x.layout
        raise KernelTypeError(f"{name} of layout {kind} is not accepted: expected a strided tensor")
    if x.dtype not in dtypes:
        same = f", the dtype of {of}" if like is not None and dtypes == (like.dtype,) else ""
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise KernelTypeError(f"{name} of {x.dtype} is not accepted: expected {names}{same}")
    if like is not None and x.device != like.device:
        raise KernelArgumentError(f"{name} on {x.device} is not accepted: expected {like.device}, the device of {of}")


def _check_distance(name: str, value: object, optional: bool) -> None:
    if optional and value is None:
        return
    accepted = f"an int from {-FARTHEST} to {FARTHEST}{' or None' if optional else ''}"
    if type(value) not in (int, torch.SymInt):
        reject_type(name, value, accepted)
    # Under torch.compile this comparison would add a guard. The compiled graph checks the range at run time.
    if not torch.compiler.is_compiling() and isinstance(value, int) and abs(value) > FARTHEST:
        reject(name, value, accepted)


def _check_axes(name: str, x: Tensor, full: tuple[int, ...], broadcast: int = 0) -> None:
    """Raise unless x has the shape `full`; the first `broadcast` axes may also have extent 1."""
    if x.dim() == len(full) and all(
        n == m or (axis < broadcast and n == 1) for axis, (n, m) in enumerate(zip(x.shape, full, strict=True))
    ):
        return
    axes = [f"{m}|1" if axis < broadcast and m != 1 else str(m) for axis, m in enumerate(full)]
    _refuse_shape(name, x, f"[{', '.join(axes)}]")


def _check_broadcasts(name: str, x: Tensor, full: tuple[int, ...]) -> None:
    missing = len(full) - x.dim()
    if missing < 0 or not all(n == m or n == 1 for n, m in zip(x.shape, full[missing:], strict=True)):
        _refuse_shape(name, x, f"one that broadcasts to {tuple(full)}")


def _refuse_shape(name: str, x: Tensor, accepted: str) -> NoReturn:
    raise KernelArgumentError(f"{name} of shape {tuple(x.shape)} is not accepted: expected {accepted}")
