"""Backward pass of flash attention with every feature, in Triton's interpreter against naive attention in fp64.

It starts from an exact fp64 output and lse, so that its own error is tested; a few tests run both passes. Memory is
poisoned and numpy warnings are errors, as in the forward tests.
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
    assert_as_good_as_torch,
    assert_backward,
    backward,
    exact_forward,
    forward,
    gradients,
    guarded,
    inputs_of,
    written_out,
)

from attnscale_kernels.flash.launch import flash_backward
from attnscale_kernels.launch import SM_90, Tile, assuming

FP32, FP16, BF16 = DTYPES
LENGTHS = (1, 2, 63, 64, 65, 129, 257)
DIMS = (16, 24, 40, 64, 80, 96, 128, 192, 256)
SHAPES = ((65, 65), (63, 129), (129, 64), (2, 65), (70, 63), (64, 130))


@pytest.fixture(autouse=True, scope="module")
def _interpreter():
    with corrected():
        yield


def cases(*several: Case):
    return pytest.mark.parametrize("case", several, ids=str)


def run(x) -> dict[str, torch.Tensor]:
    """All gradients, from an exact forward pass."""
    return gradients(backward(x, exact_forward(x, written_out(x))))


# Visibility.


@cases(*(Case(sees=rule, queries=70, keys=129, beta="each") for rule in RULES))
def test_gradients_go_through_what_each_row_sees(case):
    assert_backward(inputs_of(case))


@cases(
    *(
        Case(
            sees=rule,
            dtype=dtype,
            queries=SHAPES[i % 6][0],
            keys=SHAPES[i % 6][1],
            heads=(1, 2)[i % 2],
            dim=DIMS[i % 5],
            value_dim=DIMS[(i + i // 5) % 4],
        )
        for i, (dtype, rule) in enumerate(product((FP16, BF16), RULES))
    )
)
def test_each_rule_holds_in_half_precision(case):
    assert_backward(inputs_of(case))


@cases(
    *(Case(sees="causal", queries=n, keys=n, heads=1) for n in LENGTHS),
    *(Case(sees="everything", queries=1, keys=n, heads=1, dtype=FP16) for n in LENGTHS),
    *(Case(sees="three_ahead", queries=n, keys=1, heads=1) for n in LENGTHS[:6]),
    *(Case(sees="window_of_3", queries=n, keys=65, heads=1, dtype=FP16) for n in LENGTHS[:6]),
    *(Case(sees="any_intervals", queries=65, keys=n, heads=1) for n in LENGTHS[:6]),
    *(Case(sees="left_padding", queries=n, keys=n, heads=1, dtype=BF16) for n in LENGTHS[:6]),
    Case(sees="window_80_and_70", queries=257, keys=257, heads=1),
    Case(sees="whole_documents", queries=129, keys=257, heads=1),
)
def test_any_length_will_do(case):
    assert_backward(inputs_of(case))


@pytest.mark.parametrize("sees", ["causal", "everything", "mask_per_head"])
@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_do_is_no_error(queries, keys, sees):
    x = inputs_of(Case(sees=sees, queries=queries, keys=keys))
    out, lse = torch.zeros_like(x.q), torch.full(x.q.shape[:3], -math.inf)
    result = flash_backward(x.gradient, x.q, x.k, x.v, x.beta, x.seen.visibility, out, lse, **x.options, dbeta=True)
    assert (result.query.shape, result.key.shape, result.value.shape) == (x.q.shape, x.k.shape, x.v.shape)
    assert not any(value.count_nonzero() for value in gradients(result).values())


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
def test_rows_that_see_nothing_have_no_gradient(case):
    x = inputs_of(case)
    blind = ~x.seen.table.any(-1).expand(x.q.shape[:3])
    assert blind.any(), "the case has no such row"
    result = run(x)
    for name in ("dq", "dbeta"):
        assert (result[name][blind] == 0).all(), name
    unseen = ~x.seen.table.expand(*x.q.shape[:3], case.keys).any(1).any(1)[:, None].expand(x.k.shape[:3])
    for name in ("dk", "dv"):
        assert (result[name][unseen] == 0).all(), name
    assert_backward(x)


# Shapes.


@cases(
    *(Case(dim=dim, dtype=dtype, queries=33, keys=70) for dim, dtype in product(DIMS, (FP32, FP16))),
    *(
        Case(dim=dim, value_dim=value_dim, sees=sees, dtype=dtype, heads=1)
        for (dim, value_dim, sees), dtype in product(
            ((16, 40, "window_of_20"), (64, 24, "everything"), (40, 64, "mask_per_head"), (192, 128, "causal")),
            (FP32, BF16),
        )
    ),
)
def test_any_head_dimension_will_do(case):
    assert_backward(inputs_of(case))


@cases(
    *(
        Case(batch=batch, heads=heads, kv_heads=kv_heads, sees=sees, beta=beta, keys=70)
        for (batch, heads, kv_heads), (sees, beta) in product(
            ((1, 4, 4), (1, 4, 2), (2, 4, 1), (3, 1, 1), (2, 2, 2)),
            (("causal", "each"), ("mask_per_batch_and_head", "per_head"), ("left_padding", "per_batch")),
        )
    ),
    Case(batch=2, heads=4, kv_heads=2, dropout_p=0.3, sinks=True, sees="any_intervals"),
    Case(batch=2, heads=4, kv_heads=2, sees="bias_in_half", dtype=FP16),
    Case(batch=2, sees="a_share_for_each_sequence", keys=129),
)
def test_a_head_of_keys_gathers_from_its_query_heads(case):
    assert_backward(inputs_of(case))


# Temperature, softcap, sinks.


@cases(
    *(Case(beta=beta, dtype=dtype, queries=65) for beta, dtype in product(BETAS, (FP32, FP16))),
    *(Case(beta=beta, softcap=1.5, sees="window_of_20", sinks=True) for beta in BETAS),
    *(Case(beta=beta, sees="bias_that_hides", keys=70) for beta in BETAS),
)
def test_every_row_has_its_temperature(case):
    assert_backward(inputs_of(case))


@cases(
    *(
        Case(softcap=softcap, sees=sees, dtype=dtype, dim=24)
        for (softcap, sees), dtype in product(
            ((0.5, "everything"), (2.0, "causal"), (30.0, "bias_per_head"), (5.0, "documents_with_mask")), DTYPES
        )
    ),
    *(
        Case(sinks=True, sees=sees, dtype=dtype, heads=4, kv_heads=2, softcap=softcap)
        for (sees, softcap), dtype in product((("everything", None), ("any_intervals", 3.0)), DTYPES)
    ),
)
def test_softcap_and_sinks_have_gradients(case):
    assert_backward(inputs_of(case))


def test_a_sink_of_minus_infinity_has_no_gradient():
    x = inputs_of(Case(sinks=True, sees="any_intervals", keys=7))
    without = replace(x, sinks=None)
    expected, got = run(without), run(replace(x, sinks=torch.full((2,), -math.inf)))
    assert (got.pop("dsinks") == 0).all()
    assert all(torch.equal(value, expected[name]) for name, value in got.items())


@cases(
    Case(sharpness=30.0, beta="sharp"),
    Case(sharpness=30.0, beta="sharp", dtype=FP16, sees="window_of_20", queries=129, keys=129),
    Case(sharpness=30.0, beta="negative", sees="bias_that_hides", sinks=True),
    Case(sharpness=1e-3, beta="each", sees="mask_per_head"),
)
def test_logits_may_be_huge_or_tiny(case):
    with np.errstate(over="ignore", invalid="ignore"):  # 2^x of hidden scores or of keys past the end
        assert_backward(inputs_of(case))


# Both passes.


@cases(
    *(Case(sees=sees, dtype=dtype, beta="each") for sees, dtype in product(("causal", "documents"), DTYPES)),
    *(Case(sees=sees, dtype=FP16, sinks=True, softcap=3.0) for sees in ("mask_per_head", "bias_that_hides")),
    Case(sees="any_intervals", beta="any_sign"),
    Case(sees="everything", beta="zero"),
)
def test_the_backward_follows_on_the_forward(case):
    x = inputs_of(case)
    assert_as_good_as_torch(x, gradients(backward(x, forward(x))), written_out(x))


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
def test_dropout_replays(case):
    x = inputs_of(case)
    assert_as_good_as_torch(x, gradients(backward(x, forward(x))), written_out(x))


def test_devices_that_draw_fours_at_once_drop_the_same():
    x = inputs_of(Case(dropout_p=0.25, sees="documents"))
    plain = run(x)
    with assuming(SM_90):
        fours = run(x)
    for name, gradient in plain.items():
        assert torch.equal(gradient, fours[name]), name


# Tiles and memory.

TILES = (Tile(16, 16, 4, 1), Tile(32, 64, 4, 1), Tile(64, 32, 4, 2), Tile(128, 128, 8, 2), None)


@cases(
    Case(sees="window_of_20", queries=70, keys=90, heads=1),
    Case(sees="any_intervals", queries=70, keys=90, heads=1, dropout_p=0.2),
    Case(sees="bias_that_hides", queries=70, keys=90, heads=1, softcap=3.0, sinks=True),
    Case(sees="documents", queries=90, keys=90, heads=1, beta="any_sign"),
    Case(sees="causal_from_the_start", queries=70, keys=90, heads=1, dtype=FP16),
)
def test_the_tile_does_not_matter(case):
    x = inputs_of(case)
    for query_tile, key_tile in zip(TILES, TILES[1:] + TILES[:1], strict=True):
        assert_backward(x, query_tile, key_tile)


@cases(
    *(Case(sees=sees, dtype=dtype, batch=2) for sees, dtype in product(("causal", "documents"), (FP32, FP16))),
    Case(sees="mask_per_head", dropout_p=0.3, dtype=BF16),
    Case(sees="bias_per_head", softcap=2.0, sinks=True),
)
def test_the_same_input_gives_the_same_bits(case):
    x = inputs_of(case)
    first, second = run(x), run(x)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_what_is_not_asked_for_is_not_there_and_changes_nothing():
    x = inputs_of(Case(sees="window_of_20", softcap=2.0))
    true = exact_forward(x, written_out(x))
    arguments = (x.gradient, x.q, x.k, x.v, x.beta, x.seen.visibility, true.out, true.lse)
    full = run(x)
    for asked in ({}, {"dbeta": True}):
        result = gradients(flash_backward(*arguments, **x.options, query_tile=TILE, key_tile=TILE, **asked))
        assert result.keys() == {"dq", "dk", "dv", *asked}
        assert all(torch.equal(value, full[name]) for name, value in result.items())


@cases(
    Case(batch=2, heads=4, kv_heads=2, queries=70, keys=70, beta="each"),
    Case(sees="any_intervals", batch=3, heads=2, kv_heads=1, queries=65, keys=65, dtype=FP16),
)
def test_each_sequence_is_computed_as_if_it_were_alone(case):
    x = inputs_of(case)
    together = run(x)
    for b in range(case.batch):
        one = slice(b, b + 1)
        rule = x.seen.visibility
        bounds = {name: bound[one] for name in ("start", "stop") if (bound := getattr(rule, name)) is not None}
        table = x.seen.table if x.seen.table.shape[0] == 1 else x.seen.table[one]
        beta = x.beta if x.beta.shape[0] == 1 else x.beta[one]
        seen = x.seen._replace(visibility=rule._replace(**bounds), table=table)
        alone = replace(x, q=x.q[one], k=x.k[one], v=x.v[one], beta=beta, gradient=x.gradient[one], seen=seen)
        for name, value in run(alone).items():
            assert torch.equal(value, together[name][one]), f"{name} of sequence {b}"


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
@pytest.mark.parametrize("which", ["q", "k", "v", "gradient", "out", "lse", "mask"])
def test_any_layout_in_memory_will_do(which, layout):
    x = inputs_of(Case(sees="bias_that_hides", batch=2, heads=2, kv_heads=2, dim=24, sinks=True, queries=33, keys=40))
    result = exact_forward(x, written_out(x))
    expected = gradients(backward(x, result))
    if which == "out":
        got = backward(x, result._replace(out=layout(result.out)))
    elif which == "lse":
        got = backward(x, result._replace(lse=layout(result.lse[..., None])[..., 0]))
    elif which == "mask":
        visibility = x.seen.visibility._replace(mask=layout(x.seen.visibility.mask))
        got = backward(replace(x, seen=x.seen._replace(visibility=visibility)), result)
    else:
        got = backward(replace(x, **{which: layout(getattr(x, which))}), result)
    for name, value in gradients(got).items():
        assert torch.equal(value, expected[name]), name


def test_a_dimension_may_be_expanded():
    x = inputs_of(Case(sees="mask_per_batch_and_head", batch=2, heads=4, kv_heads=2, sinks=True, beta="one"))
    mask = x.seen.table[:, :1].expand(-1, 4, -1, -1)
    assert_backward(
        replace(
            x,
            q=x.q[:1].expand(2, -1, -1, -1),
            k=x.k[:, :1].expand(-1, 2, -1, -1),
            v=x.v[:1].expand(2, -1, -1, -1),
            gradient=torch.ones(()).expand_as(x.gradient),  # rounding of a sum
            beta=torch.tensor(1.7).expand(2, 4, 65),
            sinks=torch.tensor([0.5]).expand(4),
            seen=x.seen._replace(table=mask, visibility=x.seen.visibility._replace(mask=mask)),
        )
    )


def test_a_gradient_in_another_dtype_is_taken():
    x = inputs_of(Case(dtype=FP16))
    expected = run(x)
    assert all(
        torch.equal(value, expected[name]) for name, value in run(replace(x, gradient=x.gradient.float())).items()
    )


# NaN and infinity.

BROKEN_KEYS = (20, 64, 100)


@pytest.mark.parametrize(
    ("sees", "where", "value"),
    [
        (sees, ("k", "v", "kv")[i % 3], value)
        for i, (sees, value) in enumerate(
            product(
                ("causal", "window_5_and_9", "any_intervals", "mask_per_head", "bias_that_hides"),
                (math.nan, math.inf, -math.inf, math.nan),
            )
        )
    ],
)
def test_what_no_row_sees_may_be_anything(sees, where, value):
    """Keys hidden by padding get gradient 0, and the gradients of the others do not change."""
    x = inputs_of(Case(sees=sees, queries=70, keys=129, heads=1, dtype=FP16 if where == "v" else FP32))
    hidden = torch.zeros(1, 129, dtype=torch.bool)
    hidden[:, BROKEN_KEYS] = True
    table = x.seen.table & ~hidden[:, None, None]
    x = replace(x, seen=x.seen._replace(table=table, visibility=x.seen.visibility._replace(padding=hidden)))
    spoilt = {name: guarded(getattr(x, name)) for name in where}
    for tensor in spoilt.values():
        tensor[:, :, BROKEN_KEYS[0]] = value
        tensor[:, :, BROKEN_KEYS[1:], 3] = value
    clean = exact_forward(x, written_out(x))
    expected = gradients(backward(x, clean))
    with np.errstate(invalid="ignore"):  # hidden scores are computed and discarded
        got = gradients(backward(replace(x, **spoilt), clean))
    for name, result in got.items():
        assert torch.equal(result, expected[name]), name
    assert (got["dk"][:, :, BROKEN_KEYS] == 0).all()
    assert (got["dv"][:, :, BROKEN_KEYS] == 0).all()


@pytest.mark.parametrize("sees", ["causal_from_the_start", "bias_that_hides"])
def test_nor_do_rows_that_do_not_exist_see_it(sees):
    x = inputs_of(Case(sees=sees, queries=33, keys=65, heads=1))
    if sees == "bias_that_hides":  # hides key 40 from all rows, as the causal rule does
        x.seen.visibility.mask[..., 40] = -math.inf
        x = replace(x, seen=x.seen._replace(table=x.seen.table & (torch.arange(65) != 40)))
    clean = forward(x)
    expected = gradients(backward(x, clean))
    k, v = guarded(x.k), guarded(x.v)
    k[:, :, 40], v[:, :, 40] = math.nan, math.nan
    with np.errstate(invalid="ignore"):
        got = gradients(backward(replace(x, k=k, v=v), clean))
    for name, result in got.items():
        assert torch.equal(result, expected[name]), name


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy warning for the maximum of NaN
@pytest.mark.parametrize(
    ("sees", "where"),
    [
        *product(("causal", "window_5_and_9"), ("k", "v", "kv")),
        ("documents", "k"),
        ("mask_per_head", "v"),
        ("bias_that_hides", "kv"),
    ],
)
def test_what_is_no_number_spoils_what_depends_on_it_and_nothing_else(sees, where):
    x = inputs_of(Case(sees=sees, queries=129, keys=129, heads=1, dim=24))
    broken = replace(x, **{name: guarded(getattr(x, name)) for name in where})
    for name in where:
        getattr(broken, name)[:, :, 100, 3] = math.nan
    with np.errstate(invalid="ignore"):
        got = gradients(backward(broken, forward(broken)))
    expected = gradients(backward(x, forward(x)))
    rows = x.seen.table[0, 0, :, 100]  # rows that see it
    keys = x.seen.table[0, 0, rows].any(0)  # also seen by such rows
    assert rows.any()
    assert not rows.all()
    for name, free in {"dq": ~rows, "dbeta": ~rows, "dk": ~keys, "dv": ~keys}.items():
        assert torch.equal(got[name][0, 0, free], expected[name][0, 0, free]), name
        assert got[name][0, 0, free].isfinite().all(), name
    assert not got["dq"][0, 0, rows].isfinite().all(-1).any(), "a row that sees it does not show it"


# Behaviour that differs from the plain interpreter.


@cases(
    *(
        Case(sees=sees, queries=130, keys=130, beta="each", dtype=dtype, heads=1)
        for sees, dtype in product(("window_of_20", "any_intervals", "mask_per_head", "bias_that_hides"), (FP32, FP16))
    ),
    Case(sees="nothing", sinks=True),
)
def test_products_may_be_fused_into_sums(case):
    with fused():
        assert_backward(inputs_of(case))


@cases(
    Case(sees="window_of_3", queries=129, keys=129),
    Case(sees="any_intervals", softcap=2.0, sinks=True, dropout_p=0.2),
    Case(sees="nothing", dtype=FP16),
    Case(sees="bias_that_hides", beta="any_sign", dtype=BF16),
    Case(sees="causal", queries=129, keys=65, sinks=True),
)
def test_no_operation_is_invalid(case):
    with np.errstate(invalid="raise", divide="raise"):
        run(inputs_of(case))
