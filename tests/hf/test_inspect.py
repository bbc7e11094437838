"""`inspect` describes a model and the effect of `apply`, without changing the model."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import transformers
from tiny_models import bloom, deepseek_sparse, llama, logits, mistral, t5

import attnscale
from attnscale import ArgumentError, ArgumentTypeError
from attnscale.hf import apply
from attnscale.hf.inspection import inspect

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 8}
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWER = {key: value for key, value in SMALL.items() if key != "vocab_size"} | {"image_size": 16, "patch_size": 8}


def yarn():
    return llama(rope_parameters=YARN)


def smollm3():
    config = transformers.SmolLM3Config(**SMALL, num_key_value_heads=2, no_rope_layers=[1, 0], pad_token_id=0)
    return transformers.SmolLM3ForCausalLM(config).eval()


def gemma2():
    config = transformers.Gemma2Config(
        **SMALL,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    )
    return transformers.Gemma2ForCausalLM(config).eval()


def gpt_oss():
    config = transformers.GptOssConfig(
        **SMALL, num_key_value_heads=2, head_dim=8, num_local_experts=4, pad_token_id=0, sliding_window=5
    )
    return transformers.GptOssForCausalLM(config).eval()


def gptj():
    config = transformers.GPTJConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)
    return transformers.GPTJForCausalLM(config).eval()


def falcon():
    config = transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    return transformers.FalconForCausalLM(config).eval()


def llava():
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SMALL, pad_token_id=0),
        vision_config=transformers.CLIPVisionConfig(**TOWER),
        image_token_id=3,
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


def mamba():
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    return transformers.MambaForCausalLM(config).eval()


def lines(inspection):
    """The table of what was printed, without its titles, as lists of cells."""
    head, table = str(inspection).split("\n\n")
    assert head.splitlines()[1:] == list(inspection.context)
    titles, *rows = table.splitlines()
    starts = [titles.index(title) for title in ("path", "part", "routed", "heads", "rope", "window", "sinks")]
    starts = [0, *starts, titles.index("softcap"), titles.index("own scaling"), titles.rindex("apply"), None]
    return [[row[a:b].strip() for a, b in itertools.pairwise(starts)] for row in rows]


def test_a_run_of_equal_layers_is_one_line():
    text = str(inspect(llama(num_hidden_layers=6), "log", reference_length=8192))
    assert text.splitlines() == [
        "LlamaForCausalLM: 6 attention modules; log(reference_length=8192); β at n = 1024, 8192, 65536",
        "trained length: 64 tokens (max_position_embeddings); positions: RoPE, not stretched",
        'at 256 tokens: stretch the rotary embedding first; attnscale.hf.apply(model, "log", reference_length=64, '
        'floor=True, on_existing="replace")',
        "",
        "layer  path                      part  routed  heads  rope  window  sinks  softcap  own scaling  apply",
        "0-5    model.layers.*.self_attn  text  yes     4 × 8  RoPE  –       –      –        –            "
        "selected: β = 0.7692, 1, 1.231",
    ]


def test_layers_that_differ_have_lines_of_their_own():
    sliding, full = lines(inspect(gemma2(), "log", lengths=[2, 8, 1024]))
    assert sliding[:-1] == ["0", "model.layers.0.self_attn", "text", "yes", "4 × 8", "RoPE", "5", "–", "50", "–"]
    assert full[:-1] == ["1", "model.layers.1.self_attn", "text", "yes", "4 × 8", "RoPE", "–", "–", "50", "–"]
    # A row in the window of five sees five keys, however long the text.
    assert sliding[-1] == "selected: β = 0.6931, 1.609, 1.609"
    assert full[-1] == "selected: β = 0.6931, 2.079, 6.931"
    assert [line[5:8] for line in lines(inspect(smollm3()))] == [["RoPE", "–", "–"], ["NoPE", "–", "–"]]
    assert [line[6:8] for line in lines(inspect(gpt_oss()))] == [["5", "yes"], ["–", "yes"]]


def test_what_is_left_alone_says_what_would_select_it():
    encoder, decoder, cross = lines(inspect(t5(), "log"))
    assert encoder[:3] == ["0-1", "encoder.block.*.layer.0.SelfAttention", "text"]
    assert decoder[-1].startswith("selected: β = ")
    assert cross[2] == "cross"
    assert cross[-1] == "left alone: cross-attention (cross=True selects it)"
    assert lines(inspect(t5(), "log", cross=True))[2][-1].startswith("selected")
    vision, text = lines(inspect(llava(), "log"))
    assert vision[2:4] == ["other", "yes"]
    assert vision[-1] == "left alone: not text (towers='all' selects it)"
    assert text[-1].startswith("selected")
    assert lines(inspect(llama(), "log", layers="1"))[0][-1] == "left alone: not in layers='1'"


def test_positions_count_where_a_window_hides_them():
    model = mistral()
    (line,) = lines(inspect(model, "grok2", threshold=4, lengths=[4, 1025]))
    assert line[6] == "5"
    assert line[-1] == "selected: β = 1, 5"  # log2(1024)/log2(4), at position 1024


@pytest.mark.parametrize(
    ("on_existing", "then"), [("compose", "on top of its own scaling"), ("replace", "instead of its own scaling")]
)
def test_scaling_that_is_there_already(on_existing, then):
    (refused,) = lines(inspect(yarn(), "log", reference_length=8192))
    assert refused[-2] == "YaRN: logits × 1.459 = attention_scaling² (1.208²); policy yarn(factor=8.0)"
    assert refused[-1] == ("refused: already scaled; on_existing='compose' multiplies on top, 'replace' disables it")
    (selected,) = lines(inspect(yarn(), "log", reference_length=8192, on_existing=on_existing))
    assert selected[-1] == f"selected: β = 0.7692, 1, 1.231, {then}"


def test_a_policy_that_is_there_already():
    model = llama()
    assert [line[-1] for line in lines(inspect(model))] == ["supported"]
    plan = {"default": "constant", "layers": {"1": {"default": "constant", "heads": {"0": "log"}}}}
    with apply(model, plan):
        assert [line[-1] for line in lines(inspect(model, lengths=[8]))] == ["has β = 1", "has β = 1…2.079"]
        assert lines(inspect(model, "log"))[0][-1] == "refused: already has β = 1, 1, 1; call handle.remove() first"


def test_policies_that_read_more_than_lengths_say_so():
    assert lines(inspect(llama(), "gap_adaptive"))[0][-1] == "selected: β computed from scores"
    assert lines(inspect(llama(), "asentmax"))[0][-1] == "selected: β computed from queries"


@pytest.mark.parametrize("build", [bloom, gptj, falcon])
def test_models_that_compute_attention_themselves(build):
    for policy in (None, "log"):
        (line,) = lines(inspect(build(), policy))
        assert line[3:5] == ["no", "4 × 8"]
        assert line[-1].startswith("refused: computes attention without ")
        assert "attnscale.scaled_dot_product_attention" in line[-1]


def test_a_model_without_attention_is_an_empty_table():
    found = inspect(mamba(), "log")
    assert found.layers == ()
    assert not found.accepted
    assert str(found).startswith("MambaForCausalLM: 0 attention modules; log() would be refused")


CASES = [
    (llama, {}),
    (llama, {"layers": "1"}),
    (yarn, {}),
    (yarn, {"on_existing": "compose"}),
    (yarn, {"on_existing": "replace", "layers": [1]}),
    (smollm3, {"layers": "nope"}),
    (gemma2, {"layers": "full"}),
    (gpt_oss, {}),
    (gpt_oss, {"on_existing": "compose"}),
    (t5, {"cross": True}),
    (llava, {}),
    (bloom, {}),
    (gptj, {}),
    (falcon, {"layers": "0"}),
    (deepseek_sparse, {}),
    (mamba, {}),
]


@pytest.mark.parametrize(("build", "keywords"), CASES, ids=[f"{build.__name__} {keys}" for build, keys in CASES])
def test_it_foretells_what_apply_does(build, keywords):
    model = build()
    foretold = inspect(model, "log", reference_length=64, **keywords)
    selected = [layer.facts.path for layer in foretold.layers if layer.verdict == "selected"]
    if not foretold.accepted:
        with pytest.raises(ArgumentError):
            apply(model, "log", reference_length=64, **keywords)
        return
    with apply(model, "log", reference_length=64, **keywords) as handle:
        assert list(handle.policies) == selected
        beta = handle.policies[selected[-1]](1024)
    assert f"{beta:.4g}" in next(layer.detail for layer in foretold.layers if layer.facts.path == selected[-1])


def test_nothing_is_changed_by_looking():
    model = yarn()
    names, before = [name for name, _ in model.named_modules()], logits(model)
    config = model.config.to_dict()
    inspect(model, "ssmax", on_existing="replace")
    assert [name for name, _ in model.named_modules()] == names
    assert model.config.to_dict() == config
    assert torch.equal(logits(model), before)


def test_it_cannot_be_changed():
    found = inspect(llama())
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.model = "another"


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"policy": "no_such"}, "no_such"),
        ({"policy": "log", "layers": "7"}, "layers"),
        ({"policy": "log", "layers": "nope"}, "nope"),
        ({"policy": "log", "towers": "vision"}, "towers"),
        ({"policy": "log", "on_existing": "ignore"}, "on_existing"),
        ({"policy": {"layers": {"0-9": "log"}}}, "layers 0-1"),
        ({"lengths": [0]}, "lengths=0 is not accepted"),
        ({"lengths": []}, "lengths"),
        ({"reference_length": 8}, "policy=None"),
    ],
)
def test_bad_arguments_are_named(keywords, words):
    with pytest.raises(ArgumentError, match=words):
        inspect(llama(), **keywords)


def test_another_kind_of_model_is_refused():
    with pytest.raises(ArgumentTypeError, match="transformers model"):
        inspect(torch.nn.Linear(2, 2))


def test_policies_of_a_large_model_are_shown_without_its_weights():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=32))
    (line,) = lines(inspect(model, "log", reference_length=8192))
    assert line[0] == "0-31"
    assert line[4] == "32 × 128"
    assert line[-1] == "selected: β = 0.7692, 1, 1.231"
    assert attnscale.build_policy("log", reference_length=8192)(65536) == pytest.approx(1.231, abs=1e-3)


@pytest.mark.parametrize("layers", [np.int64(1), np.array([1]), [np.int32(1)]], ids=repr)
def test_layers_and_lengths_may_be_numbers_of_numpy(layers):
    model, reference = llama(), np.int64(8)
    found = inspect(model, "log", layers=layers, lengths=np.array([8, 64]), reference_length=reference)
    assert [layer.verdict for layer in found.layers] == ["left alone", "selected"]
    assert found.layers[1].detail == "β = 1, 2"
    with apply(model, {"layers": {"1": {"name": "log", "reference_length": reference}}}) as handle:
        assert handle.policies["model.layers.1.self_attn"].reference_length == 8
        assert model.config.attnscale["modules"]["model.layers.1.self_attn"]["reference_length"] == 8


def test_several_layers_may_be_an_array():
    with apply(llama(), "log", layers=np.array([0, 1])) as handle:
        assert len(handle.policies) == 2
    with pytest.raises(ArgumentError, match="layers of this model, 0-1"):
        apply(llama(), "log", layers=np.array([0, 7]))
