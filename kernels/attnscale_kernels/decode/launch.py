"""Host side of decoding: tiles, the number of splits, launches and their results."""

from __future__ import annotations

from torch import Tensor

from ..flash.launch import Forward, new_forward
from ..launch import (
    Launch,
    Resources,
    Tile,
    attention_arguments,
    attention_constants,
    block_of,
    cdiv,
    launched,
    positive_scale,
    resources_of,
    row_view,
    unit_stride,
    view,
)
from ..visibility import Visibility
from .kernel import decode_merge_kernel, decode_split_kernel

MERGED_AT_ONCE = 16  # splits
MOST_REGISTERS = 255  # shared memory decides how many blocks a multiprocessor has


def decode_tile(rows: int, dim: int, value_dim: int, size: int, resources: Resources) -> Tile:
    """For few rows against many keys: no more rows than there are, and many keys in flight to hide memory latency."""
    widest = max(dim, value_dim)
    m = min(max(16, 1 << (rows - 1).bit_length()), 32 if size < 4 and widest <= 128 else 16)
    if size == 4:
        amd = resources.warp_size == 64
        return Tile(m, 32, 4, 1 if amd else 2) if widest <= 64 else Tile(m, 16, 4 if amd or widest <= 128 else 8, 1)
    if resources.warp_size == 64:
        return Tile(m, 64 if widest <= 128 else 32, 4, 1)
    if m > 16:
        return Tile(m, 64 if widest <= 128 else 32, 8, 3, MOST_REGISTERS)
    return Tile(m, 128 if widest <= 64 else 64 if widest <= 128 else 32, 4, 3, MOST_REGISTERS)


def decode_splits(programs: int, tiles: int, multiprocessors: int) -> int:
    """How many parts keys are split into: two programs per multiprocessor, each with at least two tiles of keys."""
    return max(1, min(2 * multiprocessors // max(programs, 1), tiles // 2, 128))


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
    splits: int | None = None,
    tile: Tile | None = None,
) -> tuple[tuple[Launch, ...], Forward]:
    """`flash_forward` for few queries [B, H, Tq, D] and many keys [B, Hkv, Tk, D], divided among `splits` programs.

    Correct for any Tq, and meant for 16 or fewer.
    """
    batch, heads, queries, dim = query.shape
    kv_heads, keys, value_dim = value.shape[1:]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not accepted: expected a multiple of the {kv_heads} key heads")
    if splits is not None and splits < 1:
        raise ValueError(f"splits={splits!r} is not accepted: expected an int >= 1 or None")
    result = new_forward(query, value, entropy)
    query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
    linear = visibility.linear_in_products(softcap)
    if linear:
        beta, scale = positive_scale(beta, scale)
    group_rows, shape = heads // kv_heads * queries, (block_of(dim), block_of(value_dim), query.element_size())
    resources = resources_of(query.device)
    tile = tile or decode_tile(group_rows, *shape, resources)
    programs = batch * kv_heads * cdiv(group_rows, tile.m)
    splits = splits or decode_splits(programs, cdiv(keys, tile.n), resources.multiprocessors)

    rows = batch * heads * queries
    outputs = {
        "out": view(result.out),
        "sinks_ptr": None if sinks is None else sinks.contiguous(),
        "lse_ptr": result.lse,
        "top_ptr": result.max_logit,
        "entropy_ptr": result.entropy,
    }
    merging = splits > 1
    shared = {
        # One split needs no scratch memory; the kernel is the same, and so the type of what it is given.
        "rows_ptr": result.lse.new_empty(splits, rows, 3) if merging else result.lse,
        "acc_ptr": result.lse.new_empty(splits, rows, value_dim) if merging else result.lse,
        "beta": row_view(beta, batch, heads, queries),
        **outputs,
        "heads": heads,
        "queries": queries,
        "rows": rows,
        "splits": splits,
    }
    constants = {"DV": value_dim, "BLOCK_DV": block_of(value_dim)}
    split = Launch(
        decode_split_kernel,
        programs * splits,
        {
            **attention_arguments(query, key, scale, softcap),
            "v": view(value),
            "rule": visibility._replace(slot=0).rule(),
            "slot": visibility.slot if visibility.start is None else 0,
            **shared,
        },
        {**attention_constants(query, tile), **constants},
        tile.warps,
        tile.stages,
    )
    if not merging:
        return (split,), result
    merged = Launch(
        decode_merge_kernel,
        rows,
        {**shared, "factor": scale if linear else 1.0},
        {**constants, "BLOCK_S": MERGED_AT_ONCE},
        4,
        1,
    )
    return (split, merged), result


decode = launched(decode_launches)
