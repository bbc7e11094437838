"""Device functions that say which tiles a loop visits, and in which of its phases.

Either tiles of a phase lie side by side, by the rule alone, or a list says which they are: see flash/mask_kernel.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_range(rule, batch, tile, top, bottom, keys):
    """For the rows [top, bottom): first slot that any sees, slots [clear_first, clear_end) that all see, the end."""
    if rule.table_ptr is not None:
        first, clear_first, clear_end, end = _load_four(rule.table_ptr + batch * rule.stride_table + tile * 4)
    else:
        first = 0
        clear_first = 0
        clear_end = keys
        end = keys
        if rule.left is not None:
            first = tl.minimum(tl.maximum(top + rule.slot - rule.left, 0), keys)
            clear_first = tl.minimum(tl.maximum(bottom - 1 + rule.slot - rule.left, 0), keys)
        if rule.right is not None:
            clear_end = tl.minimum(tl.maximum(top + rule.slot + rule.right + 1, 0), keys)
            end = tl.minimum(tl.maximum(bottom + rule.slot + rule.right, 0), keys)
        clear_end = tl.maximum(clear_first, clear_end)
        end = tl.maximum(first, end)
    return first, clear_first, clear_end, end


@triton.jit
def query_range(rule, batch, tile, left_key, right_key, queries):
    """For the slots [left_key, right_key): the rows that see any of them, and those that see all, as `key_range`."""
    if rule.table_ptr is not None:
        first, clear_first, clear_end, end = _load_four(rule.table_ptr + batch * rule.stride_table + tile * 4)
    else:
        first = 0
        clear_first = 0
        clear_end = queries
        end = queries
        if rule.right is not None:  # row + slot + right >= key
            first = tl.minimum(tl.maximum(left_key - rule.slot - rule.right, 0), queries)
            clear_first = tl.minimum(tl.maximum(right_key - 1 - rule.slot - rule.right, 0), queries)
        if rule.left is not None:  # row + slot - left <= key
            clear_end = tl.minimum(tl.maximum(left_key + rule.left - rule.slot + 1, 0), queries)
            end = tl.minimum(tl.maximum(right_key + rule.left - rule.slot, 0), queries)
        end = tl.maximum(first, end)
        clear_first = tl.minimum(clear_first, end)
        clear_end = tl.minimum(tl.maximum(clear_first, clear_end), end)
    return first, clear_first, clear_end, end


@triton.jit
def _load_four(ptr):
    return tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2), tl.load(ptr + 3)


@triton.jit
def phase_edges(rule, ranges, BLOCK: tl.constexpr):
    """Where the three phases of a loop over tiles begin, and where the last ends, given `key_range` or `query_range`.

    Phase 0 is the left edge, phase 1 the tiles that every row sees completely, phase 2 the right edge. With a mask no
    tile is known to be seen completely, and all of them belong to phase 2.
    """
    first, clear_first, clear_end, end = ranges
    low = first // BLOCK * BLOCK
    if all_edge(rule):
        clear_low = low
        clear_high = low
    else:
        clear_low = tl.cdiv(clear_first, BLOCK) * BLOCK
        clear_high = tl.maximum(clear_end // BLOCK * BLOCK, clear_low)
    return low, clear_low, clear_high, end


@triton.jit
def all_edge(rule):
    """Whether slots may be hidden inside the interval of a row, and no table or list says in which tiles none is."""
    PADDED: tl.constexpr = rule.padding_ptr is not None and rule.table_ptr is None
    return rule.list_ptr is None and (PADDED or rule.mask_ptr is not None or rule.bias_ptr is not None)


@triton.jit
def first_phase(rule, BY_KEYS: tl.constexpr = False):
    """The first phase of a loop over keys, or over rows for a tile of keys.

    There is a left edge only where the first that is visible moves; in a list, the tiles seen whole come first.
    """
    MOVES: tl.constexpr = BY_KEYS or rule.table_ptr is not None or rule.start_ptr is not None or rule.left is not None
    return 2 if all_edge(rule) else 0 if MOVES and rule.list_ptr is None else 1


@triton.jit
def end_phase(rule):
    """One past the last phase: where keys inside a tile can be hidden, what reached an output has to be repaired."""
    BOUNDED: tl.constexpr = rule.start_ptr is not None or rule.left is not None or rule.right is not None
    MASKED: tl.constexpr = rule.list_ptr is not None or rule.padding_ptr is not None
    return 4 if BOUNDED or MASKED or all_edge(rule) else 3


@triton.jit
def is_broken(acc):
    """Whether an accumulator [rows, columns] holds something that is not finite, or so large that its sum is not."""
    row = tl.sum(acc, axis=1)
    whole = tl.sum(tl.reshape(row - row, [1, acc.shape[0]]), axis=1)
    return tl.reshape(whole, []) != 0


@triton.jit
def phase_range(edges, PHASE: tl.constexpr):
    """[low, high) of a phase, given `phase_edges`."""
    if PHASE == 1:
        low, high = edges[1], edges[2]
    elif PHASE == 2:
        low, high = edges[2], edges[3]
    elif PHASE == 3:
        low, high = edges[0], edges[3]
    else:
        low, high = edges[0], tl.minimum(edges[1], edges[3])
    return low, high


@triton.jit
def tile_list(rule, batch, head, tile):
    """The list of the tiles that a program visits: numbers of tiles, those of phase 1 before those of phase 2."""
    return rule.list_ptr + batch * rule.stride_list[0] + head * rule.stride_list[1] + tile * rule.stride_list[2]


@triton.jit
def listed_edges(tiles_at, tiles):
    """`phase_edges` as places in a list of so many tiles, which ends with how many to visit in phase 1, and in all."""
    return 0, 0, tl.load(tiles_at + tiles), tl.load(tiles_at + tiles + 1)
