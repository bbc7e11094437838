"""Contract 10 (attnscale/README.md): the hot path compiles without a graph break, and follows changing lengths."""

import pytest
import torch
from catalogue import ARGUMENTS, build
from oracle import differentiate, tensors

from attnscale import ScaledDotProductAttention, scaled_dot_product_attention

RULES = {
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 5},
    "padding": {"is_causal": True, "key_padding": torch.arange(24) < 3},
    "documents": {"is_causal": True, "cu_seqlens": torch.tensor([0, 10, 24])},
    "mask": {"attn_mask": torch.ones(24, 24, dtype=torch.bool).tril(3)},
    "bias": {"attn_mask": torch.linspace(-1, 1, 24)},
    "positions": {"is_causal": True, "positions": torch.arange(24)},
    "cache": {"is_causal": True, "cache_offset": 0},
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(**kwargs):
    def attend(q, k, v):
        return scaled_dot_product_attention(q, k, v, **kwargs)

    return attend, torch.compile(attend, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_compiles_to_one_graph(rule):
    q, k, v = tensors((2, 4, 24, 16), (2, 4, 24, 16), torch.float32)
    eager, graph = compiled(policy="log", **RULES[rule])
    expected, got = differentiate(eager, q, k, v), differentiate(graph, q, k, v)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name])


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_every_policy_compiles_to_one_graph(name):
    q, k, v = tensors((2, 4, 24, 16), (2, 4, 24, 16), torch.float32)
    eager, graph = compiled(policy=build(name), is_causal=True)
    torch.testing.assert_close(graph(q, k, v), eager(q, k, v))


@pytest.mark.parametrize(
    ("dtype", "rule"),
    [(torch.float16, "causal"), (torch.bfloat16, "causal"), (torch.float32, "causal"), (torch.float32, "documents")],
    ids=str,
)
def test_inductor_agrees(dtype, rule):
    q, k, v = tensors((1, 4, 24, 16), (1, 2, 24, 16), dtype)
    kwargs = {"policy": "log", "enable_gqa": True, **RULES[rule]}
    graph = torch.compile(lambda q, k, v: scaled_dot_product_attention(q, k, v, **kwargs), fullgraph=True)
    torch.testing.assert_close(graph(q, k, v), scaled_dot_product_attention(q, k, v, **kwargs))


def test_growing_lengths_are_one_dynamic_graph():
    module = ScaledDotProductAttention("log")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    graph = torch.compile(lambda q, k, v: module(q, k, v, is_causal=True), fullgraph=True, backend=counter)
    for length in (16, 17, 23, 31, 40):
        q, k, v = tensors((1, 2, length, 8), (1, 2, length, 8), torch.float32)
        torch.testing.assert_close(graph(q, k, v), module(q, k, v, is_causal=True))
    assert counter.frame_count <= 2  # one for the first length, one for all others


def test_decoding_into_a_static_cache_is_one_graph():
    module = ScaledDotProductAttention("log")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    q, k, v = tensors((2, 2, 40, 8), (2, 2, 40, 8), torch.float32)
    whole = module(q, k, v, is_causal=True)

    def step(q, k, v, offset):
        return module(q, k, v, is_causal=True, cache_offset=offset)

    graph = torch.compile(step, fullgraph=True, backend=counter)
    for t in range(40):
        token = graph(q[:, :, t : t + 1].clone(), k, v, torch.tensor([t, t]))
        torch.testing.assert_close(token[:, :, 0], whole[:, :, t])
    assert counter.frame_count == 1
