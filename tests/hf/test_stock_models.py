"""`observe` and `Monitor` work on stock transformers models, without `apply`."""

# ruff: noqa: E402  (there is no transformers for Python 3.10)

from __future__ import annotations

import copy

import pytest

transformers = pytest.importorskip("transformers")

import torch
from same_records import assert_same
from tiny_models import TOKENS, bloom, build, deepseek_sparse, llama, logits, ministral, t5
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import attnscale
from attnscale import ArgumentError, Monitor

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def bert():
    return build(transformers.BertModel, transformers.BertConfig(**SMALL, initializer_range=0.3))


def gpt2():
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    return build(transformers.GPT2LMHeadModel, config)


def mamba():
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    return build(transformers.MambaForCausalLM, config)


def answer(model):
    mask = torch.ones_like(TOKENS)
    mask[1, 7:] = 0
    with torch.no_grad():
        inputs = {"decoder_input_ids": TOKENS} if model.config.is_encoder_decoder else {}
        return model(input_ids=TOKENS, attention_mask=mask, **inputs)[0]


@pytest.mark.parametrize("build", [llama, ministral, gpt2, bert, t5])
def test_a_stock_model_shows_what_it_shows_under_a_constant_policy(build):
    model = build()
    before, names = answer(model), [name for name, _ in model.named_modules()]
    config, stock = model.config.to_dict(), ALL_ATTENTION_FUNCTIONS["sdpa"]
    with attnscale.observe(model) as seen:
        during = answer(model)
        assert model.config.to_dict() == config
        assert model.config._attn_implementation == "sdpa"
    with attnscale.hf.apply(model, "constant", cross=True), attnscale.observe(model) as applied:
        answer(model)
    assert_same(seen.records, applied.records, scalars=())
    assert {record.forward["beta"].mean for record in seen.records} == {1.0}
    # The output is unchanged, and nothing remains in the model.
    assert torch.equal(during, before)
    assert torch.equal(answer(model), before)
    assert [name for name, _ in model.named_modules()] == names
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is stock


def test_a_training_run_is_the_same_with_a_monitor():
    losses, records = [], []
    for watched in (False, True):
        model = llama().float().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = Monitor(model, every=2, alerts=None) if watched else None
        for step in range(4):
            loss = model(TOKENS, labels=TOKENS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            records += [] if monitor is None else monitor.step(step)
            losses.append(loss.item())
        if monitor is not None:
            monitor.close()
            assert records[0].layer == "model.layers.0.self_attn"
            assert records[0].backward["score_gradient"].rows == TOKENS.numel()
    assert losses[:4] == losses[4:]


def test_generation_of_a_stock_model():
    model = llama()
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    expected = model.generate(TOKENS, **settings)
    with attnscale.observe(model) as record:
        assert torch.equal(model.generate(TOKENS, **settings), expected)
    assert record.records[0].forward["visible"].max == TOKENS.shape[1] + 2


def test_other_models_keep_their_own_attention_meanwhile():
    one, other = llama(), gpt2()
    expected = logits(other)
    with attnscale.observe(one) as record:
        assert torch.equal(logits(other), expected)
    assert len(record.records) == 0


def test_what_computes_in_another_way_is_told_of_apply():
    model = llama()
    model.set_attn_implementation("eager")
    for look in (Monitor, lambda model: attnscale.observe(model).__enter__()):
        with pytest.raises(ArgumentError, match=r"attnscale\.hf\.apply\(model, 'constant'\)") as raised:
            look(model)
        assert "'eager'" in str(raised.value)
    with attnscale.hf.apply(model, "constant"), attnscale.observe(model) as record:
        logits(model)
    assert len(record.records) == 8


@pytest.mark.parametrize(
    ("build", "words"),
    [(mamba, "no softmax attention"), (bloom, "AttentionInterface"), (deepseek_sparse, "selects its own keys")],
)
def test_what_cannot_be_heard_says_why(build, words):
    with pytest.raises(ArgumentError, match=words) as raised:
        Monitor(build())
    assert "convert" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_a_listener_is_not_taken_for_a_policy():
    model = llama()
    monitor = Monitor(model)
    with pytest.raises(ArgumentError, match="Monitor"):
        attnscale.hf.apply(model, "log")
    assert "a Monitor is attached" in str(attnscale.hf.inspect(model))
    with pytest.raises(ArgumentError, match="close the other monitor"):
        Monitor(model)
    monitor.close()
    with attnscale.hf.apply(model, "log"):
        pass


def test_a_copy_is_not_listened_to():
    model = llama()
    with attnscale.observe(model) as record:
        copied = copy.deepcopy(model)
        assert torch.equal(logits(copied), logits(model))
    assert record.records[0].forward["visible"].rows == TOKENS.numel()
    assert torch.equal(logits(copied), logits(model))
    with attnscale.hf.apply(copied, "log"):
        assert not torch.equal(logits(copied), logits(model))
