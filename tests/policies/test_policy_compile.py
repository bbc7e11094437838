"""Every policy in one graph, under no_grad and on the meta device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from catalogue import BY_LENGTH, FIXED, LEARNED, build, temperature
from torch import Tensor

from attnscale.policies import Policy

# One row, every threshold of a preset, and a length beyond int32 arithmetic.
N = torch.tensor([[[0, 1, 2, 1024, 1025, 1026]], [[8191, 8192, 8193, 16_385, 128_001, 2**33]]])  # [B, 1, Tq]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    # All policies share `LengthPolicy.forward`, and dynamo counts recompilations per code object.
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(policy: Policy, **options: object) -> Policy:
    return torch.compile(policy, fullgraph=True, backend="aot_eager", **options)


def query_for(policy: Policy, n: Tensor) -> Tensor | None:
    if not policy.needs_query:
        return None
    return torch.linspace(-1, 1, 2 * 4 * n.shape[-1] * 16).reshape(2, 4, n.shape[-1], 16)


@pytest.mark.parametrize("name", BY_LENGTH)
def test_the_compiled_policy_is_the_eager_one_in_a_single_graph(name: str) -> None:
    policy = build(name)
    query = query_for(policy, N)
    assert torch.equal(compiled(policy)(N, query=query), policy(N, query=query))


@pytest.mark.parametrize("name", FIXED)
def test_the_compiled_policy_takes_positions(name: str) -> None:
    policy = build(name)
    n = N.clamp(max=700)
    assert torch.equal(compiled(policy)(n, positions=N), policy(n, positions=N))


@pytest.mark.parametrize("name", LEARNED)
def test_the_compiled_policy_has_the_eager_gradients(name: str) -> None:
    policy = build(name)
    query = query_for(policy, N)
    parameters = tuple(policy.parameters())
    eager = torch.autograd.grad(policy(N, query=query).square().sum(), parameters)
    fused = torch.autograd.grad(compiled(policy)(N, query=query).square().sum(), parameters)
    for ours, theirs in zip(fused, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["log", "mistral", "yarn", "ssmax"])
def test_one_dynamic_graph_serves_every_number_of_rows(name: str) -> None:
    policy = build(name)
    dynamic = compiled(policy, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (5, 17, 64):
            n = torch.arange(1, 1 + rows) * 1000
            assert torch.equal(dynamic(n), policy(n))


@pytest.mark.parametrize("name", ["log", "llama4", "ssmax"])
def test_an_int_length_compiles_too(name: str) -> None:
    policy = build(name)
    decode = compiled(policy)
    for n in (1, 8191, 8192, 8193):
        assert torch.equal(decode(n), policy(n))


@pytest.mark.parametrize("name", BY_LENGTH)
def test_a_policy_is_the_same_under_no_grad(name: str) -> None:
    n = N[:1]
    usual = temperature(build(name), n)
    with torch.no_grad():
        policy = build(name)
        beta = temperature(policy, n)
    assert torch.equal(beta, usual.detach())
    assert not beta.requires_grad
    assert all(parameter.requires_grad for parameter in policy.parameters())


@pytest.mark.parametrize("name", FIXED)
def test_a_policy_without_parameters_built_on_meta_is_the_usual_one(name: str) -> None:
    with torch.device("meta"):
        policy = build(name)
        inside = policy(9000)
    usual = build(name)
    assert inside.item() == usual(9000).item()
    assert policy.longest_beta() == usual.longest_beta()
    assert torch.equal(policy(N), usual(N))
