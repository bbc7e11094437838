"""Host side of flash attention, forward and backward: launches and results."""

from __future__ import annotations

from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import state
from ..arguments import check_attention, check_backward, finite, positive, probability
from ..errors import reject
from ..launch import (
    Forward,
    Launch,
    Tile,
    assumed_resources,
    attention_arguments,
    cdiv,
    empty_like_layout,
    fp32_beta,
    launched,
    multiplies_in_tf32,
    near_rows,
    new_forward,
    new_view,
    positive_scale,
    row_view,
    run,
    view,
)
from ..launch_cache import layout, remember
from ..visibility import Visibility
from .mask import key_rule, mask_squares, query_rule
from .plan import ROWS, BackwardPlan, ForwardPlan, backward_plan, box, forward_plan

LOG2E = 1.4426950408889634


class StatisticsGradients(NamedTuple):
    """Terms of the backward pass from gradients of row statistics, each [B, H, Tq]; None where there are none."""

    shift: Tensor | None = None  # fp32, added to Δ
    slope: Tensor | None = None  # fp32, gradient of the entropy


NO_GRADIENTS = StatisticsGradients()


class Backward(NamedTuple):
    """Gradients of `flash_backward`; None where not requested."""

    query: Tensor  # [B, H, Tq, D]
    key: Tensor  # [B, Hkv, Tk, D]
    value: Tensor  # [B, Hkv, Tk, DV]
    beta: Tensor | None  # [B, H, Tq] fp32
    sinks: Tensor | None  # [H] fp32


def forward_launches(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    entropy: bool = False,
    winner: bool = False,
    tile: Tile | None = None,
) -> tuple[tuple[Launch, ...], Forward]:
    """Build the launches of softmax(β·(softcap(scale·q·k) + bias))·v over the visible keys, with statistics per row.

    Query [B, H, Tq, D], key [B, Hkv, Tk, D] and value [B, Hkv, Tk, DV] share a dtype; β broadcasts to [B, H, Tq]. Rows
    without a visible key give zeros and lse = −∞. `sinks` [H] adds one logit per head, which counts in lse and entropy
    but is not a key. `seed` is an int64 scalar on the device; `flash_backward` with the same seed drops the same
    weights. The last launch is the attention kernel.
    """
    if type(scale) is not float or not isfinite(scale):
        scale = finite("scale", scale)
    softcap = None if softcap is None else positive("softcap", softcap)
    if type(dropout_p) is not float or dropout_p != 0.0:
        dropout_p = probability("dropout_p", dropout_p)
    beta = fp32_beta(beta)
    if scale <= 0.0 and visibility.linear_in_products(softcap):
        beta, scale = positive_scale(beta, scale)
    signature = (
        "forward", layout(query), layout(key), layout(value), layout(beta), sinks is not None and layout(sinks),
        seed is not None and layout(seed), dropout_p > 0.0, visibility.layout(), softcap is None, not entropy,
        not winner, tile, assumed_resources(), query.dtype is torch.float32 and multiplies_in_tf32(),
    )  # fmt: skip
    plan: ForwardPlan | None = state.LAUNCHES.get(signature)
    if plan is None:
        check_attention(query, key, value, beta, visibility, sinks, seed)
    batch, heads, queries, _ = query.shape
    _, kv_heads, keys, value_dim = value.shape
    out, lse, top, disorder, slots = result = new_forward(query, value_dim, entropy, winner)
    if plan is None:
        made = forward_plan(
            query, key, value, beta, result, visibility, softcap, sinks is not None, dropout_p > 0.0, tile
        )
        plan = remember(signature, made)
    seed = _seed(seed, dropout_p)
    if sinks is not None:
        sinks = sinks.contiguous()
    if plan.copies:
        query, key, value = near_rows(query), near_rows(key), near_rows(value)
    rule = plan.rule
    before: tuple[Launch, ...] = ()
    if rule is None:
        before, squares = mask_squares(visibility, (batch, heads, queries, keys))
        listing, rule = key_rule(visibility, squares, queries, keys, plan.tile)
        before += listing
    of_query, of_key, of_value, of_beta, of_out = plan.strides
    arguments: dict[str, object] = {
        "q": new_view((query, of_query)),
        "k": new_view((key, of_key)),
        "v": new_view((value, of_value)),
        "k_box": None if plan.key_block is None else box(key, plan.key_block),
        "v_box": None if plan.value_block is None else box(value, plan.value_block),
        "beta": new_view((beta, of_beta)),
        "out": new_view((out, of_out)),
        "sinks_ptr": sinks,
        "seed_ptr": seed,
        "lse_ptr": lse,
        "top_ptr": top,
        "entropy_ptr": disorder,
        "winner_ptr": slots,
        "rule": rule,
        "heads": heads,
        "group": heads // kv_heads,
        "queries": queries,
        "keys": keys,
        "scale": scale,
        "softcap": softcap,
        "dropout_p": dropout_p,
    }
    return (*before, plan.attention.launch(plan.programs, arguments)), result


flash_forward = launched(forward_launches)


def flash_backward(gradient: Tensor, *given: Any, sinks: Tensor | None = None, **options: Any) -> Backward:
    """Run `backward_launches` and compute the gradient of the sinks."""
    launches, result = made = backward_launches(gradient, *given, **options)
    run(made, gradient)
    if sinks is not None:
        lse, delta = given[6], launches[-3].arguments["rows_ptr"][..., 3]  # type: ignore[index]
        share = torch.exp(sinks.to(torch.float32)[:, None] - lse.masked_fill(lse == -torch.inf, 0.0))
        of_rows, slope = -share * delta, options.get("of_stats", NO_GRADIENTS).slope
        of_rows = of_rows if slope is None else of_rows + torch.special.entr(share) * slope
        result = result._replace(sinks=of_rows.sum((0, 2)))
    return result


def backward_launches(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    visibility: Visibility,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    dbeta: bool = False,
    of_stats: StatisticsGradients = NO_GRADIENTS,
    query_tile: Tile | None = None,
    key_tile: Tile | None = None,
) -> tuple[tuple[Launch, ...], Backward]:
    """Build the launches of the backward pass, given the arguments, output and lse of `flash_forward`.

    Deterministic: no two programs write to the same element. The last three launches are the per-row preprocessing, dQ,
    and dK/dV.
    """
    if type(scale) is not float or not isfinite(scale):
        scale = finite("scale", scale)
    softcap = None if softcap is None else positive("softcap", softcap)
    if type(dropout_p) is not float or dropout_p != 0.0:
        dropout_p = probability("dropout_p", dropout_p)
    dropout, capped = dropout_p > 0.0, softcap is not None
    shift, slope = (None if x is None else x.contiguous() for x in of_stats)
    slope = None if slope is None else slope / LOG2E
    signature = (
        "backward", layout(gradient), layout(query), layout(key), layout(value), layout(beta), layout(out), layout(lse),
        seed is not None and layout(seed), dropout, visibility.layout(), capped, dbeta, query_tile, key_tile,
        layout(shift), layout(slope), assumed_resources(), multiplies_in_tf32(),
    )  # fmt: skip
    plan: BackwardPlan | None = state.LAUNCHES.get(signature)
    if plan is None:
        check_attention(query, key, value, beta, visibility, seed=seed)
        check_backward(gradient, query, value, out, lse)
    batch, heads, queries, dim = query.shape
    kv_heads, keys, value_dim = value.shape[1:]
    of_query, of_key = empty_like_layout(query, dim), empty_like_layout(key, dim)
    of_value = empty_like_layout(value, value_dim)
    query, key, value, out = near_rows(query), near_rows(key), near_rows(value), near_rows(out)
    gradient = near_rows(gradient.to(query.dtype))
    rows = query.new_empty((batch, heads, queries, 4), dtype=torch.float32)
    of_beta = query.new_empty((batch, heads, queries), dtype=torch.float32) if dbeta else None
    result = Backward(of_query, of_key, of_value, of_beta, None)
    if plan is None:
        made = backward_plan(
            query, key, value, gradient, result[:3], visibility, capped, dropout, dbeta, slope is not None,
            query_tile, key_tile,
        )  # fmt: skip
        plan = remember(signature, made)
    query_tile, key_tile, key_block, value_block, rule = plan[:5]
    query_side = key_side = rule
    before: tuple[Launch, ...] = ()
    if rule is None:
        before, squares = mask_squares(visibility, (batch, heads, queries, keys))
        listed_keys, query_side = key_rule(visibility, squares, queries, keys, query_tile)
        listed_rows, key_side = query_rule(visibility, squares, queries, keys, key_tile)
        before = (*before, *listed_keys, *listed_rows)
    per_row: dict[str, object] = {
        "grad_out": view(gradient),
        "out": view(out),
        "beta": row_view(beta),
        "lse_ptr": lse.contiguous(),
        "shift_ptr": shift,
        "rows_ptr": rows,
        "heads": heads,
        "queries": queries,
        "factor": LOG2E * (scale if visibility.linear_in_products(softcap) else 1.0),
    }
    shared = {
        **attention_arguments(query, key, scale, softcap),
        "v": view(value),
        "grad_out": per_row["grad_out"],
        "rows_ptr": rows,
        "seed_ptr": _seed(seed, dropout_p),
        "dropout_p": dropout_p,
    }
    to_query = {
        **shared,
        "k_box": None if key_block is None else box(key, key_block),
        "v_box": None if value_block is None else box(value, value_block),
        "grad_q": view(of_query),
        "slope_ptr": slope,
        "dbeta_ptr": of_beta,
        "rule": query_side,
    }
    to_key = {
        **shared,
        "grad_k": view(of_key),
        "grad_v": view(of_value),
        "slope_ptr": None if slope is None else slope * beta,
        "rule": key_side,
    }
    return (
        *before,
        plan.rows.launch(batch * heads * cdiv(queries, ROWS), per_row),
        plan.to_query.launch(batch * heads * cdiv(queries, query_tile.m), to_query),
        plan.to_key.launch(batch * kv_heads * cdiv(keys, key_tile.n), to_key),
    ), result


def _seed(seed: Tensor | None, dropout_p: float) -> Tensor | None:
    """Return the seed if dropout is active. Kernels without a seed drop nothing."""
    if dropout_p > 0.0 and seed is None:
        reject("seed", None, f"an int64 scalar tensor with dropout_p={dropout_p!r}")
    return seed if dropout_p > 0.0 else None
