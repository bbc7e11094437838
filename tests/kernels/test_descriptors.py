"""Keys and values through TMA descriptors, as on sm_90 and sm_100, in Triton's interpreter against naive attention.

Boxes extend beyond the last key and the last dimension, where memory holds NaN or another head.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from corrected_interpreter import corrected
from flash_cases import (
    DTYPES,
    TILE,
    Case,
    assert_backward,
    assert_forward,
    backward,
    forward,
    gradients,
    guarded,
    inputs_of,
    rows_of,
)

from attnscale_kernels.flash.launch import backward_launches, forward_launches
from attnscale_kernels.launch import SM_80, SM_90, SM_100, Resources, alignment, assuming
from attnscale_kernels.tile_rules import parts_of_sums

FP32, FP16, BF16 = DTYPES
DEVICES = pytest.mark.parametrize("resources", [SM_90, SM_100], ids=["sm_90", "sm_100"])


@pytest.fixture(autouse=True, scope="module")
def _interpreter():
    with corrected():
        yield


def boxed(x, resources: Resources) -> bool:
    """Whether a call on such a device uses descriptors."""
    with assuming(resources):
        (launch,), _ = forward_launches(x.q, x.k, x.v, x.beta, x.seen.visibility, **x.options)
    return launch.arguments["k_box"] is not None


@DEVICES
@pytest.mark.parametrize(
    "case",
    [
        Case(sees="causal", queries=70, keys=129, dim=24, batch=2, dtype=FP16),
        Case(sees="window_of_20", queries=129, keys=129, dim=16, value_dim=40, dtype=BF16, beta="any_sign"),
        Case(sees="any_intervals", queries=65, keys=63, dim=40, value_dim=16, dtype=FP16, sinks=True),
        Case(sees="left_padding", queries=70, keys=70, batch=2, heads=4, kv_heads=2, dtype=BF16),
        Case(sees="bias_that_hides", queries=33, keys=70, dtype=FP16, softcap=3.0),
        Case(sees="everything", queries=2, keys=1, dtype=FP16, dropout_p=0.3),
    ],
    ids=str,
)
def test_descriptors_give_what_pointers_give(case, resources):
    x = inputs_of(case)
    assert boxed(x, resources)
    with assuming(resources):
        assert_forward(x, forward(x, TILE))


@DEVICES
def test_the_tile_that_is_chosen_will_do(resources):
    x = inputs_of(Case(sees="causal", queries=130, keys=200, dim=24, heads=1, dtype=FP16))
    with assuming(resources):
        assert_forward(x, forward(x, None))


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy warning for the maximum of NaN
@DEVICES
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_spoils_the_rows_that_see_it_and_no_other(resources, value):
    x = inputs_of(Case(sees="window_of_20", queries=129, keys=129, heads=1, dtype=FP16))
    broken = replace(x, k=guarded(x.k), v=guarded(x.v))
    broken.k[:, :, 20, 3] = value
    broken.v[:, :, 64, 5] = value
    with assuming(resources), np.errstate(invalid="ignore", over="ignore"):
        spoilt, clean = forward(broken, TILE), forward(x, TILE)
    sees_key, sees_value = x.seen.table[..., 20].expand(1, 1, 129), x.seen.table[..., 64].expand(1, 1, 129)
    free = ~(sees_key | sees_value)
    for name, expected in rows_of(clean).items():
        assert torch.equal(getattr(spoilt, name)[free], expected[free]), name
    assert not spoilt.out[sees_value].isfinite().all(-1).any()


def boxed_backward(x, resources: Resources) -> bool:
    """Whether dQ uses descriptors on such a device."""
    options = {name: x.options[name] for name in ("scale", "softcap", "dropout_p", "seed")}
    lse = x.beta.expand(x.q.shape[:3])
    with assuming(resources):
        launches, _ = backward_launches(
            x.gradient, x.q, x.k, x.v, x.beta, x.seen.visibility, x.gradient, lse, **options
        )
    return launches[-2].arguments["k_box"] is not None


@pytest.mark.parametrize(
    "case",
    [
        Case(sees="causal", queries=70, keys=129, dim=72, heads=1, dtype=FP16),
        Case(sees="window_of_20", queries=129, keys=129, dim=16, value_dim=80, heads=1, dtype=BF16, beta="any_sign"),
        Case(sees="any_intervals", queries=65, keys=63, dim=88, value_dim=24, heads=1, dtype=FP16, sinks=True),
        Case(sees="left_padding", queries=70, keys=70, dim=72, batch=2, heads=2, kv_heads=1, dtype=BF16),
        Case(sees="everything", queries=2, keys=1, dim=128, heads=1, dtype=FP16),
    ],
    ids=str,
)
def test_gradients_of_queries_by_descriptors_are_as_good(case):
    x = inputs_of(case)
    assert boxed_backward(x, SM_100)
    with assuming(SM_100):
        assert_backward(x)


def test_gradients_take_descriptors_where_they_pay_and_the_layout_allows_it():
    def takes(resources: Resources = SM_100, **changes) -> bool:
        return boxed_backward(
            inputs_of(Case(**{"queries": 5, "keys": 5, "dim": 72, "dtype": FP16, **changes})), resources
        )

    assert takes()
    assert not takes(SM_90)
    assert not takes(dim=64)
    assert not takes(dim=136)
    assert not takes(dtype=FP32)
    assert not takes(dim=73), "rows of 146 bytes"
    assert not takes(softcap=2.0)
    assert not takes(dropout_p=0.25)
    assert not takes(sees="mask_per_head")


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_is_no_number_spoils_only_gradients_that_depend_on_it(where):
    x = inputs_of(Case(sees="window_of_20", queries=129, keys=129, dim=72, heads=1, dtype=FP16))
    broken = replace(x, **{where: guarded(getattr(x, where))})
    getattr(broken, where)[:, :, 64, 5] = math.nan
    with assuming(SM_100), np.errstate(invalid="ignore", over="ignore"):
        spoilt = gradients(backward(broken, forward(broken)))
        clean = gradients(backward(x, forward(x)))
    sees = x.seen.table[0, 0, :, 64]
    for name in ("dq", "dbeta"):
        assert torch.equal(spoilt[name][0, 0, ~sees], clean[name][0, 0, ~sees]), name
    assert not spoilt["dq"][0, 0, sees].isfinite().all(-1).any()


def heads_last(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, D] in memory, as after a projection."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def test_descriptors_take_any_layout_in_steps_of_16_bytes_and_pointers_the_rest():
    x = inputs_of(Case(queries=65, keys=65, kv_heads=2, dim=24, dtype=FP16))
    other = replace(x, k=heads_last(x.k), v=heads_last(x.v))
    odd = replace(x, k=torch.nn.functional.pad(x.k, (0, 3))[..., :24])
    shared = replace(x, k=x.k[:, :1].expand(-1, 2, -1, -1))
    assert boxed(other, SM_90)
    assert not boxed(odd, SM_90), "rows of 27 elements"
    assert not boxed(shared, SM_90), "a stride of 0"
    assert not boxed(x, SM_80)
    assert not boxed(inputs_of(Case(dtype=FP32)), SM_90)
    with assuming(SM_90):
        expected = rows_of(forward(x, TILE))
        for same in (other, odd):
            assert all(torch.equal(value, expected[name]) for name, value in rows_of(forward(same, TILE)).items())


def test_rows_that_begin_every_16_bytes_are_said_to():
    half, single = torch.empty(2, 3, 5, 40, dtype=FP16), torch.empty(2, 3, 5, 20)
    assert alignment(half) == 8
    assert alignment(single) == 4
    assert alignment(half[..., :32]) == 8
    assert alignment(half, torch.empty(2, 3, 5, 41, dtype=FP16)) == 1
    assert alignment(torch.empty(2, 3, 4, 64, dtype=FP16)) == 1, "triton sees it"


def test_sums_are_kept_in_as_many_parts_as_the_device_adds_without_exchange():
    assert [parts_of_sums(False, 2, resources, entropy=True, masked=False) for resources in (SM_90, SM_100)] == [8, 2]
