"""Forward pass of flash attention with every feature, in Triton's interpreter against naive attention in fp64.

All inputs are surrounded by NaN, and outputs go to memory filled with NaN, with NaN on both sides. Numpy warnings, for
example for 0·∞, are errors. Nothing has run on a GPU.
"""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from corrected_interpreter import corrected, fused
from flash_cases import (
    BETAS,
    DTYPES,
    RULES,
    TILE,
    Case,
    assert_forward,
    draws,
    forward,
    guarded,
    inputs_of,
    rows_of,
    written_out,
)

from attnscale_kernels.flash.launch import flash_forward
from attnscale_kernels.launch import Tile

FP32, FP16, BF16 = DTYPES
LENGTHS = (1, 2, 63, 64, 65, 129, 257)
DIMS = (16, 24, 40, 64, 80, 96, 128, 192, 256)


@pytest.fixture(autouse=True, scope="module")
def _interpreter():
    with corrected():
        yield


def cases(*several: Case):
    return pytest.mark.parametrize("case", several, ids=str)


def check(case: Case) -> None:
    x = inputs_of(case)
    assert_forward(x, forward(x))


# Visibility.

SHAPES = ((65, 65), (63, 129), (129, 64), (2, 65), (70, 63), (64, 130))


@cases(*(Case(sees=rule, queries=70, keys=129, batch=2, beta="each") for rule in RULES))
def test_each_row_attends_to_what_its_rule_lets_it_see(case):
    check(case)


@cases(
    *(
        Case(
            sees=rule,
            dtype=dtype,
            queries=SHAPES[i % 6][0],
            keys=SHAPES[i % 6][1],
            heads=(1, 2, 3)[i % 3],
            dim=DIMS[i % 5],
            value_dim=DIMS[(i + i // 5) % 4],
        )
        for i, (dtype, rule) in enumerate(product((FP16, BF16), RULES))
    )
)
def test_each_rule_holds_in_half_precision(case):
    check(case)


@cases(
    *(Case(sees="causal", queries=n, keys=n, heads=1) for n in LENGTHS),
    *(Case(sees="everything", queries=1, keys=n, dtype=FP16) for n in LENGTHS),
    *(Case(sees="three_ahead", queries=n, keys=1, heads=1) for n in LENGTHS),
    *(Case(sees="window_of_3", queries=n, keys=65, dtype=FP16, heads=1) for n in LENGTHS),
    *(Case(sees="any_intervals", queries=65, keys=n, heads=1) for n in LENGTHS),
    *(Case(sees="left_padding", queries=n, keys=n, dtype=BF16, heads=1) for n in LENGTHS),
    *(Case(sees="bias_that_hides", queries=n, keys=63, heads=1) for n in LENGTHS[:6]),
    *(Case(sees="whole_documents", queries=n, keys=n, heads=1) for n in LENGTHS[1:6]),
    Case(sees="window_80_and_70", queries=257, keys=257, heads=1),
    Case(sees="window_of_100", queries=129, keys=257, heads=1, dtype=FP16),
)
def test_any_length_will_do(case):
    check(case)


@pytest.mark.parametrize(
    ("sees", "queries", "keys"),
    [
        *(
            (sees, *shape)
            for sees, shape in product(("causal", "everything", "mask_per_head"), ((0, 5), (5, 0), (0, 0)))
        ),
        ("documents", 0, 5),
    ],
)
def test_nothing_to_do_is_no_error(sees, queries, keys):
    x = inputs_of(Case(sees=sees, queries=queries, keys=keys))
    result = flash_forward(x.q, x.k, x.v, x.beta, x.seen.visibility, **x.options, entropy=True)
    assert result.out.shape == x.q.shape
    assert (result.out == 0).all()
    assert (result.lse == -math.inf).all()
    assert (result.entropy == 0).all()


@cases(
    Case(sees="nothing"),
    Case(sees="nothing", dtype=FP16, sinks=True, batch=2),
    Case(sees="any_intervals", softcap=2.0, keys=7),
    Case(sees="mask_per_batch_and_head", batch=2, queries=129, dtype=BF16),
    Case(sees="causal", queries=129, keys=65, beta="negative"),
    Case(sees="window_behind_the_keys", queries=65, keys=65, dtype=FP16),
    Case(sees="bias_that_hides", queries=65, keys=2),
    Case(sees="bias_that_hides_by_ten_thousand", queries=65, keys=2, heads=1),
)
def test_rows_that_see_nothing_are_zero(case):
    x = inputs_of(case)
    result = forward(x)
    blind = ~x.seen.table.any(-1).expand(result.lse.shape)
    assert blind.any(), "the case has no such row"
    assert (result.out[blind] == 0).all()
    assert (result.entropy[blind] == 0).all()
    assert (result.max_logit[blind] == -math.inf).all()
    expected = torch.full_like(result.lse, -math.inf) if x.sinks is None else x.sinks[:, None].expand_as(result.lse)
    torch.testing.assert_close(result.lse[blind], expected[blind])
    assert_forward(x, result)


# Shapes.


@cases(
    *(Case(dim=dim, dtype=dtype, queries=33, keys=70) for dim, dtype in product(DIMS, DTYPES)),
    *(
        Case(dim=dim, value_dim=value_dim, sees=sees, dtype=dtype, heads=1)
        for (dim, value_dim, sees), dtype in product(
            ((16, 40, "window_of_20"), (64, 24, "everything"), (40, 64, "mask_per_head"), (192, 128, "causal")),
            (FP32, FP16),
        )
    ),
)
def test_any_head_dimension_will_do(case):
    check(case)


@cases(
    *(
        Case(batch=batch, heads=heads, kv_heads=kv_heads, sees=sees, beta=beta, keys=70)
        for (batch, heads, kv_heads), (sees, beta) in product(
            ((1, 4, 4), (1, 4, 2), (2, 4, 1), (3, 1, 1), (2, 2, 2)),
            (("causal", "each"), ("mask_per_batch_and_head", "per_head"), ("left_padding", "per_batch")),
        )
    )
)
def test_query_heads_share_the_heads_of_keys(case):
    check(case)


@cases(
    Case(batch=2, heads=4, kv_heads=2, queries=70, keys=70, beta="each", sinks=True),
    Case(sees="any_intervals", batch=3, heads=2, kv_heads=1, queries=65, keys=65, dtype=FP16),
    Case(sees="bias_in_half", batch=2, heads=2, kv_heads=2, queries=65, keys=64),
)
def test_each_head_is_computed_as_if_it_were_alone(case):
    x = inputs_of(case)
    together = rows_of(forward(x))
    group = case.heads // case.kv_heads
    for b, h in product(range(case.batch), range(case.heads)):
        one, head, kv_head = slice(b, b + 1), slice(h, h + 1), slice(h // group, h // group + 1)

        def part(t: torch.Tensor | None, one: slice = one, head: slice = head) -> torch.Tensor | None:
            batched = t if t is None or t.shape[0] == 1 else t[one]
            return batched if t is None or t.ndim < 3 or t.shape[1] == 1 else batched[:, head]

        rule = x.seen.visibility
        bounds = {name: part(getattr(rule, name)) for name in ("start", "stop", "padding", "mask")}
        alone = replace(
            x,
            q=x.q[one, head],
            k=x.k[one, kv_head],
            v=x.v[one, kv_head],
            beta=part(x.beta),
            sinks=None if x.sinks is None else x.sinks[head],
            seen=x.seen._replace(visibility=rule._replace(**bounds)),
        )
        for name, value in rows_of(forward(alone)).items():
            assert torch.equal(value, together[name][one, head]), f"{name} of head {h} of sequence {b}"


# Temperature, softcap, sinks.


@cases(
    *(Case(beta=beta, dtype=dtype, batch=2, queries=65) for beta, dtype in product(BETAS, (FP32, FP16))),
    *(Case(beta=beta, softcap=1.5, sees="window_of_20", sinks=True) for beta in BETAS),
    *(Case(beta=beta, sees="bias_that_hides", keys=70) for beta in BETAS),
)
def test_every_row_has_its_temperature(case):
    check(case)


def test_a_temperature_of_zero_weighs_all_keys_alike():
    x = inputs_of(Case(sees="causal", beta="zero"))
    result = forward(x)
    visible = torch.arange(1, 66).expand(1, 2, 65)
    torch.testing.assert_close(result.entropy, visible.log(), rtol=0, atol=1e-5)
    torch.testing.assert_close(result.max_logit, torch.zeros(1, 2, 65), rtol=0, atol=1e-5)


@cases(
    *(
        Case(softcap=softcap, sees=sees, dtype=dtype, dim=24)
        for (softcap, sees), dtype in product(
            ((0.5, "everything"), (2.0, "causal"), (30.0, "bias_per_head"), (5.0, "documents_with_mask")), DTYPES
        )
    ),
    *(
        Case(sinks=True, sees=sees, dtype=dtype, heads=4, kv_heads=2, softcap=softcap)
        for (sees, softcap), dtype in product(
            (("everything", None), ("window_of_3", None), ("any_intervals", 3.0), ("bias_that_hides", None)), DTYPES
        )
    ),
)
def test_softcap_and_sinks_change_the_weights(case):
    check(case)


@pytest.mark.parametrize("height", [-40.0, 0.0, 40.0, -math.inf])
def test_a_sink_may_be_of_any_height(height):
    x = inputs_of(Case(sinks=True, sees="any_intervals", keys=70))
    assert_of_sinks = replace(x, sinks=torch.full((2,), height))
    result = forward(assert_of_sinks)
    true = written_out(assert_of_sinks)
    for name in ("out", "lse", "entropy", "max_logit"):
        torch.testing.assert_close(getattr(result, name).double(), true[name], rtol=1e-5, atol=1e-5, msg=name)


@cases(
    Case(sharpness=30.0, beta="sharp"),
    Case(sharpness=30.0, beta="sharp", dtype=FP16, sees="window_of_20", queries=129, keys=129),
    Case(sharpness=30.0, beta="negative", sees="bias_that_hides", sinks=True),
    Case(sharpness=3000.0, beta="one", sees="any_intervals", dtype=BF16),
    Case(sharpness=1e-3, beta="each", sees="mask_per_head"),
)
def test_logits_may_be_huge_or_tiny(case):
    check(case)


def test_entropy_does_not_cancel_where_one_key_has_all_the_weight():
    x = inputs_of(Case(sharpness=100.0, beta="sharp", sees="everything"))
    result, true = forward(x), written_out(x)
    assert (result.entropy >= 0).all()
    collapsed = true["entropy"] < 1e-3
    assert collapsed.any()
    assert (result.entropy - true["entropy"])[collapsed].abs().max() < 1e-5


# Dropout.


@cases(
    *(
        Case(dropout_p=p, sees=sees, dtype=dtype, batch=2, keys=70)
        for (p, sees), dtype in product(
            ((0.1, "causal"), (0.5, "window_5_and_9"), (0.9, "everything"), (0.3, "mask_per_head")), (FP32, FP16)
        )
    ),
    Case(dropout_p=0.25, sees="bias_that_hides", softcap=2.0, sinks=True, heads=4, kv_heads=2, dtype=BF16),
    Case(dropout_p=0.25, sees="documents", queries=129, keys=129, heads=1),
)
def test_dropout_takes_the_weights_that_were_drawn_and_no_statistic(case):
    check(case)


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9])
def test_dropout_keeps_as_many_as_it_should(probability):
    kept = draws(torch.tensor(17), (1, 4, 256, 256), probability)
    expected, count = 1 - probability, kept.numel()
    assert abs(kept.double().mean() - expected) < 5 * math.sqrt(probability * expected / count)
    for axis in (1, 2, 3):  # neighbours are independent
        both = (kept & kept.roll(1, axis)).double().mean()
        assert abs(both - expected**2) < 5 * math.sqrt(expected**2 * (1 - expected**2) / count) + 1e-9, axis


def test_draws_depend_on_the_seed_and_not_on_the_tile():
    shape = (2, 2, 130, 70)
    kept = draws(torch.tensor(17), shape, 0.5)
    assert torch.equal(kept, draws(torch.tensor(17), shape, 0.5, block=(16, 32)))
    assert torch.equal(kept, draws(torch.tensor(17), shape, 0.5, block=(16, 32), by_slot=True))
    for other in (18, 17 + 2**32, 17 - 2**63):
        assert 0.4 < (kept == draws(torch.tensor(other), shape, 0.5)).double().mean() < 0.6
    pairs = kept.flatten(0, 1)
    for i, j in ((0, 1), (0, 2), (1, 3)):
        assert 0.4 < (pairs[i] == pairs[j]).double().mean() < 0.6


def test_another_seed_drops_other_weights():
    x = inputs_of(Case(dropout_p=0.5))
    assert not torch.equal(forward(x).out, forward(replace(x, seed=x.seed + 1)).out)


# Tiles and memory.

TILES = (Tile(16, 16, 4, 1), Tile(32, 64, 4, 1), Tile(64, 32, 4, 2), Tile(128, 128, 8, 3), Tile(16, 128, 4, 1), None)


@cases(
    Case(sees="window_of_20", queries=70, keys=90, heads=1),
    Case(sees="any_intervals", queries=70, keys=90, heads=1, dropout_p=0.2),
    Case(sees="bias_that_hides", queries=70, keys=90, heads=1, softcap=3.0, sinks=True),
    Case(sees="documents", queries=90, keys=90, heads=1, beta="any_sign"),
    Case(sees="causal_from_the_start", queries=70, keys=90, heads=1, dtype=FP16),
)
def test_the_tile_does_not_matter(case):
    x = inputs_of(case)
    expected = rows_of(forward(x))
    for tile in TILES:
        result = forward(x, tile)
        assert_forward(x, result)
        tolerance = 2e-5 if case.dtype == FP32 else 2e-3
        for name, value in rows_of(result).items():
            limit = tolerance if name == "out" else 2e-5
            torch.testing.assert_close(value, expected[name], rtol=limit, atol=limit, msg=f"{name} with {tile}")


@cases(
    *(Case(sees=sees, dtype=dtype, batch=2) for sees, dtype in product(("causal", "documents"), DTYPES)),
    Case(sees="mask_per_head", dropout_p=0.3),
    Case(sees="bias_per_head", softcap=2.0, sinks=True),
)
def test_the_same_input_gives_the_same_bits(case):
    x = inputs_of(case)
    first, second = rows_of(forward(x)), rows_of(forward(x))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_what_is_not_asked_for_is_not_there_and_changes_nothing():
    x = inputs_of(Case(sees="window_of_20", sinks=True))
    full = forward(x)
    bare = flash_forward(x.q, x.k, x.v, x.beta, x.seen.visibility, **x.options, tile=TILE)
    assert bare.entropy is None
    assert all(torch.equal(value, rows_of(full)[name]) for name, value in rows_of(bare).items())


def heads_last(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, D] in memory, as after a projection."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def dim_first(x: torch.Tensor) -> torch.Tensor:
    """A non-contiguous last axis."""
    return x.mT.contiguous().mT


def spread(x: torch.Tensor) -> torch.Tensor:
    """Every second row of a larger tensor that holds NaN elsewhere."""
    wide = torch.full((*x.shape[:2], 2 * x.shape[2], x.shape[3] + 3), torch.nan, dtype=x.dtype)
    wide[:, :, ::2, : x.shape[3]] = x
    return wide[:, :, ::2, : x.shape[3]]


@pytest.mark.parametrize("layout", [heads_last, dim_first, spread])
@pytest.mark.parametrize("which", ["q", "k", "v", "mask"])
def test_any_layout_in_memory_will_do(which, layout):
    x = inputs_of(Case(sees="bias_that_hides", batch=2, heads=2, kv_heads=2, dim=24))
    if which == "mask":
        visibility = x.seen.visibility._replace(mask=layout(x.seen.visibility.mask))
        other = replace(x, seen=x.seen._replace(visibility=visibility))
    else:
        other = replace(x, **{which: layout(getattr(x, which))})
    expected = rows_of(forward(x))
    assert all(torch.equal(value, expected[name]) for name, value in rows_of(forward(other)).items())


def test_a_dimension_may_be_expanded():
    x = inputs_of(Case(sees="mask_per_batch_and_head", batch=2, heads=4, kv_heads=2, sinks=True, beta="one"))
    q, k, v = x.q[:1].expand(2, -1, -1, -1), x.k[:, :1].expand(-1, 2, -1, -1), x.v[:1].expand(2, -1, -1, -1)
    mask = x.seen.table[:, :1].expand(-1, 4, -1, -1)
    beta, sinks = torch.tensor(1.7).expand(2, 4, 65), torch.tensor([0.5]).expand(4)
    seen = x.seen._replace(table=mask, visibility=x.seen.visibility._replace(mask=mask))
    check_expanded = replace(x, q=q, k=k, v=v, beta=beta, sinks=sinks, seen=seen)
    assert_forward(check_expanded, forward(check_expanded))


def test_bounds_and_padding_may_be_expanded_or_spread():
    x = inputs_of(Case(sees="documents_with_padding", batch=2))
    rule = x.seen.visibility
    wide = rule._replace(
        start=torch.stack([rule.start, rule.start * 0 - 1], dim=-1)[..., 0].expand(2, -1),
        stop=torch.stack([rule.stop, rule.stop * 0], dim=-1)[..., 0].expand(2, -1),
        padding=torch.stack([rule.padding, ~rule.padding], dim=-1)[..., 0],
    )
    other = replace(x, seen=x.seen._replace(visibility=wide))
    expected = rows_of(forward(x))
    assert all(torch.equal(value, expected[name]) for name, value in rows_of(forward(other)).items())


# NaN and infinity.

BROKEN_KEYS = (20, 64, 100)


def spoil(x: torch.Tensor, value: float) -> torch.Tensor:
    """A copy with non-finite elements in a few keys, in one place or in all."""
    spoilt = guarded(x)
    spoilt[:, :, BROKEN_KEYS[0]] = value
    for place, key in enumerate(BROKEN_KEYS[1:]):
        spoilt[:, :, key, place] = value
    return spoilt


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy warning for the maximum of NaN
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["k", "v", "kv"])
@pytest.mark.parametrize(
    "sees", ["causal", "window_5_and_9", "any_intervals", "left_padding", "mask_per_head", "bias_that_hides"]
)
def test_what_is_no_number_spoils_the_rows_that_see_it_and_no_other(sees, where, value):
    dtype = FP16 if len(where) == 2 else FP32
    x = inputs_of(Case(sees=sees, queries=129, keys=129, heads=1, dtype=dtype, softcap=4.0 if where == "v" else None))
    other = replace(x, **{name: spoil(getattr(x, name), value) for name in where})
    with np.errstate(invalid="ignore", over="ignore"):  # this test provokes ∞ − ∞
        spoilt = forward(other)
    touched = x.seen.table[..., BROKEN_KEYS].any(-1).expand(1, 1, 129)
    assert touched.any()
    assert not touched.all()
    for name, clean in rows_of(forward(x)).items():
        assert torch.equal(getattr(spoilt, name)[~touched], clean[~touched]), f"{name} of rows that do not see it"
    if math.isnan(value) or where == "v":
        assert not spoilt.out[touched].isfinite().all(-1).any(), "a row that sees it does not show it"


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("sees", ["everything", "causal", "mask_per_head"])
def test_a_query_that_is_no_number_spoils_its_own_row(sees):
    x = inputs_of(Case(sees=sees))
    q = guarded(x.q)
    q[0, 1, 30, 3] = math.nan
    with np.errstate(invalid="ignore"):
        spoilt = forward(replace(x, q=q))
    own = torch.zeros(1, 2, 65, dtype=torch.bool)
    own[0, 1, 30] = True
    for name, clean in rows_of(forward(x)).items():
        assert torch.equal(getattr(spoilt, name)[~own], clean[~own]), name
    assert spoilt.out[own].isnan().all()
    assert spoilt.lse[own].isnan().all()


# Behaviour that differs from the plain interpreter.


@cases(
    *(
        Case(sees=sees, queries=130, keys=130, beta="each", dtype=dtype, heads=1)
        for sees, dtype in product(
            ("window_of_20", "documents", "any_intervals", "mask_per_head", "left_padding", "bias_that_hides"),
            (FP32, FP16),
        )
    ),
    Case(sees="window_of_20", queries=130, keys=130, beta="any_sign", softcap=2.0, sinks=True),
)
def test_products_may_be_fused_into_sums(case):
    x = inputs_of(case)
    with fused():
        result = forward(x)
    assert_forward(x, result)


@cases(
    Case(sees="window_of_3", queries=129, keys=129),
    Case(sees="any_intervals", softcap=2.0, sinks=True, dropout_p=0.2),
    Case(sees="nothing", dtype=FP16),
    Case(sees="bias_that_hides", beta="any_sign", dtype=BF16),
    Case(sees="causal", queries=129, keys=65, sinks=True),
)
def test_no_operation_is_invalid(case):
    x = inputs_of(case)
    with np.errstate(invalid="raise", divide="raise", over="raise"):
        forward(x)
