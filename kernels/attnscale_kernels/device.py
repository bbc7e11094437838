"""Device functions shared by the kernels: program ids, visibility, scores, dropout and the softmax epilogue.

A score y is q·k where logits are linear in q·k, and softcap(scale·q·k) + bias otherwise. The logit in units of ln 2 is
y·c with one c per row, so the temperature costs no extra instruction. Hidden scores are set to a finite constant.

Kernels take tensors as `View` (launch.py) and visibility as `Rule` (visibility.py). Unused features are None, which
Triton compiles out like a false constexpr: softcap, sinks_ptr, seed_ptr (dropout), entropy_ptr, winner_ptr, and left,
right, padding_ptr, mask_ptr and bias_ptr of a rule.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import key_range

HIDDEN = tl.constexpr(-1e30)  # finite, so that a weight of 0 times its logit is 0 and not NaN
SEEN_ABOVE = tl.constexpr(-1e29)
HIDDEN_BELOW = tl.constexpr(-1e4)  # an additive mask at or below this value hides the key
# Replaces β = 0: hidden scores still get weight 0, visible ones equal weights.
LEAST_BETA = tl.constexpr(2.0**-60)
NO_ROW = tl.constexpr(2**30)  # beyond any row; differences from a row index still fit into an int32
LEAST_SHARE = tl.constexpr(2.0**-126)  # a smaller constant would make Triton compute in fp64
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def program_rows(heads, count, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Map a program id to its tile, head index over the batch, batch and head as int64, and rows [BLOCK].

    LAST_FIRST launches the last tile first: under a causal rule the last rows see the most keys.
    """
    tiles = tl.cdiv(count, BLOCK)
    tile = tiles - 1 - tl.program_id(0) % tiles if LAST_FIRST else tl.program_id(0) % tiles
    head_index = tl.program_id(0) // tiles
    batch, head = (head_index // heads).to(tl.int64), (head_index % heads).to(tl.int64)
    return tile, head_index, batch, head, tile * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def as_column(x):
    """Return a vector [rows] or a column as a column [rows, 1]."""
    return x if len(x.shape) == 2 else x[:, None]


@triton.jit
def row_temperature(beta):
    """Return the sign of β, by which scores are multiplied, and c = |β|·log2(e) > 0 per row.

    The row maximum is taken before c is applied, so c must be positive.
    """
    return tl.where(beta < 0, -1.0, 1.0), tl.maximum(tl.abs(beta), LEAST_BETA) * LOG2E


@triton.jit
def row_bounds(rule, batch, rows, queries, keys):
    """Return the visible slots [start, stop) of each row; both are 0 for rows past the end."""
    exists = rows < queries
    if rule.start_ptr is not None:
        at = batch * rule.stride_bound + rows
        start = tl.load(rule.start_ptr + at, mask=exists, other=0)
        stop = tl.load(rule.stop_ptr + at, mask=exists, other=0)
    else:
        start = tl.zeros_like(rows)
        stop = tl.where(exists, keys, 0)
        if rule.left is not None:
            start = tl.maximum(rows + rule.slot - rule.left, 0)
        if rule.right is not None:
            stop = tl.where(exists, tl.minimum(tl.maximum(rows + rule.slot + rule.right + 1, 0), keys), 0)
    return start, stop


@triton.jit
def within(rule, start, stop, keys):
    """Clamp `row_bounds` to [0, keys] for loops over keys: bounds loaded from memory may hold any value.

    Loops over rows need no clamping, because they compare the bounds with existing slots only.
    """
    if rule.start_ptr is not None:
        start, stop = tl.maximum(start, 0), tl.minimum(stop, keys)
    return start, stop


@triton.jit
def visible_keys(rule, batch, tile, rows, queries, keys, BLOCK_M: tl.constexpr):
    """Return the visible slots [start, stop) of each row in a tile, and the `key_range` of the tile."""
    start, stop = row_bounds(rule, batch, rows, queries, keys)
    start, stop = within(rule, start, stop, keys)
    top = tile * BLOCK_M
    bottom = tl.minimum(top + BLOCK_M, queries)
    return start, stop, key_range(rule, batch, tile, top, bottom, keys)


@triton.jit
def visible(rule, batch, head, rows, left, slots, start, stop, queries, keys, EDGE: tl.constexpr):
    """Return the visibility mask of the scores [rows, slots], all true outside of edge tiles, and their bias or 0.

    `left` is the first slot. Bounds are compared with offsets in the tile. With absolute slots, LLVM keeps the results
    of all comparisons as bits of an integer, which took 80 more instructions on sm_80 and sm_90, and 130 more on
    sm_100.
    """
    seen = (slots >= 0)[None, :]
    bias = 0.0
    if EDGE:
        place = tl.arange(0, slots.shape[0])[None, :]
        seen = place < (stop - left)[:, None]
        if rule.start_ptr is not None or rule.left is not None:
            seen &= place >= (start - left)[:, None]
        if rule.padding_ptr is not None:
            at = rule.padding_ptr + batch * rule.stride_padding + slots
            seen &= (tl.load(at, mask=slots < keys, other=1) == 0)[None, :]
        seen, bias = _unmasked(rule, batch, head, rows, slots, seen, queries, keys)
    return seen, bias


@triton.jit
def visible_from(rule, batch, head, top, rows, slots, bounds, queries, keys, EDGE: tl.constexpr):
    """`visible` for a tile of keys, transposed to [slots, rows].

    `bounds` are the `bounds_of_keys`, `top` is the first row. Rows past the end are not masked: their gradients are 0.
    Slots that no row sees are hidden from them too.
    """
    seen = (slots >= 0)[:, None]
    bias = 0.0
    if EDGE:
        place = tl.arange(0, rows.shape[0])[None, :]
        if rule.right is not None or rule.padding_ptr is not None:
            seen = place >= (bounds[0] - top)[:, None]
        if rule.left is not None:
            seen &= place < (bounds[1] - top)[:, None]
        if rule.start_ptr is not None:
            start, stop = row_bounds(rule, batch, rows, queries, keys)
            seen &= (slots[:, None] >= start[None, :]) & (slots[:, None] < stop[None, :])
        if rule.mask_ptr is not None or rule.bias_ptr is not None:
            seen, bias = _unmasked(rule, batch, head, rows, slots, tl.trans(seen), queries, keys)
            seen = tl.trans(seen)
            if rule.bias_ptr is not None:
                bias = tl.trans(bias)
    return seen, bias


@triton.jit
def bounds_of_keys(rule, batch, slots, queries, keys):
    """Return, per slot, the first row that may see it and the end of that range, from `left`, `right` and padding.

    The first row is NO_ROW if there is none. Rows past the end must not see such a slot either, as it may hold a NaN.
    """
    first = tl.zeros_like(slots)
    end = first
    if rule.right is not None:
        first = slots - rule.slot - rule.right
        first = tl.where(first < queries, first, NO_ROW)
    if rule.left is not None:
        end = slots + rule.left - rule.slot + 1
    if rule.padding_ptr is not None:
        hidden = tl.load(rule.padding_ptr + batch * rule.stride_padding + slots, mask=slots < keys, other=1) != 0
        first = tl.where(hidden, NO_ROW, first)
    return first, end


@triton.jit
def _unmasked(rule, batch, head, rows, slots, seen, queries, keys):
    """Combine the visibility [rows, slots] with the mask or bias of the rule; also return the bias or 0."""
    bias = 0.0
    exists = (rows < queries)[:, None] & (slots < keys)[None, :]
    if rule.mask_ptr is not None:
        at = mask_pointers(rule.mask_ptr, rule.stride_mask, batch, head, rows, slots)
        seen &= tl.load(at, mask=exists, other=0) != 0
    if rule.bias_ptr is not None:
        at = mask_pointers(rule.bias_ptr, rule.stride_mask, batch, head, rows, slots)
        bias = tl.load(at, mask=exists, other=-float("inf")).to(tl.float32)
        seen &= ~(bias <= HIDDEN_BELOW)  # NaN does not hide the key: it must propagate to the row
        bias = tl.where(seen, bias, 0.0)
    return seen, bias


@triton.jit
def mask_pointers(ptr, strides, batch, head, rows, slots):
    """Return pointers to [rows, slots] of a mask or bias; any axis may be broadcast."""
    row, slot = rows[:, None].to(tl.int64), slots[None, :].to(tl.int64)
    return ptr + batch * strides[0] + head * strides[1] + row * strides[2] + slot * strides[3]


@triton.jit
def capped_scores(y, bias, rule, scale, softcap, EDGE: tl.constexpr):
    """Compute scores y from q·k, and the slope of the softcap. A bias is added in edge tiles only."""
    slope = 1.0
    if softcap is not None:
        t = tanh(y * (scale / softcap))
        slope = 1 - t * t
        y = softcap * t
    elif rule.bias_ptr is not None:
        y = y * scale
    if rule.bias_ptr is not None and EDGE:
        y += bias
    return y, slope


@triton.jit
def tanh(x):
    """tanh through exp2, which every target supports; exact to rounding at both ends."""
    shrunk = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    return tl.where(x < 0, -1.0, 1.0) * (1 - shrunk) / (1 + shrunk)


@triton.jit
def keep(seed, head, rows, left_slot, dropout_p, SLOTS: tl.constexpr):
    """Return the dropout mask [rows, SLOTS] from slot `left_slot` on, a multiple of SLOTS.

    Counter-based random numbers at (head, row, slot // 4), identical in every kernel. Each draw yields four words, one
    per slot.
    """
    fours = left_slot // 4 + tl.arange(0, SLOTS // 4)
    first, second, third, fourth = _draw(seed, head, rows[:, None], fours[None, :])
    draw = tl.join(tl.join(first, third), tl.join(second, fourth))  # [rows, SLOTS / 4, 2, 2], slots in order
    return _is_kept(tl.reshape(draw, [rows.shape[0], SLOTS]), dropout_p)


@triton.jit
def keep_by_slot(seed, head, rows, slots, dropout_p):
    """`keep` as [slots, rows]: each slot makes its own draw and uses one of its four words.

    In the dK/dV kernel, whose two accumulators fill the registers, `keep` plus a transposition spills 80 bytes on sm_80
    at D = 128.
    """
    first, second, third, fourth = _draw(seed, head, rows[None, :], slots[:, None] // 4)
    word = slots[:, None] % 4
    draw = tl.where(word < 2, tl.where(word == 0, first, second), tl.where(word == 2, third, fourth))
    return _is_kept(draw, dropout_p)


@triton.jit
def _draw(seed, head, row, four):
    """Return four random words per row and group of four slots; `row` and `four` broadcast."""
    row, four = row + 0 * four, four + 0 * row
    return tl.philox(seed, four, row, four * 0 + head, four * 0, 7)


@triton.jit
def _is_kept(draw, dropout_p):
    return (draw >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0) >= dropout_p


@triton.jit
def attention_scores(
    q, k, broken, sign, rule, place, left, slots, scale, softcap, PRECISION: tl.constexpr, PHASE: tl.constexpr
):
    """Return scores y [BM, BN] for the online softmax, HIDDEN where they are masked.

    `q` is [BM, BD] times the sign of β, `k` is [BD, BN]. `place` holds batch, head, rows, start, stop, queries and
    keys.

    In the repair phase (3), `broken` is NaN for keys with a non-finite value and 0 otherwise. Adding it to the scores
    propagates the NaN to the rows that see the key, and to no others.
    """
    y = tl.dot(q, k, input_precision=PRECISION)
    if softcap is not None:
        y = softcap * tanh(y * (scale / softcap))
    if PHASE != 1:
        batch, head, rows, start, stop, queries, keys = place
        seen, bias = visible(rule, batch, head, rows, left, slots, start, stop, queries, keys, True)
        if rule.bias_ptr is not None:
            y = (y * scale if softcap is None else y) + bias * sign[:, None]
    elif softcap is None and rule.bias_ptr is not None:
        y *= scale
    if PHASE == 3:
        y += broken[None, :]
    if PHASE != 1:
        y = tl.where(seen, y, HIDDEN)
    return y


@triton.jit
def sign_for_winner(sign, beta):
    """Return the sign of β, or β itself if it is 0 or NaN: at 0 the first key wins, at NaN none does."""
    return tl.where((beta < 0) | (beta > 0), sign, beta)


@triton.jit
def best_slot(y, left, m, winner):
    """Return the slot of each row's largest score so far, in y [BM, BN] from slot `left` on or among earlier tiles.

    `m` and `winner` are the maximum and its slot so far, vectors or columns. Ties go to the lowest slot. Slots are
    compared explicitly, because tile lists are not in slot order.
    """
    COLUMN: tl.constexpr = len(m.shape) == 2
    highest = tl.max(y, axis=1, keep_dims=COLUMN)
    place = tl.arange(0, y.shape[1])[None, :]
    first = left + tl.min(tl.where(y == as_column(highest), place, y.shape[1]), axis=1, keep_dims=COLUMN)
    return better((highest, first), (m, winner))[1]


@triton.jit
def better(one, other):
    """Return the larger of two (score, slot) pairs; ties go to the lower slot."""
    leads = (one[0] > other[0]) | ((one[0] == other[0]) & (one[1] < other[1]))
    return tl.where(leads, one[0], other[0]), tl.where(leads, one[1], other[1])


@triton.jit
def no_winner_of_nan(m, winner, total):
    """Return the row maximum and its slot; for rows with a NaN score, +∞ and slot −1.

    A NaN score makes the sum NaN. An infinite maximum does so too but keeps its slot, so a NaN next to an infinite
    score is not detected.
    """
    nan = (total != total) & (m != float("inf"))
    return tl.where(nan, float("inf"), m), tl.where(nan, -1, winner)


@triton.jit
def finish_softmax(seen, top, total, moment, sinks_ptr, lse_ptr, top_ptr, entropy_ptr, head, row_at, exists):
    """Store lse, largest logit and entropy in nats, and return the normalisation factor of the accumulator.

    `seen` marks rows with at least one visible key, `top` is m in nats. An attention sink takes a share of the weight
    like an additional key. If a score is NaN, the sum is NaN although the maximum is not.
    """
    total = tl.where(seen, total, 1.0)
    ln_total = tl.log2(total) * LN2
    lse = top + ln_total
    share = tl.where(seen, 1.0, 0.0)  # share of the weight that goes to keys
    entropy = tl.where(seen, ln_total - moment / total * LN2, 0.0)
    lse = tl.where(seen, lse, -float("inf"))
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        sink = tl.where(sink == -float("inf"), HIDDEN, sink)  # the same weight, avoids −∞ − −∞ = NaN
        high = tl.maximum(lse, sink)
        keys_part = tl.exp2((lse - high) * LOG2E)
        sink_part = tl.exp2((sink - high) * LOG2E)
        share = keys_part / (keys_part + sink_part)
        rest = sink_part / (keys_part + sink_part)
        lse = tl.where(high <= HIDDEN, -float("inf"), high + tl.log2(keys_part + sink_part) * LN2)
        if entropy_ptr is not None:
            mixing = tl.where(share > 0, share * tl.log2(tl.maximum(share, LEAST_SHARE)), 0.0)
            mixing += tl.where(rest > 0, rest * tl.log2(tl.maximum(rest, LEAST_SHARE)), 0.0)
            entropy = share * entropy - mixing * LN2
    tl.store(lse_ptr + row_at, lse, mask=exists)
    tl.store(top_ptr + row_at, tl.where(seen, top + (total - total), -float("inf")), mask=exists)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row_at, tl.where(entropy < 0, 0.0, entropy), mask=exists)
    return share / total


@triton.jit
def rounded_product(x, y, FP32: tl.constexpr):
    """x·y for a sum over columns, not fused into the sum if FP32.

    In fp32 a thread may hold one column of a row. A fused sum of two threads adds the exact product of its own column
    and the rounded product of the other, so that the threads disagree in the last bit. Matrix products in half
    precision leave at least two columns in each thread, where fusing is harmless.
    """
    if FP32:
        return tl.fma(x, y, tl.zeros_like(x))
    return x * y


@triton.jit
def as_factor(x, dtype: tl.constexpr, SHORT: tl.constexpr):
    """Round fp32 numbers to the dtype of a matrix product.

    gfx942 has no conversion to bf16. LLVM emits five instructions per number, three of them for NaN. With SHORT, adding
    half a unit to the bits takes one and a half, and ties round away from zero instead of to even: the largest error is
    the same. A NaN of at least 17 ones behind the sign is lost; see `rounds_bits` in tile_rules.py and `plain_nan`.
    """
    if SHORT:
        return ((x.to(tl.uint32, bitcast=True) + 0x8000) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def plain_nan(x):
    """Replace the bits of NaN by those of the NaN that arithmetic makes, which `as_factor` keeps."""
    bits = tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def sum_in_parts(x, PARTS: tl.constexpr):
    """Return row sums [rows, PARTS], each over every PARTS-th column.

    On sm_80, sm_90 and gfx942 a matrix product leaves columns 8 apart in the same thread, so with 8 parts no data
    crosses threads. On sm_100 a thread holds half a row and adds 2 parts with one instruction.
    """
    if PARTS == 1:
        return tl.sum(x, axis=1)[:, None]
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // PARTS, PARTS]), axis=1)


# With PAIRS, the functions below process two fp32 numbers with one packed instruction of sm_100. LLVM forms such pairs
# only where a sum over a tile follows: in the forward kernel the rescaling of the accumulator stays scalar, and so do
# the exponents under most rules. Rounding is the same as with scalar instructions.


@triton.jit
def product(x, y, PAIRS: tl.constexpr):
    """x·y in fp32, with broadcasting."""
    if PAIRS:
        return _of_two("mul.rn.f32x2", x, y)
    return x * y


@triton.jit
def difference(x, y, PAIRS: tl.constexpr):
    """x − y in fp32, with broadcasting."""
    if PAIRS:
        return _of_two("add.rn.f32x2", x, -y)
    return x - y


@triton.jit
def product_less(x, y, z, PAIRS: tl.constexpr):
    """x·y − z in fp32, with broadcasting; rounded once if PAIRS. z is a number per row: it is negated."""
    if PAIRS:
        return _product_and(x, y, -z)
    return x * y - z


@triton.jit
def less_product(z, x, y, PAIRS: tl.constexpr):
    """z − x·y in fp32, with broadcasting; rounded once if PAIRS. y is a number per row: it is negated."""
    if PAIRS:
        return _product_and(x, -y, z)
    return z - x * y


@triton.jit
def _product_and(x, y, z):
    """x·y + z as packed instructions."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b64 x, y, z;
        mov.b64 x, {$2, $3};
        mov.b64 y, {$4, $5};
        mov.b64 z, {$6, $7};
        fma.rn.f32x2 x, x, y, z;
        mov.b64 {$0, $1}, x;
        }""",
        "=r,=r,r,r,r,r,r,r",
        [x, y, z],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _of_two(INSTRUCTION: tl.constexpr, x, y):
    return tl.inline_asm_elementwise(
        """{
        .reg .b64 x, y;
        mov.b64 x, {$2, $3};
        mov.b64 y, {$4, $5};
        """
        + INSTRUCTION
        + """ x, x, y;
        mov.b64 {$0, $1}, x;
        }""",
        "=r,=r,r,r,r,r",
        [x, y],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )
