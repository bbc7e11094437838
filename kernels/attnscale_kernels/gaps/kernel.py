"""Gap counting without a score matrix: a certified bracket of Λ per row, and exact counts N(t).

Both kernels make two passes over the keys of a row, on raw scores: the first finds the best score, the second counts
the gaps to it. For Λ the first pass also finds the gap of the second-best score, and the second pass fills the bins of
bins.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import (
    HIDDEN,
    LN2,
    SEEN_ABOVE,
    capped_scores,
    program_rows,
    visible,
    visible_keys,
)
from ..tiles import (
    first_phase,
    load_rows,
    load_tile,
    phase_edges,
    phase_range,
)
from . import bins

EPSILON = tl.constexpr(bins.EPSILON)
SLACK = tl.constexpr(bins.SLACK)
TIED_BELOW = tl.constexpr(bins.TIED_BELOW)
ODD_NIBBLES = tl.constexpr(0x0F0F0F0F0F0F0F0F)
BINS = tl.constexpr(bins.BINS)  # one nibble each in a 64-bit word per row
LAST_BIN = tl.constexpr(bins.bin_edge(bins.BINS - 1))
# The bits of an fp32 number above these, its exponent and leading mantissa bits, give the bin, counted from that of 2.
LOWER_BITS = tl.constexpr(24 - bins.STEPS_PER_OCTAVE.bit_length())
BITS_OF_TWO = tl.constexpr(128 * bins.STEPS_PER_OCTAVE)


@triton.jit
def gap_scores(
    left_key, q_tile, given, place, D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr
):
    """Return scores y [BM, BN] of the keys from `left_key` on, and their visibility.

    `given` holds k, rule, group, scale and softcap; `place` holds batch, head, rows, start, stop, queries and keys.
    """
    k, rule, group, scale, softcap = given
    batch, head, rows, start, stop, queries, keys = place
    slots = left_key + tl.arange(0, BLOCK_N)  # [BN]
    BLOCK_D: tl.constexpr = q_tile.shape[1]
    d = tl.arange(0, BLOCK_D)
    k_ptr = k.ptr + batch * k.strides[0] + head // group * k.strides[1]
    k_at = k_ptr + slots[None, :].to(tl.int64) * k.strides[2] + d[:, None]  # [BD, BN]
    k_tile = load_tile(k_at, (d < D)[:, None], (slots < keys)[None, :], D != BLOCK_D, EDGE)
    y = tl.dot(q_tile, k_tile, input_precision=PRECISION)
    seen, bias = visible(rule, batch, head, rows, left_key, slots, start, stop, queries, keys, EDGE)
    y, _ = capped_scores(y, bias, rule, scale, softcap, EDGE)
    return y, seen


@triton.jit
def halves(x):
    """Return the left and the right half of [BM, N]. A thread holds both columns of a pair, so no data moves."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@triton.constexpr_function
def folds(columns):
    """Return the number of halvings in `best_two`: down to eight columns, at least one."""
    return max(1, (columns // 8).bit_length() - 1)


@triton.jit
def best_two(y, FOLDS: tl.constexpr):
    """Return the best and second-best of [BM, N] among columns that fold onto each other, [BM, N / 2^FOLDS]."""
    a, b = halves(y)
    best = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    second = tl.minimum(a, b)
    for _ in tl.static_range(FOLDS - 1):
        a, b = halves(best)
        c, e = halves(second)
        best = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
        second = tl.maximum(tl.minimum(a, b), tl.maximum(c, e))
    return best, second


@triton.jit
def find_best(
    edges, q_tile, given, place, D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, SECOND: tl.constexpr
):
    """First pass: return the best score of each row, NaN if any score is NaN, and, if SECOND, the second-best."""
    FOLDS: tl.constexpr = folds(BLOCK_N)
    best = tl.full([q_tile.shape[0], BLOCK_N >> FOLDS], HIDDEN, tl.float32)
    second = tl.full([q_tile.shape[0], BLOCK_N >> FOLDS], HIDDEN, tl.float32)
    for phase in tl.static_range(first_phase(given[1]), 3):
        low, high = phase_range(edges, phase)
        for left_key in tl.range(low, high, BLOCK_N):
            y, seen = gap_scores(left_key, q_tile, given, place, D, BLOCK_N, PRECISION, phase != 1)
            if phase != 1:
                y = tl.where(seen, y, HIDDEN)
            best_here, second_here = best_two(y, FOLDS)
            if SECOND:
                second = tl.maximum(tl.minimum(best, best_here), tl.maximum(second, second_here))
            best = tl.maximum(best, best_here, propagate_nan=tl.PropagateNan.ALL)
    top = tl.max(best, axis=1) + tl.sum(best - best, axis=1)  # the sum is 0, or NaN if a score is NaN
    at_top = best == top[:, None]
    runner_up = tl.maximum(tl.max(second, axis=1), tl.max(tl.where(at_top, HIDDEN, best), axis=1))
    return top, tl.where(tl.sum(at_top.to(tl.int32), axis=1) > 1, top, runner_up)


@triton.jit
def count_nibbles(word, even, odd):
    """Add the nibbles of words [BM, BN], each with a single 1, to the counts [BM, 8] of even and of odd nibbles.

    A nibble overflows at 16, so only eight columns are added as nibbles. A byte counts a tile of up to 128 keys.
    """
    GROUPS: tl.constexpr = max(1, word.shape[1] // 64)
    EACH: tl.constexpr = word.shape[1] // GROUPS // 8
    nibbles = tl.sum(tl.reshape(word, [word.shape[0], GROUPS, EACH, 8]), axis=2)
    nibbles = tl.reshape(nibbles, [word.shape[0], GROUPS * 8])
    return even + _bytes(nibbles & ODD_NIBBLES), odd + _bytes((nibbles >> 4) & ODD_NIBBLES)


@triton.jit
def _bytes(word):
    """Return the eight bytes of the row sums of words, [BM, 8]."""
    return ((tl.sum(word, axis=1)[:, None] >> (tl.arange(0, 8) * 8)[None, :]) & 255).to(tl.int32)


@triton.jit
def bin_start(number):
    """Return the start of a bin as a multiple of the second-best gap."""
    bits = (number + BITS_OF_TWO) << LOWER_BITS
    return (bits.to(tl.float32, bitcast=True) + EPSILON) / (2 + EPSILON)


@triton.jit
def gap_bracket_kernel(
    q,  # [B, H, Tq, D]
    k,  # [B, Hkv, Tk, D]
    top_ptr,  # [B, H, Tq] fp32, as are the next three
    gap_ptr,
    lower_ptr,
    upper_ptr,
    rule,
    heads,
    group,
    queries,
    keys,
    scale,
    softcap,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, head_index, batch, head, rows = program_rows(heads, queries, BLOCK_M, True)
    exists = rows < queries
    q_tile = load_rows(q, batch, head, rows, queries, tl.arange(0, BLOCK_D), D)
    LINEAR: tl.constexpr = softcap is None and rule.bias_ptr is None
    if LINEAR:
        q_tile *= tl.where(scale < 0, -1.0, 1.0).to(q_tile.dtype)  # so that the largest product has the best score
    start, stop, ranges = visible_keys(rule, batch, tile, rows, queries, keys, BLOCK_M)
    edges = phase_edges(rule, ranges, BLOCK_N)
    given, place = (k, rule, group, scale, softcap), (batch, head, rows, start, stop, queries, keys)
    top, runner_up = find_best(edges, q_tile, given, place, D, BLOCK_N, PRECISION, True)
    gap = top - runner_up
    paired = runner_up > SEEN_ABOVE
    apart = paired & (gap >= TIED_BELOW)
    factor = (2 + EPSILON) / tl.where(apart, gap, 1.0)

    even = tl.zeros([BLOCK_M, 8], tl.int32)
    odd = tl.zeros([BLOCK_M, 8], tl.int32)
    for phase in tl.static_range(first_phase(rule), 3):
        low, high = phase_range(edges, phase)
        for left_key in tl.range(low, high, BLOCK_N):
            y, seen = gap_scores(left_key, q_tile, given, place, D, BLOCK_N, PRECISION, phase != 1)
            one = tl.full([BLOCK_M, BLOCK_N], 1, tl.int64)
            if phase != 1:
                y = tl.where(seen, y, top[:, None])
                one = seen.to(tl.int64)
            # The best key itself is counted in the first bin. From 2 on, the lowest exponent bits and the highest
            # mantissa bits form the bin number.
            x = tl.maximum((top[:, None] - y) * factor[:, None] - EPSILON, 2.0)
            x = tl.minimum(x, LAST_BIN)
            shift = (x.to(tl.int32, bitcast=True) >> (LOWER_BITS - 2)) & (4 * BINS - 4)  # four bits per nibble
            even, odd = count_nibbles(one << shift.to(tl.int64), even, odd)

    # Start a, end b and N(b) of each bin; the last has no end.
    places = tl.arange(0, BINS)
    counts = tl.reshape(tl.join(even, odd), [BLOCK_M, BINS])
    ln_count = tl.log2(tl.maximum(tl.cumsum(counts, axis=1), 1).to(tl.float32)) * LN2
    upper = tl.max(ln_count / bin_start(places)[None, :], axis=1) * (1 + SLACK)
    within = tl.where((places < BINS - 1)[None, :], ln_count / bin_start(places + 1)[None, :], 0.0)
    lower = tl.maximum(tl.max(within, axis=1), LN2) * (1 - SLACK)
    any_key = top > SEEN_ABOVE
    broken = top - top
    if LINEAR:
        top *= tl.abs(scale)
        gap *= tl.abs(scale)
    # A tie has Λ = ∞. A nearly tied row has only a lower bound. Rows with fewer than two keys have Λ = 0.
    divisor = tl.maximum(gap, TIED_BELOW)
    lower = tl.where(gap == 0, float("inf"), tl.where(apart, lower, LN2 * (1 - SLACK)) / divisor)
    upper = tl.where(apart & (gap >= TIED_BELOW), upper / divisor, float("inf"))
    row_at = head_index.to(tl.int64) * queries + rows
    tl.store(top_ptr + row_at, tl.where(any_key, top, -float("inf")) + broken, mask=exists)
    tl.store(gap_ptr + row_at, tl.where(paired, gap, float("inf")) + broken, mask=exists)
    tl.store(lower_ptr + row_at, tl.where(paired, lower, 0.0) + broken, mask=exists)
    tl.store(upper_ptr + row_at, tl.where(paired, upper, 0.0) + broken, mask=exists)


@triton.jit
def gap_count_kernel(
    q,  # [B, H, Tq, D]
    k,  # [B, Hkv, Tk, D]
    thresholds_ptr,  # [T] fp32, in units of y
    counts_ptr,  # [B, H, Tq, T] int32
    rule,
    heads,
    group,
    queries,
    keys,
    scale,
    softcap,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    T: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, head_index, batch, head, rows = program_rows(heads, queries, BLOCK_M, True)
    exists = rows < queries
    q_tile = load_rows(q, batch, head, rows, queries, tl.arange(0, BLOCK_D), D)
    if softcap is None and rule.bias_ptr is None:
        q_tile *= tl.where(scale < 0, -1.0, 1.0).to(q_tile.dtype)  # so that the largest product has the best score
    start, stop, ranges = visible_keys(rule, batch, tile, rows, queries, keys, BLOCK_M)
    edges = phase_edges(rule, ranges, BLOCK_N)
    given, place = (k, rule, group, scale, softcap), (batch, head, rows, start, stop, queries, keys)
    top, _ = find_best(edges, q_tile, given, place, D, BLOCK_N, PRECISION, False)
    t = tl.arange(0, BLOCK_T)
    counts = tl.zeros([BLOCK_M, BLOCK_T], tl.int32)
    for phase in tl.static_range(first_phase(rule), 3):
        low, high = phase_range(edges, phase)
        for left_key in tl.range(low, high, BLOCK_N):
            y, seen = gap_scores(left_key, q_tile, given, place, D, BLOCK_N, PRECISION, phase != 1)
            if phase != 1:
                y = tl.where(seen, y, HIDDEN)
            gap = top[:, None] - y
            for i in tl.static_range(T):
                within = tl.sum((gap <= tl.load(thresholds_ptr + i)).to(tl.int32), axis=1)
                counts += tl.where((t == i)[None, :], within[:, None], 0)

    counts = tl.where((top > SEEN_ABOVE)[:, None], counts, 0)  # also 0 if top is NaN
    counts_at = counts_ptr + (head_index.to(tl.int64) * queries + rows)[:, None] * T + t[None, :]
    tl.store(counts_at, counts, mask=exists[:, None] & (t < T)[None, :])
