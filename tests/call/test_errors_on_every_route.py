"""Bad arguments get one typed sentence, whichever policy and backend would have computed the call."""

import math

import pytest
import torch
from oracle import tensors

import attnscale
from attnscale import StatsRequest, attention_with_stats, explain_dispatch, scaled_dot_product_attention
from attnscale.backends import dispatch
from attnscale.errors import AttnScaleError

Q, K, V = tensors((2, 4, 6, 8), (2, 4, 6, 8), torch.float32)
META = torch.zeros(6, device="meta")

ROUTES = pytest.mark.parametrize(
    "route",
    [
        lambda *a, **k: scaled_dot_product_attention(*a, **k),
        lambda *a, **k: scaled_dot_product_attention(*a, policy="log", **k),
        lambda *a, **k: scaled_dot_product_attention(*a, policy="gap_adaptive", **k),
        lambda *a, **k: scaled_dot_product_attention(*a, backend="blockwise", **k),
        lambda *a, **k: attention_with_stats(*a, **k),
        lambda *a, **k: explain_dispatch(*a, policy="log", **k),
        lambda *a, **k: attnscale.ScaledDotProductAttention("log")(*a, **k),
    ],
    ids=["constant", "log", "gap_adaptive", "blockwise", "statistics", "explain", "module"],
)


@ROUTES
@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"visible": "hello"}, r"visible='hello' \(str\) is not accepted: expected an integer tensor"),
        ({"visible": [3, 9]}, r"visible=\[3, 9\] \(list\) is not accepted"),
        ({"visible": torch.ones(3, 9).long()}, r"visible.shape=\[3, 9\] is not accepted.*broadcasts to \[2, 4, 6\]"),
        ({"visible": torch.ones(3, 6).long()}, r"visible.shape=\[3, 6\] is not accepted"),
        ({"visible": torch.ones(6)}, r"visible=torch.float32"),
        ({"visible": META.long()}, r"visible.device='meta' is not accepted: expected that of the query, cpu"),
        ({"dropout_p": 1.5}, r"dropout_p=1.5 is not accepted: expected a probability in \[0, 1\]"),
        ({"dropout_p": math.nan}, "dropout_p=nan"),
        ({"dropout_p": "half"}, r"dropout_p='half' \(str\)"),
        ({"scale": "big"}, r"scale='big' \(str\) is not accepted: expected a finite number or None"),
        (
            {"scale": torch.ones(2)},
            r"scale=tensor.* is not accepted: expected a finite number or None",
        ),
        ({"softcap": "30"}, r"softcap='30' \(str\) is not accepted: expected a finite number > 0 or None"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"is_causal": "no"}, r"is_causal='no' \(str\) is not accepted: expected True or False"),
        ({"enable_gqa": 1}, r"enable_gqa=1 \(int\) is not accepted"),
        ({"sinks": [0.0] * 4}, r"sinks=\[0.0, 0.0, 0.0, 0.0\] \(list\)"),
        ({"sinks": torch.zeros(4).long()}, r"sinks of shape \[4\], torch.int64"),
        ({"sinks": META[:4]}, r"sinks of .* on meta"),
        ({"attn_mask": "causal"}, r"attn_mask='causal' \(str\)"),
        ({"attn_mask": META > 0}, "attn_mask.device='meta'"),
        ({"key_padding": META > 0}, "key_padding.device='meta'"),
        ({"positions": META.long()}, "positions.device='meta'"),
        ({"positions": torch.tensor([0, 1, -2, 3, 4, 5])}, r"positions=\[\[0, 1, -2, .* none of them negative"),
        ({"cache_offset": torch.tensor([0, -1])}, r"cache_offset=\[0, -1\]"),
        ({"document_ids": "abc"}, r"document_ids='abc' \(str\)"),
        ({"cu_seqlens": torch.tensor([0, 4, 2, 6])}, r"cu_seqlens=\[0, 4, 2, 6\] is not accepted.*increases"),
        ({"cu_seqlens": torch.tensor([1, 6])}, r"cu_seqlens=\[1, 6\] is not accepted.*starts with 0"),
        ({"cu_seqlens": torch.tensor([0, 7])}, r"cu_seqlens=\[0, 7\] is not accepted.*at most the number of tokens"),
        ({"cu_seqlens": (torch.tensor([0, 3, 6]), torch.tensor([0, 6]))}, "cu_seqlens"),
        ({"cu_seqlens": (torch.tensor([0, 6]),)}, "cu_seqlens"),
        ({"cu_seqlens": META.long()}, "cu_seqlens.device='meta'"),
    ],
)
def test_arguments_are_refused_in_the_same_words(route, kwargs, sentence):
    with pytest.raises(AttnScaleError, match=sentence):
        route(Q, K, V, **kwargs)


@ROUTES
@pytest.mark.parametrize(
    ("qkv", "sentence"),
    [
        ((None, K, V), r"query=None \(NoneType\) is not accepted: expected a tensor"),
        ((Q, "key", V), r"key='key' \(str\)"),
        ((Q, K, V.tolist()), r"value=.*\(list\) is not accepted"),
        ((Q, K, V.to("meta")), "devices cpu, cpu, meta"),
        ((Q[0, 0, 0], K, V), r"query.shape=\[8\] is not accepted"),
    ],
)
def test_tensors_are_refused_in_the_same_words(route, qkv, sentence):
    with pytest.raises(AttnScaleError, match=sentence):
        route(*qkv)


@pytest.mark.parametrize("call", [attention_with_stats, explain_dispatch])
def test_a_request_of_another_type_is_refused(call):
    with pytest.raises(AttnScaleError, match=r"request=\{\} \(dict\) is not accepted: expected a StatsRequest"):
        call(Q, K, V, request={})


@pytest.mark.parametrize("thresholds", [(0.5, float("nan")), (-1.0,), (), "ab", (None,), 0.5])
def test_thresholds_that_are_no_numbers_are_refused(thresholds):
    with pytest.raises(AttnScaleError, match="gap_thresholds="):
        StatsRequest(gap_thresholds=thresholds)


def test_scores_and_masks_of_the_wrong_kind_are_refused():
    scores = torch.randn(3, 5)
    with pytest.raises(AttnScaleError, match=r"mask of torch.float32 is not accepted: expected bool"):
        attnscale.row_statistics(scores, mask=torch.zeros(3, 5))
    with pytest.raises(AttnScaleError, match=r"mask of torch.float32 is not accepted: expected bool"):
        attnscale.accumulation_scale(scores, mask=torch.zeros(3, 5))
    for function in (attnscale.row_statistics, attnscale.accumulation_scale):
        with pytest.raises(AttnScaleError, match=r"scores of torch.int64 is not accepted: expected a floating dtype"):
            function(scores.long())
        with pytest.raises(AttnScaleError, match=r"scores=\[1.0, 2.0\] \(list\) is not accepted: expected a floating"):
            function([1.0, 2.0])
        with pytest.raises(AttnScaleError, match=r"mask of shape \[4\] .* broadcasts to \[3, 5\]"):
            function(scores, mask=torch.ones(4, dtype=torch.bool))
    with pytest.raises(AttnScaleError, match=r"beta of shape \[4\] .* broadcasts to \[3\]"):
        attnscale.row_statistics(scores, beta=torch.ones(4))


@pytest.mark.parametrize("extent", [-1, 2.0, True, "4"])
def test_counts_of_tokens_are_ints(extent):
    with pytest.raises(AttnScaleError, match="queries="):
        attnscale.visible_keys(extent, 4)


def test_sampled_rows_are_explained_by_what_really_runs(monkeypatch):
    request = StatsRequest(rows=2)
    found = explain_dispatch(Q, K, V, policy="log", request=request)
    assert found.chosen == "sdpa"
    assert "statistics.rows measures the sampled rows" in str(found)
    assert explain_dispatch(Q, K, V, policy="log", request=StatsRequest()).chosen == "blockwise"
    assert explain_dispatch(Q, K, V, policy="log", request=StatsRequest(rows=6)).chosen == "blockwise"
    ran = []
    sdpa, measure = type(dispatch.BACKENDS["sdpa"]), dispatch.measure_sampled_rows
    run = sdpa.run
    monkeypatch.setattr(sdpa, "run", lambda *a: ran.append("sdpa") or run(*a))
    monkeypatch.setattr(dispatch, "measure_sampled_rows", lambda *a: ran.append("statistics.rows") or measure(*a))
    attention_with_stats(Q, K, V, policy="log", request=request)
    assert ran == ["sdpa", "statistics.rows"]


def test_a_value_of_many_lines_is_quoted_in_one():
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(8)))
    with pytest.raises(AttnScaleError, match=r"policy=Sequential\( .*… \(Sequential\) is not accepted") as raised:
        attnscale.build_policy(model)
    assert len(str(raised.value)) < 300
    with pytest.raises(AttnScaleError, match=r"model='log' \(str\) is not accepted: expected a torch.nn.Module"):
        attnscale.convert("log", model)
