"""Copies, and models loaded by implementation name, have the policies of the original at the same modules."""

# ruff: noqa: E402  (transformers is not there for Python 3.10)

from __future__ import annotations

import copy
import io
import json
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_zoo import ZOO, answer, reading
from tiny_models import TOKENS, llama, logits

import attnscale
import attnscale.hf
from attnscale import ArgumentError
from attnscale.hf.sites import site_of

LAW = {"name": "log", "reference_length": 4}
DECODER = {"is_decoder": True, "add_cross_attention": True}


def bert_decoder():
    """With cross attention, which no forward reaches without encoder states."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, **DECODER
    )
    return transformers.BertLMHeadModel(config).double().eval()


def build(name):
    return bert_decoder() if name == "bert decoder" else ZOO[name].build()


def inputs(name, model):
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"input_ids": TOKENS, "encoder_hidden_states": states} if name == "bert decoder" else reading(model)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved_whole(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model):
    return torch.optim.swa_utils.AveragedModel(model)


COPIES = {"deepcopy": copy.deepcopy, "pickle": pickled, "torch.save": saved_whole, "EMA": averaged}


def sites(model):
    return {path.removeprefix("module.") for path, module in model.named_modules() if site_of(module) is not None}


@pytest.mark.parametrize("name", ["bart", "t5", "whisper", "bert decoder"])
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_answers_as_the_original_and_can_be_restored(name, how):
    model = build(name)
    given = inputs(name, model)
    stock = answer(model, **given)
    handle = attnscale.hf.apply(model, LAW)
    expected = answer(model, **given)
    assert not torch.equal(expected, stock)
    twin = COPIES[how](model)
    assert torch.equal(answer(twin, **given), expected)
    assert sites(twin) == set(handle.policies)
    handle.remove()
    assert torch.equal(answer(twin, **given), expected)
    with attnscale.hf.attach(twin) as own:
        assert {path.removeprefix("module.") for path in own.policies} == set(handle.policies)
        assert own.record == handle.record
    assert torch.equal(answer(twin, **given), stock)
    assert not sites(twin)
    assert getattr(twin, "module", twin).config.to_dict() == model.config.to_dict()
    assert torch.equal(answer(model, **given), stock)


@pytest.mark.parametrize("name", ["bart", "t5", "whisper", "bert decoder", "llava"])
def test_a_load_by_name_answers_as_the_original_and_can_be_restored(name, tmp_path):
    model = build(name).float()
    given = {key: x.float() if x.is_floating_point() else x for key, x in inputs(name, model).items()}
    stock = answer(model, **given)
    handle = attnscale.hf.apply(model, LAW)
    expected = answer(model, **given)
    model.save_pretrained(tmp_path)
    by_name = type(model).from_pretrained(tmp_path, attn_implementation="attnscale")
    assert torch.equal(answer(by_name, **given), expected)
    assert sites(by_name) == set(handle.policies)
    attnscale.hf.attach(by_name).remove()
    assert torch.equal(answer(by_name, **given), stock)
    assert by_name.config._attn_implementation == "sdpa"
    loaded = attnscale.hf.load(tmp_path)
    assert torch.equal(answer(loaded.model, **given), expected)
    assert list(loaded.policies) == list(handle.policies)
    loaded.remove()
    assert torch.equal(answer(loaded.model, **given), stock)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("options", [{"layers": "1"}, {"layers": [0]}], ids=str)
def test_a_model_applied_to_some_layers_can_be_copied(how, options):
    model = llama()
    stock = logits(model)
    attnscale.hf.apply(model, LAW, **options)
    expected = logits(model)
    twin = COPIES[how](model)
    with torch.no_grad():
        assert torch.equal(twin(TOKENS).logits, expected)
        attnscale.hf.attach(twin).remove()
        assert torch.equal(twin(TOKENS).logits, stock)
    assert torch.equal(logits(model), expected)


def test_a_model_applied_to_some_layers_can_be_saved_and_loaded(tmp_path):
    model = llama().float()
    attnscale.hf.apply(model, LAW, layers="1")
    expected = logits(model)
    model.save_pretrained(tmp_path)
    by_name = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="attnscale")
    assert torch.equal(logits(by_name), expected)
    assert torch.equal(logits(attnscale.hf.load(tmp_path).model), expected)


def test_the_config_names_the_modules_by_ranges():
    model = llama(num_hidden_layers=6)
    constant = {"name": "constant", "beta": 1.5}
    handle = attnscale.hf.apply(model, {"default": LAW, "layers": {"1": constant, "4-5": constant}}, layers="0-2,4-5")
    modules = model.config.attnscale["modules"]
    assert set(modules) == {"model.layers.0,2.self_attn", "model.layers.1,4-5.self_attn"}
    assert modules["model.layers.1,4-5.self_attn"] == constant
    assert json.loads(json.dumps(model.config.attnscale)) == handle.record
    assert '"model.layers.1,4-5.self_attn"' in model.config.to_json_string()


def test_large_models_have_a_small_record():
    model = llama(num_hidden_layers=40)
    attnscale.hf.apply(model, LAW, probe=False)
    assert len(json.dumps(model.config.attnscale)) < 200


def test_a_copy_of_a_learned_policy_learns_on_its_own():
    model = llama()
    handle = attnscale.hf.apply(model, "ssmax", reference_length=8, layers="1")
    twin = copy.deepcopy(model)
    own = attnscale.hf.attach(twin)
    expected = logits(model)
    with torch.no_grad():
        own.parameters()[0].fill_(2.0)
    assert torch.equal(logits(model), expected)
    assert not torch.equal(logits(twin), expected)
    assert own.parameters()[0] is not handle.parameters()[0]


def test_a_copy_of_a_model_whose_own_scaling_was_replaced_gets_it_back():
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 8}
    for options in ({}, {"layers": "1"}):
        model = llama(rope_parameters=yarn)
        stock = logits(model)
        handle = attnscale.hf.apply(model, LAW, on_existing="replace", **options)
        expected = logits(model)
        for how in (copy.deepcopy, pickled):
            twin = how(model)
            assert torch.equal(logits(twin), expected)
            attnscale.hf.attach(twin).remove()
            assert torch.equal(logits(twin), stock)
            assert torch.equal(logits(model), expected)
        handle.remove()
        assert torch.equal(logits(model), stock)


def test_replaced_scaling_is_replaced_again_by_a_load(tmp_path):
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 8}
    model = llama(rope_parameters=yarn).float()
    stock = logits(model)
    attnscale.hf.apply(model, LAW, on_existing="replace")
    expected = logits(model)
    model.save_pretrained(tmp_path)
    by_name = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="attnscale")
    for loaded in (attnscale.hf.load(tmp_path), attnscale.hf.attach(by_name)):
        assert torch.equal(logits(loaded.model), expected)
        loaded.remove()
        assert torch.equal(logits(loaded.model), stock)


def test_a_copy_of_a_model_that_answers_to_sdpa_outlives_the_original():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    stock_function = ALL_ATTENTION_FUNCTIONS["sdpa"]
    model = llama()
    stock = logits(model)
    handle = attnscale.hf.apply(model, LAW, override=True)
    expected = logits(model)
    twin = copy.deepcopy(model)
    handle.remove()
    assert torch.equal(logits(model), stock)
    assert torch.equal(logits(twin), expected)
    attnscale.hf.attach(twin).remove()
    assert torch.equal(logits(twin), stock)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is stock_function


def test_a_model_set_to_sdpa_is_stock_while_another_one_overrides():
    model = llama()
    stock = logits(model)
    attnscale.hf.apply(model, LAW)
    model.set_attn_implementation("sdpa")
    with attnscale.hf.apply(llama(), LAW, override=True):
        assert torch.equal(logits(model), stock)
    model.set_attn_implementation("attnscale")
    assert not torch.equal(logits(model), stock)


@pytest.mark.parametrize(
    "written", [LAW, {"default": LAW}, {"policy": LAW, "layers": "1"}, {"policy": LAW, "cross": False}], ids=str
)
def test_configs_of_the_older_form_are_read_as_apply_reads_them(written, tmp_path):
    model = llama().float()
    with attnscale.hf.apply(model, LAW, layers=written.get("layers", "all")):
        expected = logits(model)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attnscale": written}))
    assert torch.equal(logits(attnscale.hf.load(tmp_path).model), expected)
    by_name = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="attnscale")
    assert torch.equal(logits(by_name), expected)


def test_an_older_config_leaves_cross_attention_alone(tmp_path):
    model = ZOO["bart"].build().float()
    with attnscale.hf.apply(model, LAW) as handle:
        expected = answer(model, **reading(model))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attnscale": LAW}))
    by_name = type(model).from_pretrained(tmp_path, attn_implementation="attnscale")
    assert torch.equal(answer(by_name, **reading(model)), expected)
    assert sites(by_name) == set(handle.policies)


def test_a_model_without_the_head_finds_its_modules_by_their_other_names(tmp_path):
    model = llama().float()
    attnscale.hf.apply(model, LAW, layers="1")
    with torch.no_grad():
        expected = model.model(TOKENS).last_hidden_state
    model.save_pretrained(tmp_path)
    headless = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="attnscale")
    with torch.no_grad():
        assert torch.equal(headless(TOKENS).last_hidden_state, expected)
    assert sites(headless) == {"layers.1.self_attn"}


def test_a_record_of_modules_that_the_model_lacks_is_refused():
    model = llama(attn_implementation="attnscale")
    model.config.attnscale = {"modules": {"model.blocks.0-1.attention": LAW}}
    with pytest.raises(ArgumentError, match=r"names model\.blocks\.0\.attention, which LlamaForCausalLM"):
        logits(model)


def test_there_is_nothing_to_attach_to_in_a_stock_model():
    with pytest.raises(ArgumentError, match=r"config\.attnscale=None is not accepted"):
        attnscale.hf.attach(llama())


def test_a_second_policy_for_other_layers_is_refused_and_the_first_stays():
    model = llama()
    handle = attnscale.hf.apply(model, LAW, layers="0")
    expected, config = logits(model), model.config.to_dict()
    with pytest.raises(ArgumentError, match="in one plan"):
        attnscale.hf.apply(model, LAW, layers="1")
    assert torch.equal(logits(model), expected)
    assert model.config.to_dict() == config
    handle.remove()


def test_a_stale_handle_leaves_a_newer_policy_alone():
    model = llama()
    first = attnscale.hf.apply(model, LAW)
    attnscale.hf.attach(model).remove()
    attnscale.hf.apply(model, "constant", beta=1.5)
    expected = logits(model)
    first.remove()
    assert torch.equal(logits(model), expected)


def test_a_model_that_shares_its_config_stays_stock_and_its_copy_follows_it():
    config = llama().config
    torch.manual_seed(0)
    model, other = (transformers.LlamaForCausalLM(config).double().eval() for _ in range(2))
    before = logits(other)
    twin_before = copy.deepcopy(model)
    with attnscale.hf.apply(model, LAW, layers="1"):
        assert torch.equal(logits(other), before)
        twin = copy.deepcopy(model)
        assert torch.equal(logits(twin), logits(model))
    assert torch.equal(logits(twin_before), logits(model))
    assert not torch.equal(logits(twin), logits(model))


def test_a_layer_called_outside_of_its_model_says_what_to_do():
    model = llama(attn_implementation="attnscale")
    model.config.attnscale = LAW
    hidden = torch.zeros(1, 3, 32, dtype=torch.float64)
    rotation = model.model.rotary_emb(hidden, torch.arange(3)[None])
    call = {"position_embeddings": rotation, "attention_mask": None}
    with pytest.raises(ArgumentError, match=r"attnscale\.hf\.attach\(model\) first"):
        model.model.layers[0].self_attn(hidden, **call)
    attnscale.hf.attach(model)
    model.model.layers[0].self_attn(hidden, **call)


def test_a_compiled_copy_runs_without_breaks():
    model = llama()
    attnscale.hf.apply(model, LAW, layers="1")
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True, backend="eager")
    with torch.no_grad():
        found = compiled(TOKENS, use_cache=False).logits
    torch.testing.assert_close(found, logits(model), rtol=0, atol=1e-12)


def test_a_pickle_brings_the_registration_of_our_name_along():
    """Unpickling imports the modules of the classes it names, and importing any file of attnscale.hf registers us."""
    model = llama()
    attnscale.hf.apply(model, LAW, layers="1")
    assert b"attnscale.hf." in pickle.dumps(model)
