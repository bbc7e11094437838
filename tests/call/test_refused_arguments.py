"""Numbers, sparse tensors and dtypes that no attention can be computed with, refused by every way into it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from oracle import tensors

import attnscale
from attnscale import build_policy, scaled_dot_product_attention, visible_keys
from attnscale.errors import ArgumentError, ArgumentTypeError, AttnScaleError

Q, K, V = tensors((2, 4, 6, 8), (2, 4, 6, 8), torch.float32)
TINY = torch.float8_e4m3fn

ROUTES = pytest.mark.parametrize(
    "route",
    [
        lambda *a, **k: scaled_dot_product_attention(*a, **k),
        lambda *a, **k: scaled_dot_product_attention(*a, policy="log", **k),
        lambda *a, **k: scaled_dot_product_attention(*a, policy="log", backend="blockwise", **k),
        lambda *a, **k: attnscale.attention_with_stats(*a, **k),
        lambda *a, **k: attnscale.ScaledDotProductAttention("gap_adaptive")(*a, **k),
    ],
    ids=["constant", "log", "blockwise", "statistics", "module"],
)


@ROUTES
@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"scale": math.nan}, "scale=nan is not accepted: expected a finite number or None"),
        ({"scale": -math.inf}, "scale=-inf is not accepted"),
        ({"scale": np.float32(math.inf)}, "scale=inf is not accepted"),
        ({"scale": torch.tensor(math.nan)}, "scale=nan is not accepted"),
        ({"scale": 10**400}, "scale=1000.* is not accepted"),
        ({"softcap": math.inf}, "softcap=inf is not accepted: expected a finite number > 0, or None for no cap"),
        ({"softcap": math.nan}, "softcap=nan is not accepted"),
        ({"visible": torch.tensor([1, 2, -3, 4, 5, 6])}, r"visible=\[\[\[1, 2, -3.* none of them negative"),
        ({"window": (-1, 0)}, r"window\[0\]=-1 is not accepted: expected an int >= 0 or None"),
    ],
)
def test_numbers_that_give_no_attention_are_refused(route: Any, kwargs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        route(Q, K, V, **kwargs)


@ROUTES
@pytest.mark.parametrize(
    ("qkv", "kwargs", "sentence"),
    [
        ((Q.to_sparse(), K, V), {}, "query as a torch.sparse_coo tensor is not accepted: expected a dense one"),
        ((Q, K.to_sparse(), V), {}, "key as a torch.sparse_coo tensor"),
        ((Q, K, V.to_mkldnn()), {}, "value as a torch._mkldnn tensor"),
        ((Q, K, V), {"attn_mask": torch.ones(6, 6, dtype=torch.bool).to_sparse()}, "attn_mask as a torch.sparse_coo"),
        ((Q, K, V), {"attn_mask": torch.ones(6, 6).to_sparse()}, "attn_mask as a torch.sparse_coo"),
        ((Q, K, V), {"key_padding": torch.zeros(6, dtype=torch.bool).to_sparse()}, "key_padding as a torch.sparse"),
        ((Q, K, V), {"document_ids": torch.zeros(6).long().to_sparse()}, "document_ids as a torch.sparse"),
        ((Q, K, V), {"visible": torch.ones(6).long().to_sparse()}, "visible as a torch.sparse"),
        ((Q, K, V), {"sinks": torch.zeros(4).to_sparse()}, "sinks as a torch.sparse"),
        (
            (Q.to(TINY), K.to(TINY), V.to(TINY)),
            {},
            "query of torch.float8_e4m3fn .* floating dtype of at least 16 bits",
        ),
        ((Q, K, V), {"attn_mask": torch.zeros(6, 6).to(TINY)}, "attn_mask of torch.float8_e4m3fn is not accepted"),
        ((Q, K, V), {"sinks": torch.zeros(4).to(TINY)}, r"sinks of shape \[4\], torch.float8_e4m3fn"),
    ],
)
def test_sparse_tensors_and_narrow_dtypes_are_refused(
    route: Any, qkv: tuple[torch.Tensor, ...], kwargs: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(AttnScaleError, match=sentence) as raised:
        route(*qkv, **kwargs)
    assert isinstance(raised.value, RuntimeError)  # as torch's own function raises


@pytest.mark.parametrize("function", [attnscale.softmax, attnscale.row_statistics, attnscale.accumulation_scale])
def test_sparse_and_narrow_scores_are_refused(function: Any) -> None:
    scores = torch.randn(3, 5)
    with pytest.raises(ArgumentTypeError, match=r"scores as a torch.sparse_coo tensor is not accepted"):
        function(scores.to_sparse())
    with pytest.raises(ArgumentTypeError, match=r"scores of torch.float8_e4m3fn is not accepted"):
        function(scores.to(TINY))
    with pytest.raises(ArgumentTypeError, match=r"mask as a torch.sparse_coo tensor is not accepted"):
        function(scores, mask=(scores > 0).to_sparse())


def test_more_queries_than_keys_of_documents_are_refused_as_that() -> None:
    q = torch.randn(1, 4, 24, 8)
    for offset in (0, 3):
        with pytest.raises(ArgumentError, match=r"queries, keys=\(24, 6\) is not accepted: expected no more queries"):
            scaled_dot_product_attention(
                q, K[:1], V[:1], policy="log", cache_offset=offset, document_ids=torch.zeros(6).long()
            )
    with pytest.raises(ArgumentError, match="cache_offset=5 is not accepted: expected at most 4"):
        visible_keys(2, 6, cache_offset=5, document_ids=torch.zeros(6).long())


@pytest.mark.parametrize(
    ("ours", "numpys"),
    [
        ({"window": 3}, {"window": np.int64(3)}),
        ({"window": (2, None)}, {"window": (np.int32(2), None)}),
        ({"cache_offset": 4}, {"cache_offset": np.uint8(4)}),
        ({"cache_offset": 4}, {"cache_offset": np.array(4)}),
        ({"scale": 0.5, "softcap": 30.0}, {"scale": np.float16(0.5), "softcap": np.int64(30)}),
    ],
)
@pytest.mark.parametrize("policy", ["constant", "log"])
def test_numbers_of_numpy_are_numbers(ours: dict[str, Any], numpys: dict[str, Any], policy: str) -> None:
    q = Q[..., :2, :]
    expected = scaled_dot_product_attention(q, K, V, is_causal=True, policy=policy, **ours)
    assert torch.equal(scaled_dot_product_attention(q, K, V, is_causal=True, policy=policy, **numpys), expected)


def test_counts_of_numpy_are_counts() -> None:
    expected = visible_keys(2, 6, batch=3, heads=4, window=3, cache_offset=4, is_causal=True)
    counts = visible_keys(
        np.int64(2), np.int32(6), batch=np.int8(3), heads=np.uint16(4), window=np.int64(3), cache_offset=np.int64(4),
        is_causal=True,
    )  # fmt: skip
    assert torch.equal(counts, expected)


@pytest.mark.parametrize("wrong", [True, np.True_, 2.0, np.float64(2.0), "2", torch.tensor(2), np.array([2]), None])
def test_what_is_no_int_is_refused_as_a_type(wrong: object) -> None:
    with pytest.raises(ArgumentTypeError, match="queries="):
        visible_keys(wrong, 4)  # type: ignore[arg-type]
    if wrong is not None:
        with pytest.raises(ArgumentTypeError, match="window="):
            visible_keys(4, 4, window=wrong)  # type: ignore[typeddict-item]


def test_a_negative_n_is_not_looked_for_in_a_compiled_graph() -> None:
    torch.compiler.reset()
    visible = torch.tensor([1, 2, 3, 4, 5, 6])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(visible: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(Q, K, V, policy="log", visible=visible)

    torch.testing.assert_close(attend(visible), scaled_dot_product_attention(Q, K, V, policy="log", visible=visible))


@pytest.mark.parametrize("policy", ["constant", "log"])
def test_a_scale_may_vary_in_a_compiled_graph(policy: str) -> None:
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def attend(scale: float) -> torch.Tensor:
        return scaled_dot_product_attention(Q, K, V, policy=policy, scale=scale)

    for scale in (0.5, 0.25, -1.0):
        expected = scaled_dot_product_attention(Q, K, V, policy=policy, scale=scale)
        torch.testing.assert_close(attend(scale), expected)


@pytest.mark.parametrize(
    "rules",
    [{"window": 2**64}, {"window": (2**64, 0)}, {"cache_offset": 2**63 - 1}, {"cache_offset": 10**30}],
    ids=str,
)
def test_ints_beyond_64_bits_are_refused(rules):
    q = torch.randn(1, 2, 8, 4)
    with pytest.raises(ArgumentError, match=r"at most 2\*\*62"):
        scaled_dot_product_attention(q, q, q, is_causal=True, policy="log", **rules)
    with pytest.raises(ArgumentError, match=r"at most 2\*\*62"):
        build_policy("log")(2**63)
