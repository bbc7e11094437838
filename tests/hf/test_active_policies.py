"""`inspect` shows the active policies, and a saved model gets its policy when it is loaded."""

# ruff: noqa: E402  (transformers is not there for Python 3.10)

from __future__ import annotations

import copy
import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_releases import since
from hf_zoo import ZOO, answer, reading
from tiny_models import llama, logits

import attnscale
import attnscale.hf

LAW = {"name": "log", "reference_length": 4}
load = transformers.AutoModelForCausalLM.from_pretrained


def details(model, **options):
    return [layer.detail for layer in attnscale.hf.inspect(model, lengths=[4, 16], **options).layers]


def test_inspect_says_that_a_policy_is_not_asked_for():
    model = llama()
    stock = logits(model)
    attnscale.hf.apply(model, LAW)
    assert details(model) == ["has β = 1, 2"] * 2
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(model), stock)
    idle = "has β = 1, 2, but does not use it: attn_implementation='sdpa', not 'attnscale'"
    assert details(model) == [idle] * 2
    assert details(copy.deepcopy(model)) == [idle] * 2
    model.set_attn_implementation("attnscale")
    assert details(model) == ["has β = 1, 2"] * 2
    assert not torch.equal(logits(model), stock)


def test_inspect_knows_who_answers_to_sdpa():
    model = llama()
    with attnscale.hf.apply(model, LAW, override=True):
        assert details(model) == ["has β = 1, 2"] * 2
    assert details(model) == ["supported"] * 2


def test_inspect_knows_what_a_load_by_name_will_do(tmp_path):
    model = llama()
    with attnscale.hf.apply(model, LAW, layers="1"):
        model.save_pretrained(tmp_path)
    named = load(tmp_path, attn_implementation="attnscale")
    before = [name for name, _ in named.named_modules()]
    assert details(named) == ["supported", "has β = 1, 2"]
    assert [name for name, _ in named.named_modules()] == before
    logits(named)
    assert details(named) == ["supported", "has β = 1, 2"]


def test_a_plain_load_applies_the_policy(tmp_path):
    model = llama().float()
    stock = logits(model)
    attnscale.hf.apply(model, LAW, layers="1")
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == "attnscale"
    plain = load(tmp_path)
    assert torch.equal(logits(plain), expected)
    plain.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), expected)
    # An explicit implementation gives the stock model.
    assert torch.equal(logits(load(tmp_path, attn_implementation="sdpa")), stock)


@pytest.mark.parametrize("name", ["llava", "t5", "whisper"])
def test_a_plain_load_of_a_model_with_parts_applies_the_policy(name, tmp_path):
    model = ZOO[name].build().float()
    given = {key: x.float() if x.is_floating_point() else x for key, x in reading(model).items()}
    attnscale.hf.apply(model, LAW)
    expected = answer(model, **given)
    model.save_pretrained(tmp_path)
    assert torch.equal(answer(type(model).from_pretrained(tmp_path), **given), expected)


def test_a_plain_load_of_what_was_learned_refuses_to_run_without_it(tmp_path):
    model = llama().float()
    attnscale.hf.apply(model, "ssmax", reference_length=8)
    model.save_pretrained(tmp_path)
    with pytest.raises(attnscale.ArgumentError, match=r"attnscale\.hf\.load\(path\)"):
        logits(load(tmp_path))


@since("5.4", "from_pretrained reads attn_implementation from config.json")
def test_a_plain_load_without_attnscale_fails_by_name(tmp_path, monkeypatch):
    """transformers refuses an implementation that nobody registered."""
    from transformers import AttentionInterface

    model = llama().float()
    with attnscale.hf.apply(model, LAW):
        model.save_pretrained(tmp_path)
    monkeypatch.delitem(AttentionInterface._global_mapping, "attnscale")
    with pytest.raises(ValueError, match='attn_implementation="attnscale"` is not supported'):
        load(tmp_path)


def test_a_removed_policy_leaves_no_trace_in_what_is_saved(tmp_path):
    model = llama()
    before = model.config.to_json_string()
    attnscale.hf.apply(model, LAW).remove()
    assert model.config.to_json_string() == before
    for name in ("llava", "t5"):
        parts = ZOO[name].build()
        before = parts.config.to_json_string()
        attnscale.hf.apply(parts, LAW).remove()
        assert parts.config.to_json_string() == before
