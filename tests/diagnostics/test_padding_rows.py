"""A row whose own key is padding is in no statistic of `observe` and `Monitor`, and every other row is."""

from __future__ import annotations

import pytest
import torch
from same_records import assert_same
from torch import nn

import attnscale
from attnscale import MultiheadAttention, ScaledDotProductAttention, observe
from attnscale.call.context import padding_rows
from attnscale.call.parse import describe
from attnscale.call.torch_arguments import read_layout

LENGTHS = (9, 4, 1)
LONGEST = max(LENGTHS)


def sentences(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, length, 16, dtype=dtype, generator=generator) for length in LENGTHS]


def padded(parts, side):
    """Sequences as one batch, with large numbers where there is none, and True there."""
    batch, padding = [], []
    for part in parts:
        missing = LONGEST - part.shape[1]
        filler = torch.full((1, missing, *part.shape[2:]), 3.0, dtype=part.dtype)
        batch.append(torch.cat([part, filler] if side == "right" else [filler, part], dim=1))
        hidden = torch.arange(LONGEST) >= part.shape[1] if side == "right" else torch.arange(LONGEST) < missing
        padding.append(hidden)
    return torch.cat(batch), torch.stack(padding)


@pytest.fixture
def multihead():
    torch.manual_seed(0)
    return MultiheadAttention(16, 2, batch_first=True, policy="log")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_under_key_padding(multihead, side, kind, need_weights):
    x, padding = padded(sentences(torch.float32), side)
    mask = padding if kind == "bool" else torch.zeros(padding.shape, dtype=x.dtype).masked_fill(padding, -torch.inf)
    with observe(multihead) as together:
        out, _ = multihead(x, x, x, key_padding_mask=mask, need_weights=need_weights)
        out[~padding].square().sum().backward()
    with observe(multihead) as alone:
        for part in sentences(torch.float32):
            out, _ = multihead(part, part, part, need_weights=need_weights)
            out.square().sum().backward()
    norms = ("query_gradient", "key_gradient", "value_gradient", "output_gradient", "gain")
    assert_same(together.records, alone.records, scalars=("angle_ratio", *norms))
    assert together.records[0].forward["w_max"].rows == sum(LENGTHS)


def test_the_gradient_of_padding_rows_is_in_no_norm_over_rows(multihead):
    x, padding = padded(sentences(torch.float32), "right")
    norms = []
    for loss_on in (slice(None), ~padding):
        with observe(multihead) as record:
            out, _ = multihead(x, x, x, key_padding_mask=padding, need_weights=False)
            out[loss_on].square().sum().backward()
        norms.append([record.records[0].scalars[name] for name in ("output_gradient", "query_gradient")])
        assert record.records[0].backward["score_gradient"].rows == sum(LENGTHS)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_keys_that_torch_appends_do_not_move_the_rows():
    torch.manual_seed(0)
    attention = MultiheadAttention(16, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True).double()
    x, padding = padded(sentences(), "right")
    with observe(attention) as record:
        attention(x, x, x, key_padding_mask=padding)
    assert record.records[0].forward["visible"].rows == sum(LENGTHS)


@pytest.mark.parametrize("need_weights", [True, False])
def test_rows_across_sequences_are_not_those_of_the_padded_keys(multihead, need_weights):
    x, padding = padded(sentences(torch.float32), "right")
    with observe(multihead) as record:
        multihead(x.clone(), x, x, key_padding_mask=padding, need_weights=need_weights)
    assert record.records[0].forward["visible"].rows == padding.numel()
    assert "angle_ratio" not in record.records[0].scalars


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("by", ["key_padding", "bool mask", "float mask", "mask per head"])
@pytest.mark.parametrize("causal", [True, False])
def test_the_plain_module(side, by, causal):
    parts = [x.unflatten(2, (2, 8)).transpose(1, 2) for x in sentences()]
    x, padding = padded([part.transpose(1, 2) for part in parts], side)
    x = x.transpose(1, 2)  # [B, H, T, D]
    rules = {"is_causal": causal}
    if by == "key_padding":
        rules["key_padding"] = padding
    else:
        shown = ~padding[:, None, None].expand(-1, 2 if by == "mask per head" else 1, LONGEST, -1)
        rules = {"attn_mask": shown & torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril() if causal else shown}
        if by == "float mask":
            additive = torch.zeros(shown.shape, dtype=x.dtype).masked_fill(
                ~rules["attn_mask"], torch.finfo(x.dtype).min
            )
            rules = {"attn_mask": additive}
    attention = ScaledDotProductAttention("log")
    with observe(attention) as together:
        attention(x, x, x, **rules)
    with observe(attention) as alone:
        for part in parts:
            attention(part, part, part, is_causal=causal)
    assert_same(together.records, alone.records)


def test_sampled_rows_of_a_training_step():
    x, padding = padded([part.unflatten(2, (2, 8)) for part in sentences(torch.float32)], "right")
    attention, x = ScaledDotProductAttention("log"), x.transpose(1, 2).requires_grad_()
    with attnscale.Monitor(attention, every=1, rows=5, alerts=None) as monitor:
        attention(x * 1.0, x * 1.0, x, key_padding=padding).sum().backward()
        (record, _) = monitor.step(0)
    assert record.forward["visible"].rows == record.backward["w_max"].rows < 3 * 5
    assert record.forward["visible"].max == LONGEST
    assert record.scalars["mismatch"] == 0.0


def rows_of(queries, keys, batch=1, **rules):
    """Which rows are padding, as a listener is told of a call with these rules."""
    q, k = torch.zeros(batch, 1, queries, 2), torch.zeros(batch, 1, keys, 2)
    context = describe(read_layout(q, k, k, False), queries, keys, q.device, **rules)
    found = padding_rows(context.with_own_slots(None))
    return None if found is None else found.tolist()


def nothing(found):
    return found is None or not torch.tensor(found).any()


T = 6
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
LEFT = torch.tensor([True, True, False, False, False, False])
STRICT = CAUSAL.tril(-1)


@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL,
        CAUSAL & ~CAUSAL.tril(-3),  # a window of three
        CAUSAL & torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).bool(),  # two documents
        CAUSAL | (torch.arange(T) < 3),  # a prefix that everyone sees
        STRICT,  # rows that do not see themselves; the last key is seen by none
        STRICT | (torch.eye(T).bool() & (torch.arange(T) == 0)),
        STRICT & torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).bool(),
        ~torch.eye(T, dtype=torch.bool),
    ],
)
def test_rows_are_kept_under_masks_that_hide_no_padding(mask):
    assert nothing(rows_of(T, T, attn_mask=mask))


def test_rows_are_kept_where_it_is_not_known_which_key_is_theirs():
    # One token, and two, against a cache whose first keys are padding.
    for queries in (1, 2):
        assert nothing(rows_of(queries, T, attn_mask=(~LEFT).expand(queries, T)))
        assert nothing(rows_of(queries, T, key_padding=LEFT))
        assert nothing(rows_of(queries, T, key_padding=LEFT, is_causal=True, cache_offset=T - queries))
    assert nothing(rows_of(T, T + 3, attn_mask=(torch.arange(T + 3) > 1).expand(T, T + 3)))


def test_rows_of_padding_are_found_wherever_they_lie():
    left, right = [LEFT.tolist()], [LEFT.flip(0).tolist()]
    assert rows_of(T, T, attn_mask=CAUSAL & ~LEFT) == left
    assert rows_of(T, T, attn_mask=CAUSAL & ~LEFT.flip(0)) == right
    assert rows_of(T, T, attn_mask=CAUSAL & ~CAUSAL.tril(-3) & ~LEFT.flip(0)) == right
    assert rows_of(T, T, key_padding=LEFT, is_causal=True, window=2) == left
    assert rows_of(T, T, key_padding=LEFT, is_causal=True, positions=(torch.arange(T) - 2).clamp(min=0)) == left
    assert rows_of(T, T, key_padding=LEFT.flip(0), is_causal=True, positions=torch.arange(T)) == right
    # Of a chunk in an allocated cache: padding from slot 4 on, the queries in slots 2 to 5.
    assert rows_of(4, T + 3, key_padding=torch.arange(T + 3) > 3, is_causal=True, cache_offset=2) == [
        [False, False, True, True]
    ]
    both = torch.stack([LEFT, torch.zeros_like(LEFT)])
    assert rows_of(T, T, batch=2, key_padding=both) == both.tolist()
    assert rows_of(T, T, batch=2, attn_mask=~both[:, None, None]) == both.tolist()


def test_padding_is_found_without_looking_at_each_head():
    mask = torch.zeros(1, 2, T, T, dtype=torch.bool)
    mask[0, 0, :, :4], mask[0, 1, :, :5] = True, True  # the fifth key is seen in one of the heads
    x = torch.zeros(1, 2, T, 4)
    context = describe(read_layout(x, x, x, False), T, T, x.device, attn_mask=mask)
    assert padding_rows(context).tolist() == [[False] * 5 + [True]]


def test_an_encoder_of_torch_under_padding():
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True).double()
    model = nn.TransformerDecoder(layer, 1)
    attnscale.convert(model, "constant")
    x, padding = padded(sentences(), "right")
    with observe(model) as record:
        model(x, x.flip(1), tgt_key_padding_mask=padding, memory_key_padding_mask=padding.flip(1))
    rows = {one.layer: one.forward["visible"].rows for one in record.records}
    assert rows == {"layers.0.self_attn": sum(LENGTHS), "layers.0.multihead_attn": padding.numel()}
