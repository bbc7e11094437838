"""With symbolic batch, heads and lengths, backed or not, every policy is one graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from catalogue import ARGUMENTS, build
from oracle import tensors
from torch import Tensor

from attnscale import build_policy, scaled_dot_product_attention

MASK = torch.ones(24, 24, dtype=torch.bool).tril(3)
BIAS = torch.where(MASK, 0.5, -torch.inf)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def check(function: Callable[..., object], *calls: tuple[Tensor, ...]) -> None:
    """One dynamic graph gives what eager gives."""
    graph = torch.compile(function, fullgraph=True, dynamic=True, backend="eager")
    for arguments in calls:
        torch.testing.assert_close(graph(*arguments), function(*arguments))


def inputs(batch: int = 2, heads: int = 4, queries: int = 24, keys: int = 24) -> tuple[Tensor, ...]:
    return tensors((batch, heads, queries, 16), (batch, heads, keys, 16), torch.float32)


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_every_policy_compiles_with_symbolic_shapes(name):
    policy = build(name)
    check(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, policy=policy), inputs(batch=3))


@pytest.mark.parametrize("name", ["log", "gap_adaptive"])
def test_masks_and_decoding_compile_with_symbolic_shapes(name):
    policy = build(name)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor) -> list[Tensor]:
        return [
            scaled_dot_product_attention(q, k, v, mask, policy=policy),
            scaled_dot_product_attention(q, k, v, bias, policy=policy),
            scaled_dot_product_attention(q[:, :, :1], k, v, policy=policy),
            scaled_dot_product_attention(q[:, :, :1], k, v, is_causal=True, cache_offset=k.shape[2] - 1, policy=policy),
        ]

    check(attend, (*inputs(3), MASK, BIAS))


def test_the_number_of_heads_may_change_where_the_policy_does_not_fix_it():
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    graph = torch.compile(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, policy="log"),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for heads in (4, 5, 7):
        q, k, v = inputs(heads=heads)
        torch.testing.assert_close(graph(q, k, v), scaled_dot_product_attention(q, k, v, is_causal=True, policy="log"))
    assert counter.frame_count == 1


def test_grouped_heads_compile_with_symbolic_shapes():
    q, k, v = tensors((2, 4, 24, 16), (2, 2, 24, 16), torch.float32)
    check(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, policy="log", enable_gqa=True), (q, k, v)
    )


@pytest.mark.parametrize("name", ["log", "per_head"])
def test_a_length_that_only_the_data_knows_compiles(name):
    policy = build(name)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, length: Tensor) -> list[Tensor]:
        keys = length.item()
        torch._check(keys >= 2)
        torch._check(keys <= k.shape[2])
        k, v = k[:, :, :keys], v[:, :, :keys]
        return [
            scaled_dot_product_attention(q[:, :, :1], k, v, policy=policy),
            scaled_dot_product_attention(q[:, :, :keys], k, v, is_causal=True, policy=policy),
            scaled_dot_product_attention(q[:, :, :keys], k, v, mask[:keys, :keys], policy=policy),
        ]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check(attend, *((*inputs(), MASK, torch.tensor(length)) for length in (17, 5)))


def test_a_batch_that_only_the_data_knows_compiles():
    policy = build_policy("log")

    def attend(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
        rows = chosen.nonzero()[:, 0]
        return scaled_dot_product_attention(q[rows], k[rows], v[rows], is_causal=True, policy=policy)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(attend, (*inputs(batch=4), torch.tensor([True, False, True, True])))
