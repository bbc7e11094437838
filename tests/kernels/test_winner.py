"""The slot of the largest logit of each row in the flash forward and decode kernels, in Triton's interpreter.

Most inputs are small integers with powers of two as temperatures: logits are exact in fp32, so ties are exact and the
slot equals that of fp64. Otherwise a slot is accepted if its logit is the largest up to rounding.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from corrected_interpreter import corrected
from flash_cases import DTYPES, NATS, RULES, Case, Inputs, Seen, forward, guarded, inputs_of, rows_of, written_out
from oracle import tensors
from torch import Tensor

from attnscale import StatsRequest, attention_with_stats
from attnscale.backends import triton as backend
from attnscale_kernels import Visibility, flash_attention
from attnscale_kernels.decode.launch import decode
from attnscale_kernels.decode.op import decode_attention
from attnscale_kernels.flash import mask as masks
from attnscale_kernels.flash.launch import flash_forward, forward_launches
from attnscale_kernels.launch import SM_90, SM_100, Tile, assuming

FP32, FP16, _ = DTYPES
SMALL = Tile(16, 16, 4, 1)
SPLITS = (1, 3)
SEES = ("everything", "causal", "window_5_and_9", "any_intervals", "left_padding", "mask_per_head", "bias_that_hides")


@pytest.fixture(autouse=True)
def _interpreter():
    with corrected():
        yield


def whole(case: Case) -> Inputs:
    """The call with small integers as queries and keys, and temperatures that are powers of two, 0, or negative."""
    x = inputs_of(replace(case, dim=16))
    q, k = (guarded(t.mul(1.5).round().clamp(-2, 2)) for t in (x.q, x.k))
    beta = torch.tensor([1.0, 0.5, -1.0, 0.0, -0.0, 4.0, -0.25]).repeat(case.queries)[: case.queries]
    return replace(x, q=q, k=k, beta=guarded(beta.view(1, 1, -1)))


def with_equal_keys(x: Inputs) -> Inputs:
    return replace(x, k=guarded(x.k[:, :, :1].expand_as(x.k)))


def first_of_largest(x: Inputs) -> Tensor:
    """The winner, from fp64 logits."""
    logits = written_out(x)["logits"]
    return torch.where((logits > -math.inf).any(-1), logits.max(-1).indices, -1)


def first_seen(x: Inputs) -> Tensor:
    seen = x.seen.table.expand(*x.q.shape[:3], x.k.shape[2])
    return torch.where(seen.any(-1), seen.int().argmax(-1), -1)


def assert_largest(x: Inputs, winner: Tensor) -> None:
    """The logit at the slot is the largest of its row up to rounding; −1 means none."""
    logits = written_out(x)["logits"]
    some = (logits > -math.inf).any(-1)
    assert torch.equal(winner >= 0, some)
    found = logits.gather(-1, winner.clamp(min=0)[..., None])[..., 0]
    largest = logits.amax(-1)
    tolerance = NATS * (1 + largest[some].abs().max())
    assert ((largest - found)[some] <= tolerance).all()


def decoded(x: Inputs, splits: int, tile: Tile = SMALL) -> Tensor:
    options = {"scale": x.scale, "softcap": x.softcap, "sinks": x.sinks, "splits": splits, "tile": tile}
    torch.use_deterministic_algorithms(True)  # fills new memory
    try:
        winner = decode(x.q, x.k, x.v, x.beta, x.seen.visibility, winner=True, **options).winner
    finally:
        torch.use_deterministic_algorithms(False)
    assert winner is not None
    return winner


def cases(*several: Case):
    return pytest.mark.parametrize("case", several, ids=str)


@cases(
    *(
        Case(sees=rule, queries=21, keys=70, batch=2, dtype=dtype, kv_heads=1 + i % 2)
        for i, (rule, dtype) in enumerate(product(RULES, (FP32, FP16)))
    ),
    Case(sees="causal", queries=37, keys=70, sinks=True),
    Case(sees="window_5_and_9", queries=37, keys=70, softcap=30.0),
    Case(sees="causal", queries=70, keys=70, dropout_p=0.5),
)
def test_it_is_the_first_of_the_largest_logits(case):
    x = whole(case)
    true = first_of_largest(x)
    winner = forward(x, SMALL, winner=True).winner
    assert winner.dtype == torch.int64
    assert torch.equal(winner, true)
    if case.dropout_p == 0.0:
        for splits in SPLITS:
            assert torch.equal(decoded(x, splits), true), splits


@cases(
    Case(beta="any_sign", queries=70, keys=129, heads=4, kv_heads=2),
    Case(beta="each", sees="window_80_and_70", queries=129, keys=129, dtype=FP16, dim=40),
    Case(beta="tiny", sees="any_intervals", softcap=2.0, sinks=True),
    Case(beta="sharp", sees="bias_that_hides", keys=129, dropout_p=0.3),
    Case(beta="negative", sees="documents_with_mask", sharpness=30.0),
    Case(beta="per_row", sees="three_ahead", sharpness=-1.0),
    Case(beta="any_sign", sees="bias_per_head", sharpness=-1.0),
    Case(beta="each", sees="everything", sharpness=0.0),
)
def test_the_tile_and_the_splits_do_not_matter(case):
    x = inputs_of(case)
    for tile in (SMALL, Tile(32, 64, 4, 1), Tile(64, 32, 4, 2), None):
        assert_largest(x, forward(x, tile, winner=True).winner)
    if case.dropout_p == 0.0:
        for splits, tile in ((1, SMALL), (5, SMALL), (2, Tile(16, 64, 4, 1))):
            assert_largest(x, decoded(x, splits, tile))


@cases(*(Case(sees=sees, queries=37, keys=70, batch=2) for sees in SEES if "bias" not in sees))
def test_of_equal_keys_the_first_that_is_seen_wins(case):
    x = with_equal_keys(whole(case))
    assert torch.equal(forward(x, SMALL, winner=True).winner, first_seen(x))
    for splits in (1, 3, 7):
        assert torch.equal(decoded(x, splits), first_seen(x)), splits


def test_more_splits_than_are_merged_at_once():
    x = whole(Case(sees="everything", queries=2, keys=400))
    assert torch.equal(decoded(with_equal_keys(x), 21), torch.zeros(1, 2, 2, dtype=torch.int64))
    late = replace(x, beta=torch.ones(1, 1, 1), k=guarded(x.k * torch.arange(400).ge(390)[:, None]))
    true = first_of_largest(late)
    assert (true >= 390).any()
    assert torch.equal(decoded(late, 21), true)


def test_tiles_that_a_mask_leaves_whole_come_first_and_win_no_tie():
    x = whole(Case(queries=40, keys=96))
    mask = torch.ones(1, 1, 40, 96, dtype=torch.bool)
    mask[..., :5] = False  # the first tile is partially visible
    mask[..., 32:64] = False
    x = replace(x, seen=Seen(Visibility(mask=guarded(mask, True)), mask))
    with mock.patch.object(masks, "LEAST_SCORES", 0):
        tile = Tile(32, 32, 4, 1)
        launches, _ = forward_launches(x.q, x.k, x.v, x.beta, x.seen.visibility, scale=x.scale, winner=True, tile=tile)
        assert launches[-1].arguments["rule"].list_ptr is not None
        assert (forward(with_equal_keys(x), tile, winner=True).winner == 5).all()
        assert torch.equal(forward(x, tile, winner=True).winner, first_of_largest(x))


@pytest.mark.parametrize("resources", [SM_90, SM_100])
def test_keys_may_come_by_descriptors(resources):
    x = whole(Case(sees="window_of_20", queries=65, keys=70, dtype=FP16))
    x = replace(x, **{name: getattr(x, name).clone() for name in ("q", "k", "v")})  # aligned
    with assuming(resources):
        (launch,), found = forward_launches(
            x.q, x.k, x.v, x.beta, x.seen.visibility, scale=x.scale, entropy=True, winner=True
        )
        assert launch.arguments["k_box"] is not None
        launch.run(x.q)
    assert torch.equal(found.winner, first_of_largest(x))


# NaN and infinity.


def winners(x: Inputs) -> list[Tensor]:
    with np.errstate(invalid="ignore", over="ignore"):
        return [forward(x, SMALL, winner=True).winner, *(decoded(x, splits) for splits in SPLITS)]


BROKEN = (20, 64)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("sees", SEES)
def test_rows_that_see_a_nan_have_no_winner(sees):
    x = whole(Case(sees=sees, queries=70, keys=70))
    k = guarded(x.k)
    k[:, :, BROKEN[0], 3] = math.nan
    k[:, :, BROKEN[1]] = math.nan
    touched = x.seen.table[..., BROKEN].any(-1)
    expected = first_of_largest(x).masked_fill(touched, -1)
    for winner in winners(replace(x, k=k)):
        assert torch.equal(winner, expected)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_a_query_or_temperature_of_nan_takes_the_winner_of_its_row():
    x = whole(Case(sees="window_of_20", queries=40, keys=70))
    q, beta = guarded(x.q), guarded(x.beta)
    q[:, 0, 17, 5] = beta[..., 30] = math.nan
    expected = first_of_largest(x)
    expected[:, 0, 17] = expected[..., 30] = -1
    for winner in winners(replace(x, q=q, beta=beta)):
        assert torch.equal(winner, expected)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_have_no_part_in_it(sees, value):
    x = whole(Case(sees=sees, queries=40, keys=70))
    v = guarded(x.v)
    v[:, :, BROKEN[0]] = v[:, :, BROKEN[1], 2] = value
    for winner in winners(replace(x, v=v)):
        assert torch.equal(winner, first_of_largest(x))


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_an_infinite_score_wins():
    x = inputs_of(Case(sees="causal", queries=70, keys=70, beta="each"))
    q, k = guarded(x.q.abs()), guarded(x.k)
    k[:, :, 33], k[:, :, 50] = math.inf, -math.inf
    touched = x.seen.table[..., 33].expand(1, 2, 70)
    expected = torch.where(touched, 33, forward(replace(x, q=q), SMALL, winner=True).winner)
    for winner in winners(replace(x, q=q, k=k)):
        assert torch.equal(winner, expected)


# Requested outputs, and the operators.


@cases(Case(sees="window_of_20", sinks=True), Case(sees="bias_that_hides", beta="negative", softcap=2.0))
def test_it_changes_nothing_else_and_is_none_where_not_asked_for(case):
    x = inputs_of(case)
    without, with_it = forward(x), forward(x, winner=True)
    assert without.winner is None
    for name, value in rows_of(without).items():
        assert torch.equal(getattr(with_it, name), value), name
    arguments, options = (x.q, x.k, x.v, x.beta, x.seen.visibility), {"scale": x.scale, "softcap": x.softcap}
    for splits in (1, 3):
        plain, full = (decode(*arguments, **options, splits=splits, winner=winner) for winner in (False, True))
        assert plain.winner is None
        for name, value in rows_of(plain).items():
            assert torch.equal(getattr(full, name), value), name


def test_there_may_be_no_keys_and_no_rows():
    for queries, keys in ((5, 0), (0, 5)):
        x = inputs_of(Case(sees="everything", queries=queries, keys=keys))
        found = flash_forward(x.q, x.k, x.v, x.beta, x.seen.visibility, scale=x.scale, winner=True)
        for winner in (found.winner, decoded(x, 1)):
            assert torch.equal(winner, torch.full((1, 2, queries), -1))


def test_both_operators_compile_into_one_graph():
    q, k, v = tensors((1, 2, 9, 16), (1, 1, 40, 16), torch.float32)
    beta = torch.full((1, 2, 9), 1.5)
    for attend in (flash_attention, decode_attention):

        def winner_of(q, k, v, beta, attend=attend):
            return attend(q, k, v, beta, Visibility(slot=31, right=0), scale=0.25, winner=True).winner

        torch._dynamo.reset()
        compiled = torch.compile(winner_of, fullgraph=True, backend="aot_eager")(q, k, v, beta)
        assert torch.equal(compiled, winner_of(q, k, v, beta))


# Through the public functions.

PADDING = torch.zeros(2, 40, dtype=torch.bool)
PADDING[0, :7] = True
CALLS = {
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 9},
    "padding": {"is_causal": True, "key_padding": PADDING},
    "documents": {"is_causal": True, "document_ids": torch.tensor([[0] * 11 + [1] * 29, [0] * 25 + [1] * 15])},
    "bool mask": {"attn_mask": torch.rand(2, 1, 40, 40, generator=torch.Generator().manual_seed(5)) < 0.2},
    "negative scale": {"is_causal": True, "scale": -0.3},
    "softcap and sinks": {"softcap": 3.0, "sinks": torch.tensor([0.5, -1.0, 9.0, 0.0])},
}


@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_backend_gives_that_of_the_reference_without_a_second_pass(call, rows, monkeypatch):
    monkeypatch.delattr(backend, "measure_statistics")
    q, k, v = tensors((2, 4, 40, 24), (2, 4, 40, 24), torch.float32)
    arguments = {**call, "policy": "log", "request": StatsRequest(winner=True, rows=rows)}
    found = attention_with_stats(q, k, v, backend="triton", **arguments)
    wide = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in arguments.items()}
    true = attention_with_stats(q.double(), k.double(), v.double(), backend="reference", **wide)
    assert found.stats.winner.dtype == torch.int64
    assert torch.equal(found.stats.winner, true.stats.winner)


@pytest.mark.parametrize("queries", [3, 20])
def test_alone_it_needs_no_other_statistic(queries):
    q, k, v = tensors((1, 6, queries, 16), (1, 2, 50, 16), torch.float32)
    request = StatsRequest(w_max=False, entropy=False, lse=False, max_logit=False, winner=True)
    arguments = {"enable_gqa": True, "is_causal": True, "cache_offset": 50 - queries, "request": request}
    found, true = (attention_with_stats(q, k, v, backend=name, **arguments).stats for name in ("triton", "blockwise"))
    assert found.lse is None
    assert torch.equal(found.winner, true.winner)


def test_it_is_there_beside_gradients():
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 20, 16), (1, 2, 20, 16), torch.float32))
    found = attention_with_stats(q, k, v, is_causal=True, backend="triton", request=StatsRequest(winner=True))
    plain = attention_with_stats(q, k, v, is_causal=True, backend="triton")
    for one, other in zip(*(torch.autograd.grad(x.output.sum(), (q, k, v)) for x in (found, plain)), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(found.stats.winner[..., 0], torch.zeros(1, 2, dtype=torch.int64))
