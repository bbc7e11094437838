"""A key that a row may not see takes part in no product, forward or backward, whatever it holds or hides it."""

import math
from functools import partial

import pytest
import torch
from catalogue import BY_QUERY
from oracle import tensors, visibility
from torch import nn

import attnscale
from attnscale import attention_weights, build_policy, scaled_dot_product_attention

ROWS = 6
CAUSAL = nn.Transformer.generate_square_subsequent_mask(ROWS, dtype=torch.float64)  # −∞ above the diagonal
SEEN = visibility(ROWS, ROWS, causal=True)
PADDED = torch.tensor([[False] * ROWS, [False] * 4 + [True] * 2])
FLOAT_PADDING = torch.zeros(2, ROWS, dtype=torch.float64).masked_fill(PADDED, -math.inf)
backends = pytest.mark.parametrize("backend", ["sdpa", "blockwise", "reference"])
own_backends = pytest.mark.parametrize("backend", ["blockwise", "reference"])
learned = pytest.mark.parametrize("name", ["ssmax", *BY_QUERY])


def learning(name: str) -> attnscale.policies.Policy:
    return build_policy(name, num_heads=2, **({"head_dim": 8} if name in BY_QUERY else {})).double()


def module() -> attnscale.MultiheadAttention:
    torch.manual_seed(0)
    return attnscale.MultiheadAttention(16, 2, batch_first=True, policy="ssmax", dtype=torch.float64)


def gradients(attention: nn.Module, x: torch.Tensor, **masks: object) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out, _ = attention(x, x, x, **masks)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *attention.parameters()])]


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("floats", "bools"),
    [
        ({"attn_mask": CAUSAL}, {"attn_mask": ~SEEN}),
        ({"key_padding_mask": FLOAT_PADDING}, {"key_padding_mask": PADDED}),
        (
            {"attn_mask": CAUSAL, "key_padding_mask": FLOAT_PADDING},
            {"attn_mask": ~SEEN, "key_padding_mask": PADDED},
        ),
        ({"attn_mask": ~SEEN, "key_padding_mask": FLOAT_PADDING}, {"attn_mask": ~SEEN, "key_padding_mask": PADDED}),
        (
            {"attn_mask": CAUSAL.clamp(min=torch.finfo(torch.float64).min)},
            {"attn_mask": ~SEEN},
        ),
    ],
    ids=["causal", "padding", "both", "bool_and_float", "finfo_min"],
)
def test_a_module_learns_the_same_from_a_float_mask_as_from_a_bool_one(floats, bools, need_weights):
    x = tensors((2, ROWS, 16), (2, ROWS, 16))[0]
    got = gradients(module(), x, need_weights=need_weights, **floats)
    expected = gradients(module(), x, need_weights=need_weights, **bools)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@backends
@learned
def test_a_learned_policy_gets_the_gradient_of_the_bool_mask(backend, name):
    found = []
    for mask in (CAUSAL, SEEN):
        q, k, v = (x.requires_grad_() for x in tensors((2, 2, ROWS, 8), (2, 2, ROWS, 8)))
        policy = learning(name)
        out = scaled_dot_product_attention(q, k, v, mask, policy=policy, backend=backend)
        found.append(torch.autograd.grad(out.square().sum(), [q, k, v, *policy.parameters()]))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)  # β is fp32


def test_weights_have_a_gradient_under_a_float_mask():
    q, k, _ = (x.requires_grad_() for x in tensors((1, 2, ROWS, 8), (1, 2, ROWS, 8)))
    policy = learning("ssmax")
    weights = attention_weights(q, k, attn_mask=CAUSAL, policy=policy)
    for gradient in torch.autograd.grad(weights.square().sum(), [q, k, *policy.parameters()]):
        assert torch.isfinite(gradient).all()
        assert (gradient != 0).any()


@pytest.mark.parametrize(
    ("backend", "softcap"),
    [("sdpa", None), ("blockwise", None), ("blockwise", 2.0), ("reference", None), ("reference", 2.0)],
)
def test_the_gradient_of_an_additive_mask_is_zero_where_it_hides(backend, softcap):
    q, k, v = tensors((1, 2, ROWS, 8), (1, 2, ROWS, 8))
    slope = torch.randn(ROWS, ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = {}
    for name in (backend, "finite"):
        # The same numbers without −∞: hidden by a bool rule beside a finite bias.
        bias = (slope if name == "finite" else slope + CAUSAL).requires_grad_()
        policy = learning("ssmax")
        rules = {"is_causal": True, "backend": "reference"} if name == "finite" else {"backend": backend}
        out = scaled_dot_product_attention(q, k, v, bias, softcap=softcap, policy=policy, **rules)
        found[name] = torch.autograd.grad(out.square().sum(), [bias, *policy.parameters()])
    for mine, theirs in zip(found[backend], found["finite"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    assert (found[backend][0][~SEEN] == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("masks", [{"key_padding_mask": PADDED}, {"key_padding_mask": FLOAT_PADDING}], ids=["b", "f"])
def test_nothing_leaks_from_a_hidden_token_into_a_module_that_gives_weights(bad, masks):
    query, key, value = tensors((2, ROWS, 16), (2, ROWS, 16))
    found = []
    for broken in (False, True):
        attention = module()
        if broken:
            key[1, 4:], value[1, 4:] = bad, bad
        query.requires_grad_()
        out, weights = attention(query, key, value, **masks)
        found.append((out, weights, *torch.autograd.grad(out.square().sum(), [query, attention.policy.s])))
    for clean, dirty in zip(*found, strict=True):
        torch.testing.assert_close(dirty, clean)


def test_a_visible_value_that_is_no_number_reaches_the_output_of_a_module_that_gives_weights():
    query, key, value = tensors((2, ROWS, 16), (2, ROWS, 16))
    value[1, 2] = math.nan
    out, weights = module()(query, key, value, attn_mask=~SEEN)
    assert torch.isnan(out[1, 2:]).all()
    assert torch.isfinite(out[1, :2]).all()
    assert torch.isfinite(out[0]).all()
    assert torch.isfinite(weights).all()


@own_backends
@learned
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "rules", [{"key_padding": PADDED}, {"attn_mask": FLOAT_PADDING[:, None, None]}], ids=["padding", "mask"]
)
def test_nothing_leaks_from_a_hidden_key_into_what_is_learned(backend, name, bad, rules):
    attend = partial(scaled_dot_product_attention, backend=backend, softcap=3.0, **rules)
    found = []
    for broken in (False, True):
        q, k, v = tensors((2, 2, ROWS, 8), (2, 2, ROWS, 8))
        if broken:
            k[1, :, 4:], v[1, :, 4:] = bad, bad
        policy = learning(name)
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = attend(*inputs, policy=policy)
        dq, dk, dv, *learnt = torch.autograd.grad(out.square().sum(), [*inputs, *policy.parameters()])
        assert (dk[1, :, 4:] == 0).all()
        assert (dv[1, :, 4:] == 0).all()
        found.append((out, dq, dk, dv, *learnt))
    for clean, dirty in zip(*found, strict=True):
        torch.testing.assert_close(dirty, clean)


@own_backends
def test_nothing_leaks_from_a_hidden_key_through_an_adaptive_temperature(backend):
    policy = build_policy("gap_adaptive", gradient="through")
    found = []
    for bad in (0.0, math.nan):
        q, k, v = tensors((1, 2, 5, 8), (1, 2, 5, 8))
        k[:, :, 1], v[:, :, 1] = bad, bad  # the first row sees one key, and so no gap
        inputs = [x.requires_grad_() for x in (q, k, v)]
        padding = torch.tensor([False, True, False, False, False])
        out = scaled_dot_product_attention(*inputs, is_causal=True, key_padding=padding, policy=policy, backend=backend)
        found.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for clean, dirty in zip(*found, strict=True):
        torch.testing.assert_close(dirty, clean)


@own_backends
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nothing_leaks_from_a_bias_that_another_rule_hides(backend, bad):
    bias = torch.zeros(ROWS, ROWS, dtype=torch.float64)
    found = []
    for broken in (False, True):
        given = bias.masked_fill(~SEEN, bad) if broken else bias
        q, k, v = (x.requires_grad_() for x in tensors((1, 2, ROWS, 8), (1, 2, ROWS, 8)))
        given = given.clone().requires_grad_()
        policy = learning("ssmax")
        out = scaled_dot_product_attention(q, k, v, given, is_causal=True, policy=policy, backend=backend)
        found.append((out, *torch.autograd.grad(out.square().sum(), [q, k, v, given, *policy.parameters()])))
    for clean, dirty in zip(*found, strict=True):
        torch.testing.assert_close(dirty, clean)


@own_backends
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0], dtype=torch.float64)], ids=["no_sink", "sink"])
def test_a_row_that_sees_nothing_has_no_gradient_whatever_its_query_holds(backend, sinks):
    seen = SEEN.clone()
    seen[2] = False
    found = []
    for bad in (0.0, math.nan):
        q, k, v = tensors((1, 2, ROWS, 8), (1, 2, ROWS, 8))
        q[:, :, 2] = bad
        inputs = [x.requires_grad_() for x in (q, k, v)]
        policy = learning("ssmax")
        out = scaled_dot_product_attention(*inputs, seen, sinks=sinks, policy=policy, backend=backend)
        found.append((out, *torch.autograd.grad(out.square().sum(), [*inputs, *policy.parameters()])))
        assert (out[:, :, 2] == 0).all()
        assert (found[-1][1][:, :, 2] == 0).all()
    for clean, dirty in zip(*found, strict=True):
        torch.testing.assert_close(dirty, clean)
