"""Error messages of `hf.apply`, `inspect` and `load` name the problem and the accepted values."""

# ruff: noqa: E402  (there is no transformers for Python 3.10)

from __future__ import annotations

import logging

import pytest

transformers = pytest.importorskip("transformers")

import torch
from hf_releases import since
from tiny_models import TOKENS, bloom, build, deepseek_sparse, llama, logits

from attnscale import ArgumentError, ArgumentTypeError
from attnscale.hf import apply, inspect, load

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWER = {key: value for key, value in SMALL.items() if key != "vocab_size"} | {"image_size": 16, "patch_size": 8}


def mamba():
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    return build(transformers.MambaForCausalLM, config)


def clip():
    text = transformers.CLIPTextConfig(
        **SMALL, max_position_embeddings=16, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    vision = transformers.CLIPVisionConfig(**TOWER)
    config = transformers.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
    return build(transformers.CLIPModel, config)


def llava():
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SMALL, pad_token_id=0),
        vision_config=transformers.CLIPVisionConfig(**TOWER),
        image_token_id=3,
    )
    return build(transformers.LlavaForConditionalGeneration, config)


@pytest.mark.parametrize("layers", [1, [1], (1,), "1", range(1, 2)])
def test_one_layer_may_be_a_number(layers):
    model = llama()
    assert [layer.verdict for layer in inspect(model, "log", layers=layers).layers] == ["left alone", "selected"]
    with apply(model, "log", layers=layers) as handle:
        assert list(handle.policies) == ["model.layers.1.self_attn"]


@pytest.mark.parametrize("layers", [True, None, 1.5, [], [0.5], {"0": "log"}])
def test_other_things_are_no_layers(layers):
    for look in (apply, inspect):
        with pytest.raises(ArgumentTypeError, match=r"layers=.* an int, a sequence of ints, or a range"):
            look(llama(), "log", layers=layers)


@pytest.mark.parametrize("layers", [2, [0, 7], "1-2"])
def test_layers_that_are_not_there(layers):
    with pytest.raises(ArgumentError, match="layers of this model, 0-1"):
        apply(llama(), "log", layers=layers)


def test_two_applies_on_different_layers_are_one_plan():
    model = llama()
    with apply(model, "log", layers=[0]):
        before = logits(model)
        with pytest.raises(ArgumentError) as raised:
            apply(model, "sqrt_log", layers=[1])
        assert "apply(model, {'layers': {'0': ..., '1': ...}})" in str(raised.value)
        assert torch.equal(logits(model), before)
    with apply(model, {"layers": {"0": "log", "1": "sqrt_log"}}) as handle:
        assert [policy.name for policy in handle.policies.values()] == ["log", "sqrt_log"]


@pytest.mark.parametrize("look", [apply, inspect])
def test_swapped_arguments_are_told_in_one_line(look):
    with pytest.raises(ArgumentTypeError, match="the model is the first argument") as raised:
        look("log", llama())
    assert str(raised.value).startswith("policy=LlamaForCausalLM is not accepted")
    assert len(str(raised.value)) < 200
    with pytest.raises(ArgumentTypeError, match="policy=LlamaForCausalLM is not accepted"):
        look(llama(), llama())


@pytest.mark.parametrize("look", [apply, inspect])
def test_another_kind_of_model_is_not_printed(look):
    with pytest.raises(ArgumentTypeError, match=r"model=TransformerEncoderLayer .*attnscale\.convert") as raised:
        look(torch.nn.TransformerEncoderLayer(16, 2), "log")
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("layers", ["all", "full", "0", 0])
def test_a_model_without_attention_is_told_so(layers):
    with pytest.raises(ArgumentError, match="MambaForCausalLM is not accepted: it has no softmax attention"):
        apply(mamba(), "log", layers=layers)


@pytest.mark.parametrize(("build", "helps"), [(bloom, "attnscale.scaled_dot_product_attention"), (deepseek_sparse, "")])
def test_layers_are_not_advised_where_none_would_remain(build, helps):
    model = build()
    with pytest.raises(ArgumentError) as raised:
        apply(model, "log")
    detail = inspect(model, "log").layers[0].detail
    for text in (str(raised.value), detail):
        assert "layers=" not in text
        assert helps in text


@pytest.mark.parametrize(("towers", "number"), [("text", 2), ("all", 4)])
@pytest.mark.parametrize("build", [pytest.param(clip, marks=since("5.6", "the towers of CLIP are models")), llava])
def test_a_model_of_two_towers_is_proven_tower_by_tower(build, towers, number):
    with apply(build(), "log", reference_length=8, towers=towers) as handle:
        assert len(handle.policies) == number


def test_inputs_that_are_given_are_what_is_run():
    with pytest.raises(ArgumentError, match=r"CLIPModel with inputs \['input_ids'\] failed"):
        apply(clip(), "log", probe={"input_ids": TOKENS[:, :4]})
    inputs = {"input_ids": TOKENS[:, :4], "pixel_values": torch.zeros(2, 3, 16, 16, dtype=torch.float64)}
    with apply(clip(), "log", towers="all", probe=inputs) as handle:
        assert len(handle.policies) == 4


@pytest.mark.parametrize("kind", [None, "LlamaForCausalLM", "AutoModelForCausalLM"])
def test_loading_a_policy_is_not_reported_as_unexpected(tmp_path, caplog, monkeypatch, kind):
    model = llama().float()
    with apply(model, "ssmax", reference_length=8):
        expected = logits(model)
        model.save_pretrained(tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.INFO):
        arguments = {} if kind is None else {"model_class": getattr(transformers, kind)}
        handle = load(tmp_path, **arguments)
    assert "UNEXPECTED" not in caplog.text
    assert torch.equal(logits(handle.model.eval()), expected)
    # The class is unchanged: loading without attnscale still reports the unexpected keys.
    assert "_keys_to_ignore_on_load_unexpected" not in vars(transformers.LlamaForCausalLM)


def test_other_unexpected_keys_are_still_reported(tmp_path, caplog, monkeypatch):
    model = llama()
    with apply(model, "ssmax", reference_length=8):
        model.lm_head.register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
        model.save_pretrained(tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.INFO):
        load(tmp_path)
    assert "lm_head.extra" in caplog.text
    assert "attnscale.policy" not in caplog.text


def test_a_model_of_two_towers_loads_by_name(tmp_path):
    model = llava().float()
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[5, 3, 3, 3, 3, 7, 9]])
    with apply(model, "log", reference_length=64), torch.no_grad():
        expected = model(input_ids=tokens, pixel_values=pixels).logits
        model.save_pretrained(tmp_path)
    kind = transformers.LlavaForConditionalGeneration
    named = kind.from_pretrained(tmp_path, attn_implementation="attnscale").eval()
    later = kind.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    later.set_attn_implementation("attnscale")
    for loaded in (named, later):
        with torch.no_grad():
            assert torch.equal(loaded(input_ids=tokens, pixel_values=pixels).logits, expected)


def test_sinks_of_every_token_are_refused_instead_of_ignored():
    model = llama()
    apply(model, "constant")
    with pytest.raises(ArgumentError, match="LlamaAttention has an attention sink per token"):
        model(TOKENS, sinks=torch.zeros(2, 4, TOKENS.shape[1], 1))
