"""Every generating model type of the zoo: a batch gives the same logits as its rows alone."""

from __future__ import annotations

import pytest
import torch
from hf_zoo import TOKENS, TRANSLATORS, WRITERS, ZOO, apply_log, left_padding, reading

# transformers scripts functions of GPT-BigCode when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

# Cases that stock transformers computes incorrectly.
STOCK_FAILS = {"llama4_text": "its own temperature counts slots of the cache, padding among them"}


def generate(model, inputs, **more):
    """Greedily four tokens more [B, 4], and their logits [B, 4, V]."""
    found = model.generate(
        inputs,
        **more,
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return found.sequences[:, -4:], torch.stack(found.logits, dim=1)


def assert_batch_equals_rows(model, batch, rows, tolerance=1e-9):
    """`batch` and `rows` are inputs of `generate`."""
    tokens, logits = generate(model, **batch)
    for number, row in enumerate(rows):
        alone, logits_alone = generate(model, **row)
        assert torch.equal(tokens[number : number + 1], alone)
        torch.testing.assert_close(logits[number : number + 1], logits_alone, rtol=0, atol=tolerance)


def left_padded():
    """Rows of eleven tokens and of seven behind padding: the batch, and each alone."""
    mask = left_padding()["attention_mask"]
    tokens = TOKENS * mask
    rows = [{"inputs": row, "attention_mask": torch.ones_like(row)} for row in (tokens[:1], tokens[1:, 4:])]
    return {"inputs": tokens, "attention_mask": mask}, rows


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in STOCK_FAILS])
def test_a_left_padded_batch_generates_what_its_rows_do(name):
    model = ZOO[name].build()
    with apply_log(model):
        assert_batch_equals_rows(model, *left_padded(), tolerance=ZOO[name].tolerance)


@pytest.mark.parametrize("name", STOCK_FAILS)
def test_what_is_left_out_fails_in_stock_too(name):
    with pytest.raises(AssertionError):
        assert_batch_equals_rows(ZOO[name].build(), *left_padded(), tolerance=1e-3)


@pytest.mark.parametrize("name", TRANSLATORS)
def test_a_padded_batch_is_translated_as_its_rows_are(name):
    model = ZOO[name].build()
    mask = torch.ones_like(TOKENS)
    mask[1, 7:] = 0
    tokens = TOKENS * mask
    rows = [{"inputs": row, "attention_mask": torch.ones_like(row)} for row in (tokens[:1], tokens[1:, :7])]
    with apply_log(model):
        assert_batch_equals_rows(model, {"inputs": tokens, "attention_mask": mask}, rows)


def test_a_batch_is_transcribed_as_its_rows_are():
    model = ZOO["whisper"].build()
    sound = reading(model)["input_features"]
    with apply_log(model):
        assert_batch_equals_rows(model, {"inputs": sound}, [{"inputs": sound[:1]}, {"inputs": sound[1:]}])
