"""Host side of decode attention: number of splits, launches and results."""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from .. import state
from ..arguments import FARTHEST, check_attention, check_splits, finite, positive
from ..launch import (
    Forward,
    Launch,
    PlannedKernel,
    Tile,
    assumed_resources,
    attention_constants,
    block_of,
    cdiv,
    fp32_beta,
    launched,
    multiplies_in_tf32,
    new_forward,
    new_view,
    positive_scale,
    resources_of,
    row_strides,
    unit_stride,
)
from ..launch_cache import layout, layout_of_any_length, remember
from ..tile_rules import keeps_columns, tile_for
from ..visibility import Rule, Visibility
from .kernel import decode_merge_kernel, decode_split_kernel

MERGED_AT_ONCE = 16  # splits merged per step
MANY_ROWS = 16  # rows of a head group; above this a larger tile is used


class DecodePlan(NamedTuple):
    """The launch parameters shared by decode steps of one signature, for any number of keys."""

    tile: Tile
    programs: int  # programs per split
    most_splits: int
    copies: bool  # query, key or value must be copied
    linear: bool  # whether raw scores are scale·q·k
    query_strides: tuple[int, ...]  # after copying
    beta_strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    rule: Rule | None  # None: the rule contains tensors and is built per call
    split: PlannedKernel
    merge: PlannedKernel


def most_splits(programs: int, multiprocessors: int) -> int:
    """Return the maximum number of splits: enough for two programs per multiprocessor."""
    return max(1, min(2 * multiprocessors // max(programs, 1), 128))


def decode_launches(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    entropy: bool = False,
    winner: bool = False,
    splits: int | None = None,
    tile: Tile | None = None,
) -> tuple[tuple[Launch, ...], Forward]:
    """Build the launches of `flash_forward` for few queries [B, H, Tq, D] and many keys [B, Hkv, Tk, D].

    The keys are divided into `splits` parts. Correct for any Tq, intended for 16 or fewer.
    """
    if splits is not None:
        check_splits(splits)
    if type(scale) is not float or not isfinite(scale):
        scale = finite("scale", scale)
    softcap = None if softcap is None else positive("softcap", softcap)
    beta = fp32_beta(beta)
    if scale <= 0.0 and visibility.linear_in_products(softcap):
        beta, scale = positive_scale(beta, scale)
    try:
        batch, heads, queries, _ = shape = query.shape
        key_batch, kv_heads, keys, key_dim = key.shape
        value_batch, value_heads, values, value_dim = value.shape
        signature = (
            "decode", query.dtype, shape, query.stride(), query.device, query.data_ptr() % 16 == 0,
            layout_of_any_length(key), key_batch, kv_heads, key_dim,
            layout_of_any_length(value), value_batch, value_heads, value_dim, values == keys,
            beta.shape, beta.stride(), beta.device, beta.data_ptr() % 16 == 0, sinks is not None and layout(sinks),
            # Padding and masks have the length of the keys.
            visibility.layout()[1:], None if visibility.padding is None and visibility.mask is None else keys,
            softcap is None, not entropy, not winner, tile, assumed_resources(),
            query.dtype is torch.float32 and multiplies_in_tf32(),
        )  # fmt: skip
    except (RuntimeError, ValueError):  # not four axes, or no strides
        check_attention(query, key, value, beta, visibility, sinks)
        raise
    plan: DecodePlan | None = state.LAUNCHES.get(signature)
    if plan is None or not -FARTHEST <= visibility.slot <= FARTHEST:
        check_attention(query, key, value, beta, visibility, sinks)
    out, lse, top, disorder, slots = result = new_forward(query, value_dim, entropy, winner)
    if plan is None:
        plan = remember(signature, _decode_plan(query, key, value, beta, visibility, softcap, out, tile))
    if sinks is not None:
        sinks = sinks.contiguous()
    if plan.copies:
        query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
    if splits is None:  # at least two key tiles per split
        splits = max(1, min(plan.most_splits, cdiv(keys, plan.tile.n) // 2))
    rows = batch * heads * queries
    shared: dict[str, object] = {
        # A single split needs no scratch memory, but the kernel argument must have the same type.
        "scratch_ptr": lse if splits == 1 else lse.new_empty(splits * rows * (value_dim + (5 if winner else 3))),
        "beta": new_view((beta, plan.beta_strides)),
        "out": new_view((out, plan.out_strides)),
        "sinks_ptr": sinks,
        "lse_ptr": lse,
        "top_ptr": top,
        "entropy_ptr": disorder,
        "winner_ptr": slots,
        "heads": heads,
        "queries": queries,
        "rows": rows,
        "splits": splits,
    }
    arguments: dict[str, object] = {
        **shared,
        "q": new_view((query, plan.query_strides)),
        "k": new_view((key, key.stride())),
        "v": new_view((value, value.stride())),
        "rule": plan.rule or visibility.rule(slot=0),
        "slot": visibility.slot if visibility.start is None else 0,
        "group": heads // kv_heads,
        "keys": keys,
        "scale": scale,
        "softcap": softcap,
    }
    split = plan.split.launch(plan.programs * splits, arguments)
    if splits == 1:
        return (split,), result
    shared["factor"] = scale if plan.linear else 1.0
    return (split, plan.merge.launch(rows, shared)), result


decode = launched(decode_launches)


def _decode_plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    visibility: Visibility,
    softcap: float | None,
    out: Tensor,
    tile: Tile | None,
) -> DecodePlan:
    """Return the plan of a decode step; it depends on the signature only."""
    batch, heads, queries, dim = query.shape
    kv_heads, value_dim = value.shape[1], value.shape[-1]
    resources = resources_of(query.device)
    group_rows = heads // kv_heads * queries
    widest = block_of(max(dim, value_dim))
    tile = tile or tile_for("decode", widest, query.element_size(), resources, many_rows=group_rows > MANY_ROWS)
    programs = batch * kv_heads * cdiv(group_rows, tile.m)
    constants = {"DV": value_dim, "BLOCK_DV": block_of(value_dim)}
    return DecodePlan(
        tile,
        programs,
        most_splits(programs, resources.multiprocessors),
        any(unit_stride(x) is not x for x in (query, key, value)),
        visibility.linear_in_products(softcap),
        unit_stride(query).stride(),
        row_strides(beta),
        out.stride(),
        visibility.rule(slot=0) if visibility.is_plain else None,
        PlannedKernel(
            decode_split_kernel,
            {
                **attention_constants(query, tile),
                **constants,
                "COLUMNS": keeps_columns(visibility.mask, resources),
            },
            tile.warps,
            tile.stages,
            [],
        ),
        PlannedKernel(decode_merge_kernel, {**constants, "BLOCK_S": MERGED_AT_ONCE}, 4, 1, []),
    )
