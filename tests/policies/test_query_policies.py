"""Policies that read the row's query: the released formulas, restated, and the contracts of `QueryPolicy`."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from catalogue import BY_QUERY, started
from torch import Tensor, nn
from torch.nn import functional as F

import attnscale
from attnscale import ArgumentError, QueryPolicy, build_policy, scaled_dot_product_attention
from attnscale.policies.learned import ASEntmax

HEADS, DIM, ROWS = 4, 16, 6
query_policies = pytest.mark.parametrize("name", BY_QUERY)


def queries(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def exact(name: str) -> QueryPolicy:
    return started(name).double()


def assert_same_numbers(found: Tensor, expected: Tensor) -> None:
    """Equal up to the order of additions in fp64."""
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-15)


def moondream_tau(qkv: Tensor, wq: Tensor, alpha: Tensor, position: Tensor) -> Tensor:
    """The factor of q in Moondream 3 [B, H, T]: projections [B, T, 3·H·D], weight [H, 3·H·D], α [H], positions [T]."""
    token = torch.tanh(F.gelu(qkv) @ wq.T).transpose(1, 2)
    by_position = 1 + (torch.sigmoid(alpha[:, None] * (position.to(qkv.dtype) + 1).log()) - 0.5)
    return token + by_position


def test_moondream_is_the_released_formula_with_the_weights_of_the_own_query() -> None:
    policy, q = exact("moondream"), queries(2, HEADS, ROWS, DIM)
    others = queries(2, ROWS, 2 * HEADS * DIM, seed=1)
    weight = torch.zeros(HEADS, 3 * HEADS * DIM, dtype=torch.float64)
    for head in range(HEADS):
        weight[head, head * DIM : (head + 1) * DIM] = policy.w[head].detach()
    qkv = torch.cat([q.transpose(1, 2).flatten(2), others], dim=-1)
    position = torch.tensor([0, 1, 7, 2047, 8192, 130_000])
    expected = moondream_tau(qkv, weight, policy.alpha.detach(), position)
    assert_same_numbers(policy(position + 1, positions=position, query=q).detach(), expected)


def test_selective_is_the_formula_of_its_paper() -> None:
    policy, q, n = exact("selective"), queries(2, HEADS, ROWS, DIM), torch.tensor([1, 2, 8, 2048, 8193, 130_001])
    token = torch.stack([torch.tanh(F.gelu(q[:, h]) @ policy.w[h]) for h in range(HEADS)], 1)
    by_length = 1 + policy.alpha.sigmoid()[:, None] * torch.log(n.double())
    assert_same_numbers(policy(n, query=q).detach(), (token + by_length).detach())


@pytest.mark.parametrize("b", [1.5, 2.0])
def test_selective_without_the_token_term_is_the_released_code(b: float) -> None:
    policy = build_policy("selective", num_heads=2, head_dim=4, strength=math.exp(-math.exp(b))).double()
    policy.reset_parameters()
    row_length = torch.arange(1, 1025, dtype=torch.float64)
    released = 1 + torch.exp(-torch.exp(torch.tensor(b, dtype=torch.float64))) * torch.log(row_length)
    found = policy(torch.arange(1, 1025), query=queries(1, 2, 1024, 4))
    torch.testing.assert_close(found.detach(), released.expand(1, 2, -1), rtol=1e-15, atol=2e-15)


def test_the_default_strength_of_selective_is_that_of_the_released_code() -> None:
    assert build_policy("selective", num_heads=1, head_dim=2).strength == math.exp(-math.exp(2.0))


@pytest.mark.parametrize("n", [1, 2, 1000, 100_000])
def test_qassmax_is_the_released_formula(n: int) -> None:
    policy, q = exact("qassmax"), queries(2, HEADS, ROWS, DIM)
    base = nn.Sequential(nn.Linear(1, 64), nn.GELU(), nn.Linear(64, HEADS)).double()
    gate = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, 1)).double()
    base.load_state_dict({
        "0.weight": policy.base_in, "0.bias": policy.base_in_bias,
        "2.weight": policy.base_out, "2.bias": policy.base_out_bias,
    })  # fmt: skip
    gate.load_state_dict({
        "0.weight": policy.gate_in, "0.bias": policy.gate_in_bias,
        "2.weight": policy.gate_out, "2.bias": policy.gate_out_bias,
    })  # fmt: skip
    length = torch.tensor([[math.log(max(1, n))]], dtype=torch.float64)
    scaled = q * base(length).view(1, HEADS, 1, 1) * (1 + torch.tanh(gate(q)))
    beta = policy(torch.full((ROWS,), n), query=q)
    torch.testing.assert_close(q * beta[..., None], scaled, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("shape", [(), (ROWS,), (1, ROWS), (2, 1, ROWS), (2, HEADS, ROWS), (1, 1, 1)])
@query_policies
def test_lengths_of_every_shape_broadcast(name: str, shape: tuple[int, ...]) -> None:
    policy, q = exact(name), queries(2, HEADS, ROWS, DIM)
    n = torch.randint(1, 5000, shape, generator=torch.Generator().manual_seed(2))
    found = policy(n, query=q)
    assert found.shape == (2, HEADS, ROWS)
    whole = n.expand(2, HEADS, ROWS)
    for head in range(HEADS):
        for row in range(ROWS):
            one = policy(whole[1, head, row].reshape(1), query=q[1:, :, row : row + 1])
            torch.testing.assert_close(found[1, head, row], one[0, head, 0], rtol=1e-13, atol=1e-14)


@query_policies
def test_gradients_reach_the_parameters_and_the_query(name: str) -> None:
    policy, q = exact(name), queries(1, HEADS, 3, DIM).requires_grad_()
    k, v = queries(1, HEADS, 5, DIM, seed=1), queries(1, HEADS, 5, DIM, seed=2)
    names = [parameter for parameter, _ in policy.named_parameters()]
    values = [parameter.detach().clone().requires_grad_() for parameter in policy.parameters()]
    weight = queries(1, HEADS, 3, DIM, seed=3)
    mask = torch.arange(5) < torch.tensor([[3], [4], [5]])
    beta = torch.func.functional_call(
        policy, dict(zip(names, values, strict=True)), (torch.tensor([3, 4, 5]),), {"query": q}
    )
    scores = beta[..., None] * (q @ k.transpose(-1, -2)) / math.sqrt(DIM)
    plain = torch.softmax(scores.masked_fill(~mask, -math.inf), -1) @ v
    expected = torch.autograd.grad((plain * weight).sum(), [q, *values])
    for backend in ("reference", "blockwise", "sdpa"):
        out = scaled_dot_product_attention(q, k, v, mask, policy=policy, backend=backend)
        found = torch.autograd.grad((out * weight).sum(), [q, *policy.parameters()])
        torch.testing.assert_close(out, plain, rtol=1e-12, atol=1e-13)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


@query_policies
def test_a_row_depends_on_no_other_row_and_on_no_key(name: str) -> None:
    policy, q = exact(name), queries(2, HEADS, ROWS, DIM)
    k = queries(2, HEADS, ROWS, DIM, seed=1)
    one = scaled_dot_product_attention(q, k, k, is_causal=True, policy=policy)
    q[:, :, 4:], k[:, :, 4:] = q[:, :, 4:] * 3, k[:, :, 4:] - 1
    other = scaled_dot_product_attention(q, k, k, is_causal=True, policy=policy)
    assert torch.equal(one[:, :, :4], other[:, :, :4])
    assert not torch.equal(one[:, :, 4:], other[:, :, 4:])


@pytest.mark.parametrize("backend", ["sdpa", "blockwise"])
def test_a_negative_temperature_is_a_temperature(backend: str) -> None:
    policy = build_policy("moondream", num_heads=2, head_dim=4).double()
    with torch.no_grad():
        policy.w.fill_(-5.0)
        policy.alpha.fill_(-5.0)
    q, k = queries(1, 2, 8, 4).abs(), queries(1, 2, 8, 4, seed=1)
    assert (policy(torch.arange(1, 9), query=q)[..., 2:] < 0).all()
    found = scaled_dot_product_attention(q, k, k, is_causal=True, policy=policy, backend=backend)
    true = scaled_dot_product_attention(q, k, k, is_causal=True, policy=policy, backend="reference")
    torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-13)


def test_initial_values_leave_pretrained_attention_alone() -> None:
    q = queries(1, 2, 8, 4)
    for name in ("moondream", "qassmax"):
        policy = build_policy(name, num_heads=2, head_dim=4)
        assert torch.equal(policy(torch.arange(1, 9), query=q), torch.ones(1, 2, 8))


def test_qassmax_starts_alike_everywhere_and_takes_no_random_numbers() -> None:
    torch.manual_seed(0)
    first = build_policy("qassmax", num_heads=2, head_dim=4)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(1), drawn)
    second = build_policy("qassmax", num_heads=2, head_dim=4)
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
    assert first.gate_in.unique().numel() == first.gate_in.numel()


def test_a_state_dict_of_asentmax_has_the_names_of_earlier_versions() -> None:
    policy = build_policy("asentmax", num_heads=2, head_dim=4)
    assert isinstance(policy, QueryPolicy)
    assert {name: tuple(x.shape) for name, x in policy.state_dict().items()} == {"w_beta": (2, 4), "w_gamma": (2, 4)}
    assert policy.to_dict() == {"name": "asentmax", "num_heads": 2, "head_dim": 4, "delta": 1.0}
    # A pickled policy names its class by this path.
    assert f"{ASEntmax.__module__}.{ASEntmax.__qualname__}" == "attnscale.policies.learned.ASEntmax"
    assert torch.equal(pickle.loads(pickle.dumps(policy)).w_beta, policy.w_beta)


@query_policies
def test_wrong_queries_and_lengths_are_refused(name: str) -> None:
    policy = build_policy(name, num_heads=2, head_dim=4)
    with pytest.raises(TypeError, match=r"query=None .* \[B, H, Tq, D\]"):
        policy(5)
    with pytest.raises(ArgumentError, match=rf"\[1, 3, 5, 4\] .* \[B, 2, Tq, 4\], the heads of this {name} policy"):
        policy(5, query=torch.zeros(1, 3, 5, 4))
    with pytest.raises(ArgumentError, match=r"n or positions=\[3\]"):
        policy(torch.tensor([1, 2, 3]), query=torch.zeros(1, 2, 5, 4))
    with pytest.raises(ArgumentError, match=r"n or positions=\[3\]"):
        policy(torch.ones(5, dtype=torch.int64), positions=torch.arange(3), query=torch.zeros(1, 2, 5, 4))


def test_a_user_defined_query_policy_works_in_attention_and_its_modules() -> None:
    class Norm(QueryPolicy):
        name = "norm"

        def from_query(self, q: Tensor, n: Tensor, position: Tensor) -> Tensor:
            return q.norm(dim=-1) / torch.log1p(n.to(q.dtype))

    policy, q = Norm(num_heads=2, head_dim=4), queries(1, 2, 6, 4)
    beta = (q.norm(dim=-1) / torch.log1p(torch.arange(1, 7).double())).float().double()
    expected = scaled_dot_product_attention(q * beta[..., None], q, q, is_causal=True)
    found = attnscale.ScaledDotProductAttention(policy)(q, q, q, is_causal=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
