"""Every model type of the zoo with a length-dependent β: the logits of a token do not depend on how it was computed."""

from __future__ import annotations

import copy
import functools
import inspect

import pytest
import torch
import transformers
from hf_zoo import TOKENS, TRANSLATORS, WRITERS, ZOO, answer, apply_log, left_padding, reading

# transformers scripts functions of GPT-BigCode when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

READERS = [*(name for name, species in ZOO.items() if species.family == "encoder"), "clip_text_model"]
ROW = TOKENS[:1]

# Cases that stock transformers computes incorrectly.
STOCK_FAILS = {
    ("llama4_text", "left padded"): "its own temperature counts slots of the cache, padding among them",
    ("llama4_text", "packed"): "its own temperature counts slots of the cache, not positions in a document",
    ("afmoe", "packed"): "its masks are not told the positions",
    ("biogpt", "packed"): "its masks are not told the positions",
    ("gpt_oss", "packed"): "its masks are not told the positions",
    ("opt", "packed"): "its masks are not told the positions",
    ("qwen2_vl", "packed"): "its positions have three axes, and one axis does not say where documents begin",
    ("lfm2", "packed"): "convolutions reach into the document before",
    ("minimax", "packed"): "linear attention has a state that documents share",
    ("minimax", "static cache"): "it has a cache of its own",
    ("minimax", "static cache in chunks"): "it has a cache of its own",
}


def write(model, sizes=None, cache=None):
    """Logits of one row read at once, or in pieces of these sizes with a cache; an encoder has read before."""
    around = {}
    if model.config.is_encoder_decoder:
        heard = {model.main_input_name: reading(model)[model.main_input_name][:1]}
        around = {"encoder_outputs": model.get_encoder()(**heard)}
    name = "decoder_input_ids" if around else "input_ids"
    if sizes is None:
        return model(**{name: ROW}, **around, use_cache=False).logits
    logits = []
    for piece in ROW.split(sizes, dim=1):
        output = model(**{name: piece}, **around, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


# Cases of one type follow each other, and share a model and the logits that each of them compares with.
at_once = functools.lru_cache(maxsize=1)(write)


@functools.lru_cache(maxsize=1)
def applied(name):
    """A model of the zoo with a temperature, which no case changes."""
    model = ZOO[name].build()
    apply_log(model)
    return model


def static_cache(model):
    """Room for sixteen tokens, of which the last five stay empty."""
    config = model.config.get_text_config(decoder=True)
    own = transformers.StaticCache(config=config, max_cache_len=16)
    if not model.config.is_encoder_decoder:
        return own
    heard = model.get_encoder()(**{model.main_input_name: reading(model)[model.main_input_name][:1]})
    config = copy.deepcopy(config)
    config.sliding_window, config.layer_types = None, None  # cross attention has no window
    cross = transformers.StaticCache(config=config, max_cache_len=heard.last_hidden_state.shape[1])
    return transformers.EncoderDecoderCache(own, cross)


def left_padded(model):
    """Rows of eleven tokens and of seven behind padding, with positions as `generate` makes them: batch, singles."""
    mask = left_padding()["attention_mask"]
    tokens = TOKENS * mask
    positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    takes = "position_ids" in inspect.signature(model.forward).parameters
    batch = model(input_ids=tokens, attention_mask=mask, use_cache=False, **(positions if takes else {})).logits
    singles = [model(input_ids=row, use_cache=False).logits for row in (tokens[:1], tokens[1:, 4:])]
    return torch.cat([batch[:1], batch[1:, 4:]], dim=1), torch.cat(singles, dim=1)


def packed(model):
    """Documents of five and six tokens in one row, told apart by their positions: packed, separate."""
    positions = torch.cat([torch.arange(5), torch.arange(6)])[None]
    documents = [model(input_ids=piece, use_cache=False).logits for piece in ROW.split([5, 6], dim=1)]
    return model(input_ids=ROW, position_ids=positions, use_cache=False).logits, torch.cat(documents, dim=1)


STEPS = {
    "token by token": lambda model: (write(model, [1] * 11), at_once(model)),
    "in chunks": lambda model: (write(model, [4, 4, 3]), at_once(model)),
    "static cache": lambda model: (write(model, [6, 1, 1, 1, 1, 1], static_cache(model)), at_once(model)),
    "static cache in chunks": lambda model: (write(model, [4, 4, 3], static_cache(model)), at_once(model)),
}
WAYS = STEPS | {"left padded": left_padded, "packed": packed}
CASES = [(name, way) for name in WRITERS for way in WAYS] + [
    (name, way) for name in [*TRANSLATORS, "whisper"] for way in STEPS
]


@pytest.mark.parametrize(("name", "way"), [case for case in CASES if case not in STOCK_FAILS])
@torch.no_grad()
def test_every_way_to_a_token_gives_the_same_logits(name, way):
    found, expected = WAYS[way](applied(name))
    torch.testing.assert_close(found, expected, rtol=0, atol=ZOO[name].tolerance)


@pytest.mark.parametrize(("name", "way"), STOCK_FAILS)
@torch.no_grad()
def test_what_is_left_out_fails_in_stock_too(name, way):
    model = ZOO[name].build()
    if "cache of its own" in STOCK_FAILS[name, way]:
        with pytest.raises(ValueError, match="cache of its own"):
            WAYS[way](model)
    else:
        found, expected = WAYS[way](model)
        assert (found - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", READERS)
def test_a_padded_batch_of_an_encoder_equals_its_rows(name):
    model = ZOO[name].build()
    mask = torch.ones_like(TOKENS)
    mask[1, 7:] = 0
    tokens = TOKENS * mask
    with apply_log(model):
        batch = answer(model, input_ids=tokens, attention_mask=mask)
        for row, length in enumerate((11, 7)):
            single = answer(model, input_ids=tokens[row : row + 1, :length])
            torch.testing.assert_close(batch[row : row + 1, :length], single, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", TRANSLATORS)
@pytest.mark.parametrize("padded", ["input_ids", "decoder_input_ids"])
def test_a_padded_batch_of_a_translator_equals_its_rows(name, padded):
    model = ZOO[name].build()
    mask = torch.ones_like(TOKENS)
    mask[1, 7:] = 0
    tokens = {"input_ids": TOKENS, "decoder_input_ids": TOKENS.flip(1)}
    tokens[padded] = tokens[padded] * mask
    with apply_log(model):
        batch = answer(model, **tokens, **{padded.replace("input_ids", "attention_mask"): mask})
        for row, length in enumerate((11, 7)):
            single = {key: value[row : row + 1] for key, value in tokens.items()}
            single[padded] = single[padded][:, :length]
            written = single["decoder_input_ids"].shape[1]
            alone = answer(model, **single)
            torch.testing.assert_close(batch[row : row + 1, :written], alone, rtol=0, atol=1e-9)
