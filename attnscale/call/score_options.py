"""The arguments that shape scores: scale, dropout, softcap, flags and sinks as callers write them, checked."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnscale._util.checks import check_dense, check_flag, is_floating, read_number
from attnscale.call.layout import Layout
from attnscale.errors import TensorError, reject, reject_type


def read_numbers(
    scale: object, dropout_p: object, softcap: object, is_causal: object, enable_gqa: object
) -> tuple[float | None, float, float | None]:
    """`scale`, `dropout_p` and `softcap` as plain floats; refuses what cannot be used, the flags included."""
    if scale is not None:
        scale = read_number("scale", scale, "a finite number or None")
        if not -math.inf < scale < math.inf:
            reject("scale", scale, "a finite number or None")
    dropout_p = read_number("dropout_p", dropout_p, "a probability in [0, 1]")
    if not 0.0 <= dropout_p <= 1.0:
        reject("dropout_p", dropout_p, "a probability in [0, 1]", TensorError)
    if softcap is not None:
        softcap = read_number("softcap", softcap, "a finite number > 0 or None")
        if not 0.0 < softcap < math.inf:
            reject("softcap", softcap, "a finite number > 0, or None for no cap")
    if is_causal is not True and is_causal is not False:
        check_flag("is_causal", is_causal)
    if enable_gqa is not True and enable_gqa is not False:
        check_flag("enable_gqa", enable_gqa)
    return scale, dropout_p, softcap


def default_scale(query: Tensor) -> float:
    """1/√D, and 1 for heads without a dimension, whose scores are all 0."""
    return 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0


def check_sinks(layout: Layout, sinks: Tensor | None, device: torch.device) -> None:
    """Refuse sinks that are not one floating logit per head, on the query's device."""
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        reject_type("sinks", sinks, "a floating tensor [H], one logit per head")
    check_dense("sinks", sinks)
    if tuple(sinks.shape) != (layout.heads,) or not is_floating(sinks.dtype) or sinks.device != device:
        raise TensorError(
            f"sinks of shape {list(sinks.shape)}, {sinks.dtype}, on {sinks.device} is not accepted: expected "
            f"a floating tensor [{layout.heads}] on {device}, one logit per head"
        )
