"""Rotary embeddings of an evaluation: stretched for all policies or for one; an error for models without one."""

from __future__ import annotations

import pytest
import torch
from small_evaluation import rows, small
from transformers import AutoModelForCausalLM, BloomConfig, Gemma3TextConfig, GPT2Config, LlamaConfig, LlamaForCausalLM

from attnscale.errors import ArgumentError
from attnscale.hf.context import trained_length
from attnscale.lab.evaluation import evaluate
from attnscale.lab.inputs import stretch
from attnscale.lab.sequences import windows_of
from scripts.training.embedded import save_byte_tokenizer

SMALL = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.5}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture
def llama(tmp_path):
    path = tmp_path / "llama"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(path)
    save_byte_tokenizer(path)
    return path


@torch.no_grad()
def plain_bits(llama, text, rope):
    """Of the second half of one window, by a plain forward of a model that transformers has stretched."""
    config = LlamaConfig(**SMALL, rope_parameters={"rope_theta": 10000.0, **rope})
    model = AutoModelForCausalLM.from_pretrained(llama, config=config)
    (window,) = windows_of(torch.tensor(list(text.read_bytes())), 256, 1)
    losses = torch.nn.functional.cross_entropy(model(window[None, :-1]).logits[0], window[1:], reduction="none")
    return losses[128:].double().mean().item() / torch.tensor(2.0).log().item()


def test_a_policy_may_have_a_rotary_embedding_of_its_own(llama, text, tmp_path):
    policies = ("constant", "plain=constant@own", "constant@linear:2", "yarn:factor=4")
    settings = small(llama, text, tmp_path / "out", policies=policies, rope="yarn:4", tasks=("perplexity",), windows=1)
    output = evaluate(settings)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    expected = {
        "constant": yarn | {"attention_factor": 1.0},
        "plain": {"rope_type": "default"},
        "constant@linear:2": {"rope_type": "linear", "factor": 2.0},
        "yarn:factor=4": yarn,  # with its own factor of the logits, which the policy of that name has
    }
    found = {}
    for policy, rope in expected.items():
        (row,) = rows(output, policy=policy, metric="bits_per_byte", length=256, bin="")
        found[policy] = float(row["value"])
        assert found[policy] == pytest.approx(plain_bits(llama, text, rope), rel=1e-4)
    assert len(set(found.values())) == 4


def test_a_stretched_config_is_anchored_at_the_length_before_stretching(llama, text, tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.0}
    config = LlamaConfig(**SMALL | {"max_position_embeddings": 256}, rope_parameters={"rope_theta": 10000.0, **yarn})
    config.save_pretrained(llama)
    settings = {"policies": ("constant", "log"), "tasks": ("perplexity",), "lengths": (256,), "windows": 1}
    output = evaluate(small(llama, text, tmp_path / "out", **settings))
    (row,) = rows(output, "statistics.csv", policy="log", length=256, layer="model.layers.0.self_attn", head=0)
    assert float(row["beta"]) > 1.1
    (row,) = rows(output, policy="log", metric="bits_per_byte", length=256, bin="")
    assert float(row["difference"]) != 0.0


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 64),
        ({"rope_type": "yarn", "factor": 4.0}, 256),  # transformers then stretches from max_position_embeddings
        (LLAMA3, 256),  # Llama 3.1 was trained at the stretched length
    ],
    ids=["plain", "yarn", "yarn_without_original", "llama3"],
)
def test_the_trained_length_of_a_config(rope, expected):
    config = LlamaConfig(**SMALL | {"max_position_embeddings": 256}, rope_parameters={"rope_theta": 10000.0, **rope})
    assert trained_length(config) == expected


def test_the_trained_length_of_a_config_with_one_embedding_per_layer_type():
    config = Gemma3TextConfig(max_position_embeddings=4096)
    stretch(config, "yarn:4", 1024)
    assert trained_length(config) == 1024


def test_the_trained_length_of_a_config_without_positions_is_unknown():
    assert trained_length(BloomConfig()) is None


def test_layers_with_a_sliding_window_keep_their_rotary_embedding():
    config = Gemma3TextConfig()
    sliding = dict(config.rope_parameters["sliding_attention"])
    stretch(config, "yarn:4", 1024)
    assert config.rope_parameters["sliding_attention"] == sliding
    full = config.rope_parameters["full_attention"]
    assert (full["rope_type"], full["factor"], full["attention_factor"]) == ("yarn", 4.0, 1.0)
    assert full["rope_theta"] == 1_000_000.0


def test_a_model_without_rotary_embedding_is_refused():
    with pytest.raises(ArgumentError, match=r"rope='yarn:4' is not accepted: a gpt2 model has no rotary embedding"):
        stretch(GPT2Config(), "yarn:4", 1024)


@pytest.mark.parametrize("rope", ["yarn", "yarn:0.5", "yarn:inf", "yarn:nan", "dynamic:2", ":2", ""])
def test_what_is_no_rotary_embedding_is_refused(rope):
    with pytest.raises(ArgumentError, match=r"rope=.* is not accepted: expected yarn:4 or linear:4"):
        stretch(LlamaConfig(), rope, 1024)
