"""torch's `causal_upper_left` and `causal_lower_right` masks hold no values: they are taken as the rules they are."""

import pytest
import torch
from oracle import tensors
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attnscale
from attnscale import attention_weights, attention_with_stats, scaled_dot_product_attention, visible_keys
from attnscale.errors import ArgumentError, ArgumentTypeError

BIASES = pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
SHAPES = pytest.mark.parametrize(("queries", "keys"), [(5, 5), (5, 9), (1, 6), (9, 5)])
pytestmark = pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs:UserWarning")


def written_out(bias, queries, keys):
    offset = keys - queries if bias is causal_lower_right else 0
    return torch.ones(queries, keys, dtype=torch.bool).tril(offset)


@BIASES
@SHAPES
@pytest.mark.parametrize("policy", ["constant", "log", "gap_adaptive"])
@pytest.mark.parametrize("backend", ["auto", "blockwise", "reference"])
def test_a_causal_bias_is_the_mask_it_stands_for(bias, queries, keys, policy, backend):
    q, k, v = tensors((2, 4, queries, 8), (2, 4, keys, 8))
    mask = written_out(bias, queries, keys)
    out = scaled_dot_product_attention(q, k, v, bias(queries, keys), policy=policy, backend=backend)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v, mask, policy=policy, backend=backend))
    output, stats = attention_with_stats(q, k, v, bias(queries, keys), policy=policy)
    same_output, same = attention_with_stats(q, k, v, mask, policy=policy)
    torch.testing.assert_close(output, same_output)
    for name in ("visible", "lse", "w_max", "entropy", "max_logit"):
        torch.testing.assert_close(getattr(stats, name), getattr(same, name))
    weights = attention_weights(q, k, attn_mask=bias(queries, keys), policy=policy)
    torch.testing.assert_close(weights, attention_weights(q, k, attn_mask=mask, policy=policy))


@BIASES
@SHAPES
def test_n_counts_what_a_causal_bias_shows(bias, queries, keys):
    n = visible_keys(queries, keys, attn_mask=bias(queries, keys))
    assert torch.equal(n[0, 0], written_out(bias, queries, keys).sum(-1))


@BIASES
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (5, 9), (1, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_constant_temperature_it_is_what_torch_makes_of_it(bias, queries, keys, dtype):
    q, k, v = tensors((2, 4, queries, 8), (2, 4, keys, 8), dtype)
    ours = scaled_dot_product_attention(q, k, v, bias(queries, keys))
    assert torch.equal(ours, F.scaled_dot_product_attention(q, k, v, bias(queries, keys)))


def test_positions_and_windows_follow_the_rule():
    q, k, v = tensors((1, 2, 3, 8), (1, 2, 9, 8))
    decoded = scaled_dot_product_attention(q, k, v, is_causal=True, cache_offset=6, window=4, policy="qwen")
    biased = scaled_dot_product_attention(q, k, v, causal_lower_right(3, 9), window=4, policy="qwen")
    torch.testing.assert_close(biased, decoded)


def test_beside_another_alignment_it_stays_a_mask():
    documents = torch.tensor([0, 0, 0, 1, 1, 1])
    n = visible_keys(3, 6, attn_mask=causal_lower_right(3, 6), document_ids=documents, cache_offset=3)
    assert n.tolist() == [[[1, 2, 3]]]


def test_dispatch_explains_it_and_errors_name_it():
    q, k, v = tensors((1, 2, 5, 8), (1, 2, 9, 8))
    assert attnscale.explain_dispatch(q, k, v, causal_lower_right(5, 9), policy="log").chosen == "sdpa"
    with pytest.raises(ArgumentError, match=r"causal bias of \[4, 9\].*expected \[5, 9\]"):
        scaled_dot_product_attention(q, k, v, causal_upper_left(4, 9))
    with pytest.raises(
        ArgumentError,
        match=r"is_causal=True is not accepted: expected False with a causal bias.*CausalBias should not be used",
    ):
        scaled_dot_product_attention(q, k, v, causal_upper_left(5, 9), is_causal=True)
    module = attnscale.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(1, 5, 16)
    with pytest.raises(ArgumentTypeError, match="attn_mask"):
        module(x, x, x, attn_mask=causal_upper_left(5, 5))
