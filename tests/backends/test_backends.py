"""Contracts 5, 7 and 8 (attnscale/README.md) and the features that not every backend has."""

import math

import pytest
import torch
from catalogue import LEARNED, started
from oracle import differentiate, tensors, visibility

from attnscale import (
    ArgumentError,
    ArgumentTypeError,
    AttnScaleError,
    BackendError,
    StatsRequest,
    attention_weights,
    attention_with_stats,
    build_policy,
    explain_dispatch,
    scaled_dot_product_attention,
)


def test_an_explicit_backend_never_falls_back():
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 4, 8))
    with pytest.raises(BackendError, match="backend='sdpa' cannot compute this call: torch's SDPA has no softcap"):
        scaled_dot_product_attention(q, k, v, softcap=30.0, backend="sdpa")
    with pytest.raises(BackendError, match="sinks"):
        scaled_dot_product_attention(q, k, v, sinks=torch.zeros(2), backend="sdpa")
    with pytest.raises(
        ArgumentError,
        match="backend='flash' is not accepted: expected 'auto' or one of sdpa, triton, blockwise, reference",
    ):
        scaled_dot_product_attention(q, k, v, backend="flash")


def test_dispatch_is_explained():
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 4, 8))
    plain = explain_dispatch(q, k, v, None, 0.0, True, policy="log")
    assert plain.chosen == "sdpa"
    assert {v.backend: v.usable for v in plain.verdicts} == {
        "sdpa": True,
        "triton": False,  # which has no fp64
        "blockwise": True,
        "reference": True,
    }
    capped = explain_dispatch(q, k, v, softcap=5.0)
    assert capped.chosen == "blockwise"
    measured = explain_dispatch(q, k, v, policy="log", request=StatsRequest())
    assert measured.chosen == "blockwise"
    assert "no row statistics" in measured.verdicts[0].reason
    assert "no softcap" in str(capped)
    refused = explain_dispatch(q, k, v, softcap=5.0, backend="sdpa")
    assert refused.chosen == "none"
    assert explain_dispatch(q, k, v, backend="reference").chosen == "reference"


def test_what_is_explained_is_what_runs(monkeypatch):
    from attnscale.backends.dispatch import BACKENDS

    q, k, v = tensors((1, 2, 4, 8), (1, 2, 4, 8))
    ran = []
    for name, backend in BACKENDS.items():
        monkeypatch.setattr(backend, "run", lambda call, name=name: ran.append(name) or call.query)
    for kwargs in ({"policy": "log", "window": 3}, {"softcap": 5.0}, {"sinks": torch.zeros(2)}, {"window": 2}):
        scaled_dot_product_attention(q, k, v, **kwargs)
        assert ran.pop() == explain_dispatch(q, k, v, **kwargs).chosen


@pytest.mark.parametrize("backend", ["auto", "sdpa", "blockwise", "reference"])
def test_what_a_policy_reads_is_measured_by_the_backend_that_is_explained(backend, monkeypatch):
    from attnscale.backends.dispatch import MEASURING

    q, k, v = tensors((1, 2, 4, 8), (1, 2, 4, 8))
    measured = []
    for name, one in MEASURING.items():
        own = one.statistics
        monkeypatch.setattr(one, "statistics", lambda *a, name=name, own=own: measured.append(name) or own(*a))
    scaled_dot_product_attention(q, k, v, policy="gap_adaptive", backend=backend)
    assert measured == ["reference" if backend == "reference" else "blockwise"]
    explained = explain_dispatch(q, k, v, policy="gap_adaptive", backend=backend)
    reason = next(verdict.reason for verdict in explained.verdicts if verdict.backend == explained.chosen)
    assert f"{measured[0]} measures the scores" in reason
    assert "measures the scores" not in str(explain_dispatch(q, k, v, policy="log", backend=backend))


def test_a_backend_that_cannot_compute_a_call_is_explained_also_where_scores_are_read():
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 4, 8))  # fp64, which triton does not take
    assert explain_dispatch(q, k, v, policy="gap_adaptive", backend="triton").chosen == "none"
    with pytest.raises(BackendError, match="backend='triton' cannot compute this call"):
        scaled_dot_product_attention(q, k, v, policy="gap_adaptive", backend="triton")


def test_softcap_bends_the_score_and_beta_multiplies_what_comes_out():
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 4, 8))
    scores = 2.0 * torch.tanh(q @ k.mT / 8**0.5 / 2.0)
    expected = torch.softmax(3.0 * scores, -1) @ v
    out = scaled_dot_product_attention(q, k, v, softcap=2.0, policy={"name": "constant", "beta": 3.0})
    torch.testing.assert_close(out, expected)


def test_a_sink_takes_weight_that_beta_does_not_sharpen():
    q, k, v = tensors((2, 2, 4, 8), (2, 2, 4, 8))
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    logits = 3.0 * (q @ k.mT / 8**0.5)
    joint = torch.cat([logits, sinks[:, None, None].expand(2, 2, 4, 1)], -1).softmax(-1)[..., :-1]
    out = scaled_dot_product_attention(q, k, v, sinks=sinks, policy={"name": "constant", "beta": 3.0})
    torch.testing.assert_close(out, joint @ v)
    out.sum().backward()
    assert (sinks.grad != 0).all()


def test_a_sink_alone_gives_zeros():
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 4, 8))
    out = scaled_dot_product_attention(q, k, v, torch.zeros(4, 4, dtype=torch.bool), sinks=torch.zeros(2), policy="log")
    assert (out == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["key", "value"])
def test_nothing_leaks_from_a_hidden_key_in_the_reference(bad, which):
    q, k, v = tensors((1, 2, 6, 8), (1, 2, 6, 8))
    clean = differentiate(
        lambda *qkv: scaled_dot_product_attention(*qkv, is_causal=True, policy="log", backend="reference"), q, k, v
    )
    (k if which == "key" else v)[:, :, 4] = bad
    dirty = scaled_dot_product_attention(q, k, v, is_causal=True, policy="log", backend="reference")
    torch.testing.assert_close(dirty[:, :, :4], clean["out"][:, :, :4])
    assert not torch.isfinite(dirty[:, :, 4:]).all()

    padding = torch.tensor([False] * 4 + [True] * 2)
    result = differentiate(
        lambda *qkv: scaled_dot_product_attention(*qkv, key_padding=padding, policy="log", backend="reference"), q, k, v
    )
    assert all(torch.isfinite(value).all() for value in result.values())


def test_the_reference_is_differentiable_to_the_last_argument():
    q, k, v = tensors((1, 2, 3, 4), (1, 2, 3, 4))
    policy = build_policy("ssmax", num_heads=2, bias=True, reference_length=4).double()
    bias = torch.randn(1, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sinks = torch.tensor([0.1, 0.2], dtype=torch.float64)

    class Wide(type(policy)):
        """The same policy without the rounding of β to fp32, which finite differences would see."""

        def forward(self, n, *, positions=None, query=None):
            return self.formula(n.clamp(min=1), n.clamp(min=1) - 1)

    policy.__class__ = Wide

    def attend(q, k, v, bias, sinks, s, b):
        return torch.func.functional_call(_Call(policy), {"policy.s": s, "policy.b": b}, (q, k, v, bias, sinks))

    inputs = [x.requires_grad_() for x in (q, k, v, bias, sinks, policy.s.detach(), policy.b.detach())]
    assert torch.autograd.gradcheck(attend, inputs)


class _Call(torch.nn.Module):
    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, q, k, v, bias, sinks):
        return scaled_dot_product_attention(
            q, k, v, bias, is_causal=True, sinks=sinks, softcap=4.0, policy=self.policy, backend="reference"
        )


def test_weights_are_those_the_output_is_made_of():
    q, k, v = tensors((2, 4, 5, 8), (2, 2, 5, 8))
    weights = attention_weights(q, k, is_causal=True, enable_gqa=True, policy="log")
    assert weights.shape == (2, 4, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 5, dtype=torch.float64))
    assert (weights[:, :, ~visibility(5, 5, causal=True)] == 0).all()
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, policy="log")
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), out)


def test_learned_temperatures_get_the_gradient_of_the_oracle():
    q, k, v = tensors((2, 4, 9, 16), (2, 4, 9, 16))
    for name in LEARNED:
        gradients = []
        for backend in ("sdpa", "reference"):
            policy = started(name)
            scaled_dot_product_attention(
                q, k, v, is_causal=True, policy=policy, backend=backend
            ).square().sum().backward()
            gradients.append([p.grad for p in policy.parameters()])
        for ours, true in zip(*gradients, strict=True):
            assert (true != 0).any()
            torch.testing.assert_close(ours, true, rtol=1e-5, atol=1e-6)


Q = torch.randn(2, 4, 6, 8)


@pytest.mark.parametrize(
    ("arguments", "kwargs", "kind", "message"),
    [
        ((Q, Q[..., :4], Q), {}, ArgumentError, r"key.shape\[-1\]=4 .* head dimension of query, 8"),
        ((Q, Q, Q[:, :, :3]), {}, ArgumentError, r"value.shape\[-2\]=3 .* number of keys, 6"),
        ((Q, Q[0, 0, 0], Q[0]), {}, ArgumentError, r"key.shape=\[8\] .* at least \[tokens, dimension\]"),
        ((Q[0, 0, 0], Q[0, 0, 0], Q[0, 0, 0]), {}, ArgumentError, "at least"),
        ((Q, Q[:, :2], Q[:, :2]), {}, ArgumentError, r"\[2, 4\], \[2, 2\], .* enable_gqa=True"),
        ((Q, Q[:, :3], Q[:, :3]), {"enable_gqa": True}, ArgumentError, "divisors of the 4 query heads"),
        ((Q, Q.double(), Q), {}, ArgumentTypeError, "float64"),
        ((Q.long(), Q.long(), Q.long()), {}, ArgumentTypeError, "floating dtype"),
        ((Q, Q.expand(3, 2, 4, 6, 8)[:, 0], Q), {}, ArgumentError, r"leading dimensions .* \[3, 4\].* broadcast"),
        ((Q, Q[:, :2].expand(3, 2, 2, 6, 8)[:, 0], Q), {"enable_gqa": True}, ArgumentError, "batch dimensions"),
        ((Q, Q, Q, torch.ones(5, 5) > 0), {"policy": "log"}, ArgumentError, r"attn_mask of shape \[5, 5\]"),
        ((Q, Q, Q, torch.ones(6, 6).long()), {"policy": "log"}, ArgumentTypeError, "attn_mask of torch.int64"),
        ((Q, Q, Q), {"policy": "log", "dropout_p": 1.5}, ArgumentError, "dropout_p=1.5"),
        ((Q, Q, Q), {"policy": "log", "scale": "big"}, ArgumentTypeError, "scale='big'"),
        ((Q, Q, Q), {"window": 0}, ArgumentError, "window=0"),
        ((Q, Q, Q), {"window": (1, -1)}, ArgumentError, r"window\[1\]=-1"),
        ((Q, Q, Q), {"window": 2.5}, ArgumentTypeError, "window=2.5"),
        ((Q, Q, Q), {"softcap": 0.0}, ArgumentError, "softcap=0.0"),
        ((Q, Q, Q), {"sinks": torch.zeros(3)}, ArgumentError, r"sinks of shape \[3\].* a floating tensor \[4\]"),
        ((Q, Q, Q), {"positions": torch.zeros(6)}, ArgumentTypeError, "positions=torch.float32"),
        ((Q, Q, Q), {"positions": torch.zeros(3, 6).long()}, ArgumentError, r"positions of shape \[3, 6\]"),
        ((Q, Q, Q), {"key_padding": torch.zeros(6)}, ArgumentTypeError, "a bool tensor"),
        ((Q, Q, Q), {"key_padding": torch.zeros(2, 7) > 0}, ArgumentError, r"key_padding of shape \[2, 7\]"),
        ((Q, Q, Q), {"cache_offset": -1}, ArgumentError, "cache_offset=-1"),
        ((Q, Q, Q), {"cache_offset": 1.0}, ArgumentTypeError, "cache_offset=1.0"),
        ((Q, Q, Q), {"cache_offset": torch.zeros(3).long()}, ArgumentError, "cache_offset"),
        ((Q, Q, Q), {"document_ids": torch.zeros(5).long()}, ArgumentError, "document_ids of shape"),
        ((Q, Q, Q), {"cu_seqlens": torch.zeros(1).long()}, ArgumentError, "cu_seqlens"),
        (
            (Q, Q, Q),
            {"cu_seqlens": torch.tensor([0, 6]), "document_ids": torch.zeros(6).long()},
            ArgumentError,
            "together",
        ),
        ((Q[:, :, :2], Q, Q), {"cu_seqlens": torch.tensor([0, 6])}, ArgumentError, "cache_offset, or two cu_seqlens"),
        ((Q, Q, Q), {"visible": torch.ones(5).long(), "policy": "log"}, ArgumentError, "visible"),
        ((Q, Q, Q), {"policy": "logg"}, ArgumentError, "Did you mean 'log'"),
        ((Q, Q, Q), {"policy": 3}, ArgumentTypeError, "policy=3"),
        ((Q, Q, Q), {"policy": "ssmax"}, ArgumentError, "num_heads"),
        ((Q, Q, Q), {"policy": build_policy("ssmax", num_heads=3)}, ArgumentError, "another number of heads"),
    ],
)
def test_bad_input_is_named_quoted_and_answered(arguments, kwargs, kind, message):
    with pytest.raises(kind, match=message) as raised:
        scaled_dot_product_attention(*arguments, **kwargs)
    assert isinstance(raised.value, AttnScaleError)
    assert isinstance(raised.value, (ValueError, TypeError))


@pytest.mark.parametrize("other", [attention_with_stats, explain_dispatch])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((Q, Q), {}),
        ((Q, Q, Q), {"casual": True}),
        ((Q, Q, Q, None, 0.0, True, None, False, "log"), {}),
        ((Q, Q, Q, None), {"attn_mask": None}),
        ((Q, Q), {"key": Q, "value": Q}),
    ],
)
def test_arguments_that_python_refuses_are_refused_wherever_they_are_taken(other, args, kwargs):
    for function in (scaled_dot_product_attention, other):
        with pytest.raises(TypeError, match=r"argument"):
            function(*args, **kwargs)
