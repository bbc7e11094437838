"""β is cached for plain calls, and never if it may have changed."""

import pytest
import torch
from catalogue import ARGUMENTS, build
from oracle import tensors

from attnscale import LengthPolicy, build_policy, scaled_dot_product_attention
from attnscale._util import state


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
@pytest.mark.parametrize("causal", [False, True])
def test_plain_calls_equal_the_same_call_with_its_rules_spelt_out(name, causal):
    q, k, v = tensors((2, 4, 9, 16), (2, 4, 12, 16))
    policy = build(name)
    for _ in range(2):
        plain = scaled_dot_product_attention(q, k, v, is_causal=causal, policy=policy)
        spelt = scaled_dot_product_attention(q, k, v, is_causal=causal, policy=policy, cache_offset=0)
        torch.testing.assert_close(plain, spelt, rtol=1e-12, atol=1e-12)


def test_a_policy_with_a_state_of_its_own_is_asked_each_time():
    class Annealed(LengthPolicy):
        name = "annealed"
        step = 0

        def formula(self, n, position):
            self.step += 1
            return torch.full_like(n, self.step, dtype=torch.float32)

    q, k, v = tensors((1, 2, 9, 8), (1, 2, 9, 8))
    policy = Annealed()
    policy.step = 0
    outputs = [scaled_dot_product_attention(q, k, v, is_causal=True, policy=policy) for _ in range(3)]
    assert policy.step == 3
    assert not torch.equal(outputs[0], outputs[1])


def test_memory_is_bounded():
    for length in range(2, 80):
        q, k, v = tensors((1, 1, length, 8), (1, 1, length, 8))
        scaled_dot_product_attention(q, k, v, is_causal=True, policy=build_policy("log", gamma=length / 8))
    assert len(state.BETAS) <= 64


@pytest.mark.parametrize("rows", [1, 9], ids=["decoding", "prefill"])
@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_a_learned_policy_is_evaluated_once_per_call(monkeypatch, rows, grad, num_heads):
    policy = build_policy("ssmax", num_heads=num_heads)
    evaluated = []
    formula = type(policy).formula
    monkeypatch.setattr(type(policy), "formula", lambda *a: evaluated.append(1) or formula(*a))
    q, k, v = tensors((1, num_heads, rows, 8), (1, num_heads, 9, 8))
    with torch.set_grad_enabled(grad):
        scaled_dot_product_attention(q, k, v, is_causal=rows > 1, policy=policy)
    assert len(evaluated) == 1


def test_one_row_of_one_learned_head_is_scaled_without_rounding():
    policy = build_policy("ssmax", num_heads=1, init=0.3)
    q, k, v = (x.to(torch.bfloat16) for x in tensors((1, 1, 1, 8), (1, 1, 9, 8)))
    with torch.no_grad():
        produced = scaled_dot_product_attention(q, k, v, policy=policy)
        beta = float(policy(9))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=beta / 8**0.5)
    assert torch.equal(produced, expected)
