"""The mistakes of public implementations (FORMULAS §2.3 in attnscale/policies/README.md), one test each."""

import math

import pytest
import torch
from oracle import additive, tensors
from torch import nn
from torch.nn import functional as F

from attnscale import (
    ArgumentError,
    LengthPolicy,
    MultiheadAttention,
    build_policy,
    convert,
    scaled_dot_product_attention,
)


class Seen(LengthPolicy):
    """β = 1, and remembers the n and positions it was called with."""

    name = "seen"

    def formula(self, n, position):
        self.n, self.position = n, position
        return torch.ones_like(n, dtype=torch.float32)


def seen(queries: int, keys: int, *, batch: int = 1, **rules):
    policy = Seen()
    q, k, v = tensors((batch, 1, queries, 4), (batch, 1, keys, 4))
    scaled_dot_product_attention(q, k, v, policy=policy, **rules)
    shape = (batch, 1, queries)
    return policy.n.expand(shape)[:, 0].tolist(), policy.position.expand(shape)[:, 0].tolist()


def test_n_is_not_taken_from_the_query_length():
    n, _ = seen(1, 1000, is_causal=True, cache_offset=999)
    assert n == [[1000]]
    n, _ = seen(1, 1000)
    assert n == [[1000]]


def test_n_does_not_count_left_padding():
    padding = torch.tensor([[True, True, False, False], [False] * 4])
    n, position = seen(4, 4, batch=2, is_causal=True, key_padding=padding)
    assert n == [[0, 0, 1, 2], [1, 2, 3, 4]] or n == [[1, 1, 1, 2], [1, 2, 3, 4]]  # rows without a key count as one
    assert position[0][2:] == [0, 1]
    assert position[1] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "where", [{"cache_offset": 5}, {"positions": torch.tensor([5])}, {"cache_offset": torch.tensor(5)}]
)
def test_n_is_not_the_allocated_length_of_a_static_cache(where):
    n, position = seen(1, 4096, is_causal=True, **where)
    assert n == [[6]]
    assert position == [[5]]


def test_packed_documents_do_not_share_one_count():
    n, position = seen(6, 6, is_causal=True, cu_seqlens=torch.tensor([0, 2, 6]))
    assert n == [[1, 2, 1, 2, 3, 4]]
    assert position == [[0, 1, 0, 1, 2, 3]]


def test_positions_of_the_first_sequence_are_not_used_for_all():
    positions = torch.tensor([[7], [2]])
    n, position = seen(1, 8, batch=2, is_causal=True, positions=positions)
    assert n == [[8], [3]]
    assert position == [[7], [2]]


@pytest.mark.parametrize("policy", ["log", {"name": "constant", "beta": 2.0}])
@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.float64).min, -1e4])
def test_a_masked_score_is_not_multiplied(policy, hidden):
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 4, 8))
    visible = torch.ones(4, 4, dtype=torch.bool).tril()
    expected = scaled_dot_product_attention(q, k, v, visible, policy=policy)
    out = scaled_dot_product_attention(q, k, v, additive(visible, hidden), policy=policy)
    torch.testing.assert_close(out, expected)
    assert torch.isfinite(out).all()


def test_a_bias_is_part_of_the_score_and_is_multiplied():
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 4, 8))
    bias = torch.randn(1, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.softmax(math.log(4) * (q @ k.mT / 8**0.5 + bias), -1) @ v
    for backend in ("sdpa", "reference"):
        out = scaled_dot_product_attention(q, k, v, bias, policy="log", backend=backend)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)  # β is fp32


@pytest.mark.parametrize(
    ("name", "floor_length", "first_step"),
    [("llama4", 8192, 8191), ("mistral", 8192, 8192), ("mistral", 16384, 16384)],
)
def test_pos_and_pos_plus_one_are_not_confused(name, floor_length, first_step):
    policy = build_policy(name, floor_length=floor_length)
    beta = policy(torch.arange(first_step - 1, first_step + 2) + 1)
    assert beta.tolist() == pytest.approx([1.0, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(2)], rel=1e-7)


def test_context_parallel_shards_do_not_count_locally():
    n, position = seen(4, 8, is_causal=True, positions=torch.tensor([4, 5, 6, 7]))
    assert n == [[5, 6, 7, 8]]
    assert position == [[4, 5, 6, 7]]
    n, _ = seen(4, 4, is_causal=True, visible=torch.tensor([5, 6, 7, 8]))
    assert n == [[5, 6, 7, 8]]


def test_k_is_never_scaled_so_cached_keys_stay_valid(monkeypatch):
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 4, 8))
    given = []
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, **_: given.append((q, k, v)) or torch.zeros_like(q)
    )
    scaled_dot_product_attention(q, k, v, is_causal=True, policy="log")
    assert given[0][1].data_ptr() == k.data_ptr()
    assert given[0][2].data_ptr() == v.data_ptr()
    assert not torch.equal(given[0][0], q)


def test_a_model_that_already_scales_is_not_scaled_twice():
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    convert(model, "log")
    with pytest.raises(ArgumentError, match="already converted"):
        convert(model, "log")
    assert isinstance(model.self_attn, MultiheadAttention)
