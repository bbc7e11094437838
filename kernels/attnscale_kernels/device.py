"""Device functions shared by the kernels: division of work, visibility, scores, dropout, and the end of a softmax.

Scores y are the products q·k where logits are linear in them, else softcap(scale·q·k) + bias. A logit in units of ln 2
is y·c with one c per row, so that a temperature costs no instruction. Hidden scores are a finite number.

Kernels take tensors as `View` of launch.py, and what rows may see as `Rule` of visibility.py. What is not asked for is
None, which triton compiles out as it does a false constexpr: softcap, sinks_ptr, seed_ptr (dropout), entropy_ptr,
winner_ptr, a rule's left, right, padding_ptr, mask_ptr and bias_ptr.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import key_range

HIDDEN = tl.constexpr(-1e30)  # finite: a weight of 0 times its logit is 0, not NaN
SEEN_ABOVE = tl.constexpr(-1e29)
HIDDEN_BELOW = tl.constexpr(-1e4)  # an additive mask at or below this hides the key
# Stands for β = 0: hidden scores still get a weight of 0, visible ones equal weights.
LEAST_BETA = tl.constexpr(2.0**-60)
NO_ROW = tl.constexpr(2**30)  # beyond the last row; the number of a row less it is still an int32
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def program_rows(heads, count, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """What this program works on: tile, head counted over the batch, batch and head as int64, and rows [BLOCK].

    LAST_FIRST starts with the last tile: the last rows of a causal rule see the most keys.
    """
    tiles = tl.cdiv(count, BLOCK)
    tile = tiles - 1 - tl.program_id(0) % tiles if LAST_FIRST else tl.program_id(0) % tiles
    head_index = tl.program_id(0) // tiles
    batch, head = (head_index // heads).to(tl.int64), (head_index % heads).to(tl.int64)
    return tile, head_index, batch, head, tile * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def row_temperature(beta):
    """The sign of β, which scores are multiplied by, and c = |β|·log2(e) > 0 of each row.

    The maximum of a row is taken before c is applied, so c must be positive.
    """
    return tl.where(beta < 0, -1.0, 1.0), tl.maximum(tl.abs(beta), LEAST_BETA) * LOG2E


@triton.jit
def row_bounds(rule, batch, rows, queries, keys):
    """First visible slot of each row and the one after the last; both 0 for rows that do not exist."""
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
    """`row_bounds` within [0, keys] for loops over keys: those that are loaded may be any numbers.

    Loops over rows do without: they compare bounds with slots that exist.
    """
    if rule.start_ptr is not None:
        start, stop = tl.maximum(start, 0), tl.minimum(stop, keys)
    return start, stop


@triton.jit
def visible_keys(rule, batch, tile, rows, queries, keys, BLOCK_M: tl.constexpr):
    """For a tile of rows: the slots [start, stop) that each may see, and the `key_range` of the tile."""
    start, stop = row_bounds(rule, batch, rows, queries, keys)
    start, stop = within(rule, start, stop, keys)
    top = tile * BLOCK_M
    bottom = tl.minimum(top + BLOCK_M, queries)
    return start, stop, key_range(rule, batch, tile, top, bottom, keys)


@triton.jit
def visible(rule, batch, head, rows, left, slots, start, stop, queries, keys, EDGE: tl.constexpr):
    """Which of the scores [rows, slots] count (all of them where the tile is no edge), and their bias or 0.

    `left` is the first of the slots. Bounds are compared with places in the tile: of slots, LLVM keeps the results of
    all comparisons as bits of an integer, which took 80 instructions more on sm_80 and sm_90, and 130 on sm_100.
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
    """The same for a tile of keys, transposed [slots, rows]; `bounds` are the `bounds_of_keys`, `top` the first row.

    Rows that do not exist are not left out: they have gradients of 0. Slots that no row sees are hidden from them too.
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
    """For each slot the first row that may see it and the one after the last, by `left`, `right` and padding alone.

    NO_ROW comes first if none does. A row that does not exist must not see it either: the slot may hold a NaN.
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
    """Those of the scores [rows, slots] that count and a mask does not hide, and their bias or 0."""
    bias = 0.0
    exists = (rows < queries)[:, None] & (slots < keys)[None, :]
    if rule.mask_ptr is not None:
        at = mask_pointers(rule.mask_ptr, rule.stride_mask, batch, head, rows, slots)
        seen &= tl.load(at, mask=exists, other=0) != 0
    if rule.bias_ptr is not None:
        at = mask_pointers(rule.bias_ptr, rule.stride_mask, batch, head, rows, slots)
        bias = tl.load(at, mask=exists, other=-float("inf")).to(tl.float32)
        seen &= ~(bias <= HIDDEN_BELOW)  # a NaN hides no key: it has to reach the row
        bias = tl.where(seen, bias, 0.0)
    return seen, bias


@triton.jit
def mask_pointers(ptr, strides, batch, head, rows, slots):
    """Pointers to [rows, slots] of a mask or a bias, any of whose axes may be broadcast."""
    row, slot = rows[:, None].to(tl.int64), slots[None, :].to(tl.int64)
    return ptr + batch * strides[0] + head * strides[1] + row * strides[2] + slot * strides[3]


@triton.jit
def capped_scores(y, bias, rule, scale, softcap, EDGE: tl.constexpr):
    """Scores y of the products q·k, and the slope of the softcap; a bias there is only at an edge."""
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
    """Through 2^x, which every device has; exact to rounding at both ends."""
    shrunk = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    return tl.where(x < 0, -1.0, 1.0) * (1 - shrunk) / (1 + shrunk)


@triton.jit
def keep(seed, head, rows, left_slot, dropout_p, SLOTS: tl.constexpr):
    """Which of [rows, SLOTS] dropout keeps, from `left_slot` on, a multiple of SLOTS.

    A counter-based draw at (head, row, slot // 4), the same in every kernel; its four words are those of four slots.
    """
    fours = left_slot // 4 + tl.arange(0, SLOTS // 4)
    first, second, third, fourth = _draw(seed, head, rows[:, None], fours[None, :])
    draw = tl.join(tl.join(first, third), tl.join(second, fourth))  # [rows, SLOTS / 4, 2, 2]: slots in order
    return _is_kept(tl.reshape(draw, [rows.shape[0], SLOTS]), dropout_p)


@triton.jit
def keep_by_slot(seed, head, rows, slots, dropout_p):
    """`keep` as [slots, rows], where each slot draws for itself and takes one word of the four.

    Where two accumulators fill the registers, `keep` and a transposition spill 80 bytes on sm_80 at 128 dimensions.
    """
    first, second, third, fourth = _draw(seed, head, rows[None, :], slots[:, None] // 4)
    word = slots[:, None] % 4
    draw = tl.where(word < 2, tl.where(word == 0, first, second), tl.where(word == 2, third, fourth))
    return _is_kept(draw, dropout_p)


@triton.jit
def _draw(seed, head, row, four):
    """Four random words for each of some rows and fours of slots, which broadcast."""
    row, four = row + 0 * four, four + 0 * row
    return tl.philox(seed, four, row, four * 0 + head, four * 0, 7)


@triton.jit
def _is_kept(draw, dropout_p):
    return (draw >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0) >= dropout_p


@triton.jit
def attention_scores(
    q, k, broken, sign, rule, place, left, slots, scale, softcap, PRECISION: tl.constexpr, PHASE: tl.constexpr
):
    """Scores y [BM, BN] for the online softmax, HIDDEN where they do not count, and the values.

    Of tiles q [BM, BD] times the sign of β, k [BD, BN] and v [BN, BDV]; `place` is batch, head, rows, start, stop,
    queries and keys.

    In the phase that repairs, a value that is not finite becomes 0 and makes the scores of its key NaN instead, so that
    it reaches the rows that see it and no others.
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
    """The sign of β, or β where it has none: at 0 all logits are equal and the first key wins, at NaN no key does."""
    return tl.where((beta < 0) | (beta > 0), sign, beta)


@triton.jit
def best_slot(y, left, m, winner):
    """The slot of the largest score of each row so far: of y [BM, BN], from slot `left` on, or the `winner` before, m.

    The lowest of equals. They are compared by slot, since the tiles of a list are not visited in order.
    """
    highest = tl.max(y, axis=1)
    place = tl.arange(0, y.shape[1])[None, :]
    first = left + tl.min(tl.where(y == highest[:, None], place, y.shape[1]), axis=1)
    return better((highest, first), (m, winner))[1]


@triton.jit
def better(one, other):
    """Of two scores, each with its slot, the larger; of equals that of the lower slot."""
    leads = (one[0] > other[0]) | ((one[0] == other[0]) & (one[1] < other[1]))
    return tl.where(leads, one[0], other[0]), tl.where(leads, one[1], other[1])


@triton.jit
def no_winner_of_nan(m, winner, total):
    """The largest score of each row and its slot; where a score is NaN, a score above all others at no slot, −1.

    Then the sum is NaN. So it is where the largest score is infinite, which has a slot all the same: in a row that has
    both, the NaN is not noticed.
    """
    nan = (total != total) & (m != float("inf"))
    return tl.where(nan, float("inf"), m), tl.where(nan, -1, winner)


@triton.jit
def finish_softmax(seen, top, total, moment, sinks_ptr, lse_ptr, top_ptr, entropy_ptr, head, row_at, exists):
    """Stores lse, largest logit and entropy of finished rows in nats; returns the factor of their unnormalised weights.

    `seen` says which rows have seen a key, `top` is m in nats. A sink is one more outcome, which takes part of the
    weight. Where a NaN was seen the sum is NaN, though the maximum is not.
    """
    total = tl.where(seen, total, 1.0)
    ln_total = tl.log2(total) * LN2
    lse = top + ln_total
    share = tl.where(seen, 1.0, 0.0)  # of the weight that is left to the keys
    entropy = tl.where(seen, ln_total - moment / total * LN2, 0.0)
    lse = tl.where(seen, lse, -float("inf"))
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        sink = tl.where(sink == -float("inf"), HIDDEN, sink)  # the same weight, without the NaN of −∞ − −∞
        high = tl.maximum(lse, sink)
        keys_part = tl.exp2((lse - high) * LOG2E)
        sink_part = tl.exp2((sink - high) * LOG2E)
        share = keys_part / (keys_part + sink_part)
        rest = sink_part / (keys_part + sink_part)
        lse = tl.where(high <= HIDDEN, -float("inf"), high + tl.log2(keys_part + sink_part) * LN2)
        if entropy_ptr is not None:
            mixing = tl.where(share > 0, share * tl.log2(tl.maximum(share, 1e-38)), 0.0)
            mixing += tl.where(rest > 0, rest * tl.log2(tl.maximum(rest, 1e-38)), 0.0)
            entropy = share * entropy - mixing * LN2
    tl.store(lse_ptr + row_at, lse, mask=exists)
    tl.store(top_ptr + row_at, tl.where(seen, top + (total - total), -float("inf")), mask=exists)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row_at, tl.where(entropy < 0, 0.0, entropy), mask=exists)
    return share / total


@triton.jit
def sum_in_parts(x, PARTS: tl.constexpr):
    """Row sums [rows, PARTS], each over every PARTS-th column.

    A matrix product leaves columns that are 8 apart with one thread on sm_80, sm_90 and gfx942, so that in 8 parts
    threads exchange nothing. On sm_100 a thread has half a row, and adds 2 parts in one instruction.
    """
    if PARTS == 1:
        return tl.sum(x, axis=1)[:, None]
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // PARTS, PARTS]), axis=1)


# Functions with PAIRS work on two fp32 numbers with one instruction, which sm_100 has. LLVM finds such pairs only where
# a sum over a tile leads to them: of a tile of the forward, it leaves the products with the accumulator scalar, and the
# exponents too under most rules. Rounding is that of the scalar instructions.


@triton.jit
def product(x, y, PAIRS: tl.constexpr):
    """x·y in fp32, which broadcast."""
    if PAIRS:
        return _of_two("mul.rn.f32x2", x, y)
    return x * y


@triton.jit
def difference(x, y, PAIRS: tl.constexpr):
    """x − y in fp32, which broadcast."""
    if PAIRS:
        return _of_two("add.rn.f32x2", x, -y)
    return x - y


@triton.jit
def product_less(x, y, z, PAIRS: tl.constexpr):
    """x·y − z in fp32, which broadcast, rounded once where PAIRS."""
    if PAIRS:
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
            [x, y, -z],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return x * y - z


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
