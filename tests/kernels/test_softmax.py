"""The row softmax against fp64: weights, gradients and statistics, for any length, strides and sign of β."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from corrected_interpreter import corrected, fused
from softmax_cases import (
    STATISTICS,
    THRESHOLDS,
    assert_as_good_as_torch,
    by_torch,
    counts_by_torch,
    normal,
    random_mask,
)
from torch import Tensor

from attnscale_kernels.launch import GFX_942, SM_80, Tile
from attnscale_kernels.softmax import launch as launches
from attnscale_kernels.softmax.launch import RowSoftmax, SoftmaxGradient, softmax_tile
from attnscale_kernels.softmax.op import row_softmax, softmax_backward_op, softmax_op

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (1, 2, 63, 64, 65, 129, 257)
SHORT, LONG = None, Tile(2, 32, 4, 1)  # rows of one block, and longer rows


def forward(scores: Tensor, beta: Tensor, tile: Tile | None = None, **arguments: Any) -> RowSoftmax:
    """The forward launch, on poisoned outputs."""
    options = {"mask": None, "bias": None, "thresholds": None} | arguments
    (launch,), result = launches.forward_launches(scores, beta, tile=tile, **options)
    for output in result:
        if output is not None:
            output.fill_(math.nan if output.is_floating_point() else -1)
    launch.run(scores)
    return result


def backward(
    gradient: Tensor, weights: Tensor, beta: Tensor, tile: Tile | None = None, **arguments: Any
) -> SoftmaxGradient:
    """The backward launch, on poisoned outputs."""
    options = {"scores": None, "bias": None} | arguments
    (launch,), result = launches.backward_launches(gradient, weights, beta, tile=tile, **options)
    for output in result:
        if output is not None:
            output.fill_(math.nan)
    launch.run(weights)
    return result


# Intended overflows and NaN must not raise numpy warnings.
EXTREME = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> Iterator[None]:
    with corrected():
        yield


@pytest.fixture(params=[SHORT, LONG], ids=["short", "long"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tile | None:
    """Rows in one block and in several, also for code that chooses its own tile."""
    if request.param is not None:
        monkeypatch.setattr(launches, "softmax_tile", lambda *_: request.param)
    chosen: Tile | None = request.param
    return chosen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", LENGTHS)
def test_everything_at_every_length(keys: int, dtype: torch.dtype, tile: Tile | None) -> None:
    shape = (1, 2, 3, keys)
    scores, bias, upstream = (normal(*shape, dtype=dtype, seed=seed) for seed in range(3))
    beta = torch.tensor([[1.5, -2.0, 0.0], [0.0, 5.5, -0.25]])[None]
    mask = random_mask(*shape)
    mask[..., 0] = True
    mask[0, 1, 1] = False  # row without visible keys
    found = forward(scores, beta, tile, mask=mask, bias=bias, thresholds=torch.tensor(THRESHOLDS))
    gradient = backward(upstream, found.weights, beta, tile, scores=scores, bias=bias)
    got = found._asdict() | {"dscores": gradient.scores, "dbias": gradient.scores, "dbeta": gradient.beta}
    counts = got.pop("gap_counts")
    assert_as_good_as_torch(got, scores, beta, mask, bias, upstream)
    assert torch.equal(counts, counts_by_torch(scores, mask, bias, THRESHOLDS))
    assert (counts[0, 1, 1] == 0).all()
    assert gradient.beta is not None
    assert gradient.beta[0, 1, 1] == 0


def test_products_may_be_fused_into_sums(tile: Tile | None) -> None:
    """Compilers fuse multiply-adds: the code must not rely on both sides of a difference being rounded alike."""
    scores, upstream, mask = normal(4, 65) * 8, normal(4, 65, seed=1), random_mask(4, 65)
    mask[:, :40] = False  # the first blocks are fully hidden
    mask[3] = False
    beta = torch.tensor([1.5, -2.0, 0.0, 3.0])
    with fused():
        found = forward(scores, beta, tile, mask=mask)
        gradient = backward(upstream, found.weights, beta, tile, scores=scores)
    got = found._asdict() | {"dscores": gradient.scores, "dbeta": gradient.beta}
    del got["gap_counts"]
    assert_as_good_as_torch(got, scores, beta, mask, upstream=upstream)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_asked_for_is_not_needed(dtype: torch.dtype, tile: Tile | None) -> None:
    scores, upstream, beta = normal(3, 70, dtype=dtype), normal(3, 70, dtype=dtype, seed=1), torch.tensor(1.7)
    found = forward(scores, beta, tile)
    gradient = backward(upstream, found.weights, beta, tile)
    assert found.gap_counts is None
    assert gradient.beta is None
    got = {name: getattr(found, name) for name in ("weights", *STATISTICS)} | {"dscores": gradient.scores}
    assert_as_good_as_torch(got, scores, beta, upstream=upstream)


def test_rows_of_a_multiple_of_eight_are_said_to_be(tile: Tile | None) -> None:
    for wide, keys, said in ((40, 40, 8), (40, 37, 1), (43, 40, 1), (64, 64, 1)):  # Triton detects multiples of 16
        scores, upstream, beta = normal(3, wide)[:, :keys], normal(3, keys, seed=1), torch.tensor(1.7)
        (launch,), _ = launches.forward_launches(scores, beta, mask=None, bias=None, thresholds=None)
        assert launch.constants["ALIGN"] == said
        found = forward(scores, beta, tile)
        gradient = backward(upstream, found.weights, beta, tile)
        got = {name: getattr(found, name) for name in ("weights", *STATISTICS)} | {"dscores": gradient.scores}
        assert_as_good_as_torch(got, scores, beta, upstream=upstream)


def test_a_row_of_many_blocks() -> None:
    """2¹⁷ keys with the default block size."""
    scores, upstream = normal(1, 2**17), normal(1, 2**17, seed=1)
    beta = torch.tensor([3.0])
    found = forward(scores, beta, thresholds=torch.tensor(THRESHOLDS))
    gradient = backward(upstream, found.weights, beta, scores=scores)
    got = found._asdict() | {"dscores": gradient.scores, "dbeta": gradient.beta}
    assert torch.equal(got.pop("gap_counts"), counts_by_torch(scores, None, None, THRESHOLDS))
    assert_as_good_as_torch(got, scores, beta, upstream=upstream)


def test_a_block_holds_rows_up_to_its_limit() -> None:
    for resources in (SM_80, GFX_942):
        for queries, keys in ((1, 1), (1, 64), (4096, 1), (4096, 65), (64, 8192), (64, 8193), (1, 2**20), (0, 0)):
            chosen = softmax_tile(queries, keys, resources)
            assert (chosen.n >= keys) == (keys <= 8192)
            assert 1 <= chosen.warps * resources.warp_size <= 1024
            assert chosen.m * chosen.n <= 8192
            assert chosen.m <= max(1, 2 * queries)
    for keys in (64, 8192, 8193):
        scores = torch.empty(2, keys)
        (launch,), _ = launches.forward_launches(scores, torch.tensor(1.0), mask=None, bias=None, thresholds=None)
        assert launch.constants["LONG"] == (keys > 8192)


@pytest.mark.parametrize("shape", [(0, 2, 3, 5), (2, 0, 5), (0, 4)], ids=str)
def test_no_rows(shape: tuple[int, ...]) -> None:
    found = row_softmax(torch.empty(shape), thresholds=(1.0,))
    assert found.weights.shape == shape
    assert found.lse.shape == shape[:-1]


def test_no_keys() -> None:
    found = row_softmax(torch.empty(2, 3, 0), thresholds=(1.0,))
    assert found.weights.shape == (2, 3, 0)
    assert (found.lse == -math.inf).all()
    assert (found.entropy == 0).all()
    assert found.gap_counts is not None
    assert (found.gap_counts == 0).all()


def test_rows_hidden_in_four_ways_give_zeros(tile: Tile | None) -> None:
    """By the mask, by the bias, by −∞, and by the lowest finite number, which some libraries use instead."""
    scores = normal(5, 40)
    mask, bias = torch.ones(5, 40, dtype=torch.bool), normal(5, 40, seed=1)
    mask[0] = False
    bias[1] = -1e4
    scores[2] = -math.inf
    scores[3] = torch.finfo(torch.float32).min
    beta = torch.tensor([1.0, -2.0, -3.0, 4.0, -5.0]).requires_grad_()
    inputs = scores.requires_grad_(), bias.requires_grad_()
    found = row_softmax(*inputs[:1], beta, mask=mask, bias=bias, thresholds=THRESHOLDS)
    ds, db, dbias = torch.autograd.grad(found.weights.square().sum(), (scores, beta, bias))
    assert found.gap_counts is not None
    for value in (found.weights, found.w_max, found.entropy, found.gap_counts, ds, db, dbias):
        assert (value[:4] == 0).all()
        assert value[4].count_nonzero() > 0
    assert (found.lse[:4] == -math.inf).all()
    assert (found.max_logit[:4] == -math.inf).all()


@EXTREME
def test_the_lowest_number_hides_one_key_at_any_temperature(tile: Tile | None) -> None:
    scores = normal(3, 40)
    scores[:, 7] = torch.finfo(torch.float32).min
    scores[:, 36] = -math.inf
    beta = torch.tensor([0.0, -1e6, 1e12])
    found = forward(scores, beta, tile, thresholds=torch.tensor([math.inf]))
    got = found._asdict()
    assert (got.pop("gap_counts") == 38).all()
    assert_as_good_as_torch(got, scores, beta)
    assert (found.weights[:, 7] == 0).all()
    assert (found.weights[:, 36] == 0).all()


def test_hidden_values_do_not_leak(tile: Tile | None) -> None:
    scores, upstream, mask = normal(4, 50), normal(4, 50, seed=1), random_mask(4, 50)
    beta = torch.tensor([1.0, -1.0, 0.0, 2.0])
    clean = forward(scores, beta, tile, mask=mask, thresholds=torch.tensor(THRESHOLDS))
    dclean = backward(upstream, clean.weights, beta, tile, scores=scores)
    for broken in (math.nan, math.inf, -math.inf):
        dirty = scores.masked_fill(~mask, broken)
        found = forward(dirty, beta, tile, mask=mask, thresholds=torch.tensor(THRESHOLDS))
        dfound = backward(upstream.masked_fill(~mask, broken), found.weights, beta, tile, scores=dirty)
        for got, expected in zip((*found, *dfound), (*clean, *dclean), strict=True):
            assert got is not None
            assert torch.equal(got, expected)


@EXTREME
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_no_number_spoils_its_row_and_no_other(broken: float, tile: Tile | None) -> None:
    scores = normal(4, 50)
    clean = forward(scores, torch.tensor(1.5), tile)
    scores[2, 33] = broken
    found = forward(scores, torch.tensor(1.5), tile)
    for got, expected in zip(found[:5], clean[:5], strict=True):
        assert got[2].isnan().all()
        assert torch.equal(got[[0, 1, 3]], expected[[0, 1, 3]])


def test_gap_counts_are_of_raw_scores_whatever_the_temperature(tile: Tile | None) -> None:
    scores = torch.tensor([[0.0, 1.0, 3.0, 3.0, 2.0, -5.0]]).repeat(1, 8).expand(4, 48)
    found = row_softmax(scores, torch.tensor([1.0, -1.0, 0.0, 9.0]), thresholds=(0.0, 0.5, 1.0, 2.0, 7.9, 8.0, -1.0))
    assert found.gap_counts is not None
    assert found.gap_counts.dtype == torch.int64
    assert found.gap_counts.tolist() == [[16, 16, 24, 32, 40, 48, 0]] * 4


def test_a_common_offset_costs_no_accuracy_of_the_gradient_of_beta(tile: Tile | None) -> None:
    """dβ is a covariance; computed as Σ dℓ·s, it would contain 300 times the error of Σ dℓ, which should be 0."""
    scores, upstream = normal(4, 100) + 300.0, normal(4, 100, seed=1)
    beta = torch.full((4,), 2.0)
    weights = forward(scores, beta, tile).weights
    found = backward(upstream, weights, beta, tile, scores=scores).beta
    assert found is not None
    true = by_torch(scores, beta, None, None, upstream, torch.float64)["dbeta"]
    torch.testing.assert_close(found.double(), true, rtol=0, atol=2e-6)


LAYOUTS = {
    "transposed": lambda: normal(2, 2, 37, 3).transpose(2, 3),
    "heads last": lambda: normal(2, 3, 2, 37).transpose(1, 2),
    "part of wider rows": lambda: normal(2, 2, 3, 64)[..., 5:42],
    "every second row": lambda: normal(2, 2, 6, 37)[:, :, ::2],
    "expanded heads": lambda: normal(2, 1, 3, 37).expand(2, 2, 3, 37),
    "one row for all": lambda: normal(37).expand(2, 2, 3, 37),
    "two axes": lambda: normal(3, 37),
    "one axis": lambda: normal(37),
    "five axes": lambda: normal(2, 1, 2, 3, 37),
    "five axes that are no four": lambda: normal(2, 2, 2, 3, 37).permute(1, 2, 0, 3, 4)[:, :, :1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_are_followed(layout: str, tile: Tile | None) -> None:
    scores = LAYOUTS[layout]()
    bias, upstream = LAYOUTS[layout]().flip(-1), LAYOUTS[layout]() * 0.5 + 1
    mask = random_mask(*scores.shape)
    beta = normal(*scores.shape[:-1], seed=4)
    found = forward(scores, beta, tile, mask=mask, bias=bias)
    gradient = backward(upstream, found.weights, beta, tile, scores=scores, bias=bias)
    got = found._asdict() | {"dscores": gradient.scores, "dbeta": gradient.beta}
    del got["gap_counts"]
    assert_as_good_as_torch(got, scores, beta, mask, bias, upstream)


@pytest.mark.parametrize("shape", [(), (37,), (1, 37), (3, 1), (2, 1, 1), (2, 1, 3, 37), (2, 2, 3, 37)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_and_biases_broadcast_and_gradients_are_summed(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    scores, bias = normal(2, 2, 3, 37, dtype=dtype).requires_grad_(), normal(*shape, seed=1).requires_grad_()
    upstream, mask, beta = normal(2, 2, 3, 37, dtype=dtype, seed=2), random_mask(*shape), torch.tensor(1.5)
    found = row_softmax(scores, beta, mask=mask, bias=bias)
    ds, db = torch.autograd.grad(found.weights, (scores, bias), upstream)
    assert (ds.dtype, db.dtype, db.shape) == (dtype, torch.float32, bias.shape)
    got = {"weights": found.weights.detach(), "lse": found.lse, "dscores": ds}
    if bias.shape[-1:] == (37,):
        got["dbias"] = db
    else:  # a constant bias changes nothing: its gradient is 0 up to rounding
        assert db.abs().max() <= torch.finfo(dtype).eps * ds.abs().sum()
    assert_as_good_as_torch(got, scores, beta, mask.expand(2, 2, 3, 37), bias, upstream)


@pytest.mark.parametrize("shape", [(), (3,), (1,), (2, 1), (2, 1, 1), (2, 1, 3), (2, 2, 3)], ids=str)
def test_temperatures_broadcast_and_gradients_are_summed(shape: tuple[int, ...]) -> None:
    scores, beta = normal(2, 2, 3, 37).requires_grad_(), normal(*shape, seed=8).requires_grad_()
    upstream = normal(2, 2, 3, 37, seed=2)
    found = row_softmax(scores, beta)
    ds, dbeta = torch.autograd.grad(found.weights, (scores, beta), upstream)
    assert dbeta.shape == beta.shape
    got = {"weights": found.weights.detach(), "dscores": ds, "dbeta": dbeta}
    assert_as_good_as_torch(got, scores, beta, upstream=upstream)


def test_a_temperature_may_be_a_number_or_any_float() -> None:
    scores = normal(3, 20)
    expected = (scores.double() * 1.5).softmax(-1)
    for beta in (1.5, torch.tensor(1.5, dtype=torch.float64), torch.tensor([1.5], dtype=torch.bfloat16)):
        torch.testing.assert_close(row_softmax(scores, beta).weights.double(), expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(row_softmax(scores).weights, row_softmax(scores, 1).weights)
    half = torch.tensor(1.5, dtype=torch.float16, requires_grad=True)
    (dbeta,) = torch.autograd.grad(row_softmax(scores, half).weights.square().sum(), half)
    assert dbeta.dtype == torch.float16


def test_statistics_have_no_gradient_and_weights_the_dtype_of_scores() -> None:
    scores = normal(3, 20, dtype=torch.float16).requires_grad_()
    found = row_softmax(scores, thresholds=(1.0,))
    assert found.weights.dtype == torch.float16
    assert found.weights.requires_grad
    assert not any(x.requires_grad for x in found[1:] if x is not None)
    weights, *statistics = softmax_op(scores, torch.tensor(1.0), None, None, None)
    assert [x.requires_grad for x in (weights, *statistics)] == [True] + 5 * [False]


def test_the_gradient_of_a_wide_bias_does_not_vanish_in_half_precision() -> None:
    """Each term is below the smallest fp16 number; their sum is not."""
    scores, bias = normal(64, 20, dtype=torch.float16), torch.zeros(20, requires_grad=True)
    upstream = (normal(20, seed=1) * 5e-7).half().expand(64, 20)
    (found,) = torch.autograd.grad(row_softmax(scores, bias=bias).weights, bias, upstream)
    true = by_torch(scores, torch.tensor(1.0), None, bias.expand(64, 20), upstream, torch.float64)["dbias"].sum(0)
    torch.testing.assert_close(found.double(), true, rtol=0, atol=1e-2 * float(true.abs().max()))


def test_only_the_gradient_of_beta_keeps_the_scores() -> None:
    def kept(**arguments: Any) -> set[int]:
        pointers = set()

        def pack(x: Tensor) -> Tensor:
            pointers.add(x.data_ptr())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            row_softmax(scores, **arguments)
        return pointers

    scores = normal(3, 20).requires_grad_()
    assert scores.data_ptr() not in kept(bias=normal(3, 20).requires_grad_())
    assert scores.data_ptr() in kept(beta=torch.tensor(1.0, requires_grad=True))


def test_a_second_gradient_is_refused() -> None:
    scores = normal(2, 8).requires_grad_()
    (first,) = torch.autograd.grad(row_softmax(scores).weights.square().sum(), scores, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(first.sum(), scores)


def test_rows_beyond_two_to_the_31_elements() -> None:
    """A tensor with untouched pages except for three rows far apart, the last beyond an int32 offset."""
    apart = 2**30 + 16
    storage = torch.empty(2 * apart + 32, dtype=torch.float16)
    scores = storage.as_strided((3, 32), (apart, 1))
    scores.copy_(normal(3, 32))
    near = scores.clone()
    assert torch.equal(row_softmax(scores, 1.5).weights, row_softmax(near, 1.5).weights)
    gradient = backward(scores, scores, torch.tensor(1.0)).scores
    assert torch.equal(gradient, backward(near, near, torch.tensor(1.0)).scores)


SAMPLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"mask": random_mask(5), "bias": normal(2, 1, 5).requires_grad_(), "thresholds": torch.tensor([0.0, 1.0])},
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_torch_finds_nothing_wrong_with_the_operators(sample: str) -> None:
    given = {"mask": None, "bias": None, "thresholds": None} | SAMPLES[sample]
    scores, beta = normal(2, 3, 5).requires_grad_(), torch.ones(3, requires_grad=True)
    torch.library.opcheck(softmax_op, (scores, beta, *given.values()))
    frozen = [x if x is None else x.detach() for x in (scores.clone(), beta, *given.values())]
    weights, asked = frozen[0].softmax(-1), sample == "all"
    arguments = (normal(2, 3, 5), weights, frozen[1], frozen[0] if asked else None, frozen[3], asked)
    torch.library.opcheck(softmax_backward_op, arguments)


def test_one_graph_with_gradients() -> None:
    def step(scores: Tensor, beta: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        found = row_softmax(scores * 2, beta, bias=bias, mask=mask, thresholds=(0.0, 1.0))
        return found.weights * 3, found.lse, found.entropy, found.gap_counts

    mask, upstream = random_mask(3, 20), normal(2, 3, 20, seed=2)
    inputs = normal(2, 3, 20), torch.tensor([1.0, 2.0, -1.0]), normal(20, seed=1)
    for x in inputs:
        x.requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for run in (step, compiled):
        out = run(*inputs)
        results.append((*out, *torch.autograd.grad(out[0], inputs, upstream)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
