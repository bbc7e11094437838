"""Contract 3 (attnscale/README.md): β is applied in fp32, and errors stay within twice torch's own."""

import math
from functools import partial

import pytest
import torch
from oracle import assert_within_budget, differentiate, exact, tensors, torch_error, visibility
from torch.nn import functional as F

from attnscale import build_policy, scaled_dot_product_attention

POLICIES = [
    {"name": "log"},
    {"name": "log_squared", "gamma": 0.1},
    {"name": "log", "reference_length": 32},
    {"name": "constant", "beta": 3.0},
    {"name": "yarn", "factor": 8},
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["name"])
@pytest.mark.parametrize("length", [2, 63, 129])
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_errors_stay_within_the_budget(dtype, policy, length, backend):
    policy = build_policy(policy)
    q, k, v = tensors((2, 4, length, 32), (2, 2, length, 32), dtype)
    kwargs = {"is_causal": True, "enable_gqa": True, "policy": policy}
    ours = differentiate(lambda *qkv: scaled_dot_product_attention(*qkv, backend=backend, **kwargs), q, k, v)
    beta = policy(torch.arange(1, length + 1))
    own = torch_error(q, k, v, beta, visibility(length, length, causal=True), gqa=True)
    assert_within_budget(ours, exact(q, k, v, **kwargs), own, times=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_bias_in_any_dtype_stays_within_the_budget(dtype):
    q, k, v = tensors((2, 4, 33, 32), (2, 4, 33, 32), dtype)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
    bias = (-slopes * (torch.arange(33)[:, None] - torch.arange(33)).abs()).to(dtype)
    kwargs = {"attn_mask": bias, "policy": "log"}
    ours = differentiate(lambda *qkv: scaled_dot_product_attention(*qkv, **kwargs), q, k, v)
    own = torch_error(q, k, v, math.log(33), None)
    assert_within_budget(ours, exact(q, k, v, **kwargs), own, times=2)


@pytest.mark.parametrize("name", ["log", "log_squared", "rem", "sphere"])
def test_fp16_near_the_overflow_is_as_good_as_fp32(name):
    arguments = {"head_dim": 64} if name == "sphere" else {}
    policy = build_policy(name, **arguments)
    q, k, v = tensors((1, 2, 64, 64), (1, 2, 64, 64), torch.float16)
    q = (q * 12_000).clamp(-65_000, 65_000)
    k = k / 16_000  # scores of order one
    beta = policy(torch.arange(1, 65))
    assert (q.float() * beta[:, None]).abs().max() > 65_504  # β·q itself does overflow
    kwargs = {"is_causal": True, "policy": policy}
    size = 2.0**-10  # the gradient of so small a key is as large as the query: keep it within fp16
    attend = partial(scaled_dot_product_attention, **kwargs)
    half = differentiate(attend, q, k, v, size)
    single = differentiate(attend, q.float(), k.float(), v.float(), size)
    true = exact(q, k, v, size, **kwargs)
    for result, value in half.items():
        assert torch.isfinite(value).all()
        spacing = max(torch.finfo(torch.float16).eps * true[result].abs().max().item(), 2.0**-24)  # 2⁻²⁴: subnormal
        assert (value - true[result]).abs().max() <= (single[result] - true[result]).abs().max() + 2 * spacing


def test_a_shared_beta_goes_through_scale_and_is_not_rounded(monkeypatch):
    calls = []

    def spy(q, k, v, **kwargs):
        calls.append((q, kwargs["scale"]))
        return torch.zeros_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    q, k, v = tensors((2, 2, 1, 16), (2, 2, 100, 16), torch.bfloat16)
    scaled_dot_product_attention(q, k, v, is_causal=True, cache_offset=99, policy="log")
    scaled_dot_product_attention(q, k, v, policy={"name": "yarn", "factor": 4})
    scaled_dot_product_attention(q.expand(2, 2, 5, 16), k, v, policy="log")
    for (query, scale), beta in zip(calls, [math.log(100), (1 + 0.1 * math.log(4)) ** 2, math.log(100)], strict=True):
        assert query.dtype == torch.bfloat16
        assert query.data_ptr() == q.data_ptr()
        assert scale == pytest.approx(beta / 4, rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_beta_per_row_is_multiplied_in_fp32_and_its_product_is_not_rounded_to_half(monkeypatch, dtype):
    calls = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: calls.append(q) or torch.zeros_like(q))
    q, k, v = tensors((1, 2, 33, 16), (1, 2, 33, 16), dtype)
    assert scaled_dot_product_attention(q, k, v, is_causal=True, policy="log").dtype == dtype
    beta = torch.log(torch.arange(1, 34).clamp(min=2).double()).float()
    assert torch.equal(calls[0], q.float() * beta[:, None])


def test_the_same_input_gives_the_same_bits():
    q, k, v = tensors((2, 4, 129, 32), (2, 2, 129, 32), torch.float32)

    def run():
        return differentiate(
            lambda *qkv: scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True, policy="log"), q, k, v
        )

    first, second = run(), run()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_autocast_chooses_the_precision():
    q, k, v = tensors((1, 2, 16, 8), (1, 2, 16, 8), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = scaled_dot_product_attention(q, k.bfloat16(), v, is_causal=True, policy="log")
    assert out.dtype == torch.bfloat16
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, policy="log")
    assert (out - expected).abs().max() < 0.05
