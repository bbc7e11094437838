"""Tiles of a call per phase, compared with the device functions and with manual counts."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from attnscale_kernels.flash import mask as masks
from attnscale_kernels.launch import Tile
from attnscale_kernels.tiles import (
    first_phase,
    key_range,
    listed_edges,
    phase_edges,
    phase_range,
    query_range,
    tile_list,
)
from attnscale_kernels.visibility import Visibility
from scripts.static.calls import BLOCK, MASKED, RULES, WINDOW, Passes, Sequence, passes, sequences
from scripts.static.counts import Counts, Phases
from scripts.static.per_score import edge, over_all_hot, per_score, per_visible_score, with_the_rest
from scripts.static.table import KernelRow
from scripts.static.variants import phases_of


@triton.jit
def count_tiles_kernel(
    rule, length, found_ptr, first_ptr, BLOCK: tl.constexpr, STEP: tl.constexpr, BY_KEYS: tl.constexpr
):
    """Tiles per phase for each program, and the first phase of a loop over keys."""
    block, batch = tl.program_id(0), tl.program_id(1)
    low = block * BLOCK
    high = tl.minimum(low + BLOCK, length)
    find: tl.constexpr = query_range if BY_KEYS else key_range
    if rule.list_ptr is not None:
        edges = listed_edges(tile_list(rule, batch, 0, block), tl.cdiv(length, STEP))
    else:
        edges = phase_edges(rule, find(rule, batch, block, low, high, length), STEP)
    for phase in tl.static_range(3):
        first, end = phase_range(edges, phase)
        passes = tl.maximum(tl.cdiv(end - first, 1 if rule.list_ptr is not None else STEP), 0)
        tl.store(found_ptr + (batch * tl.num_programs(0) + block) * 3 + phase, passes)
    tl.store(first_ptr, first_phase(rule))


def visibility_of(rule: str, length: int) -> Visibility:
    """The rule as kernel argument."""
    rows = torch.arange(length, dtype=torch.int32)[None]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    return {
        "everything": Visibility(),
        "causal": Visibility(right=0),
        "window": Visibility(right=0, left=WINDOW - 1),
        "bounds": Visibility(start=rows // (length // 2) * (length // 2), stop=rows + 1),
        "padding": Visibility(right=0, padding=torch.cat([rows < 0, rows >= length // 2])),
        "bool mask": Visibility(mask=mask),
        "block-sparse": Visibility(mask=(rows.mT // BLOCK == rows // BLOCK)[None, None]),
        "bias": Visibility(mask=torch.zeros(1, 1, length, length).masked_fill(~mask, -torch.inf)),
    }[rule]


@pytest.mark.parametrize("by_keys", [False, True], ids=["blocks of rows", "blocks of keys"])
@pytest.mark.parametrize("rule", RULES)
def test_tiles_are_counted_as_the_kernels_divide_them(rule: str, by_keys: bool) -> None:
    length, (rows, keys) = 1024 if rule in MASKED else 2048, (256, 128)
    visibility = visibility_of(rule, length)
    block, step = (keys, rows) if by_keys else (rows, keys)
    several = len(sequences(rule, length))
    found, first = torch.zeros(several, length // block, 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    scores = (1, 32, length, length)  # a single head would have too few
    before, squares = masks.mask_squares(visibility, scores)
    make_rule = masks.query_rule if by_keys else masks.key_rule
    listing, found_rule = make_rule(visibility, squares, length, length, Tile(rows, keys, 4, 1))

    for launch in (*before, *listing):
        launch.run(found)
    count_tiles_kernel[(length // block, several)](
        found_rule, length, found, first, BLOCK=block, STEP=step, BY_KEYS=by_keys
    )

    expected = passes(rule, length, (rows, keys), by_keys=by_keys)
    assert tuple(found.sum((0, 1))) == expected[:3]
    assert ("before", "hot", "after")[int(first) :] == phases_of(rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("by_keys", [False, True])
def test_tiles_that_are_needed_hold_a_score_that_counts(rule: str, by_keys: bool) -> None:
    def holds_one(sequence: Sequence, top: int, left: int) -> bool:
        rows = range(top, top + 32)
        return any(max(left, sequence.start(row)) < min(left + 16, sequence.stop(row)) for row in rows)

    needed = sum(
        holds_one(sequence, top, left)
        for sequence in sequences(rule, 128)
        for top in range(0, 128, 32)
        for left in range(0, 128, 16)
    )

    assert passes(rule, 128, (32, 16), by_keys=by_keys).needed == needed


def test_a_window_has_edges_on_both_sides() -> None:
    # 16 blocks of 256 rows; the fifth is the first without a row that sees the first key. Each has 2 tiles on its
    # diagonal, from the fifth on 2 cut by the window, and 6 of 128 keys in between.
    assert passes("window", 4096, (256, 128)) == Passes(2 * 12, 2 * (0 + 1 + 2 + 3) + 6 * 12, 2 * 16, 24 + 84 + 32)


def test_blocks_of_a_mask_are_hot_and_all_else_costs_nothing() -> None:
    # 8 diagonal blocks of 512, each of 4 by 8 tiles; without classification a kernel visits 32 by 64.
    assert passes("block-sparse", 4096, (128, 64)) == Passes(0, 8 * 4 * 8, 0, 8 * 4 * 8)
    assert passes("block-sparse", 4096, (128, 64), by_keys=True) == Passes(0, 8 * 4 * 8, 0, 8 * 4 * 8)
    assert passes("block-sparse", 4096, (128, 64), classified=False) == Passes(0, 0, 32 * 64, 8 * 4 * 8)


def row(name: str, **phases: Counts) -> KernelRow:
    """A forward kernel with tiles of 128 rows and 64 keys and 8 warps: 32 scores per thread."""
    return KernelRow("forward", name, "bf16", 64, "sm_80", (128, 64), 8, 3, 200, 0, 1, 0, 1, 1, Phases(**phases))


CAUSAL = row("causal, plain", hot=Counts(total=320), after=Counts(total=640))


def test_instructions_are_for_one_score_of_a_tile() -> None:
    assert (per_score(CAUSAL, CAUSAL.phases.hot), per_score(CAUSAL, edge(CAUSAL))) == (10.0, 20.0)
    assert per_score(CAUSAL._replace(target="gfx942", warps=4), CAUSAL.phases.hot) == 10.0


def test_a_call_weighs_its_loops_by_the_tiles_that_run_in_them() -> None:
    # At 1024 keys, 56 tiles are hot and 16 at the edge; 1024·1025/2 scores are visible.
    executed = 56 * 320 + 16 * 640

    assert over_all_hot(CAUSAL, [CAUSAL], 1024) == pytest.approx(executed / (72 * 320))
    assert per_visible_score(CAUSAL, 1024) == pytest.approx(executed * 256 / (1024 * 1025 / 2))
    assert over_all_hot(CAUSAL, [CAUSAL], 16384) == pytest.approx(1.0, abs=0.02)


def test_what_stands_outside_of_loops_is_added_for_each_program() -> None:
    # 8 programs of 128 rows; by keys 16 programs of 64, each of which loops over four heads.
    loops = per_visible_score(CAUSAL, 1024)
    forward = CAUSAL._replace(phases=CAUSAL.phases._replace(once=1000))
    keys = forward._replace(family="backward dK dV", phases=forward.phases._replace(around=Counts(total=300)))
    in_loops = per_visible_score(keys, 1024)

    assert loops is not None
    assert in_loops is not None
    assert with_the_rest(forward, 1024) == pytest.approx(loops + 8 * 1000 * 256 / (1024 * 1025 / 2))
    assert with_the_rest(keys, 1024) == pytest.approx(in_loops + 16 * (300 + 250) * 256 / (1024 * 1025 / 2))


def test_a_call_without_a_hot_loop_is_held_against_that_of_the_causal_rule() -> None:
    masked = row("bool mask, plain", after=Counts(total=960))

    assert over_all_hot(masked, [CAUSAL, masked], 1024) == pytest.approx(128 * 960 / (72 * 320))
    assert over_all_hot(masked, [masked], 1024) is None


def test_a_kernel_that_classifies_its_tiles_runs_only_those_it_needs() -> None:
    classified = row("padding, plain", hot=Counts(total=320), after=Counts(total=320))

    assert over_all_hot(classified, [classified], 1024) == 1.0


def test_kernels_without_a_rule_have_no_calls() -> None:
    softmax = row("n = 65536", hot=Counts(total=320))

    assert (per_visible_score(softmax, 1024), over_all_hot(softmax, [softmax], 1024)) == (None, None)
