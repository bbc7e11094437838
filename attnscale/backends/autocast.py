"""torch.autocast for our own backends: inputs are cast as torch's SDPA casts them, and nothing else is.

Inside, backends choose fp32 or fp64 themselves, so that autocast has to be off for their products.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnscale.call.attention_call import AttentionCall
from attnscale.errors import ArgumentTypeError

Found = TypeVar("Found")


def cast(call: AttentionCall) -> AttentionCall:
    """The call with query, key and value in autocast's dtype, where it is on; fp64 stays, as in torch."""
    if not _is_on(call.query.device):
        return call
    query, key, value = (x.to(dtype_of(x)) for x in (call.query, call.key, call.value))
    if not query.dtype == key.dtype == value.dtype:
        raise ArgumentTypeError(
            f"dtypes {query.dtype}, {key.dtype}, {value.dtype} of query, key and value under autocast are not "
            "accepted: expected one, as autocast leaves float64 alone"
        )
    return replace(call, query=query, key=key, value=value)


def dtype_of(x: Tensor) -> torch.dtype:
    """The dtype in which torch's SDPA computes with a floating tensor here."""
    if x.dtype == torch.float64 or not _is_on(x.device):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def off(device: torch.device) -> AbstractContextManager[object]:
    """A context in which products have the dtype of their factors."""
    return torch.autocast(device.type, enabled=False) if _is_on(device) else nullcontext()


def without(function: Callable[..., Found]) -> Callable[..., Found]:
    """The same function with autocast off, on the device of its first argument."""

    @wraps(function)
    def run(first: Tensor, *others: Any) -> Found:
        with off(first.device):
            return function(first, *others)

    return run


def _is_on(device: torch.device) -> bool:
    if not torch._C._is_any_autocast_enabled():  # much cheaper than the rest
        return False
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
