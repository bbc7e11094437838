"""Contract 1 (attnscale/README.md): constant β = 1 is standard attention, in values and gradients."""

import itertools

import pytest
import torch
from oracle import additive, assert_within_budget, differentiate, exact, tensors, torch_error, visibility
from torch.nn import functional as F

from attnscale import ScaledDotProductAttention, scaled_dot_product_attention

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [1, 2, 63, 129, 521]  # the last is beyond a block of torch's kernel, 512 keys


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_plain_calls_are_torchs_to_the_bit(dtype, length, causal, kv_heads):
    q, k, v = tensors((2, 4, length, 16), (2, kv_heads, length, 16), dtype)
    kwargs = {"is_causal": causal, "enable_gqa": kv_heads != 4}
    ours = differentiate(lambda *qkv: scaled_dot_product_attention(*qkv, policy="constant", **kwargs), q, k, v)
    torchs = differentiate(lambda *qkv: F.scaled_dot_product_attention(*qkv, **kwargs), q, k, v)
    assert all(torch.equal(ours[name], torchs[name]) for name in torchs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("mask", "window", "kv_heads"), list(itertools.product(["none", "bool", "float"], [None, 5], [4, 2]))
)
def test_masks_windows_and_groups_agree_with_a_mask_written_out(dtype, length, mask, window, kv_heads):
    batch = 1 if length > 512 else 2
    q, k, v = tensors((batch, 4, length, 16), (batch, kv_heads, length, 16), dtype)
    visible = visibility(length, length, causal=True, window=window)
    kwargs = {"is_causal": True, "window": window, "enable_gqa": kv_heads != 4}
    if mask != "none":
        holes = torch.rand(batch, 1, length, length, generator=torch.Generator().manual_seed(1)) > 0.3
        holes[:, :, length // 2] = False  # a row that sees nothing
        visible = visible & holes
        kwargs["attn_mask"] = holes if mask == "bool" else additive(holes).to(dtype)
    ours = differentiate(lambda *qkv: scaled_dot_product_attention(*qkv, **kwargs), q, k, v)
    own = torch_error(q, k, v, 1.0, visible, gqa=kv_heads != 4)
    assert_within_budget(ours, exact(q, k, v, attn_mask=visible, enable_gqa=kv_heads != 4), own, times=2)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("kind", ["bool", "float", "padding"])
@pytest.mark.parametrize("policy", ["constant", "log"])
def test_a_row_that_sees_nothing_gives_zeros_and_zero_gradient(backend, kind, policy):
    q, k, v = tensors((2, 2, 6, 8), (2, 2, 6, 8))
    visible = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    visible[1] = False
    kwargs = {
        "bool": {"attn_mask": visible},
        "float": {"attn_mask": additive(visible)},
        "padding": {"key_padding": ~visible[:, 0, 0]},
    }[kind]
    result = differentiate(
        lambda *qkv: scaled_dot_product_attention(*qkv, policy=policy, backend=backend, **kwargs), q, k, v
    )
    for value in result.values():
        assert torch.isfinite(value).all()
        assert (value[1] == 0).all()
        assert (value[0] != 0).any()


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3), (2, 1, 2, 3)])
@pytest.mark.parametrize("policy", ["constant", "log"])
def test_any_number_of_leading_dimensions_is_accepted(lead, policy):
    q, k, v = tensors((*lead, 5, 8), (*lead, 7, 8))
    out = scaled_dot_product_attention(q, k, v, policy=policy)
    flat = scaled_dot_product_attention(*(x.reshape(-1, 1, *x.shape[-2:]) for x in (q, k, v)), policy=policy)
    assert out.shape == (*lead, 5, 8)
    torch.testing.assert_close(out, flat.reshape(out.shape))


def test_per_sequence_rules_follow_extra_batch_dimensions():
    q, k, v = tensors((2, 3, 4, 5, 8), (2, 3, 4, 5, 8))
    padding = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(2)) > 0.6
    padding[..., 0] = False
    out = scaled_dot_product_attention(q, k, v, policy="log", key_padding=padding)
    for i, j in itertools.product(range(2), range(3)):
        alone = scaled_dot_product_attention(q[i, j], k[i, j], v[i, j], policy="log", key_padding=padding[i, j])
        torch.testing.assert_close(out[i, j], alone)


def test_a_query_head_may_share_keys_in_three_dimensions_too():
    q, k, v = tensors((4, 5, 8), (2, 5, 8))
    out = scaled_dot_product_attention(q, k, v, enable_gqa=True, policy="log")
    whole = scaled_dot_product_attention(q[None], k[None], v[None], enable_gqa=True, policy="log")
    torch.testing.assert_close(out, whole[0])


def test_scale_and_dropout_mean_what_they_mean_in_torch():
    q, k, v = tensors((1, 2, 6, 8), (1, 2, 6, 8))
    doubled = scaled_dot_product_attention(q, k, v, scale=0.5, policy="constant")
    torch.testing.assert_close(doubled, F.scaled_dot_product_attention(q, k, v, scale=0.5))
    beta = scaled_dot_product_attention(q, k, v, scale=0.5, policy={"name": "constant", "beta": 2.0})
    torch.testing.assert_close(beta, F.scaled_dot_product_attention(q, k, v, scale=1.0))
    for backend in ("sdpa", "reference"):
        dropped = scaled_dot_product_attention(q, k, v, dropout_p=1.0, policy="log", backend=backend)
        assert (dropped == 0).all()


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_dropout_keeps_the_mean(backend):
    torch.manual_seed(0)
    q, k, _ = tensors((1, 1, 4, 8), (1, 1, 64, 8))
    ones = torch.ones(1, 1, 64, 512, dtype=torch.float64)
    out = scaled_dot_product_attention(q, k, ones[..., :1].expand(-1, -1, -1, 8), dropout_p=0.5, backend=backend)
    runs = torch.stack(
        [
            scaled_dot_product_attention(q, k, ones[..., :8], dropout_p=0.5, policy="log", backend=backend)
            for _ in range(400)
        ]
    )
    assert (out != 1).any()
    assert (runs.mean(0) - 1).abs().max() < 0.15


def test_the_module_has_torchs_positional_signature():
    q, k, v = tensors((1, 4, 6, 8), (1, 2, 6, 8))
    module = ScaledDotProductAttention("constant")
    out = module(q, k, v, None, 0.0, True, 0.3, True)
    torch.testing.assert_close(
        out, F.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.3, enable_gqa=True)
    )


def test_top_left_alignment_is_torchs_when_lengths_differ():
    for queries, keys in ((3, 7), (7, 3)):
        q, k, v = tensors((1, 2, queries, 8), (1, 2, keys, 8))
        ours = scaled_dot_product_attention(q, k, v, is_causal=True, policy={"name": "constant", "beta": 2.0})
        torchs = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=2.0 / 8**0.5)
        torch.testing.assert_close(ours, torchs)


def test_no_key_at_all_gives_zeros():
    q, k, v = tensors((1, 2, 3, 8), (1, 2, 0, 8))
    for backend in ("sdpa", "reference"):
        assert (scaled_dot_product_attention(q, k, v, policy="log", backend=backend) == 0).all()
