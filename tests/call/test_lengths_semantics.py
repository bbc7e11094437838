"""Contract 2 (attnscale/README.md): n is what the row may see.

Every way to arrive at a token gives it the same β and the same output.
"""

import pytest
import torch
from catalogue import ADAPTIVE, ARGUMENTS
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import additive, tensors, visibility

from attnscale import LengthPolicy, build_policy, scaled_dot_product_attention, visible_keys

# Thresholds so low that every policy changes within the forty tokens of these tests.
SHORT = ARGUMENTS | {
    "qwen": {"reference_length": 4},
    "llama4": {"floor_length": 8},
    "mistral": {"floor_length": 8},
    "grok2": {"threshold": 4},
    "inkling": {"floor_length": 8},
    "hypenet": {"a": 5},
    "swan": {"a": 5},
    "ssmax": {"num_heads": 4, "reference_length": 4},
    "beam": {"reference_length": 4, "exponent": 0.5},
    "dual_chunk": {"original_length": 4, "coefficient": 0.5},
}
TOKENS = 40


class Recorder(LengthPolicy):
    """β = 1 + n/100 + position/10000, and remembers what it was called with."""

    name = "recorder"

    def formula(self, n, position):
        self.n, self.position = n, position
        return 1 + n / 100 + position / 10_000


def policy_for(name: str):
    policy = build_policy(name, **SHORT[name])
    for index, parameter in enumerate(policy.parameters()):
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(index))
    return policy


@pytest.fixture(params=sorted(SHORT))
def policy(request):
    return policy_for(request.param)


def assert_same(got, expected, policy):
    # β is fp32. Where it comes from a product with the query, another shape of that product may round it differently.
    tolerance = 1e-5 if policy.needs_query or policy.name in ADAPTIVE else 1e-10
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def sequence(batch: int = 2, tokens: int = TOKENS):
    return tensors((batch, 4, tokens, 16), (batch, 2, tokens, 16), seed=3)


def attend(q, k, v, **kwargs):
    return scaled_dot_product_attention(q, k, v, enable_gqa=True, **kwargs)


@pytest.mark.parametrize("window", [None, 7])
def test_prefill_equals_token_by_token_decoding(policy, window):
    q, k, v = sequence()
    whole = attend(q, k, v, is_causal=True, policy=policy, window=window)
    for t in range(TOKENS):
        token = attend(
            q[:, :, t : t + 1],
            k[:, :, : t + 1],
            v[:, :, : t + 1],
            is_causal=True,
            policy=policy,
            window=window,
            cache_offset=t,
        )
        assert_same(token[:, :, 0], whole[:, :, t], policy)


@pytest.mark.parametrize("chunk", [3, 16])
@pytest.mark.parametrize("say", ["offset", "tensor offset", "positions"])
def test_prefill_equals_chunked_prefill_into_an_allocated_cache(policy, chunk, say):
    q, k, v = sequence()
    whole = attend(q, k, v, is_causal=True, policy=policy)
    cache_k, cache_v = (torch.full((2, 2, TOKENS + 9, 16), 1e3, dtype=torch.float64) for _ in range(2))
    for start in range(0, TOKENS, chunk):
        part = slice(start, min(start + chunk, TOKENS))
        cache_k[:, :, part], cache_v[:, :, part] = k[:, :, part], v[:, :, part]
        where = {
            "offset": {"cache_offset": start},
            "tensor offset": {"cache_offset": torch.tensor([start, start])},
            "positions": {"positions": torch.arange(part.start, part.stop)},
        }[say]
        out = attend(q[:, :, part], cache_k, cache_v, is_causal=True, policy=policy, **where)
        assert_same(out, whole[:, :, part], policy)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("say", ["key_padding", "bool mask", "float mask", "finite mask", "positions"])
@pytest.mark.parametrize("window", [None, 7])
def test_padding_on_either_side_changes_nothing(policy, side, say, window):
    q, k, v = sequence(batch=1)
    alone = attend(q, k, v, is_causal=True, policy=policy, window=window)
    pad = (0, 0, 6, 0) if side == "left" else (0, 0, 0, 6)
    q, k, v = (torch.nn.functional.pad(x, pad, value=7.0) for x in (q, k, v))
    real = torch.nn.functional.pad(torch.ones(1, TOKENS, dtype=torch.bool), pad[2:])
    rule = {
        "key_padding": {"key_padding": ~real},
        "bool mask": {"attn_mask": real[:, None, None]},
        "float mask": {"attn_mask": additive(real)[:, None, None]},
        "finite mask": {"attn_mask": additive(real, torch.finfo(torch.float32).min)[:, None, None]},
        "positions": {"key_padding": ~real, "positions": (real.cumsum(-1) - 1).clamp(min=0)},
    }[say]
    padded = attend(q, k, v, is_causal=True, policy=policy, window=window, **rule)
    assert_same(padded[:, :, real[0]], alone, policy)


@pytest.mark.parametrize("say", ["cu_seqlens", "document_ids", "mask"])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 4), (False, None)])
def test_packed_documents_equal_separate_ones(policy, say, causal, window):
    q, k, v = sequence(batch=1)
    lengths = [1, 2, 20, 17]
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    documents = tuple(torch.bucketize(torch.arange(TOKENS), edges[1:], right=True).tolist())
    # What counts is a run of equal ids, not the number: the first and the last document share theirs.
    ids = torch.tensor([3, 4, 9, 3])[list(documents)]
    rule = {
        "cu_seqlens": {"cu_seqlens": edges},
        "document_ids": {"document_ids": ids},
        "mask": {"attn_mask": visibility(TOKENS, TOKENS, documents=documents)},
    }[say]
    packed = attend(q, k, v, is_causal=causal, window=window, policy=policy, **rule)
    for start, length in zip(edges[:-1].tolist(), lengths, strict=True):
        part = slice(start, start + length)
        alone = attend(q[:, :, part], k[:, :, part], v[:, :, part], is_causal=causal, window=window, policy=policy)
        assert_same(packed[:, :, part], alone, policy)


def test_differently_packed_queries_are_the_last_tokens_of_their_documents(policy):
    q, k, v = sequence(batch=1)
    whole = attend(q, k, v, is_causal=True, policy=policy, cu_seqlens=torch.tensor([0, 15, 40]))
    last = torch.cat([torch.arange(12, 15), torch.arange(35, 40)])
    edges = (torch.tensor([0, 3, 8]), torch.tensor([0, 15, 40]))
    out = attend(q[:, :, last], k, v, is_causal=True, policy=policy, cu_seqlens=edges)
    assert_same(out, whole[:, :, last], policy)


def test_context_parallel_shards_equal_the_whole(policy):
    q, k, v = sequence()
    whole = attend(q, k, v, is_causal=True, policy=policy)
    for shard in (torch.arange(0, 10), torch.cat([torch.arange(10, 15), torch.arange(30, 35)])):
        out = attend(q[:, :, shard], k, v, is_causal=True, policy=policy, positions=shard)
        assert_same(out, whole[:, :, shard], policy)


def test_every_policy_and_its_gradients_are_finite_with_one_and_two_keys(policy):
    for keys in (1, 2):
        q, k, v = (x.requires_grad_() for x in tensors((1, 4, 3, 16), (1, 2, keys, 16)))
        out = attend(q, k, v, policy=policy, key_padding=torch.tensor([False, True][:keys]))
        out.square().sum().backward()
        assert torch.isfinite(out).all()
        assert all(torch.isfinite(x.grad).all() for x in (q, k, v, *policy.parameters()))


def test_a_sliding_window_saturates_n_but_not_the_position():
    recorder = Recorder()
    q, k, v = sequence()
    attend(q, k, v, is_causal=True, window=7, policy=recorder)
    assert recorder.n.flatten().tolist() == [min(t + 1, 7) for t in range(TOKENS)]
    assert recorder.position.flatten().tolist() == list(range(TOKENS))


def test_a_rolling_cache_keeps_the_position_that_is_given():
    recorder = Recorder()
    q, k, v = sequence()
    attend(
        q[:, :, :1],
        k[:, :, :7],
        v[:, :, :7],
        is_causal=True,
        window=7,
        cache_offset=6,
        policy=recorder,
        positions=torch.tensor([5000]),
    )
    assert (recorder.n.item(), recorder.position.item()) == (7, 5000)


def test_a_mask_per_head_gives_n_per_head():
    mask = torch.zeros(1, 4, 3, 5, dtype=torch.bool)
    for head in range(4):
        mask[:, head, :, : head + 1] = True
    assert visible_keys(3, 5, heads=4, attn_mask=mask)[0, :, 0].tolist() == [1, 2, 3, 4]


def test_two_sided_windows_count_both_sides():
    assert visible_keys(5, 5, window=2)[0, 0].tolist() == [2, 3, 3, 3, 2]
    assert visible_keys(5, 5, window=(1, None))[0, 0].tolist() == [5, 5, 4, 3, 2]
    assert visible_keys(5, 5, window=(0, 2), is_causal=True)[0, 0].tolist() == [1] * 5


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_counting_agrees_with_the_mask_written_out(data):
    keys = data.draw(st.integers(1, 12))
    queries = data.draw(st.integers(1, keys))
    offset = data.draw(st.integers(0, keys - queries))
    causal, window = data.draw(st.booleans()), data.draw(st.none() | st.integers(1, 14))
    documents = tuple(sorted(data.draw(st.lists(st.integers(0, 3), min_size=keys, max_size=keys))))
    padding = tuple(data.draw(st.lists(st.booleans(), min_size=keys, max_size=keys)))
    packed, padded = data.draw(st.booleans()), data.draw(st.booleans())
    visible = visibility(
        queries,
        keys,
        causal=causal,
        window=window,
        offset=offset,
        documents=documents if packed else None,
        padding=padding if padded else None,
    )
    n = visible_keys(
        queries,
        keys,
        is_causal=causal,
        window=window,
        cache_offset=offset,
        document_ids=torch.tensor(documents) if packed else None,
        key_padding=torch.tensor(padding) if padded else None,
    )
    assert n.shape == (1, 1, queries)
    assert n.flatten().tolist() == visible.sum(-1).tolist()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_backends_hide_what_the_mask_written_out_hides(data):
    keys = data.draw(st.integers(1, 10))
    queries = data.draw(st.integers(1, keys))
    offset = data.draw(st.integers(0, keys - queries))
    causal, window = data.draw(st.booleans()), data.draw(st.none() | st.integers(1, 12))
    padding = tuple(data.draw(st.lists(st.booleans(), min_size=keys, max_size=keys)))
    visible = visibility(queries, keys, causal=causal, window=window, offset=offset, padding=padding)
    q, k, v = tensors((1, 2, queries, 8), (1, 2, keys, 8))
    expected = scaled_dot_product_attention(q, k, v, visible, policy="log", backend="reference")
    for backend in ("sdpa", "reference"):
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            policy="log",
            backend=backend,
            is_causal=causal,
            window=window,
            cache_offset=offset,
            key_padding=torch.tensor(padding),
        )
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
