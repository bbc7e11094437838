"""Launch plans of flash attention: tiles, constants and TMA descriptors that follow from the signature of a call."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..launch import (
    Forward,
    PlannedKernel,
    Resources,
    Tile,
    alignment,
    attention_constants,
    block_of,
    cdiv,
    near_rows,
    resources_of,
    row_strides,
)
from ..tile_rules import (
    backward_takes_boxes,
    clamps_rows,
    draws_fours,
    edge_stages,
    keeps_columns,
    keeps_pointers,
    parts_of_sums,
    rounds_bits,
    sums_first,
    tile_for,
    works_in_pairs,
)
from ..visibility import Rule, Visibility
from .backward_kernel import flash_backward_key_kernel, flash_backward_query_kernel, flash_backward_rows_kernel
from .forward_kernel import flash_forward_kernel

ROWS = 32  # rows per program of the backward preprocessing kernel


class ForwardPlan(NamedTuple):
    """The launch parameters shared by forward passes of one signature."""

    tile: Tile
    programs: int
    key_block: list[int] | None  # block shape of the TMA descriptor; None: pointers are used
    value_block: list[int] | None
    copies: bool  # query, key or value must be copied
    strides: list[tuple[int, ...]]  # of query, key and value (after copying), β and output
    rule: Rule | None  # None: the rule contains tensors and is built per call
    attention: PlannedKernel


class BackwardPlan(NamedTuple):
    """The launch parameters shared by backward passes of one signature."""

    query_tile: Tile
    key_tile: Tile
    key_block: list[int] | None  # as in `ForwardPlan`, for the dQ kernel
    value_block: list[int] | None
    rule: Rule | None
    rows: PlannedKernel
    to_query: PlannedKernel
    to_key: PlannedKernel


def forward_plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    result: Forward,
    visibility: Visibility,
    softcap: float | None,
    sinks: bool,
    dropout: bool,
    tile: Tile | None,
) -> ForwardPlan:
    """Return the plan of a forward pass; it depends on the signature only."""
    given = query, key, value
    query, key, value = near_rows(query), near_rows(key), near_rows(value)
    dim, value_dim = query.shape[-1], value.shape[-1]
    entropy, resources = result.entropy is not None, resources_of(query.device)
    boxed = fits_box(key, resources) and fits_box(value, resources)
    busy = dropout or result.winner is not None  # on sm_100 a winner does not fit into tiles with one row per thread
    if not resources.has_tensor_memory:
        busy |= visibility.start is not None or visibility.padding is not None or visibility.biased
    if not boxed:
        busy |= visibility.left is not None or _is_busy(dim, value_dim, visibility, softcap, dropout)
        busy |= sinks and max(dim, value_dim) > 64  # otherwise sm_80 spills 16 bytes
    widest, size = block_of(max(dim, value_dim)), query.element_size()
    tile = tile or tile_for(
        "forward", widest, size, resources, boxed=boxed, busy=busy, masked=visibility.mask is not None,
        dropout=dropout, capped=softcap is not None, entropy=entropy,
    )  # fmt: skip
    masked = visibility.mask is not None and visibility.mask.element_size() < 4 and size == 2
    first = sums_first(block_of(value_dim), size, tile, resources, boxed=boxed, entropy=entropy)
    constants = {
        **attention_constants(query, tile),
        "DV": value_dim,
        "BLOCK_DV": block_of(value_dim),
        "K_ROW": 0 if boxed else key.stride(2),
        "V_ROW": 0 if boxed else value.stride(2),
        "ALIGN": alignment(query, key, value, result.out),
        "PARTS": parts_of_sums(first, size, resources, entropy=entropy, masked=masked),
        "SUMS_FIRST": first,
        "COLUMNS": keeps_columns(visibility.mask, resources),
        "KEEP_POINTERS": keeps_pointers(widest, tile, resources),
        "SHORT": rounds_bits(query.dtype, None, resources),
        "PAIRS": works_in_pairs(size, resources),
    }
    copies = any(near is not x for near, x in zip((query, key, value), given, strict=True))
    batch, heads, queries, _ = query.shape
    return ForwardPlan(
        tile,
        batch * heads * cdiv(queries, tile.m),
        [1, 1, tile.n, block_of(dim)] if boxed else None,
        [1, 1, tile.n, block_of(value_dim)] if boxed else None,
        copies,
        [query.stride(), key.stride(), value.stride(), row_strides(beta), result.out.stride()],
        visibility.rule() if visibility.is_plain else None,
        PlannedKernel(flash_forward_kernel, constants, tile.warps, tile.stages, []),
    )


def backward_plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gradient: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    visibility: Visibility,
    capped: bool,
    dropout: bool,
    dbeta: bool,
    entropy: bool,
    query_tile: Tile | None,
    key_tile: Tile | None,
) -> BackwardPlan:
    """Return the plan of a backward pass; it depends on the signature only."""
    dim, value_dim, resources = query.shape[-1], value.shape[-1], resources_of(query.device)
    biased = visibility.mask if visibility.biased else None
    launched_for = block_of(max(dim, value_dim)), query.element_size(), resources
    masked = visibility.mask is not None
    boxed = backward_takes_boxes(*launched_for, busy=masked or dropout or capped) and all(
        fits_box(x, resources) for x in (key, value)
    )
    query_tile = query_tile or tile_for(
        "dQ", *launched_for, boxed=boxed, dropout=dropout, biased=visibility.biased, busy=dbeta or capped,
        entropy=entropy,
    )  # fmt: skip
    key_tile = key_tile or tile_for(
        "dK dV", *launched_for, padded=_is_padded(dim, value_dim), dropout=dropout, busy=masked or capped,
        bounded=visibility.start is not None or visibility.padding is not None, entropy=entropy,
    )  # fmt: skip
    of_values: dict[str, object] = {"DV": value_dim, "BLOCK_DV": block_of(value_dim)}
    shared: dict[str, object] = {
        **of_values,
        "ALIGN": alignment(query, key, value, gradient, *gradients),
        "SHORT": rounds_bits(query.dtype, None if biased is None else biased.dtype, resources),
    }
    to_query = {
        **attention_constants(query, query_tile),
        **shared,
        "K_ROW": 0 if boxed else key.stride(2),
        "V_ROW": 0 if boxed else value.stride(2),
        "PAIRS": works_in_pairs(*launched_for[1:]),
    }
    to_key = {
        **attention_constants(query, key_tile),
        **shared,
        "Q_ROW": query.stride(2),
        "DO_ROW": gradient.stride(2),
        "CLAMP_ROWS": clamps_rows(key_tile, resources, busy=entropy or _is_padded(dim, value_dim)),
        "DRAW_FOURS": draws_fours(resources),
        "EDGE_STAGES": edge_stages(launched_for[0], resources, masked=masked and not visibility.biased),
    }
    return BackwardPlan(
        query_tile,
        key_tile,
        [1, 1, query_tile.n, block_of(dim)] if boxed else None,
        [1, 1, query_tile.n, block_of(value_dim)] if boxed else None,
        visibility.rule() if visibility.is_plain else None,
        PlannedKernel(flash_backward_rows_kernel, {**of_values, "BLOCK_M": ROWS}, 4, 1, []),
        PlannedKernel(flash_backward_query_kernel, to_query, query_tile.warps, query_tile.stages, []),
        PlannedKernel(flash_backward_key_kernel, to_key, key_tile.warps, key_tile.stages, []),
    )


def _is_busy(dim: int, value_dim: int, visibility: Visibility, softcap: float | None, dropout: bool) -> bool:
    """Whether a score needs more registers than usual; see the forward table of tile_rules.py."""
    return _is_padded(dim, value_dim) or visibility.mask is not None or softcap is not None or dropout


def _is_padded(dim: int, value_dim: int) -> bool:
    """Whether a head dimension is not a power of two, or below the minimum of a matrix product."""
    return (block_of(dim), block_of(value_dim)) != (dim, value_dim)


class Box(TensorDescriptor):  # type: ignore[misc]
    """A Triton tensor descriptor without its checks, which take longer than a launch; `fits_box` covers them."""

    def __post_init__(self) -> None:
        pass


def fits_box(x: Tensor, resources: Resources) -> bool:
    """Whether a TMA descriptor can address [B, H, T, D]: half precision, strides in multiples of 16 bytes."""
    aligned = all(stride > 0 and stride % 8 == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return resources.copies_boxes and x.element_size() == 2 and x.numel() > 0 and aligned


def box(x: Tensor, block: list[int]) -> Box:
    """Return a TMA descriptor of [B, H, T, D] that loads blocks [1, 1, rows, columns]."""
    return Box(x, x.shape, x.stride(), block)
