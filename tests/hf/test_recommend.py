"""`recommend` reads what limits a model from its config, and what it prints can be pasted."""

# ruff: noqa: E402  (there is no transformers for Python 3.10)

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

import torch
from hf_releases import models
from hf_zoo import ZOO
from tiny_models import bloom, deepseek_sparse, llama, t5

import attnscale
from attnscale import ArgumentError, ArgumentTypeError
from attnscale.cli import main
from attnscale.hf import apply, inspect, recommend
from attnscale.hf.advice import FAR, OWN_FACTOR, SMOLLM2, TINY_MODELS
from attnscale.hf.attention_layers import find_attention_layers
from attnscale.hf.existing import find_existing
from attnscale.hf.sites import site_of

ASSETS = Path(__file__).resolve().parents[2] / ".github/assets"
L = 64  # the trained length of the tiny models
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": L,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
HALF = ["sliding_attention", "full_attention"] * 2
THETA = {"rope_theta": 10000.0}
YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": L}
LLAMA3 = THETA | {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
LONGROPE = THETA | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}
LONGROPE |= {"original_max_position_embeddings": 16}


def small(kind: str, **settings):
    """The config of a tiny model of this kind."""
    return getattr(models, f"{kind}Config")(**(SMALL | settings))


CONFIGS = {
    "llama": lambda: small("Llama"),
    "qwen3": lambda: small("Qwen3"),
    "gemma3": lambda: small("Gemma3Text", sliding_window=5, layer_types=HALF),
    "smollm3": lambda: small("SmolLM3", no_rope_layers=[1, 1, 1, 0]),
    "cohere2": lambda: small("Cohere2", sliding_window=5, layer_types=HALF),
    "mistral": lambda: small("Mistral", sliding_window=5),
    "llama4": lambda: small(
        "Llama4Text", attention_chunk_size=8, no_rope_layers=[1, 1, 1, 0], moe_layers=[], intermediate_size_mlp=48
    ),
    "gpt_oss": lambda: small(
        "GptOss", **EXPERTS, sliding_window=5, layer_types=HALF, rope_parameters=YARN, max_position_embeddings=4 * L
    ),
    "yarn": lambda: small("Llama", rope_parameters=YARN, max_position_embeddings=4 * L),
    "linear": lambda: small("Llama", rope_parameters=THETA | {"rope_type": "linear", "factor": 2.0}),
    "dynamic": lambda: small("Llama", rope_parameters=THETA | {"rope_type": "dynamic", "factor": 2.0}),
    "llama3": lambda: small("Llama", rope_parameters=LLAMA3),
    "longrope": lambda: small("Llama", rope_parameters=LONGROPE),
    "ministral3": lambda: small(
        "Ministral3", rope_parameters=YARN | {"llama_4_scaling_beta": 0.1}, max_position_embeddings=4 * L
    ),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=L),
    "modernbert": lambda: transformers.ModernBertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=L,
        local_attention=6,
        pad_token_id=0,
        cls_token_id=1,
        sep_token_id=2,
    ),
    "mla": lambda: small(
        "MiniCPM3" if hasattr(transformers, "MiniCPM3Config") else "DeepseekV3",
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        num_key_value_heads=4,
    ),
}
KINDS = {"gemma3": "Gemma3ForCausalLM", "modernbert": "ModernBertForMaskedLM"}


def mamba():
    return transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2))


@pytest.fixture
def folder(tmp_path):
    """A function that saves a tiny model and returns its folder."""

    def save(name):
        config = CONFIGS[name]()
        kind = KINDS.get(name)
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config) if kind else transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


def pasted(found):
    """The model after the printed program, without the network."""
    names = {}
    exec(found.code, names)
    return names["model"].eval()


# Case, length, verdict, the call, and words of the advice.
TO_PASTE = [
    ("llama", 4 * L, "stretch", ('"log"', 'on_existing="replace"'), "not stretched, and fails beyond 64 tokens"),
    ("qwen3", 3 * L, "stretch", ('"log"', 'on_existing="replace"'), "YaRN stretches it by 3,"),
    ("gemma3", 4 * L, "stretch", ('"log"', 'layers="full"', 'on_existing="replace"'), "not stretched"),
    ("smollm3", 4 * L, "stretch", ('"log"', 'on_existing="replace"'), "not stretched"),
    ("cohere2", 4 * L, "apply", ('"log"', 'layers="full"'), "log is 1 up to 64 tokens"),
    ("cohere2", FAR * L, "apply", ('"log_squared"', 'layers="full"'), "log is milder"),
    ("gpt_oss", 4 * L, "compare", ('"log"', 'layers="full"', 'on_existing="replace"'), "Keep it unless"),
    ("yarn", 2 * L, "compare", ('"log"', 'on_existing="replace"'), "policy yarn(factor=4.0)"),
    ("yarn", 8 * L, "stretch", ('"log"', 'on_existing="replace"'), "stretched to 256 tokens only"),
    ("linear", 2 * L, "stretch", ('"log"',), "was not measured by us"),
    ("dynamic", 2 * L, "apply", ('"log"',), "cached keys keep the rotation"),
    ("llama3", 2 * L, "stretch", ('"log"',), "reaches 64 tokens only"),
    ("modernbert", 4 * L, "stretch", ('"log"', 'layers="full"'), "An encoder"),
    ("mla", 4 * L, "stretch", ('"log"', 'on_existing="replace"'), "not stretched"),
]


@pytest.mark.parametrize(("name", "length", "verdict", "call", "words"), TO_PASTE, ids=lambda value: str(value)[:12])
def test_what_is_printed_can_be_pasted(folder, name, length, verdict, call, words):
    path = folder(name)
    found = recommend(path, length)
    assert (found.verdict, found.trained_length) == (verdict, L)
    assert [part for part in (*call, f"reference_length={L}", "floor=True") if part not in found.line] == []
    assert words in " ".join(str(found).split())
    model = pasted(found)  # warnings are errors
    layers = [layer for layer in find_attention_layers(model) if site_of(layer.module) is not None]
    assert layers
    assert not [layer for layer in layers if layer.window is not None and layer.window < L]
    for layer in layers:
        policy, exponent = site_of(layer.module).policy, 2 if found.policy["name"] == "log_squared" else 1
        assert float(policy(L)) == 1.0
        assert float(policy(length)) == pytest.approx((math.log(length) / math.log(L)) ** exponent)
        # Where only some layers are selected, hooks remove the factor that they share with the others.
        assert not find_existing(model, layer) or len(layers) < len(find_attention_layers(model))
    tokens = torch.randint(1, 60, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert model(tokens).logits.isfinite().all()


@pytest.mark.parametrize(
    ("name", "length", "verdict", "words"),
    [
        ("llama", L, "unneeded", "trained at 64 tokens"),
        ("llama3", L, "unneeded", "trained at 64 tokens"),
        ("longrope", L, "unneeded", "trained at 64 tokens"),
        ("longrope", 2 * L, "impossible", "LongRoPE finds by a search"),
        ("mistral", 8 * L, "unneeded", "sliding window, of at most 5 keys"),
        ("gpt2", 2 * L, "impossible", "a table with 64 entries"),
        ("llama4", 8 * L, "keep", "Llama 4: logits × 1 + 0.1·ln"),
        ("ministral3", 2 * L, "keep", "Mistral: logits × 1 + 0.1·ln"),
    ],
)
def test_what_needs_no_policy_or_allows_none_has_no_line(folder, name, length, verdict, words):
    found = recommend(folder(name), length)
    assert (found.verdict, found.line, found.code) == (verdict, None, None)
    assert words in " ".join(str(found).split())


def test_a_law_of_its_own_is_kept_when_the_embedding_is_stretched_further(folder):
    found = recommend(folder("ministral3"), 8 * L)
    assert (found.verdict, found.line) == ("stretch", None)
    model = pasted(found)
    assert model.config.rope_parameters["factor"] == 8.0
    assert [one.name for one in find_existing(model, find_attention_layers(model)[0])][-1] == "Mistral"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (bloom, "AttentionInterface"),
        (deepseek_sparse, "selects its own keys"),
        (
            lambda: transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=64, hidden_size=32)),
            "no softmax attention",
        ),
    ],
)
def test_models_that_apply_refuses_are_said_to_be_unsupported(build, words):
    model = build()
    found = recommend(model, 8 * L)
    assert (found.verdict, found.line) == ("unsupported", None)
    assert words in found.reasons[0]
    with pytest.raises(ArgumentError):
        apply(model, "log", reference_length=L)
    assert "ALiBi" in recommend(bloom(), 8 * L).positions


def test_an_encoder_decoder_needs_a_trained_length_and_names_cross_attention():
    assert recommend(t5(), 4 * L).verdict == "unknown"
    assert "trained_length" in recommend(t5(), 4 * L).missing[0]
    found, model = recommend(t5(), 4 * L, trained_length=L), t5()
    assert (found.verdict, found.trained_source) == ("apply", "as passed")
    assert found.positions == ("relative position bias",)
    assert any("cross=True" in text for text in found.warnings)
    exec(found.code, {"model": model})
    assert sum(site_of(layer.module) is not None for layer in find_attention_layers(model)) == 4


ENCODER_DECODER = {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 0}
ENCODER_DECODER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 1}
ENCODER_DECODER |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (lambda: transformers.M2M100Config(**ENCODER_DECODER), "embed_positions"),
        (lambda: transformers.CTRLConfig(vocab_size=64, n_embd=32, n_head=4, n_layer=1, dff=48), "pos_encoding"),
    ],
)
def test_positions_added_to_the_input_are_not_taken_for_none(config, name):
    found = recommend(config(), FAR * L, trained_length=L)
    assert found.positions == (f"added to the input ({name})",)
    assert found.policy == {"name": "log", "reference_length": L, "floor": True}  # log_squared only without positions
    assert any(name in text and "not seen in training" in text for text in found.warnings)


def test_a_table_whose_length_the_config_names_otherwise_is_found():
    sizes = {"max_source_positions": 2 * L, "max_target_positions": L}
    found = recommend(transformers.WhisperConfig(**ENCODER_DECODER, **sizes), 2 * L, trained_length=L)
    assert (found.verdict, found.positions) == ("impossible", (f"table of {L} positions",))


def test_a_learned_table_is_not_taken_for_layers_without_positions():
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=FAR * L)
    found = recommend(config, FAR * L, trained_length=L)
    assert found.policy == {"name": "log", "reference_length": L, "floor": True}
    assert any("not seen in training" in text for text in found.warnings)


def test_a_trained_length_that_was_passed_is_not_doubted():
    stretched = small("Llama", rope_parameters=YARN, max_position_embeddings=4 * L)
    assert any("trained_length=" in text for text in recommend(stretched, 2 * L).warnings)
    assert not recommend(stretched, 2 * L, trained_length=L).warnings
    assert not recommend(small("Llama"), 2 * L, trained_length=L // 2).warnings


def test_an_embedding_that_transformers_cannot_stretch_for_this_class_is_named():
    found = recommend(ZOO["phimoe"].build(), 4 * L)
    assert (found.verdict, found.code) == ("impossible", None)
    assert "transformers cannot do so for PhimoeForCausalLM" in found.reasons[0]


def test_encoder_and_decoder_are_stretched_if_each_has_its_own_embedding(tmp_path):
    ZOO["t5gemma"].build().float().save_pretrained(tmp_path)
    found = recommend(tmp_path, 4 * L)
    assert found.verdict == "stretch"
    model = pasted(found)  # warnings are errors
    for part in (model.config.encoder, model.config.decoder):
        assert part.rope_parameters["rope_type"] == "yarn"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # gpt_bigcode
@pytest.mark.parametrize("name", ZOO)
def test_every_tested_model_type_has_a_recommendation_that_apply_agrees_with(name):
    model = ZOO[name].build()
    found = recommend(model, 4 * L, trained_length=L)
    assert (found.verdict, bool(found.positions)) != ("unsupported", True)
    if found.line is not None and not found.missing:
        exec(found.line, {"attnscale": attnscale, "model": model})
        assert recommend(model, 4 * L, trained_length=L).verdict == "applied"


def test_a_model_in_memory_is_not_loaded_again():
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["cohere2"]())
    found = recommend(model, 4 * L)
    assert "from_pretrained" not in found.code
    before = [name for name, _ in model.named_modules()]
    exec(found.code, {"model": model})
    assert [name for name, _ in model.named_modules()] != before
    again = recommend(model, 4 * L)
    assert (again.verdict, again.line) == ("applied", None)
    assert "Log(" in again.reasons[0]


def test_a_policy_in_the_config_is_found(tmp_path):
    model = llama().float()
    with apply(model, "log", reference_length=8):
        model.save_pretrained(tmp_path / "applied")
    found = recommend(tmp_path / "applied", 8 * L)
    assert found.verdict == "applied"
    assert "'reference_length': 8" in found.reasons[0]


def test_modules_outside_of_transformers_are_converted_once_their_length_is_known():
    model = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    assert recommend(model, 4 * L).verdict == "unknown"
    found = recommend(model, 4 * L, trained_length=L)
    assert found.line == f'attnscale.convert(model, "log", reference_length={L}, floor=True)'
    exec(found.code, {"model": model})
    assert isinstance(model.self_attn, attnscale.MultiheadAttention)
    other = recommend(torch.nn.Linear(2, 2), 4 * L, trained_length=L)
    assert (other.verdict, other.line) == ("unsupported", None)
    assert recommend(model, L, trained_length=L).verdict == "unneeded"


def test_no_weights_are_read_and_the_config_is_not_changed(folder):
    path = folder("llama")
    for file in path.glob("*.safetensors"):
        file.unlink()
    assert recommend(path, 4 * L).verdict == "stretch"
    large = transformers.LlamaConfig(num_hidden_layers=80, hidden_size=8192, num_attention_heads=64)
    before = large.to_dict()
    assert recommend(large, 8192).trained_length == 2048
    assert large.to_dict() == before


@pytest.mark.parametrize(
    ("arguments", "keywords", "words"),
    [
        (("nowhere", 64), {}, "hf download nowhere"),
        ((transformers.LlamaConfig(), 0), {}, "length=0"),
        ((transformers.LlamaConfig(), 64), {"trained_length": 1}, "trained_length=1"),
    ],
)
def test_bad_arguments_are_named(arguments, keywords, words):
    with pytest.raises(ArgumentError, match=words):
        recommend(*arguments, **keywords)


def test_broken_folders_and_other_types_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    with pytest.raises(ArgumentError, match=r"its config\.json cannot be read"):
        recommend(tmp_path, 64)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ArgumentError, match=r"its config\.json cannot be read"):
        recommend(tmp_path, 64)
    with pytest.raises(ArgumentTypeError, match="model="):
        recommend(3, 64)


def test_it_is_frozen_and_plain_data(folder):
    found = recommend(folder("llama"), 4 * L)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.length = 1
    assert json.loads(json.dumps(found.to_dict()))["code"] == found.code


def test_the_command_prints_the_text_or_json(folder, capsys):
    path = folder("llama")
    assert main(["recommend", str(path), "--to", str(4 * L)]) == 0
    assert capsys.readouterr().out == f"{recommend(str(path), 4 * L)}\n"
    assert main(["recommend", str(path), "--to", "256", "--trained-length", "32", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["trained_length"], plain["policy"]["reference_length"]) == (32, 32)
    assert main(["recommend", "embedded", "--to", "512"]) == 0
    assert 'apply(model, "log", reference_length=128, floor=True, layers="full")' in capsys.readouterr().out
    assert main(["recommend", "nowhere", "--to", "512"]) == 2
    assert "model='nowhere' is not accepted" in capsys.readouterr().err


def test_the_command_to_measure_is_one_that_evaluate_accepts(folder, monkeypatch):
    from attnscale.cli.evaluate import EXPERIMENTS

    ran = []
    monkeypatch.setitem(EXPERIMENTS, "evaluation", ("attnscale.lab.evaluation", "Evaluation", "evaluate"))
    monkeypatch.setattr("attnscale.lab.evaluation.evaluate", lambda given, progress: ran.append(given) or Path())
    monkeypatch.setattr("attnscale.cli.evaluate.show_evaluation", lambda *_, **__: 0)
    for name, length in (("llama", 3 * L), ("yarn", 4 * L), ("yarn", 8 * L), ("llama4", 8 * L), ("cohere2", 4 * L)):
        command = recommend(folder(name), length).command
        assert main(command.split()[1:]) == 0
        assert (ran[-1].trained_length, max(ran[-1].lengths), ran[-1].lengths[0]) == (L, length, L)
    assert recommend(folder("modernbert"), 4 * L).command is None


def test_the_figures_of_the_evidence_are_those_of_the_committed_tables():
    def rows(name):
        with (ASSETS / name).open(newline="") as file:
            return list(csv.DictReader(file))

    whole = {
        (row["metric"], row["policy"], row["length"]): row
        for row in rows("swapped_in.csv")
        if row["model"] == "all" and not row["bin"]
    }
    laws = ("constant", "log", "log_squared")
    shown = [f"{100 * float(whole['accuracy', law, n]['value']):.1f}" for n in ("2048", "16384") for law in laws]
    shown += [f"{float(whole['bits_per_byte', law, '16384']['difference']):.3f}" for law in laws[1:]]
    numbers = iter(re.findall(r"\d+(?:\.\d+)?", TINY_MODELS.text))
    assert all(number in numbers for number in shown)
    assert whole["accuracy", "log", "512"]["value"] == whole["accuracy", "log_squared", "512"]["value"]
    # At FAR times the trained length of 128 tokens, and beyond, the sharper law answers more.
    for length in ("2048", "8192", "16384"):
        assert int(length) >= FAR * 128
        log, sharper = (float(whole["accuracy", law, length]["value"]) for law in laws[1:])
        assert sharper > log
    found = {
        (row["policy"], row["metric"], row["bin"]): row
        for row in rows("calibrated_smollm2.csv")
        if row["factor"] == "2" and row["task"] == "needles"
    }
    assert f"saves {-float(found['log', 'bits_per_byte', '']['difference']):.4f} bits per byte" in SMOLLM2.text
    for law, text in (("log", SMOLLM2.text), ("constant", SMOLLM2.text), ("yarn:factor=2", OWN_FACTOR.text)):
        assert f"finds {100 * float(found[law, 'accuracy', '']['value']):.1f} %" in text
    cost = found["yarn:factor=2", "bits_per_byte", "0-4096"]
    assert f"costs {float(cost['difference']):.4f} bits per byte" in OWN_FACTOR.text


def test_inspect_is_headed_by_trained_length_positions_and_the_suggestion():
    lines = str(inspect(llama())).splitlines()
    assert lines[1] == "trained length: 64 tokens (max_position_embeddings); positions: RoPE, not stretched"
    assert lines[2].startswith('at 256 tokens: stretch the rotary embedding first; attnscale.hf.apply(model, "log"')
    assert inspect(t5()).context == ("trained length: unknown; positions: relative position bias",)
