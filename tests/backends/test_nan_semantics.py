"""Contract 12: NaN in the query, a visible key or β comes out as NaN, on every backend, and in no other row."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from corrected_interpreter import corrected
from oracle import tensors
from torch import Tensor

from attnscale import Monitor, MultiheadAttention, build_policy, scaled_dot_product_attention
from attnscale_kernels import why_unavailable

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on NaN, in Triton's interpreter

BACKENDS = ["sdpa", "blockwise", "reference"]
if why_unavailable(torch.device("cpu")) is None:  # triton exists on Linux only
    BACKENDS.append("triton")
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)

ROW, LENGTH = 3, 8


def case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return tensors((2, 4, LENGTH, 16), (2, 2, LENGTH, 16), dtype)


def broken_rows(*arguments: Tensor, **options: object) -> Tensor:
    """Which rows [B, H, Tq] are NaN; a row is so as a whole or not at all."""
    if arguments[0].dtype == torch.float64 and options.get("backend") == "triton":
        options["backend"] = "auto"  # the kernels have no fp64
    with corrected():
        out = scaled_dot_product_attention(*arguments, enable_gqa=True, **options)
    assert (out.isnan().any(-1) == out.isnan().all(-1)).all()
    return out.isnan().all(-1)


@every_backend
@every_dtype
@pytest.mark.parametrize("policy", ["constant", "log", {"name": "yarn", "factor": 4}], ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_query_with_nan_gives_nan_in_its_row_alone(backend, dtype, policy, is_causal):
    q, k, v = case(dtype)
    q[0, 1, ROW, 5] = math.nan
    expected = torch.zeros(2, 4, LENGTH, dtype=torch.bool)
    expected[0, 1, ROW] = True
    assert torch.equal(broken_rows(q, k, v, policy=policy, is_causal=is_causal, backend=backend), expected)


@every_backend
@every_dtype
@pytest.mark.parametrize("policy", ["constant", "log", "gap_adaptive", "entropy_adaptive"])
@pytest.mark.parametrize("first", [0, ROW])
def test_a_key_with_nan_gives_nan_in_the_rows_that_see_it(backend, dtype, policy, first):
    q, k, v = case(dtype)
    k[0, 1, first:] = math.nan  # the key of heads 2 and 3; with `first` 0 they see no other
    expected = torch.zeros(2, 4, LENGTH, dtype=torch.bool)
    expected[0, 2:, first:] = True
    assert torch.equal(broken_rows(q, k, v, policy=policy, is_causal=True, backend=backend), expected)


@every_backend
@every_dtype
@pytest.mark.parametrize("rows", [LENGTH, 1])
def test_a_temperature_of_nan_gives_nan_in_its_head(backend, dtype, rows):
    q, k, v = case(dtype)
    policy = build_policy("ssmax", num_heads=4)
    with torch.no_grad():
        policy.s[2] = math.nan
    expected = torch.zeros(2, 4, rows, dtype=torch.bool)
    expected[:, 2] = True
    found = broken_rows(
        q[:, :, -rows:], k, v, policy=policy, is_causal=True, cache_offset=LENGTH - rows, backend=backend
    )
    assert torch.equal(found, expected)


def masks() -> dict[str, Tensor]:
    """Row 0 sees nothing, row 1 only the broken key 2, row 2 others before it, row 3 only others."""
    seen = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    seen[1, 2] = seen[2, 1:4] = seen[3, 4:] = seen[4:, 2:] = True
    return {"bool": seen, "float": torch.zeros(LENGTH, LENGTH).masked_fill(~seen, -math.inf)}


@every_backend
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("policy", ["constant", "log"])
def test_masks_decide_which_rows_see_it(backend, kind, policy):
    q, k, v = case()
    k[:, :, 2] = math.nan
    q[:, :, 0] = math.nan
    found = broken_rows(q, k, v, attn_mask=masks()[kind], policy=policy, backend=backend)
    assert found[:, :, [1, 2, 4, 5, 6, 7]].all()
    if backend != "sdpa":  # torch adds a mask of −∞ to the NaN of a hidden key, which stays NaN
        assert not found[:, :, [0, 3]].any()


@pytest.mark.parametrize("backend", ["sdpa", "blockwise", "reference"])
@every_dtype
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_row_that_sees_nothing_is_zero_whatever_its_query_holds(backend, dtype, kind, compiled):
    q, k, v = (x.requires_grad_() for x in case(dtype))
    with torch.no_grad():
        q[:, :, 0] = math.nan
    torch._dynamo.reset()
    attend = scaled_dot_product_attention
    attend = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    mask = masks()[kind].to(torch.bool if kind == "bool" else dtype)
    out = attend(q, k, v, mask, policy="log", enable_gqa=True, backend=backend)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert (out[:, :, 0] == 0).all()
    assert (gradients[0][:, :, 0] == 0).all()
    assert all(torch.isfinite(x).all() for x in (out, *gradients))


@pytest.mark.parametrize("policy", ["constant", "log"])
@pytest.mark.parametrize("mask", [None, "bool"])
def test_a_compiled_graph_keeps_nan_too(policy, mask):
    q, k, v = case()
    q[0, 1, ROW] = math.nan
    k[1, 1] = math.nan
    options = {"policy": policy, "enable_gqa": True, "is_causal": mask is None}
    options["attn_mask"] = None if mask is None else torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    graph = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    expected = scaled_dot_product_attention(q, k, v, backend="reference", **options)
    torch.testing.assert_close(graph(q, k, v, **options), expected, equal_nan=True)
    assert expected.isnan().any()
    assert not expected.isnan().all()


def test_a_value_projection_of_zero_gives_zeros():
    q, k, v = case()
    out = scaled_dot_product_attention(q, k, v * 0, is_causal=True, enable_gqa=True, policy="log")
    assert (out == 0).all()


def nan_in_the_policy(attention: MultiheadAttention) -> None:
    attention.policy.s[1] = math.nan


def nan_in_a_key(attention: MultiheadAttention) -> None:
    attention.in_proj_weight[16 + 12] = math.nan


@pytest.mark.parametrize(
    ("policy", "damage"),
    [({"name": "ssmax", "num_heads": 2}, nan_in_the_policy), ({"name": "gap_adaptive"}, nan_in_a_key)],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_the_monitor_reports_it(policy: dict[str, object], damage: Callable[[MultiheadAttention], None]):
    attention = MultiheadAttention(16, 2, batch_first=True, policy=build_policy(policy))
    with torch.no_grad():
        damage(attention)
    alerts = []
    with Monitor(torch.nn.Sequential(attention), every=1, on_alert=alerts.append) as monitor:
        x = tensors((2, 12, 16), (1,), torch.float32)[0]
        out, _ = attention(x, x, x, need_weights=False)
        out.sum().backward()
        monitor.step(0)
    assert out.isnan().any()
    assert [(event.cause, [heads for _, heads in event.places]) for event in alerts] == [("nan", [(1,)])]
