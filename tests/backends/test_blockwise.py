"""The blockwise backend and its statistics against the fp64 reference, with every feature."""

import math
from functools import partial

import pytest
import torch
from oracle import additive, assert_within_budget, differentiate, exact, tensors, torch_error, visibility
from torch.utils.checkpoint import checkpoint

from attnscale import StatsRequest, attention_with_stats, build_policy, scaled_dot_product_attention
from attnscale.call.attention_call import AttentionCall, FlatCall
from attnscale.call.context import Context
from attnscale.statistics.rows import tiles
from attnscale.statistics.rows.attend import NOTHING, attend_rows, rows_forward

TOKENS = 37


def causal_call(q, k, v, beta, bias=None, sinks=None, *, scale, softcap=None, dropout_p=0.0):
    """A call by its parts, so that gradients can be taken of each."""
    context = Context(q.shape[2], k.shape[2], q.device, causal=True, mask=bias)
    return AttentionCall(q, k, v, context, scale, dropout_p, softcap, sinks, beta)


FEATURES = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 5},
    "two_sided": {"window": (3, 9)},
    "padding": {"is_causal": True, "key_padding": torch.stack([torch.arange(TOKENS) < 4, torch.arange(TOKENS) > 30])},
    "documents": {"is_causal": True, "cu_seqlens": torch.tensor([0, 1, 20, TOKENS])},
    "bool_mask": {"attn_mask": torch.rand(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) > 0.5},
    "bias": {
        "attn_mask": torch.randn(1, 4, TOKENS, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    },
    "hidden_bias": {"attn_mask": additive(visibility(TOKENS, TOKENS, causal=True, window=7)) + 0.25},
    "softcap": {"is_causal": True, "softcap": 1.5},
    "sinks": {"is_causal": True, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
    "everything": {
        "is_causal": True,
        "window": 11,
        "softcap": 2.0,
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64),
        "attn_mask": torch.randn(TOKENS, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
        "key_padding": torch.arange(TOKENS) < 3,
    },
}
REQUEST = StatsRequest(accumulation="exact", gap_thresholds=(0.25, 1.0, math.inf))
features = pytest.mark.parametrize("feature", FEATURES)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "ROWS", 16)
    monkeypatch.setattr(tiles, "SCORES", 160)
    monkeypatch.setattr(tiles, "SAMPLED_SCORES", 160)


def arguments(feature: str, dtype: torch.dtype = torch.float64) -> dict:
    return {
        name: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in FEATURES[feature].items()
    } | {"enable_gqa": True}


@features
@pytest.mark.parametrize("policy", ["constant", "log"])
def test_output_and_gradients_are_those_of_the_reference(feature, policy):
    q, k, v = tensors((2, 4, TOKENS, 16), (2, 2, TOKENS, 16))
    kwargs = arguments(feature) | {"policy": policy}
    got = differentiate(partial(scaled_dot_product_attention, backend="blockwise", **kwargs), q, k, v)
    expected = exact(q, k, v, **kwargs)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@features
def test_statistics_are_those_of_the_reference(feature):
    q, k, v = tensors((2, 4, TOKENS, 16), (2, 2, TOKENS, 16))
    kwargs = arguments(feature) | {"policy": "log", "request": REQUEST}
    _, got = attention_with_stats(q, k, v, **kwargs)
    _, expected = attention_with_stats(q, k, v, backend="reference", **kwargs)
    for name in ("visible", "gap_counts"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    for name in ("lse", "max_logit", "w_max", "entropy", "criticality"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-8, atol=1e-10, msg=name)
    torch.testing.assert_close(got.accumulation.upper, expected.accumulation.upper, rtol=1e-8, atol=0)


@features
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_statistics_are_exact_in_every_dtype(feature, dtype):
    q, k, v = tensors((2, 4, TOKENS, 16), (2, 2, TOKENS, 16), dtype)
    got = attention_with_stats(q, k, v, policy="log", **arguments(feature, dtype)).stats
    wide = {
        name: x.double() if name in ("attn_mask", "sinks") and x.is_floating_point() else x
        for name, x in arguments(feature, dtype).items()
    }
    expected = attention_with_stats(q.double(), k.double(), v.double(), policy="log", backend="reference", **wide).stats
    for name in ("lse", "max_logit", "w_max", "entropy"):
        torch.testing.assert_close(getattr(got, name).double(), getattr(expected, name), rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [1, 2, 63, 129])
def test_errors_stay_within_twice_torchs_own(dtype, length):
    policy = build_policy("log")
    q, k, v = tensors((2, 4, length, 32), (2, 2, length, 32), dtype)
    kwargs = {"is_causal": True, "enable_gqa": True, "policy": policy}
    got = differentiate(partial(scaled_dot_product_attention, backend="blockwise", **kwargs), q, k, v)
    own = torch_error(q, k, v, policy(torch.arange(1, length + 1)), visibility(length, length, causal=True), gqa=True)
    assert_within_budget(got, exact(q, k, v, **kwargs), own, times=2)


def test_gradients_reach_beta_bias_and_sinks():
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 5, 4), (1, 1, 5, 4)))
    beta = (torch.rand(1, 2, 5, dtype=torch.float64) + 0.5).requires_grad_()
    bias = torch.randn(1, 2, 5, 5, dtype=torch.float64).requires_grad_()
    sinks = torch.randn(2, dtype=torch.float64).requires_grad_()

    def attend(q, k, v, beta, bias, sinks):
        return attend_rows(causal_call(q, k, v, beta, bias, sinks, scale=0.7, softcap=3.0)).out

    assert torch.autograd.gradcheck(attend, (q, k, v, beta, bias, sinks))


def test_gradients_reach_beta_where_it_is_folded():
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 5, 4), (1, 1, 5, 4)))
    beta = (torch.rand(1, 2, 5, dtype=torch.float64) + 0.5).requires_grad_()

    def attend(q, k, v, beta):
        return attend_rows(causal_call(q, k, v, beta, scale=0.7)).out

    assert torch.autograd.gradcheck(attend, (q, k, v, beta))


def test_learned_temperatures_train_through_statistics():
    q, k, v = tensors((2, 4, 9, 16), (2, 4, 9, 16))
    gradients = []
    for backend in ("blockwise", "reference"):
        policy = build_policy("ssmax", num_heads=4)
        out = attention_with_stats(q, k, v, is_causal=True, policy=policy, backend=backend).output
        out.square().sum().backward()
        gradients.append(policy.s.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_dropout_replays_in_backward():
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 20, 8), (1, 2, 20, 8)))
    beta = torch.ones(1, 2, 20, dtype=torch.float64)

    def attend(q, k, v):
        return attend_rows(causal_call(q, k, v, beta, scale=0.3, dropout_p=0.4), seed=torch.tensor(123)).out

    assert torch.autograd.gradcheck(attend, (q, k, v))
    torch.manual_seed(0)
    first = scaled_dot_product_attention(q, k, v, dropout_p=0.5, backend="blockwise")
    second = scaled_dot_product_attention(q, k, v, dropout_p=0.5, backend="blockwise")
    torch.manual_seed(0)
    again = scaled_dot_product_attention(q, k, v, dropout_p=0.5, backend="blockwise")
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nothing_leaks_from_padding(bad):
    q, k, v = tensors((1, 2, 6, 8), (1, 2, 6, 8))
    padding = torch.tensor([False] * 4 + [True] * 2)
    clean = differentiate(
        partial(scaled_dot_product_attention, key_padding=padding, policy="log", backend="blockwise"), q, k, v
    )
    for x in (k, v):
        x[:, :, 4:] = bad
    dirty = differentiate(
        partial(scaled_dot_product_attention, key_padding=padding, policy="log", backend="blockwise"), q, k, v
    )
    for name in ("out", "dq"):
        torch.testing.assert_close(dirty[name], clean[name])
    for name in ("dk", "dv"):
        torch.testing.assert_close(dirty[name][:, :, :4], clean[name][:, :, :4])


def test_sampled_rows_are_those_rows():
    q, k, v = tensors((2, 4, TOKENS, 16), (2, 2, TOKENS, 16))
    for feature in FEATURES:
        kwargs = arguments(feature) | {"policy": "log"}
        whole = attention_with_stats(q, k, v, request=REQUEST, **kwargs)
        some = attention_with_stats(
            q, k, v, request=StatsRequest(accumulation="exact", gap_thresholds=(0.25, 1.0, math.inf), rows=7), **kwargs
        )
        torch.testing.assert_close(some.output, whole.output)
        assert some.stats.rows.tolist() == sorted(set(some.stats.rows.tolist()))
        assert some.stats.rows.numel() == 7
        for name in ("visible", "lse", "max_logit", "w_max", "entropy", "criticality"):
            torch.testing.assert_close(getattr(some.stats, name), getattr(whole.stats, name)[..., some.stats.rows])
        assert torch.equal(some.stats.gap_counts, whole.stats.gap_counts[:, :, some.stats.rows])


def test_statistics_of_key_halves_merge_into_the_whole():
    q, k, v = tensors((2, 2, 9, 16), (2, 2, 40, 16))
    whole = attention_with_stats(q, k, v, policy="constant").stats
    halves = [attention_with_stats(q, k[:, :, part], v[:, :, part]).stats for part in (slice(0, 11), slice(11, 40))]
    merged = halves[0].merge(halves[1])
    for name in ("visible", "lse", "max_logit", "w_max", "entropy"):
        torch.testing.assert_close(getattr(merged, name), getattr(whole, name))


def test_inference_leaves_nothing_that_training_cannot_use():
    """Rows, bounds and temperatures are remembered from call to call."""
    q, k, v = tensors((1, 4, TOKENS + 2, 16), (1, 4, TOKENS + 2, 16))  # a length that no other test has asked for
    request = StatsRequest(rows=5)
    with torch.inference_mode():
        attention_with_stats(q, k, v, is_causal=True, policy="log")
        first = attention_with_stats(q, k, v, is_causal=True, policy="log", request=request)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    for rows in (request, StatsRequest()):
        second = attention_with_stats(q, k, v, is_causal=True, policy="log", request=rows)
        second.output.sum().backward()
    second = attention_with_stats(q, k, v, is_causal=True, policy="log", request=request)
    second.stats.rows.zero_()  # the caller's own
    third = attention_with_stats(q, k, v, is_causal=True, policy="log", request=request).stats
    assert third.rows.tolist() == first.stats.rows.tolist()
    assert torch.equal(third.entropy, first.stats.entropy)


def test_what_is_not_asked_for_is_not_computed():
    q, k, v = tensors((1, 2, 9, 8), (1, 2, 9, 8))
    request = StatsRequest(w_max=False, entropy=False, max_logit=False)
    stats = attention_with_stats(q, k, v, request=request).stats
    assert stats.lse is not None
    others = (stats.w_max, stats.entropy, stats.max_logit, stats.gap_counts, stats.accumulation, stats.criticality)
    assert others == (None,) * 6
    assert not stats.lse.requires_grad


def test_it_compiles_to_one_graph_and_survives_checkpointing():
    q, k, v = (x.requires_grad_() for x in tensors((2, 4, 24, 16), (2, 4, 24, 16), torch.float32))

    def attend(q, k, v):
        output, stats = attention_with_stats(q, k, v, is_causal=True, policy="log")
        return output, stats.entropy

    expected = attend(q, k, v)
    for run in (
        torch.compile(attend, fullgraph=True, backend="aot_eager"),
        partial(checkpoint, attend, use_reentrant=False),
    ):
        got = run(q, k, v)
        torch.testing.assert_close(got[0], expected[0])
        torch.testing.assert_close(got[1], expected[1])
        for mine, theirs in zip(
            torch.autograd.grad(got[0].sum(), (q, k, v)),
            torch.autograd.grad(expected[0].sum(), (q, k, v), retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs)
    torch.compiler.reset()


def test_dropout_compiles_too():
    q, k, v = tensors((1, 2, 20, 8), (1, 2, 20, 8))

    def attend(q, k, v):
        return scaled_dot_product_attention(q, k, v, dropout_p=1.0, softcap=3.0, policy="log")

    assert (torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v) == 0).all()
    torch.compiler.reset()


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (1, 1)])
def test_empty_and_tiny_inputs_are_served(queries, keys):
    q, k, v = tensors((1, 2, queries, 8), (1, 2, keys, 8))
    output, stats = attention_with_stats(q, k, v, policy="log", request=REQUEST)
    assert output.shape == (1, 2, queries, 8)
    assert stats.entropy.shape == (1, 2, queries)
    assert (stats.entropy == 0).all()
    assert (output == 0).all() if keys == 0 else torch.isfinite(output).all()


def test_the_operators_pass_torchs_own_check():
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 5, 4), (1, 2, 5, 4)))
    beta = torch.ones(1, 2, 5, dtype=torch.float64, requires_grad=True)
    flat = FlatCall.of(causal_call(q, k, v, beta, scale=0.5))
    torch.library.opcheck(rows_forward, (*flat, *NOTHING.flat(), False, None))
