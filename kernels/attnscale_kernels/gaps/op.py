"""Gap counting as operators of torch.library, and adaptive attention built on them. Counts have no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_numbers, check_scores, check_values, finite, numbers, positive
from ..errors import reject, reject_type
from ..flash.op import flash_attention
from ..launch import Forward
from ..operators import FLAT_SCORES, operator
from ..visibility import Visibility
from .launch import GapBracket, gap_bracket, gap_count


def accumulation_bracket(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
) -> GapBracket:
    """`gap_bracket` as an operator: the best raw score, the gap of the second, and Λ between two bounds, per row."""
    return GapBracket(*gap_bracket_op(*_arguments(query, key, visibility, scale, softcap)))


def gap_counts(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    thresholds: Sequence[float],
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """`gap_count` as an operator: N(t) [B, H, Tq, thresholds] in int32."""
    given = _arguments(query, key, visibility, scale, softcap)
    counts: Tensor = gap_count_op(*given, numbers("thresholds", thresholds))
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
) -> tuple[Forward, Tensor]:
    """`flash_attention` at β = r·Λ of each row, between `floor` and `ceiling`; and that β [B, H, Tq].

    β is a constant in gradients. Λ is the upper end of its bracket, so that r > 1 guarantees w_max ≥ 1/ζ(r). A tie at
    the top gets the ceiling, a row of fewer than two keys the floor.
    """
    r, floor, ceiling = positive("r", r), finite("floor", floor), finite("ceiling", ceiling)
    if floor > ceiling:
        reject("floor", floor, f"at most ceiling={ceiling!r}")
    given = _arguments(query, key, visibility, scale, softcap)
    check_values(query, key, value, sinks, seed)
    check_numbers(scale, softcap, dropout_p)
    found = GapBracket(*gap_bracket_op(*given))
    beta = (r * found.upper).clamp(floor, ceiling)
    forward = flash_attention(
        query, key, value, beta, visibility, scale=scale, softcap=softcap, sinks=sinks, dropout_p=dropout_p, seed=seed,
        entropy=entropy,
    )  # fmt: skip
    return forward, beta


@operator("gap_bracket", schema=f"({FLAT_SCORES}) -> (Tensor, Tensor, Tensor, Tensor)")
def gap_bracket_op(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Best raw score, gap of the second, and the two bounds of Λ, per row."""
    query, key, *visibility, scale, softcap = arguments
    found = gap_bracket(query, key, Visibility(*visibility), scale=scale, softcap=softcap)
    return found.top, found.second_gap, found.lower, found.upper


@gap_bracket_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    query, key, *visibility, _, _ = arguments
    check_scores(query, key, Visibility(*visibility))
    return tuple(query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(4))


@operator("gap_count", schema=f"({FLAT_SCORES}, float[] thresholds) -> Tensor")
def gap_count_op(*arguments: Any) -> Tensor:
    """N(t) per row and threshold."""
    query, key, *visibility, scale, softcap, thresholds = arguments
    return gap_count(query, key, Visibility(*visibility), thresholds, scale=scale, softcap=softcap)


@gap_count_op.register_fake
def _(*arguments: Any) -> Tensor:
    query, key, *visibility, _, _, thresholds = arguments
    check_scores(query, key, Visibility(*visibility))
    counts: Tensor = query.new_empty((*query.shape[:3], len(thresholds)), dtype=torch.int32)
    return counts


def _arguments(
    query: Tensor, key: Tensor, visibility: Visibility, scale: float, softcap: float | None
) -> tuple[Any, ...]:
    """What both operators begin with, checked; detached, as they have no gradient."""
    if not isinstance(visibility, Visibility):
        reject_type("visibility", visibility, "a Visibility")
    check_scores(query, key, visibility)
    check_numbers(scale, softcap)
    mask = None if visibility.mask is None else visibility.mask.detach()
    return query.detach(), key.detach(), *visibility._replace(mask=mask), scale, softcap
