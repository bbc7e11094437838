"""Generation with a policy: every cache and decoding method gives the tokens of the plain loop."""

from __future__ import annotations

import pytest
import torch
import transformers
from hf_releases import models, since
from tiny_models import TOKENS, llama, mistral

import attnscale

POLICY = {"name": "log", "reference_length": 4}
NEW = 10


def plain_loop(model, tokens, new=NEW):
    """Greedy tokens, each from a forward over everything so far: no cache and no mask is involved."""
    for _ in range(new):
        with torch.no_grad():
            best = model(tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, best], dim=1)
    return tokens


def generate(model, tokens, **arguments):
    return model.generate(tokens, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=-1, **arguments)


@pytest.fixture(params=["llama", "mistral"])
def swapped(request):
    """A model with a policy that changes what it says."""
    model = {"llama": llama, "mistral": mistral}[request.param](max_position_embeddings=128)
    stock = plain_loop(model, TOKENS)
    with attnscale.hf.apply(model, POLICY):
        assert not torch.equal(plain_loop(model, TOKENS), stock)
        yield model


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"use_cache": False},
        {"cache_implementation": "static"},
        pytest.param({"prefill_chunk_size": 4}, marks=since("5.13", "generate makes the cache of a chunked prefill")),
        {"num_beams": 1, "num_return_sequences": 1},
    ],
    ids=str,
)
def test_every_cache_gives_the_tokens_of_the_plain_loop(swapped, arguments):
    assert torch.equal(generate(swapped, TOKENS, **arguments), plain_loop(swapped, TOKENS))


def test_a_left_padded_batch_gives_the_tokens_of_its_rows(swapped):
    rows = [TOKENS[:1], TOKENS[1:, :5]]
    padded = torch.zeros_like(TOKENS)
    padded[0], padded[1, -5:] = rows[0][0], rows[1][0]
    batch = generate(swapped, padded, attention_mask=(padded != 0).long())
    for row, tokens in zip(batch, rows, strict=True):
        assert torch.equal(row[-NEW:], plain_loop(swapped, tokens)[0, -NEW:])


def test_beams_score_as_a_forward_does(swapped):
    """The score that beam search reports is the log-probability of its tokens in one forward."""
    found = generate(
        swapped, TOKENS[:1], num_beams=3, return_dict_in_generate=True, output_scores=True, length_penalty=0.0
    )
    with torch.no_grad():
        log = swapped(found.sequences, use_cache=False).logits.log_softmax(-1)
    taken = log[0, TOKENS.shape[1] - 1 : -1].gather(-1, found.sequences[0, TOKENS.shape[1] :, None]).sum()
    torch.testing.assert_close(found.sequences_scores[0].double(), taken, rtol=0, atol=1e-5)


def test_assisted_generation_gives_the_same_tokens():
    model, assistant = llama(max_position_embeddings=128), llama(num_hidden_layers=1, max_position_embeddings=128)
    with attnscale.hf.apply(model, POLICY), attnscale.hf.apply(assistant, "constant"):
        assert torch.equal(generate(model, TOKENS[:1], assistant_model=assistant), plain_loop(model, TOKENS[:1]))


def test_prompt_lookup_gives_the_same_tokens():
    model = llama(max_position_embeddings=128)
    tokens = TOKENS[:1].repeat(1, 2)
    with attnscale.hf.apply(model, POLICY):
        assert torch.equal(generate(model, tokens, prompt_lookup_num_tokens=3), plain_loop(model, tokens))


def test_a_quantised_cache_gives_what_stock_gives_with_it():
    """With β = 1, to the token; with a law it runs and differs from stock."""
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    model = llama(max_position_embeddings=128).float()
    cache = {"cache_implementation": "quantized", "cache_config": {"backend": "quanto", "nbits": 4, "q_group_size": 8}}
    stock = generate(model, TOKENS, **cache)
    with attnscale.hf.apply(model, "constant"):
        assert torch.equal(generate(model, TOKENS, **cache), stock)
    with attnscale.hf.apply(model, POLICY):
        assert not torch.equal(generate(model, TOKENS, **cache), stock)


def test_continuous_batching_in_override_mode():
    """`generate_batch` takes only the name "sdpa"; its tokens are those of `generate`."""
    model = llama(max_position_embeddings=128).float()
    config = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    rows = [TOKENS[0].tolist(), TOKENS[1, :5].tolist()]
    with attnscale.hf.apply(model, POLICY, override=True):
        assert model.config._attn_implementation == "sdpa"
        expected = [plain_loop(model, torch.tensor([row]))[0, len(row) :].tolist() for row in rows]
        small = models.ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64)
        outputs = model.generate_batch(inputs=rows, generation_config=config, continuous_batching_config=small)
    answers = [output.generated_tokens for output in outputs.values()]
    assert sorted(answers) == sorted(expected)


def test_overriding_leaves_other_models_and_the_registry_alone():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    stock, other = ALL_ATTENTION_FUNCTIONS["sdpa"], llama()
    before = plain_loop(other, TOKENS, new=2)
    first = attnscale.hf.apply(llama(), POLICY, override=True)
    second = attnscale.hf.apply(llama(), POLICY, override=True)
    assert torch.equal(plain_loop(other, TOKENS, new=2), before)
    first.remove()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not stock
    second.remove()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is stock


def test_overriding_needs_sdpa():
    model = llama(attn_implementation="eager")
    with pytest.raises(attnscale.ArgumentError, match=r"attn_implementation='eager' .* override=True"):
        attnscale.hf.apply(model, POLICY, override=True)
