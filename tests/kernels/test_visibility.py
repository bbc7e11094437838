"""Visited tiles, and those run without masking, compared with every pair of row and key."""

from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from corrected_interpreter import corrected
from hypothesis import given, settings
from hypothesis import strategies as st

from attnscale_kernels.device import row_bounds
from attnscale_kernels.tiles import first_phase, key_range, phase_edges, phase_range, query_range
from attnscale_kernels.visibility import Visibility, key_ranges, query_ranges


@pytest.fixture(autouse=True, scope="module")
def _interpreter():
    with corrected():
        yield


@triton.jit
def _walk_kernel(found_ptr, rule, queries, keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BY_KEY: tl.constexpr):
    """[low, high) of the phases for each tile of queries, or of keys, of the first sequence."""
    tile = tl.program_id(0)
    if BY_KEY:
        last = tl.minimum(tile * BLOCK_N + BLOCK_N, keys)
        edges = phase_edges(rule, query_range(rule, 0, tile, tile * BLOCK_N, last, queries), BLOCK_M)
    else:
        last = tl.minimum(tile * BLOCK_M + BLOCK_M, queries)
        edges = phase_edges(rule, key_range(rule, 0, tile, tile * BLOCK_M, last, keys), BLOCK_N)
    # The loops of the kernels; the loop over query tiles omits fewer phases.
    for phase in tl.static_range(first_phase(rule, BY_KEY), 3):
        low, high = phase_range(edges, phase)
        tl.store(found_ptr + tile * 6 + 2 * phase, low)
        tl.store(found_ptr + tile * 6 + 2 * phase + 1, high)


@triton.jit
def _bounds_kernel(found_ptr, rule, queries, keys, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    start, stop = row_bounds(rule, 0, rows, queries, keys)
    tl.store(found_ptr + rows * 2, start)
    tl.store(found_ptr + rows * 2 + 1, stop)


def seen_by(rule: Visibility, queries: int, keys: int) -> torch.Tensor:
    """[Tq, Tk] bool, from the definition of `Visibility`."""
    table = torch.zeros(queries, keys, dtype=torch.bool)
    for row, key in product(range(queries), range(keys)):
        if rule.padding is not None and rule.padding[0, key]:
            continue
        if rule.start is not None:
            table[row, key] = int(rule.start[0, row]) <= key < int(rule.stop[0, row])
            continue
        own = rule.slot + row
        before = rule.left is None or key >= own - rule.left
        table[row, key] = before and (rule.right is None or key <= own + rule.right)
    return table


def walk(rule: Visibility, queries: int, keys: int, m: int, n: int, by_key: bool) -> list[dict[int, int]]:
    """For each tile of queries (or of keys), the starts of the visited tiles, each with its phase."""
    tiles = triton.cdiv(keys, n) if by_key else triton.cdiv(queries, m)
    table = query_ranges(rule, queries, keys, n) if by_key else key_ranges(rule, queries, keys, m)
    found = torch.full((tiles, 3, 2), -7, dtype=torch.int32)  # no tile in an omitted phase
    _walk_kernel[(tiles,)](found, rule.rule(table), queries, keys, BLOCK_M=m, BLOCK_N=n, BY_KEY=by_key)
    step = m if by_key else n
    visited = []
    for loops in found.tolist():
        here: dict[int, int] = {}
        for phase in range(3):
            for at in range(*loops[phase], step):
                assert at not in here, "a tile is visited twice"
                assert at % step == 0
                here[at] = phase
        visited.append(here)
    return visited


def assert_walk(rule: Visibility, queries: int, keys: int, m: int, n: int, *, by_key: bool, tight: bool) -> None:
    """All visible keys are visited, unmasked tiles are fully visible; if `tight`, no tile is visited needlessly."""
    table = seen_by(rule, queries, keys)
    if by_key:
        table, m, n = table.T, n, m
    masked = rule.mask is not None
    for index, visited in enumerate(walk(rule, queries, keys, *((n, m) if by_key else (m, n)), by_key)):
        rows = table[index * m : (index + 1) * m]
        for at in range(0, rows.shape[1], n):
            part = rows[:, at : at + n]
            whole = bool(part.all()) and part.shape[1] == n
            assert at in visited or not part.any(), f"tile {index} does not visit {at}"
            assert visited.get(at) != 1 or whole, f"tile {index} does not look at {at}, of which not all is seen"
            assert not masked or visited.get(at) != 1
            if tight and rows.any():
                between = rows.any(0).nonzero()
                inside = between.min() < at + n and at <= between.max()
                assert at not in visited or inside, f"tile {index} visits {at} for nothing"
                assert masked or not whole or visited[at] == 1, f"tile {index} looks at {at} for nothing"


lengths = st.integers(1, 30)
blocks = st.sampled_from([2, 4, 8, 16])


@st.composite
def moving(draw, queries: int, keys: int) -> Visibility:
    """A window that moves with the rows, also where there are no keys."""
    side = st.none() | st.integers(0, 35)
    return Visibility(slot=draw(st.integers(-35, 35)), left=draw(side), right=draw(side))


@st.composite
def bounded(draw, queries: int, keys: int, rising: bool = False) -> Visibility:
    """Intervals in any order, or increasing as in packed documents."""
    ends = draw(st.lists(st.tuples(*[st.integers(0, keys)] * 2), min_size=queries, max_size=queries))
    start, stop = torch.tensor(ends, dtype=torch.int32).sort(1).values.T
    if rising:
        start, stop = start.sort().values, stop.sort().values
    return Visibility(start=start[None].contiguous(), stop=stop[None].contiguous())


@settings(max_examples=40, deadline=None)
@given(st.data(), lengths, lengths, blocks, blocks, st.booleans())
def test_a_window_is_walked_without_a_gap_and_without_waste(data, queries, keys, m, n, by_key):
    rule = data.draw(moving(queries, keys))
    assert_walk(rule, queries, keys, m, n, by_key=by_key, tight=True)
    mask = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    assert_walk(rule._replace(mask=mask), queries, keys, m, n, by_key=by_key, tight=True)


@settings(max_examples=60, deadline=None)
@given(st.data(), lengths, lengths, blocks, blocks, st.booleans())
def test_padding_on_either_side_is_walked_without_a_gap_and_without_waste(data, queries, keys, m, n, by_key):
    rule = data.draw(moving(queries, keys))
    first, end = sorted(data.draw(st.tuples(*[st.integers(0, keys)] * 2)))
    place = torch.arange(keys)
    rule = rule._replace(padding=((place < first) | (place >= end))[None])
    assert_walk(rule, queries, keys, m, n, by_key=by_key, tight=not by_key)


@settings(max_examples=60, deadline=None)
@given(st.data(), lengths, lengths, blocks, blocks, st.booleans())
def test_padding_anywhere_is_walked_without_a_gap(data, queries, keys, m, n, by_key):
    rule = data.draw(st.one_of(moving(queries, keys), bounded(queries, keys)))
    hidden = data.draw(st.lists(st.booleans(), min_size=keys, max_size=keys))
    rule = rule._replace(padding=torch.tensor([hidden]))
    assert_walk(rule, queries, keys, m, n, by_key=by_key, tight=False)


@settings(max_examples=40, deadline=None)
@given(st.data(), lengths, lengths, blocks, blocks, st.booleans())
def test_bounds_in_any_order_are_walked_without_a_gap(data, queries, keys, m, n, by_key):
    rule = data.draw(bounded(queries, keys))
    assert_walk(rule, queries, keys, m, n, by_key=by_key, tight=False)


@settings(max_examples=40, deadline=None)
@given(st.data(), lengths, lengths, blocks)
def test_tables_of_key_tiles_are_the_extremes_of_their_rows(data, queries, keys, m):
    rule = data.draw(bounded(queries, keys))
    table = key_ranges(rule, queries, keys, m)
    assert table.dtype == torch.int32
    for index, row in enumerate(table[0].tolist()):
        start, stop = (bound[0, index * m : (index + 1) * m] for bound in (rule.start, rule.stop))
        clear = int(start.max())
        assert row == [int(start.min()), clear, max(clear, int(stop.min())), int(stop.max())]


@settings(max_examples=40, deadline=None)
@given(st.data(), lengths, lengths, blocks)
def test_tables_of_query_tiles_are_tight_for_bounds_that_rise(data, queries, keys, n):
    rule = data.draw(bounded(queries, keys, rising=True))
    table = query_ranges(rule, queries, keys, n)
    assert table.dtype == torch.int32
    start, stop = rule.start[0], rule.stop[0]
    for index, (first, clear_first, clear_end, end) in enumerate(table[0].tolist()):
        low, high = index * n, min(index * n + n, keys)
        some = [row for row in range(queries) if stop[row] > low and start[row] < high]
        whole = [row for row in range(queries) if start[row] <= low and stop[row] >= high]
        assert first <= clear_first <= clear_end <= end
        assert range(first, end) == range(some[0], some[-1] + 1) if some else first == end
        assert list(range(clear_first, clear_end)) == whole


def test_tables_are_made_for_each_sequence():
    start = torch.tensor([[0, 3, 1, 5], [2, 2, 0, 0]], dtype=torch.int32)
    stop = torch.tensor([[4, 7, 6, 8], [8, 3, 8, 8]], dtype=torch.int32)
    rule = Visibility(start=start, stop=stop)
    for b in (0, 1):
        alone = Visibility(start=start[b : b + 1], stop=stop[b : b + 1])
        assert torch.equal(key_ranges(rule, 4, 8, 2)[b : b + 1], key_ranges(alone, 4, 8, 2))
        assert torch.equal(query_ranges(rule, 4, 8, 4)[b : b + 1], query_ranges(alone, 4, 8, 4))


def test_windows_need_no_table():
    rule = Visibility(slot=3, left=4, right=0)
    assert key_ranges(rule, 10, 10, 4) is None
    assert query_ranges(rule, 10, 10, 4) is None


@settings(max_examples=40, deadline=None)
@given(st.data(), lengths, lengths)
def test_bounds_of_rows_are_what_they_see(data, queries, keys):
    """Rows past the end see nothing."""
    rule = data.draw(st.one_of(moving(queries, keys), bounded(queries, keys)))
    table = seen_by(rule, queries, keys)
    found = torch.full((64, 2), -7, dtype=torch.int32)
    _bounds_kernel[(1,)](found, rule.rule(), queries, keys, BLOCK=64)
    places = torch.arange(keys)
    device = (places >= found[:, :1]) & (places < found[:, 1:])
    assert torch.equal(device[:queries], table)
    assert not device[queries:].any()


def test_what_is_not_given_is_compiled_out():
    bound, mask = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 1, 3, 3)

    def given(visibility: Visibility) -> set[str]:
        rule = visibility.rule()
        names = ("start_ptr", "stop_ptr", "padding_ptr", "mask_ptr", "bias_ptr", "left", "right")
        return {name for name in names if getattr(rule, name) is not None}

    assert given(Visibility()) == set()
    assert given(Visibility(right=0)) == {"right"}
    assert given(Visibility(left=0, right=0)) == {"left", "right"}
    assert given(Visibility(start=bound, stop=bound)) == {"start_ptr", "stop_ptr"}
    assert given(Visibility(padding=bound > 0)) == {"padding_ptr"}
    assert given(Visibility(mask=mask > 0)) == {"mask_ptr"}
    assert given(Visibility(mask=mask)) == {"bias_ptr"}


def test_one_mask_for_all_has_no_stride():
    mask = torch.zeros(1, 1, 4, 6, dtype=torch.bool)
    padding = torch.zeros(1, 6, dtype=torch.bool)
    rule = Visibility(mask=mask, padding=padding).rule()
    assert rule.stride_mask == (0, 0, 6, 1)
    assert rule.stride_padding == 0
    assert Visibility(mask=mask[:, :, :1]).rule().stride_mask[2] == 0
