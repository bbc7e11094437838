"""Fully masked tiles are not visited, and fully visible tiles run without the mask.

Block classes and tile lists are compared with every score; then attention with block-sparse masks in Triton's
interpreter is compared with naive attention in fp64. Launches this small normally skip the classification; here it is
forced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from corrected_interpreter import corrected
from flash_cases import (
    DTYPES,
    Case,
    Inputs,
    Seen,
    assert_as_good_as_torch,
    assert_forward,
    backward,
    forward,
    gradients,
    guarded,
    inputs_of,
    rows_of,
    written_out,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_memory import is_read, recording
from torch import Tensor

from attnscale_kernels import flash_attention
from attnscale_kernels.flash import mask as masks
from attnscale_kernels.flash.launch import backward_launches, flash_forward, forward_launches
from attnscale_kernels.launch import Tile
from attnscale_kernels.visibility import Visibility

FP32, FP16, BF16 = DTYPES
SQUARE = masks.SQUARE
TILE, KEY_TILE = Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)
INFINITY = math.inf


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> Iterator[None]:
    with corrected(), mock.patch.object(masks, "LEAST_SCORES", 0):
        yield


def blocks(generator: torch.Generator, *shape: int, side: int = SQUARE) -> Tensor:
    """A mask [..., Tq, Tk] of blocks, a third each hidden, visible, and partially visible."""
    *others, rows, keys = shape
    kind = torch.randint(0, 3, (*others, -(-rows // side), -(-keys // side)), generator=generator)
    kind = kind.repeat_interleave(side, -2).repeat_interleave(side, -1)[..., :rows, :keys]
    return (kind == 2) | ((kind == 1) & (torch.rand(shape, generator=generator) < 0.7))


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Classes of blocks.


def in_squares(found: Tensor) -> Tensor:
    """Whether any element is set in each block of [..., Tq, Tk]."""
    rows, keys = (-(-n // SQUARE) for n in found.shape[-2:])
    wide = torch.zeros(*found.shape[:-2], rows * SQUARE, keys * SQUARE, dtype=torch.bool)
    wide[..., : found.shape[-2], : found.shape[-1]] = found
    return wide.unflatten(-1, (keys, SQUARE)).unflatten(-3, (rows, SQUARE)).any(-1).any(-2)


def squares_of(mask: Tensor, heads: int = 8) -> Tensor:
    launches, squares = masks.mask_squares(Visibility(mask=mask), (2, heads, *mask.shape[2:]))
    assert squares is not None
    squares.fill_(255)
    for launch in launches:
        launch.run(mask)
    return squares


@pytest.mark.parametrize("layout", ["plain", "spread", "transposed"])
def test_a_square_of_a_bool_mask_hides_or_shows(layout: str) -> None:
    mask = blocks(random(), 2, 3, 70, 600)
    given = guarded(mask, around=True)
    if layout == "spread":
        given = torch.stack([mask, ~mask], dim=-1)[..., 0]
    elif layout == "transposed":
        given = mask.mT.contiguous().mT
    expected = in_squares(~mask) + 2 * in_squares(mask).to(torch.uint8)
    assert {1, 2, 3} == set(expected.unique().tolist())
    assert torch.equal(squares_of(given), expected)


def test_a_square_of_a_bias_leaves_scores_as_they_are_only_if_it_is_zero_and_hides_only_if_no_nan_is_in_it() -> None:
    bias = torch.zeros(1, 2, 3 * SQUARE, 6 * SQUARE)
    corner = (slice(None), slice(None), slice(0, SQUARE))
    several = [[0.0], [-INFINITY, -1e4, torch.finfo(FP32).min], [-INFINITY, math.nan], [0.0, math.nan], [0.0, 0.5]]
    for square, values in enumerate(several):
        part = torch.tensor(values).repeat(SQUARE * SQUARE)[: SQUARE * SQUARE].view(SQUARE, SQUARE)
        bias[(*corner, slice(square * SQUARE, square * SQUARE + SQUARE))] = part
    assert squares_of(bias)[0, 1].tolist() == [[2, 1, 3, 3, 3, 2], [2] * 6, [2] * 6]


def test_what_is_shared_by_heads_sequences_or_rows_is_read_once() -> None:
    mask = blocks(random(), 1, 1, 70, 90)
    for shared in (mask, mask.expand(2, 8, -1, -1)):
        launches, squares = masks.mask_squares(Visibility(mask=shared), (2, 8, 70, 90))
        assert (squares.shape, launches[0].grid) == ((1, 1, 3, 3), 3)
    assert squares_of(mask[:, :, :1].expand(-1, -1, 70, -1)).shape == (1, 1, 1, 3)


def test_whether_it_pays_is_decided_by_shapes() -> None:
    def pays(mask: Tensor, heads: int = 32, length: int = 1024) -> bool:
        with mock.patch.object(masks, "LEAST_SCORES", 2**23):
            return masks.mask_squares(Visibility(mask=mask), (2, heads, length, length))[1] is not None

    per_score = torch.zeros(2, 32, 1024, 1024, dtype=torch.bool, device="meta")
    assert pays(per_score)
    assert not pays(per_score[:, :, :64, :64], length=64), "so few scores take less time than two launches"
    assert not pays(per_score.bfloat16()), "to read two bytes for each score would take too long"
    assert pays(per_score.bfloat16()[:1])
    assert pays(per_score.float()[:, :1].expand(-1, 32, -1, -1))


# Visited tiles.


@st.composite
def rules(draw: st.DrawFn, queries: int, keys: int) -> Visibility:
    """All rules that can accompany a mask, for two sequences."""
    side = st.none() | st.integers(0, 100)
    rule = Visibility(slot=draw(st.integers(-50, 100)), left=draw(side), right=draw(side))
    if draw(st.booleans()):
        ends = torch.randint(0, keys + 1, (2, 2, queries), generator=random(draw(st.integers(0, 99)))).sort(0).values
        rule = Visibility(start=ends[0].int(), stop=ends[1].int())
    if draw(st.booleans()):
        first, end = sorted(draw(st.tuples(*[st.integers(0, keys)] * 2)))
        place = torch.arange(keys)
        rule = rule._replace(padding=torch.stack([(place < first) | (place >= end), place < 0]))
    return rule


def seen_by(rule: Visibility, queries: int, keys: int) -> Tensor:
    """[2, 1, Tq, Tk], from the definition of `Visibility`, without the mask."""
    own, place = (rule.slot + torch.arange(queries))[:, None], torch.arange(keys)
    table = torch.ones(2, queries, keys, dtype=torch.bool)
    if rule.left is not None:
        table &= place >= own - rule.left
    if rule.right is not None:
        table &= place <= own + rule.right
    if rule.start is not None:
        table &= (place >= rule.start[..., None]) & (place < rule.stop[..., None])
    if rule.padding is not None:
        table &= ~rule.padding[:, None]
    return table[:, None]


@settings(max_examples=30, deadline=None)
@given(
    st.data(), st.integers(1, 150), st.integers(1, 150), st.sampled_from([16, 32, 64]), st.sampled_from([16, 64, 128]),
    st.booleans(),
)  # fmt: skip
def test_lists_have_all_tiles_that_are_seen_and_those_seen_whole_first(
    data: st.DataObject, queries: int, keys: int, m: int, n: int, by_keys: bool
) -> None:
    shape = (data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 3])), queries, keys)
    mask = blocks(random(data.draw(st.integers(0, 99))), *shape)
    rule = data.draw(rules(queries, keys))._replace(mask=mask)
    before, squares = masks.mask_squares(rule, (2, 3, queries, keys))
    make_rule = masks.query_rule if by_keys else masks.key_rule
    listing, listed_rule = make_rule(rule, squares, queries, keys, Tile(m, n, 4, 1))
    listed_rule.list_ptr.fill_(-7)
    for launch in (*before, *listing):
        launch.run(mask)

    bounds = seen_by(rule, queries, keys)
    table, own, step = bounds & mask, m, n
    if by_keys:
        mask, table, own, step = mask.mT, table.mT, n, m
    steps = -(-table.shape[-1] // step)
    assert listed_rule.list_ptr.shape[2:] == (-(-table.shape[-2] // own), steps + 2)
    lists = listed_rule.list_ptr.expand(*table.shape[:2], -1, -1)
    masked = mask.expand_as(table)
    for batch, head, tile in np.ndindex(*lists.shape[:3]):
        *order, whole, visited = lists[batch, head, tile].tolist()
        assert sorted(order) == list(range(steps)), "a tile is listed twice"
        for number, at in enumerate(order):
            rows = slice(tile * own, tile * own + own)
            part = table[batch, head, rows, at * step : at * step + step]
            square = slice(at * step // SQUARE * SQUARE, max(at * step + step, at * step // SQUARE * SQUARE + SQUARE))
            around = slice(tile * own // SQUARE * SQUARE, max(tile * own + own, tile * own // SQUARE * SQUARE + SQUARE))
            assert number < visited or not part.any(), "a tile that is seen is not visited"
            assert number >= visited or masked[batch, head, around, square].any(), "a tile that is hidden is visited"
            if number < whole:
                assert part.all(), "not all of a tile is seen"
                assert part.shape[1] == step, "some of a tile does not exist"


# Attention with block-sparse masks.


def block_sparse(x: Inputs, mask: Tensor, bias: Tensor | None = None, **rule: object) -> Inputs:
    """The call with a mask, bool or as −∞ in a bias, and the rest of a rule."""
    visibility = Visibility(**rule)
    bounds = seen_by(visibility, mask.shape[2], mask.shape[3])[: x.q.shape[0]]
    if bias is None:
        return replace(x, seen=Seen(visibility._replace(mask=guarded(mask, around=True)), bounds & mask))
    added = guarded(bias.masked_fill(~mask, -INFINITY))
    return replace(x, seen=Seen(visibility._replace(mask=added), bounds & mask, bias.double().masked_fill(~mask, 0.0)))


def listed_launches(x: Inputs) -> int:
    return len(forward_launches(x.q, x.k, x.v, x.beta, x.seen.visibility, **x.options, tile=TILE)[0])


def check(x: Inputs) -> None:
    """Check output, statistics and all gradients."""
    assert listed_launches(x) == 3
    result = forward(x, TILE)
    assert_forward(x, result)
    assert_as_good_as_torch(x, gradients(backward(x, result, TILE, KEY_TILE)), written_out(x))


CALLS = {
    "for_each_head": (Case(queries=70, keys=130, heads=2, beta="each"), (1, 2), {}),
    "for_all_heads": (Case(queries=100, keys=70, batch=2, dtype=FP16, beta="any_sign"), (2, 1), {}),
    "for_all_rows": (Case(queries=65, keys=130, heads=2, sinks=True), (1, 1), {}),
    "causal_and_padded": (Case(queries=97, keys=129, batch=2, heads=1, dim=24), (1, 1), {"slot": 32, "right": 0}),
    "in_intervals": (Case(queries=70, keys=100, batch=2, heads=1, dtype=BF16, dropout_p=0.2), (2, 1), {}),
    "capped": (Case(queries=100, keys=64, heads=2, softcap=2.0), (1, 2), {"left": 60}),
}


@pytest.mark.parametrize("name", CALLS)
def test_block_sparse_masks_are_followed(name: str) -> None:
    case, per, rule = CALLS[name]
    rule = dict(rule)
    mask = blocks(random(3), *per, case.queries, case.keys)
    mask[..., 40:45, :] = False  # rows without visible keys
    if name == "for_all_rows":
        mask = mask[:, :, :1].expand(-1, -1, case.queries, -1)
    elif name == "causal_and_padded":
        rule["padding"] = torch.arange(case.keys) < torch.tensor([[3], [70]])
    elif name == "in_intervals":
        ends = torch.randint(0, case.keys + 1, (2, 2, case.queries), generator=random()).sort(0).values.int()
        rule |= {"start": ends[0], "stop": ends[1]}
    check(block_sparse(inputs_of(case), mask, **rule))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_bias_is_added_only_where_there_is_one(softcap: float | None) -> None:
    x = inputs_of(Case(queries=70, keys=130, softcap=softcap, beta="any_sign"))
    generator = random(1)
    bias = torch.randn(1, 1, 70, 130, generator=generator) * blocks(generator, 1, 1, 70, 130)
    shown = blocks(generator, 1, 1, 70, 130)
    bias[..., :64, :64], shown[..., :64, :64] = 0.0, True
    assert {1, 2, 3} == set(squares_of(bias.masked_fill(~shown, -INFINITY)).unique().tolist())
    check(block_sparse(x, shown, bias=bias.half()))


def test_a_mask_that_shows_nothing_gives_zeros() -> None:
    x = block_sparse(inputs_of(Case(queries=70, keys=70)), torch.zeros(1, 1, 70, 70, dtype=torch.bool))
    result = forward(x, TILE)
    assert (result.out == 0).all()
    assert (result.lse == -INFINITY).all()
    assert not any(value.count_nonzero() for value in gradients(backward(x, result, TILE, KEY_TILE)).values())


def test_a_mask_that_shows_everything_changes_no_bit() -> None:
    x = inputs_of(Case(sees="everything", queries=70, keys=128, dim=24))
    masked = block_sparse(x, torch.ones(1, 1, 70, 128, dtype=torch.bool))
    plain, result = forward(x, TILE), forward(masked, TILE)
    assert all(torch.equal(value, getattr(plain, name)) for name, value in rows_of(result).items())
    expected = gradients(backward(x, plain, TILE, KEY_TILE))
    for name, value in gradients(backward(masked, result, TILE, KEY_TILE)).items():
        assert torch.equal(value, expected[name]), name


# NaN and infinity.


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy warning for the maximum of NaN
@pytest.mark.parametrize(("additive", "value"), [(False, math.nan), (True, math.nan), (False, INFINITY)])
def test_what_is_no_number_spoils_the_rows_that_see_it_and_no_other(additive: bool, value: float) -> None:
    mask = blocks(random(4), 1, 1, 70, 100)
    mask[..., 50] = False  # visible to no row; the others to some, in fully and partially visible tiles
    broken = [50, 10, 80]
    zero = torch.zeros(1, 1, 70, 100, dtype=FP16)
    x = block_sparse(inputs_of(Case(queries=70, keys=100)), mask, zero if additive else None)
    assert listed_launches(x) == 3
    k, v = guarded(x.k), guarded(x.v)
    k[:, :, broken, 3], v[:, :, broken] = value, value
    spoilt = replace(x, k=k, v=v)
    with np.errstate(invalid="ignore", over="ignore"):
        clean, result = forward(x, TILE), forward(spoilt, TILE)
        before, after = (gradients(backward(y, f, TILE, KEY_TILE)) for y, f in ((x, clean), (spoilt, result)))
    touched = mask[0, 0, :, broken].any(-1)
    assert touched.any()
    assert not touched.all()
    for name, expected in rows_of(clean).items():
        assert torch.equal(getattr(result, name)[:, :, ~touched], expected[:, :, ~touched]), name
    assert not result.out[:, :, touched].isfinite().all(-1).any(), "a row that sees it does not show it"
    keys = mask[0, 0, touched].any(0)  # also seen by such rows
    for name, free in {"dq": ~touched, "dbeta": ~touched, "dk": ~keys, "dv": ~keys}.items():
        assert torch.equal(after[name][:, :, free], before[name][:, :, free]), name
    assert (after["dk"][:, :, 50] == 0).all()
    assert (after["dv"][:, :, 50] == 0).all()


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_a_nan_in_a_bias_reaches_its_row() -> None:
    hidden = torch.zeros(1, 1, 64, 96)
    hidden[..., 32:] = -INFINITY
    hidden[..., 7, 50] = math.nan  # in a block that hides everything else
    x = block_sparse(inputs_of(Case(queries=64, keys=96, heads=4)), hidden == 0)
    x = replace(x, seen=x.seen._replace(visibility=Visibility(mask=hidden)))
    assert listed_launches(x) == 3
    with np.errstate(invalid="ignore"):
        result = forward(x, TILE)
    spoilt = torch.arange(64) == 7
    assert result.out[:, :, spoilt].isnan().all()
    assert result.out[:, :, ~spoilt].isfinite().all()


# Memory reads.


def test_hidden_tiles_are_not_read_and_the_mask_only_where_it_has_holes() -> None:
    x = inputs_of(Case(queries=128, keys=128, heads=2, kv_heads=2, dim=16))
    mask = torch.ones(1, 1, 128, 128, dtype=torch.bool)
    mask[..., :64, 64:] = False  # tiles of rows 0–63 do not see these keys
    mask[..., 64:, 96:] = False
    mask[..., 64:, 64:96] = torch.rand(64, 32, generator=random()) < 0.5  # one key tile is partially visible
    x = block_sparse(x, mask)
    given, options = (x.q, x.k, x.v, x.beta, x.seen.visibility), {"scale": x.scale}
    result = flash_forward(*given, tile=TILE, **options)
    tiles = {"query_tile": TILE, "key_tile": KEY_TILE}
    launches = [
        *forward_launches(*given, tile=TILE, **options)[0],
        *backward_launches(x.gradient, *given, result.out, result.lse, **tiles, **options)[0],
    ]
    ran = {}
    for launch in launches:
        with recording() as recorded:
            launch.run(x.q)
        ran[launch.kernel.fn.__name__] = recorded[0]

    given_mask = x.seen.visibility.mask
    holes = torch.zeros_like(mask)
    holes[..., 64:, 64:96] = True
    assert is_read(ran["mask_squares_kernel"], given_mask).all()
    for kernel in ("flash_forward_kernel", "flash_backward_query_kernel"):
        assert torch.equal(is_read(ran[kernel], given_mask), holes), kernel
        assert is_read(ran[kernel], x.k)[:, :, :96].all()
        assert not is_read(ran[kernel], x.k)[:, :, 96:].any(), kernel
        assert not is_read(ran[kernel], x.v)[:, :, 96:].any(), kernel
    wide = torch.zeros_like(mask)
    wide[..., 64:, 64:] = True  # a tile of 64 keys is partially visible
    assert torch.equal(is_read(ran["flash_backward_key_kernel"], given_mask), wide)


def test_autograd_has_them_too() -> None:
    x = block_sparse(inputs_of(Case(queries=70, keys=70, heads=2)), blocks(random(), 1, 2, 70, 70))
    leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)]
    out = flash_attention(*leaves, x.beta, x.seen.visibility, scale=x.scale).out
    found = torch.autograd.grad(out, leaves, x.gradient)
    true = written_out(x)
    assert_as_good_as_torch(x, dict(zip(("dq", "dk", "dv"), found, strict=True)), true)
