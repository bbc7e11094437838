"""Padded batches of transformers models give the statistics of their sequences run one at a time."""

# ruff: noqa: E402  (there is no transformers for Python 3.10)

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")

import torch
from same_records import assert_same
from tiny_models import TOKENS, build, llama, mistral, t5

import attnscale

LENGTHS = (11, 4)


def bert():
    """As the encoders that sentences are embedded with."""
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
    )
    return build(transformers.BertModel, config)


def right_padding():
    return (torch.arange(TOKENS.shape[1]) < torch.tensor(LENGTHS)[:, None]).long()


def alone(model):
    """Each sentence by itself, without padding."""
    for row, length in enumerate(LENGTHS):
        model(input_ids=TOKENS[row : row + 1, :length])


@pytest.mark.parametrize("policy", ["constant", "log", "ssmax"])
@pytest.mark.parametrize("build", [bert, llama, mistral])
def test_right_padding(build, policy):
    model = build()
    attnscale.hf.apply(model, policy)
    with torch.no_grad():
        with attnscale.observe(model) as together:
            model(input_ids=TOKENS, attention_mask=right_padding())
        with attnscale.observe(model) as apart:
            alone(model)
    assert_same(together.records, apart.records)
    assert together.records[0].forward["w_max"].rows == sum(LENGTHS)


def test_left_padding_of_an_encoder():
    model = bert()
    tokens = torch.cat([TOKENS[1, LENGTHS[1] :], TOKENS[1, : LENGTHS[1]]])[None]
    mask = right_padding()[1:].flip(1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        with attnscale.observe(model) as padded:
            model(input_ids=tokens, attention_mask=mask, position_ids=positions)
        with attnscale.observe(model) as plain:
            model(input_ids=TOKENS[1:, : LENGTHS[1]])
    assert_same(padded.records, plain.records)


def test_generation_with_left_padding_counts_every_token_once():
    model = llama()
    mask = right_padding().flip(1)
    with attnscale.observe(model) as record:
        model.generate(TOKENS, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    # The first new token comes from the prompts, each of the other three from one row more.
    assert {one.forward["visible"].rows for one in record.records} == {sum(LENGTHS) + 2 * 3}


@pytest.mark.parametrize("applied", [True, False])
def test_cross_attention_keeps_the_rows_beside_padded_encoder_states(applied):
    model = t5()
    if applied:
        attnscale.hf.apply(model, "constant", cross=True)
    with torch.no_grad(), attnscale.observe(model) as record:
        model(input_ids=TOKENS, attention_mask=right_padding(), decoder_input_ids=TOKENS)
    rows = {one.layer: one.forward["visible"].rows for one in record.records}
    for layer, number in rows.items():
        assert number == (sum(LENGTHS) if layer.startswith("encoder") else TOKENS.numel()), layer


def test_training_on_a_padded_batch():
    model = bert().float()
    mask = right_padding()
    monitor = attnscale.Monitor(model, every=1, rows=None, alerts=None)
    model(input_ids=TOKENS, attention_mask=mask).last_hidden_state[mask.bool()].sin().sum().backward()
    together = monitor.step(0)
    for row, length in enumerate(LENGTHS):
        model(input_ids=TOKENS[row : row + 1, :length]).last_hidden_state.sin().sum().backward()
    apart = monitor.step(1)
    monitor.close()
    assert_same(together, apart, scalars=("angle_ratio", "query_gradient", "output_gradient", "gain"), tolerance=1e-3)
