"""Host side of gap counting: launches and results."""

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

MOST_KEYS = 128  # keys per tile; a byte counts them

# Clamp for infinite thresholds: counts every visible key and no hidden one.
LARGEST_THRESHOLD = 5e29


class GapBracket(NamedTuple):
    """The bracket of Λ and its ingredients, each [B, H, Tq] in fp32.

    Attributes:
        top: The best raw score, −∞ for rows without a visible key.
        second_gap: The gap of the second-best score, ∞ if there is none.
        lower: Lower bound of Λ.
        upper: Upper bound of Λ.
    """

    top: Tensor
    second_gap: Tensor
    lower: Tensor
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
    """Build the launch that brackets Λ = max ln k/Δ_k, over ranks k ≥ 2, of the raw scores softcap(scale·q·k) + bias.

    Query [B, H, Tq, D], key [B, Hkv, Tk, D]. upper ≤ (1 + `bins.WIDTH`)·lower for rows of up to `bins.LONGEST` keys.
    For longer rows the bracket remains valid and widens slowly. Rows with fewer than two visible keys have exactly Λ =
    0, ties at the top exactly Λ = ∞. A visible NaN score makes its row NaN.
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
    """Build the launch that counts N(t) [B, H, Tq, thresholds] in int32.

    N(t) is the number of visible keys with a raw score within t of the best. The best key itself counts, and so do keys
    exactly at the threshold. A threshold of ∞ counts all visible keys.
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
    """Return the arguments and constants common to both kernels, the grid, and the tile."""
    check_scores(query, key, visibility)
    scale, softcap = finite("scale", scale), None if softcap is None else positive("softcap", softcap)
    batch, heads, queries, dim = query.shape
    query, key = unit_stride(query.detach()), unit_stride(key.detach())
    tile = tile or tile_for(
        "gaps", block_of(dim), query.element_size(), resources_of(query.device), biased=visibility.biased
    )
    if tile.n > MOST_KEYS:
        reject("tile", tile, f"a tile of at most {MOST_KEYS} keys")
    arguments = attention_arguments(query, key, scale, softcap)
    arguments["rule"] = visibility.rule(key_ranges(visibility, queries, key.shape[2], tile.m))
    return arguments, attention_constants(query, tile), batch * heads * cdiv(queries, tile.m), tile


def _in_products(threshold: float, scale: float) -> float:
    """Convert a threshold to units of q·k. If the scale is 0, every gap is 0."""
    if scale == 0.0:
        return math.copysign(math.inf, threshold) if threshold != 0.0 else math.inf
    return threshold / abs(scale)
