"""Built-in scaling of logits: detected per layer, disabled exactly, restored bit for bit."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import transformers
from hf_releases import models, skip_before
from tiny_models import TOKENS, build, llama

import attnscale
import attnscale.hf
from attnscale.hf.attention_layers import find_attention_layers
from attnscale.hf.existing import find_existing

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
LOG = {"name": "log", "reference_length": 4}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 16,
}


def answer(model):
    with torch.no_grad():
        return model(TOKENS)[0]


def rope(kind, **settings):
    return {"rope_type": kind, "rope_theta": 10000.0, **settings}


def yarn(**settings):
    return rope("yarn", **{"factor": 8.0, "original_max_position_embeddings": 8} | settings)


def deepseek(**parameters):
    config = models.DeepseekV3Config(**SMALL | LATENT, rope_parameters=yarn(**parameters))
    return build(models.DeepseekV3ForCausalLM, config)


def phi3(attention_factor=None):
    parameters = rope(
        "longrope",
        short_factor=[1.0] * 4,
        long_factor=[1.0] * 4,
        factor=8.0,
        attention_factor=attention_factor,
        original_max_position_embeddings=8,
    )
    config = models.Phi3Config(**SMALL, original_max_position_embeddings=8, rope_parameters=parameters)
    return build(models.Phi3ForCausalLM, config)


def phimoe(short=1.5, long=1.25):
    skip_before("5.5", "PhiMoE accepts and runs these settings")
    parameters = rope(
        "longrope",
        short_factor=[1.0] * 4,
        long_factor=[2.0] * 4,
        short_mscale=short,
        long_mscale=long,
        original_max_position_embeddings=8,
    )
    config = models.PhimoeConfig(**SMALL, rope_parameters=parameters, num_local_experts=2)
    return build(models.PhimoeForCausalLM, config).float()  # its experts have no fp64


def llama4(tuned=True):
    config = models.Llama4TextConfig(
        **SMALL,
        head_dim=8,
        intermediate_size_mlp=48,
        moe_layers=[],
        no_rope_layers=[1, 0],
        attention_chunk_size=64,
        attn_temperature_tuning=tuned,
        floor_scale=4,
        attn_scale=0.5,
    )
    return build(models.Llama4ForCausalLM, config)


def ministral3(beta=0.5):
    skip_before("5.4", "the scaling of Ministral 3 can be disabled")
    parameters = yarn(llama_4_scaling_beta=beta, original_max_position_embeddings=4, attention_factor=1.0)
    config = models.Ministral3Config(**SMALL, head_dim=8, rope_parameters=parameters)
    return build(models.Ministral3ForCausalLM, config)


def mistral4(beta=0.5):
    parameters = yarn(llama_4_scaling_beta=beta, original_max_position_embeddings=4, attention_factor=1.0)
    config = models.Mistral4Config(**SMALL | LATENT, rope_parameters=parameters)
    return build(models.Mistral4ForCausalLM, config)


def inkling(floor=4):
    config = models.InklingTextConfig(
        **SMALL,
        head_dim=8,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=4,
        d_rel=4,
        rel_extent=16,
        log_scaling_n_floor=floor,
        log_scaling_alpha=0.5,
        layer_types=["hybrid_sliding", "hybrid"],
        mlp_layer_types=["dense", "dense"],
    )
    return build(models.InklingForCausalLM, config)


def beam():
    config = models.BeamConfig(
        **SMALL,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "dense"],
    )
    return build(models.BeamForCausalLM, config)


def mistral_large4(identity=False):
    config = models.MistralLarge4TextConfig(
        **SMALL | LATENT,
        head_dim=8,
        index_topk=64,
        index_head_dim=16,
        index_n_heads=2,
        no_rope_layers=[1, 0],
        mlp_layer_types=["dense", "dense"],
    )
    model = build(models.MistralLarge4TextModel, config)
    for layer in model.layers:
        torch.nn.init.uniform_(layer.self_attn.softmax_scaling.scale, *((0.0, 0.0) if identity else (0.3, 0.6)))
        torch.nn.init.constant_(layer.self_attn.softmax_scaling.bias, 1.0 if identity else 0.25)
    return model


def smollm3(**parameters):
    config = models.SmolLM3Config(**SMALL, no_rope_layers=[1, 0], rope_parameters=yarn(**parameters))
    return build(models.SmolLM3ForCausalLM, config)


def gemma3(full):
    skip_before("5.9", "Gemma 3 accepts rope parameters by layer type that differ in kind")
    config = models.Gemma3TextConfig(
        **SMALL,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": rope("default"), "full_attention": full},
    )
    return build(models.Gemma3ForCausalLM, config)


# With the factor, without it, and the layers that have it.
CASES = {
    "YaRN": (lambda: llama(rope_parameters=yarn()), lambda: llama(rope_parameters=yarn(attention_factor=1.0)), [0, 1]),
    "YaRN in some layers": (lambda: gemma3(yarn()), lambda: gemma3(yarn(attention_factor=1.0)), [1]),
    "YaRN beside layers that do not rotate": (smollm3, lambda: smollm3(attention_factor=1.0), [0]),
    "LongRoPE": (phi3, lambda: phi3(1.0), [0, 1]),
    "LongRoPE of PhiMoE": (phimoe, lambda: phimoe(1.0, 1.0), [0, 1]),
    "MLA": (
        lambda: deepseek(mscale=1.0, mscale_all_dim=1.0),
        lambda: deepseek(mscale=0.0, mscale_all_dim=0.0, attention_factor=1.0),
        [0, 1],
    ),
    "MLA, rotated part": (lambda: deepseek(), lambda: deepseek(attention_factor=1.0), [0, 1]),
    "Llama 4": (llama4, lambda: llama4(False), [1]),
    "Ministral 3": (ministral3, lambda: ministral3(0.0), [0, 1]),
    "Mistral 4": (mistral4, lambda: mistral4(0.0), [0, 1]),
    "Inkling": (inkling, lambda: inkling(None), [1]),
    "Mistral Large 4": (mistral_large4, lambda: mistral_large4(identity=True), [0, 1]),
}


def decoded(model):
    """Logits of the tokens fed one at a time."""
    cache, steps = None, []
    with torch.no_grad():
        for token in TOKENS.split(1, dim=1):
            step = model(token, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            steps.append(step.logits)
    return torch.cat(steps, 1)


def found_in(model):
    return {layer.layer: found for layer in find_attention_layers(model) if (found := find_existing(model, layer))}


def switch_off(found):
    """Switch everything off, and return what undoes that in reverse."""
    undo = [existing.switch_off() for each in found.values() for existing in each]
    return lambda: [restore() for restore in reversed(undo)]


@pytest.mark.parametrize("case", CASES)
def test_found_where_it_is_and_nowhere_else(case):
    scaled, plain, layers = CASES[case]
    assert sorted(found_in(scaled())) == layers
    assert not found_in(plain())


@pytest.mark.parametrize("case", CASES)
def test_switched_off_is_the_model_without_it(case):
    scaled, plain, _ = CASES[case]
    model, expected = scaled(), answer(plain())
    before = answer(model)
    assert (before - expected).abs().max() > 1e-2
    restore = switch_off(found_in(model))
    assert torch.equal(answer(model), expected)
    assert not any(
        layer.window != other.window
        for layer, other in zip(find_attention_layers(model), find_attention_layers(plain()), strict=True)
    )
    restore()
    assert torch.equal(answer(model), before)


def test_beam_has_no_setting_for_it(monkeypatch):
    model = beam()
    from transformers.models.beam import modeling_beam  # missing in releases without Beam, where `beam` skips

    before, found = answer(model), found_in(model)
    assert sorted(found) == [1]
    restore = switch_off(found)
    after = answer(model)
    restore()
    assert torch.equal(answer(model), before)
    monkeypatch.setattr(
        modeling_beam,
        "compute_attention_scaling",
        lambda position_ids: torch.ones(*position_ids.shape)[:, None, :, None],
    )
    assert torch.equal(after, answer(model))
    assert not torch.equal(after, before)


def test_ordinary_models_have_none():
    assert not found_in(llama())
    assert not found_in(llama(rope_parameters=rope("linear", factor=4.0)))
    assert not found_in(llama(rope_parameters=rope("dynamic", factor=4.0)))


@pytest.mark.parametrize(
    ("model", "layer", "effect", "law"),
    [
        (CASES["YaRN"][0], 0, "YaRN: logits × 1.459 = attention_scaling² (1.208²)", "yarn(factor=8.0)"),
        (
            CASES["LongRoPE"][0],
            1,
            "LongRoPE: logits × 2 = attention_scaling² (1.414²)",
            "longrope(factor=8.0, original_length=8)",
        ),
        (phimoe, 0, "LongRoPE: logits × 2.25 (1.5²) for short inputs, × 1.562 (1.25²) for long ones", None),
        (
            CASES["MLA"][0],
            0,
            "DeepSeek mscale: logits × 1.459 = mscale² (1.208²) in module.scaling",
            "deepseek(factor=8.0, mscale=1.0)",
        ),
        (deepseek, 0, "YaRN: logits × 1.459 = attention_scaling² (1.208²) in 8 of 16 dimensions", None),
        (
            lambda: llama(rope_parameters=yarn(attention_factor=1.5)),
            0,
            "YaRN: logits × 2.25 = attention_scaling² (1.5²)",
            None,
        ),
        (
            llama4,
            1,
            "Llama 4: logits × 1 + 0.5·ln(1 + ⌊(position + 1)/4⌋)",
            "llama4(floor_length=4, coefficient=0.5)",
        ),
        (mistral4, 1, "Mistral: logits × 1 + 0.5·ln(1 + ⌊position/4⌋)", "mistral(floor_length=4, coefficient=0.5)"),
        (
            mistral_large4,
            1,
            "Mistral Large 4: logits × s·ln(position + 1) + b, both learned per head",
            "ssmax(bias=True)",
        ),
        (
            inkling,
            1,
            "Inkling: logits × 1 + 0.5·ln max(1, (position + 1)/4)",
            "inkling(floor_length=4, coefficient=0.5)",
        ),
        (beam, 1, "Beam: logits × (1 + (position + 1)/2048)^0.1", "beam()"),
    ],
)
def test_it_is_described_with_its_numbers_and_its_policy(model, layer, effect, law):
    (existing,) = found_in(model())[layer]
    assert existing.description == effect + ("" if law is None else f"; policy {law}")
    assert effect.startswith(existing.name)


@pytest.mark.parametrize("case", ["YaRN", "LongRoPE", "MLA", "Llama 4", "Ministral 3", "Mistral 4", "Inkling", "Beam"])
def test_the_named_policy_is_the_scaling_it_replaces(case):
    model = (CASES | {"Beam": (beam,)})[case][0]()
    before, found = answer(model), found_in(model)
    (law,) = [existing.law for existing in found[max(found)]]
    with attnscale.hf.apply(model, law, layers=sorted(found), on_existing="replace"):
        # transformers computes the factor in fp32
        torch.testing.assert_close(answer(model), before, rtol=0, atol=2e-5)
    with attnscale.hf.apply(model, "constant", layers=sorted(found), on_existing="replace"):
        assert (answer(model) - before).abs().max() > 1e-4


def test_the_learned_scaling_of_mistral_large_4_is_ssmax_with_its_values():
    (existing,) = found_in(model := mistral_large4())[1]
    learned = model.layers[1].self_attn.softmax_scaling
    policy = attnscale.build_policy(existing.law, num_heads=4).double()
    with torch.no_grad():
        policy.s.copy_(learned.scale)
        policy.b.copy_(learned.bias)
    query, position = torch.randn(2, 4, 11, 8, dtype=torch.float64), torch.arange(11).expand(2, -1)
    scaled = learned(query, position, head_dim_first=True)
    found = query * policy(position[:, None] + 1)[..., None]
    # transformers takes the logarithm in fp32. Of a single key the policy takes ln 2: its weight is 1 in any case.
    torch.testing.assert_close(found[:, :, 1:], scaled[:, :, 1:], rtol=1e-6, atol=1e-6)
    with pytest.raises(attnscale.ArgumentError, match="selects its own keys"):
        attnscale.hf.apply(model, "log")


def test_one_layer_alone_can_do_without_what_it_shares():
    model = llama(rope_parameters=yarn())
    before, factor = answer(model), model.model.rotary_emb.attention_scaling
    (restore,) = [existing.switch_off() for existing in found_in(model)[1]]
    half = llama(rope_parameters=yarn(attention_factor=1.0))
    with torch.no_grad():
        half.model.layers[0].self_attn.q_proj.weight.mul_(factor**2)
    # transformers rounds cos · factor to fp32
    torch.testing.assert_close(answer(model), answer(half), rtol=0, atol=1e-5)
    assert (answer(model) - before).abs().max() > 1e-2
    assert model.model.rotary_emb.attention_scaling == factor
    restore()
    assert torch.equal(answer(model), before)


def test_layers_may_be_restored_in_any_order():
    model = llama(rope_parameters=yarn())
    before = answer(model)
    first, second = ([existing.switch_off() for existing in found] for found in found_in(model).values())
    without = answer(model)
    first[0]()
    between = answer(model)
    assert not torch.equal(between, without)
    assert not torch.equal(between, before)
    second[0]()
    assert torch.equal(answer(model), before)


def test_a_copy_keeps_what_was_switched_off():
    model = llama(rope_parameters=yarn())
    restore = switch_off({1: found_in(model)[1]})
    twin, expected = copy.deepcopy(model), answer(model)
    restore()
    twin_owner = twin.model.rotary_emb
    assert torch.equal(answer(twin), expected)
    twin_owner.attention_scaling = 1.0  # its own, not that of the original
    assert torch.equal(answer(twin), answer(llama(rope_parameters=yarn(attention_factor=1.0))))


@pytest.mark.parametrize("case", ["YaRN", "Llama 4", "Ministral 3", "Inkling"])
def test_it_stays_off_token_by_token(case):
    scaled, plain, _ = CASES[case]
    model = scaled()
    switch_off(found_in(model))
    assert torch.equal(decoded(model), decoded(plain()))


@pytest.mark.parametrize("case", ["YaRN", "MLA", "Llama 4", "Ministral 3", "Inkling"])
def test_apply_refuses_replaces_or_composes(case):
    scaled, plain, layers = CASES[case]
    model = scaled()
    before = answer(model)
    description = found_in(model)[layers[0]][0].description
    with pytest.raises(attnscale.ArgumentError, match=re.escape(description)):
        attnscale.hf.apply(model, "constant")
    with attnscale.hf.apply(model, "constant", on_existing="replace"):
        torch.testing.assert_close(answer(model), answer(plain()), rtol=0, atol=1e-12)
    with attnscale.hf.apply(model, "constant", on_existing="compose"):
        torch.testing.assert_close(answer(model), before, rtol=0, atol=1e-12)
    assert torch.equal(answer(model), before)


@pytest.mark.parametrize("case", ["YaRN", "Ministral 3"])
def test_a_replaced_scaling_is_replaced_in_the_first_forward_of_a_saved_model(case, tmp_path):
    peft = pytest.importorskip("peft")
    model = CASES[case][0]().float()
    attnscale.hf.apply(model, LOG, on_existing="replace")
    expected = answer(model)
    model.save_pretrained(tmp_path / "model")
    kind = transformers.AutoModelForCausalLM
    loaded, _ = kind.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert torch.equal(answer(loaded), expected)
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(kind.from_pretrained(tmp_path / "model"), lora).eval()
    first = answer(adapted)
    assert torch.equal(first, answer(adapted))
    assert not torch.equal(first, expected)
    adapted.save_pretrained(tmp_path / "adapter")
    assert torch.equal(answer(peft.AutoPeftModel.from_pretrained(tmp_path / "adapter").base_model), first)


def test_a_scaling_cannot_be_replaced_in_a_forward_that_has_computed_it():
    model = llama(rope_parameters=yarn())
    attnscale.hf.apply(model, LOG, on_existing="replace")
    twin = type(model)(copy.deepcopy(model.config)).double().eval()  # is given its policies later
    twin.load_state_dict(model.state_dict())
    for _ in range(2):
        with pytest.raises(attnscale.ArgumentError, match=r"on_existing='replace'.*hf\.load\(.*hf\.attach\("):
            answer(twin)
    attnscale.hf.attach(twin)
    assert torch.equal(answer(twin), answer(model))


def test_a_learned_policy_that_replaces_a_scaling_is_not_given_by_from_pretrained(tmp_path):
    model = llama(rope_parameters=yarn()).float()
    attnscale.hf.apply(model, "ssmax", reference_length=8, on_existing="replace")
    expected = answer(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(attnscale.ArgumentError, match=r"hf\.load\(path\)"):
        answer(loaded)
    attnscale.hf.load_policy(loaded, tmp_path)
    assert torch.equal(answer(loaded), expected)
