"""A plain causal attention forward kernel, the baseline of the static table.

FlashAttention-2 (Dao, 2023, algorithm 1) with exp2: no temperature, no statistics except the log-sum-exp, causal
masking only, no NaN handling, and lengths in multiples of the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(x, first, BLOCK: tl.constexpr, D: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """Load BLOCK rows of a contiguous matrix [rows, D]."""
    if DESCRIPTORS:
        tile = x.load([first, 0])
    else:
        rows = first + tl.arange(0, BLOCK)
        tile = tl.load(x + rows.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :])
    return tile


@triton.jit
def _load_transposed(x, first, BLOCK: tl.constexpr, D: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """`_load` transposed to [D, BLOCK]."""
    if DESCRIPTORS:
        tile = x.load([first, 0]).T
    else:
        rows = first + tl.arange(0, BLOCK)
        tile = tl.load(x + rows.to(tl.int64)[None, :] * D + tl.arange(0, D)[:, None])
    return tile


@triton.jit
def reference_forward_kernel(
    q,  # [B·H·T, D], as are the next three; pointers or TMA descriptors
    k,
    v,
    out,
    lse_ptr,  # [B·H·T] fp32, in units of ln 2
    length,  # T
    edge_keys,  # BLOCK_M as a run-time value; otherwise a single edge tile is not compiled as a loop
    c,  # scale·log2(e)
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    blocks = length // BLOCK_M
    top = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M  # longest rows first
    base = tl.program_id(0) // blocks * length
    rows = top + tl.arange(0, BLOCK_M)
    q_tile = _load(q, base + top, BLOCK_M, D, DESCRIPTORS)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)

    for edge in tl.static_range(2):
        low = top // BLOCK_N * BLOCK_N if edge else 0
        high = top + edge_keys if edge else top // BLOCK_N * BLOCK_N
        for left in tl.range(low, high, BLOCK_N):
            y = tl.dot(q_tile, _load_transposed(k, base + left, BLOCK_N, D, DESCRIPTORS), input_precision=PRECISION)
            if edge:
                y = tl.where(rows[:, None] >= left + tl.arange(0, BLOCK_N)[None, :], y, -float("inf"))
            peak = tl.maximum(m, tl.max(y, axis=1) * c)
            p = tl.exp2(y * c - peak[:, None])
            fade = tl.exp2(m - peak)
            total = total * fade + tl.sum(p, axis=1)
            v_tile = _load(v, base + left, BLOCK_N, D, DESCRIPTORS)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * fade[:, None], input_precision=PRECISION)
            m = peak

    tl.store(lse_ptr + base + rows, m + tl.log2(total))
    result = (acc / total[:, None]).to(q_tile.dtype)
    if DESCRIPTORS:
        out.store([base + top, 0], result)
    else:
        at = out + (base + rows).to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(at, result)
