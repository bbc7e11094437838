"""Gap counting as operators that torch knows, and adaptive attention made of them; what they return has no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..flash.forward import Forward
from ..flash.op import flash_attention
from ..visibility import Visibility
from .kernel import GapBracket, gap_bracket, gap_count


def accumulation_bracket(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
    bins: int = 15,
) -> GapBracket:
    """`gap_bracket`, for graphs: the best raw score, the gap of the second, and Λ between two bounds, per row."""
    return GapBracket(*gap_bracket_rows(*_arguments(query, key, visibility), scale, softcap, bins))


def gap_counts(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    thresholds: Sequence[float],
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """`gap_count`, for graphs: N(t) [B, H, Tq, thresholds] in int32."""
    counts: Tensor = gap_count_rows(*_arguments(query, key, visibility), scale, softcap, list(thresholds))
    return counts


def adaptive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    *,
    r: float,
    floor: float,
    ceiling: float,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    entropy: bool = False,
    squares: bool = False,
    probe: Tensor | None = None,
    bins: int = 15,
) -> tuple[Forward, Tensor]:
    """`adaptive_forward` with gradients of query, key, value and sinks; β [B, H, Tq] is a constant to them."""
    found = accumulation_bracket(query, key, visibility, scale=scale, softcap=softcap, bins=bins)
    beta = (r * found.upper).clamp(floor, ceiling)
    forward = flash_attention(
        query, key, value, beta, visibility, scale=scale, softcap=softcap, sinks=sinks, dropout_p=dropout_p, seed=seed,
        entropy=entropy, squares=squares, probe=probe,
    )  # fmt: skip
    return forward, beta


@torch.library.custom_op("attnscale_kernels::gap_bracket", mutates_args=())
def gap_bracket_rows(
    query: Tensor,
    key: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    padding: Tensor | None,
    mask: Tensor | None,
    slot: int,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float | None,
    bins: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Best raw score, gap of the second, and the two bounds of Λ, per row."""
    visibility = Visibility(slot, left, right, start, stop, padding, mask)
    found = gap_bracket(query, key, visibility, scale=scale, softcap=softcap, bins=bins)
    return found.top, found.second_gap, found.lower, found.upper


@gap_bracket_rows.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    query: Tensor = arguments[0]
    return tuple(query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(4))


@torch.library.custom_op("attnscale_kernels::gap_count", mutates_args=())
def gap_count_rows(
    query: Tensor,
    key: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    padding: Tensor | None,
    mask: Tensor | None,
    slot: int,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float | None,
    thresholds: Sequence[float],
) -> Tensor:
    """N(t) per row and threshold."""
    visibility = Visibility(slot, left, right, start, stop, padding, mask)
    return gap_count(query, key, visibility, thresholds, scale=scale, softcap=softcap)


@gap_count_rows.register_fake
def _(*arguments: Any) -> Tensor:
    query: Tensor = arguments[0]
    return query.new_empty((*query.shape[:3], len(arguments[11])), dtype=torch.int32)


def _arguments(query: Tensor, key: Tensor, visibility: Visibility) -> tuple[Any, ...]:
    """What both operators begin with; detached, as there is no gradient to give."""
    mask = None if visibility.mask is None else visibility.mask.detach()
    bounds = visibility.start, visibility.stop, visibility.padding
    return query.detach(), key.detach(), *bounds, mask, visibility.slot, visibility.left, visibility.right
