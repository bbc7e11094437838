"""The fused kernels behind the public functions: every rule, gradients, compilation, and reasons for rejection.

Runs in Triton's interpreter, selected by `conftest`; "auto" therefore never selects the kernels here.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from oracle import assert_within_budget, differentiate, exact, tensors, torch_error
from torch.utils.checkpoint import checkpoint

from attnscale import (
    BackendError,
    StatsRequest,
    attention_with_stats,
    build_policy,
    explain_dispatch,
    scaled_dot_product_attention,
)
from attnscale.backends.triton import TritonBackend
from attnscale_kernels import Visibility, flash_attention
from attnscale_kernels.flash.op import flash_backward_op, flash_forward_op
from attnscale_kernels.operators import FlatAttention

LENGTH = 40
SIZE = (2, 4, LENGTH, 24)
PADDING = torch.zeros(2, LENGTH, dtype=torch.bool)
PADDING[0, :7] = True
DOCUMENTS = torch.tensor([[0] * 11 + [1] * 29, [0] * 25 + [1] * 15])
GENERATOR = torch.Generator().manual_seed(5)
BIAS = torch.randn(1, 4, LENGTH, LENGTH, generator=GENERATOR)
SEEN = torch.rand(2, 1, LENGTH, LENGTH, generator=GENERATOR) < 0.6

RULES = {
    "nothing": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 9},
    "two-sided window": {"window": (4, 6)},
    "padding": {"is_causal": True, "key_padding": PADDING},
    "documents": {"is_causal": True, "document_ids": DOCUMENTS},
    "bool mask": {"attn_mask": SEEN},
    "bias": {"attn_mask": BIAS},
    "softcap": {"is_causal": True, "softcap": 3.0},
    "sinks": {"is_causal": True, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "everything": {
        "is_causal": True,
        "window": 20,
        "key_padding": PADDING,
        "softcap": 5.0,
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
        "attn_mask": BIAS,
    },
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("policy", ["constant", "log"])
def test_output_and_gradients_are_within_budget(rules, policy):
    q, k, v = tensors(SIZE, SIZE, torch.float32)
    arguments = {**rules, "policy": policy}
    got = differentiate(lambda *qkv: scaled_dot_product_attention(*qkv, backend="triton", **arguments), q, k, v)
    true = exact(q, k, v, **arguments)
    # Torch's own error on equally sharp logits; features that torch lacks hardly change the size of errors.
    own = torch_error(q, k, v, 3.7 if policy == "log" else 1.0, torch.ones(LENGTH, LENGTH).tril().bool())
    assert_within_budget(got, true, own, 2.0)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_statistics_are_those_of_the_reference(rules):
    q, k, v = tensors(SIZE, SIZE, torch.float32, seed=1)
    request = StatsRequest(gap_thresholds=(0.5, 2.0), accumulation="bracket")
    arguments = {**rules, "policy": "log", "request": request}
    found = attention_with_stats(q, k, v, backend="triton", **arguments).stats
    wide = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in arguments.items()}
    wide["request"] = StatsRequest(gap_thresholds=(0.5, 2.0), accumulation="exact")
    true = attention_with_stats(q.double(), k.double(), v.double(), backend="reference", **wide).stats
    for name in ("lse", "max_logit", "w_max", "entropy"):
        torch.testing.assert_close(getattr(found, name).double(), getattr(true, name), rtol=1e-5, atol=1e-5)
    assert torch.equal(found.visible, true.visible)
    assert torch.equal(found.gap_counts, true.gap_counts)
    value = true.accumulation.lower
    slack = 1e-4 + 4e-6 * value  # rounding of scores relative to a small gap
    assert (found.accumulation.lower.double() <= value * (1 + slack)).all()
    assert (found.accumulation.upper.double() >= value * (1 - slack)).all()


def test_grouped_heads_and_a_cache_are_taken():
    q, _, _ = tensors((1, 6, 3, 16), (1, 2, 50, 16), torch.float32)
    _, k, v = tensors((1, 6, 3, 16), (1, 2, 50, 16), torch.float32)
    arguments = {"enable_gqa": True, "is_causal": True, "cache_offset": 47, "policy": "log"}
    out = scaled_dot_product_attention(q, k, v, backend="triton", **arguments)
    true = scaled_dot_product_attention(q.double(), k.double(), v.double(), backend="reference", **arguments)
    torch.testing.assert_close(out.double(), true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [2**31, 2**62, (2**62, 2**62)])
def test_a_window_larger_than_kernels_can_count_hides_nothing(window):
    q, k, v = tensors(SIZE, SIZE, torch.float32)
    found, expected = (
        scaled_dot_product_attention(q, k, v, window=extent, policy="log", backend="triton")
        for extent in (window, None)
    )
    assert torch.equal(found, expected)


def test_sampled_rows_are_those_of_all_rows():
    q, k, v = tensors(SIZE, SIZE, torch.float32)
    arguments = {"is_causal": True, "policy": "log", "backend": "triton"}
    every = attention_with_stats(q, k, v, **arguments)
    some = attention_with_stats(q, k, v, request=StatsRequest(rows=7), **arguments)
    torch.testing.assert_close(some.output, every.output)
    assert some.stats.rows.numel() == 7
    for name in ("lse", "max_logit", "w_max", "entropy", "visible"):
        torch.testing.assert_close(getattr(some.stats, name), getattr(every.stats, name)[..., some.stats.rows])


def test_learnable_temperatures_get_their_gradient():
    q, k, v = tensors(SIZE, SIZE, torch.float32)
    policies = [build_policy("ssmax", num_heads=4, bias=True, reference_length=16) for _ in range(2)]
    for policy, backend, dtype in zip(policies, ("triton", "reference"), (torch.float32, torch.float64), strict=True):
        out = scaled_dot_product_attention(
            *(x.to(dtype) for x in (q, k, v)), is_causal=True, policy=policy, backend=backend
        )
        out.square().sum().backward()
    for found, true in zip(policies[0].parameters(), policies[1].parameters(), strict=True):
        assert found.grad.abs().max() > 0
        torch.testing.assert_close(found.grad, true.grad, rtol=1e-4, atol=1e-4)


def test_it_compiles_as_one_graph_and_gives_the_same_bits():
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 17, 16), (1, 2, 17, 16), torch.float32))

    def attend(q, k, v):
        return attention_with_stats(q, k, v, is_causal=True, policy="log", backend="triton")

    torch._dynamo.reset()
    plain, compiled = attend(q, k, v), torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(plain.output, compiled.output)
    assert torch.equal(plain.stats.entropy, compiled.stats.entropy)
    for one, other in zip(*(torch.autograd.grad(x.output.sum(), (q, k, v)) for x in (plain, compiled)), strict=True):
        assert torch.equal(one, other)


def test_the_operators_keep_what_they_promise_to_torch():
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 9, 16), (1, 1, 9, 16), torch.float32))
    beta = torch.full((1, 2, 9), 1.5, requires_grad=True)
    sinks = torch.zeros(2, requires_grad=True)
    visibility = Visibility(right=0)
    flat = FlatAttention.of(q, k, v, beta, visibility, sinks, scale=0.25, softcap=None)
    torch.library.opcheck(flash_forward_op, (*flat, True, False, True))
    torch.library.opcheck(flash_forward_op, (*flat._replace(sinks=None, softcap=4.0), False, True, False))
    q, k, v, beta, sinks = (x.detach() for x in (q, k, v, beta, sinks))
    found = flash_attention(q, k, v, beta, visibility, scale=0.25, sinks=sinks)
    flat = FlatAttention.of(q, k, v, beta, visibility, sinks, scale=0.25, softcap=None)
    arguments = (*flat, torch.ones_like(q), found.out, found.lse)
    torch.library.opcheck(flash_backward_op, (*arguments, True, None, None))
    torch.library.opcheck(flash_backward_op, (*arguments, False, found.lse, found.lse))


def test_checkpointing_replays_dropout():
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 17, 16), (1, 2, 17, 16), torch.float32))

    def attend(q, k, v):
        return scaled_dot_product_attention(q, k, v, None, 0.3, True, policy="log", backend="triton")

    results = []
    for call in (attend, lambda *qkv: checkpoint(attend, *qkv, use_reentrant=False)):
        torch.manual_seed(3)
        results.append(torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    torch.manual_seed(4)
    assert not torch.equal(torch.autograd.grad(attend(q, k, v).square().sum(), (q,))[0], results[0][0])


def test_deterministic_algorithms_are_no_obstacle():
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 17, 16), (1, 2, 17, 16), torch.float32))
    torch.use_deterministic_algorithms(True)
    try:
        runs = [
            torch.autograd.grad(
                scaled_dot_product_attention(q, k, v, is_causal=True, policy="log", backend="triton").sum(), (q, k, v)
            )
            for _ in range(2)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


def test_offsets_go_beyond_two_to_the_31():
    # Reserved memory of which only a few pages are touched.
    far = 2**31 + 64
    storage = torch.empty(far + 4096, dtype=torch.float16)
    k = storage.as_strided((1, 2, 8, 16), (0, far, 16, 1))
    generator = torch.Generator().manual_seed(0)
    k.copy_(torch.randn(k.shape, generator=generator))
    q = torch.randn(1, 2, 8, 16, generator=generator).half()
    out = scaled_dot_product_attention(q, k, k, policy="log", backend="triton")
    near = scaled_dot_product_attention(q, k.clone(), k.clone(), policy="log", backend="triton")
    assert torch.equal(out, near)


def test_whatever_the_strides_the_numbers_are_the_same():
    q, k, v = tensors((2, 4, 12, 16), (2, 4, 12, 16), torch.float32)
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, policy="log", backend="triton")
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    last = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
    for inputs in (transposed, last):
        out = scaled_dot_product_attention(*inputs, is_causal=True, policy="log", backend="triton")
        assert torch.equal(out, expected)
    one_key = k[:, :, :1].expand(2, 4, 12, 16)
    out = scaled_dot_product_attention(q, one_key, one_key, backend="triton")
    torch.testing.assert_close(out, one_key)


def test_empty_calls_give_empty_or_zero_results():
    q, k, v = tensors((1, 2, 0, 16), (1, 2, 5, 16), torch.float32)
    assert scaled_dot_product_attention(q, k, v, backend="triton").shape == (1, 2, 0, 16)
    q, k, v = tensors((1, 2, 3, 16), (1, 2, 0, 16), torch.float32)
    out, stats = attention_with_stats(q, k, v, backend="triton")
    assert (out == 0).all()
    assert (stats.lse == -torch.inf).all()
    assert (stats.w_max == 0).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "float32, float16 and bfloat16, not torch.float64"),
        ({"dim": 264}, "head dimensions up to 256"),
        ({"bias": True}, "no gradient for an additive mask"),
    ],
)
def test_a_call_it_cannot_take_is_refused_with_the_reason(change, reason):
    size = (1, 2, 4, change.get("dim", 16))
    q, k, v = tensors(size, size, change.get("dtype", torch.float32))
    mask = torch.zeros(4, 4, requires_grad=True) if "bias" in change else None
    with pytest.raises(BackendError, match="backend='triton' cannot compute this call") as error:
        scaled_dot_product_attention(q, k, v, mask, backend="triton")
    assert reason in str(error.value)
    assert reason in str(explain_dispatch(q, k, v, mask))


def test_without_the_interpreter_a_cpu_tensor_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.import_module("attnscale_kernels.availability"), "interpreting", lambda: False)
    q, k, v = tensors((1, 2, 4, 16), (1, 2, 4, 16), torch.float32)
    with pytest.raises(BackendError, match="triton kernels need a CUDA or ROCm device, not cpu"):
        scaled_dot_product_attention(q, k, v, backend="triton")


def test_auto_picks_it_for_what_sdpa_cannot_do_where_it_can_run(monkeypatch):
    monkeypatch.setenv("ATTNSCALE_TRITON", "1")
    monkeypatch.setattr(TritonBackend, "automatic", True)
    q, k, v = tensors((1, 2, 4, 16), (1, 2, 4, 16), torch.float32)
    assert explain_dispatch(q, k, v, policy="log").chosen == "sdpa"
    assert explain_dispatch(q, k, v, policy="log", softcap=2.0).chosen == "triton"
    assert explain_dispatch(q, k, v, policy="log", request=StatsRequest()).chosen == "triton"
    assert explain_dispatch(q.double(), k.double(), v.double(), request=StatsRequest()).chosen == "blockwise"
