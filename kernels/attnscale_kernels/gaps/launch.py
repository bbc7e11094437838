"""Host side of gap counting: launches and their results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..arguments import check_scores, finite, positive
from ..errors import reject
from ..launch import (
    Launch,
    Tile,
    attention_arguments,
    attention_constants,
    block_of,
    cdiv,
    launched,
    on_device,
    resources_of,
    unit_stride,
)
from ..tile_rules import tile_for
from ..visibility import Visibility, key_ranges
from .kernel import gap_bracket_kernel, gap_count_kernel

MOST_KEYS = 128  # of a tile, which a byte can count

# An infinite threshold admits every visible key, and no hidden one.
LARGEST_THRESHOLD = 5e29


class GapBracket(NamedTuple):
    """What `gap_bracket` finds, all [B, H, Tq] in fp32."""

    top: Tensor  # the best raw score, −∞ where a row sees nothing
    second_gap: Tensor  # how far behind the second best is, ∞ where there is none
    lower: Tensor  # lower ≤ Λ ≤ upper
    upper: Tensor


def bracket_launches(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
    tile: Tile | None = None,
) -> tuple[tuple[Launch], GapBracket]:
    """A certified bracket of Λ = max ln k/Δ_k, over ranks k ≥ 2, of the raw scores softcap(scale·q·k) + bias.

    Query [B, H, Tq, D], key [B, Hkv, Tk, D]. upper ≤ (1 + `bins.WIDTH`)·lower for rows of up to `bins.LONGEST` keys;
    beyond that the bracket holds, but widens slowly. Fewer than two visible keys have Λ = 0, a tie at the top has
    Λ = ∞, both exactly. A visible score that is NaN makes its row NaN.
    """
    shared, constants, grid, tile = _prepare(query, key, visibility, scale, softcap, tile)
    result = GapBracket(*(query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(4)))
    top, second_gap, lower, upper = result
    outputs = {"top_ptr": top, "gap_ptr": second_gap, "lower_ptr": lower, "upper_ptr": upper}
    return (Launch(gap_bracket_kernel, grid, {**shared, **outputs}, constants, tile.warps, tile.stages),), result


gap_bracket = launched(bracket_launches)


def count_launches(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    thresholds: Sequence[float],
    *,
    scale: float,
    softcap: float | None = None,
    tile: Tile | None = None,
) -> tuple[tuple[Launch], Tensor]:
    """N(t) [B, H, Tq, thresholds] in int32: visible keys whose raw score is within t of the best, that one included.

    A key at the threshold counts; a threshold of ∞ counts all that a row sees.
    """
    shared, constants, grid, tile = _prepare(query, key, visibility, scale, softcap, tile)
    linear = visibility.linear_in_products(softcap)
    edges = [_in_products(t, scale) if linear else t for t in thresholds]
    counts = query.new_empty((*query.shape[:3], len(edges)), dtype=torch.int32)
    held = on_device([min(edge, LARGEST_THRESHOLD) for edge in edges], query)
    arguments = {**shared, "thresholds_ptr": held, "counts_ptr": counts}
    constants |= {"T": len(edges), "BLOCK_T": triton.next_power_of_2(max(1, len(edges)))}
    return (Launch(gap_count_kernel, grid * bool(edges), arguments, constants, tile.warps, tile.stages),), counts


gap_count = launched(count_launches)


def _prepare(
    query: Tensor, key: Tensor, visibility: Visibility, scale: float, softcap: float | None, tile: Tile | None
) -> tuple[dict[str, object], dict[str, object], int, Tile]:
    """What both kernels are given and compiled for, how many programs, and the tile."""
    check_scores(query, key, visibility)
    scale, softcap = finite("scale", scale), None if softcap is None else positive("softcap", softcap)
    batch, heads, queries, dim = query.shape
    query, key = unit_stride(query.detach()), unit_stride(key.detach())
    tile = tile or tile_for(
        "gaps", block_of(dim), query.element_size(), resources_of(query.device), biased=visibility.biased
    )
    if tile.n > MOST_KEYS:
        reject("tile", tile, f"at most {MOST_KEYS} keys, which a byte can count")
    arguments = attention_arguments(query, key, scale, softcap)
    arguments["rule"] = visibility.rule(key_ranges(visibility, queries, key.shape[2], tile.m))
    return arguments, attention_constants(query, tile), batch * heads * cdiv(queries, tile.m), tile


def _in_products(threshold: float, scale: float) -> float:
    """A threshold in units of q·k; where the scale is 0 every gap is 0."""
    if scale == 0.0:
        return math.copysign(math.inf, threshold) if threshold != 0.0 else math.inf
    return threshold / abs(scale)
