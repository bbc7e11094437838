"""Learned policies with PEFT adapters, in separate files, and from the Hub."""

# ruff: noqa: E402  (transformers is not there for Python 3.10)

from __future__ import annotations

import json
import os

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file
from tiny_models import TOKENS, llama, logits

import attnscale
import attnscale.hf
from attnscale import ArgumentError, AttnScaleWarning

VALUES = torch.tensor([0.3, 0.5, 0.7, 0.9])
LEARNED = "base_model.model.model.layers.{}.self_attn.attnscale.policy.s"
OTHERS = {
    "lora": peft.LoraConfig,
    "ia3": lambda **given: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
    "prompt": lambda **given: peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
}


def adapt(model, method="lora"):
    torch.manual_seed(1)
    return peft.get_peft_model(model, OTHERS[method](r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def applied(order, method="lora", dtype=torch.float32, **options):
    """A model, by default in fp32, with an adapter and a policy that learns, and its handle."""
    model = llama().to(dtype)
    options = {"reference_length": 8} | options
    if order == "before":
        handle = attnscale.hf.apply(model, "ssmax", **options)
        return adapt(model, method), handle
    model = adapt(model, method)
    return model, attnscale.hf.apply(model, "ssmax", **options)


def answers(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def train(model, steps=2):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_policy_is_trained_beside_the_adapter(order):
    model, handle = applied(order)
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert {id(p) for p in handle.parameters()} < trained
    assert len(trained) == 2 + 2 * 2  # layers: a scale each, and the two matrices of an adapter
    before = [p.detach().clone() for p in handle.parameters()]
    train(model)
    assert all((a != b).all() for a, b in zip(before, handle.parameters(), strict=True))


@pytest.mark.parametrize("order", ["before", "after"])
def test_in_a_bf16_model_it_is_trained_in_fp32_as_the_adapter_is(order):
    model, handle = applied(order, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in handle.parameters()} == {torch.float32}


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("loading", ["apply first", "load_policy"])
def test_it_is_saved_with_the_adapter_and_comes_back(order, loading, tmp_path):
    model, handle = applied(order, layers="1")
    train(model)
    expected = answers(model)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert torch.equal(saved[LEARNED.format(1)], handle.parameters()[0])
    assert sum(value.nbytes for name, value in saved.items() if "attnscale" in name) < 1000
    base = llama().float()
    if loading == "apply first":
        own = attnscale.hf.apply(base, "ssmax", reference_length=8, layers="1")
        loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    else:
        with pytest.warns(AttnScaleWarning, match="the model has no policy"):
            loaded = peft.PeftModel.from_pretrained(base, tmp_path)
        own = attnscale.hf.load_policy(loaded, tmp_path)
    assert torch.equal(answers(loaded), expected)
    assert [p.tolist() for p in own.parameters()] == [p.tolist() for p in handle.parameters()]
    own.remove()
    assert not any("attnscale" in name for name, _ in loaded.named_modules())


def test_an_adapter_loaded_for_training_goes_on_training_the_policy(tmp_path):
    model, _ = applied("before")
    model.save_pretrained(tmp_path)
    for trainable in (False, True):
        base = llama().float()
        handle = attnscale.hf.apply(base, "ssmax", reference_length=8)
        peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=trainable)
        assert {p.requires_grad for p in handle.parameters()} == {trainable}


@pytest.mark.parametrize(("method", "order"), [("ia3", "before"), ("ia3", "after"), ("prompt", "after")])
def test_other_methods_than_lora(method, order, tmp_path):
    """Prompt tuning freezes whatever it finds in the model, without asking: there a policy is applied afterwards."""
    model, handle = applied(order, method)
    assert all(p.requires_grad for p in handle.parameters())
    train(model)
    expected = answers(model.eval())
    model.save_pretrained(tmp_path)
    base = llama().float()
    own = attnscale.hf.load_policy(base, tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    assert [p.tolist() for p in own.parameters()] == [p.tolist() for p in handle.parameters()]
    assert torch.equal(answers(loaded), expected)


def test_an_adapter_without_a_policy_is_loaded_beside_one(tmp_path):
    adapt(llama().float()).save_pretrained(tmp_path)
    base = llama().float()
    handle = attnscale.hf.apply(base, "ssmax", init=0.4)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    assert all(torch.equal(p, torch.full((4,), 0.4)) for p in handle.parameters())
    answers(loaded)
    handle.save(tmp_path / "policy")
    with pytest.raises(ArgumentError, match="has a policy"):
        attnscale.hf.load_policy(loaded, tmp_path / "policy")
    assert all(torch.equal(p, torch.full((4,), 0.4)) for p in handle.parameters())
    handle.remove()
    with pytest.raises(ArgumentError, match=r"path=.* expected attnscale_config\.json"):
        attnscale.hf.load_policy(loaded, tmp_path)


def test_merging_switching_and_disabling_leave_the_policy_acting():
    model, handle = applied("before")
    train(model)
    model.eval()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    expected = answers(model)
    model.set_adapter("second")
    assert all(p.requires_grad for p in handle.parameters())
    assert peft.get_model_status(model).active_adapters == ["second"]
    model.set_adapter("default")
    model.delete_adapter("second")
    assert torch.equal(answers(model), expected)
    plain = llama().float()
    attnscale.hf.apply(plain, {"layers": dict(zip("01", handle.policies.values(), strict=True))})
    base = logits(plain)
    with model.disable_adapter():
        assert torch.equal(answers(model), base)
    with torch.no_grad():
        mixed = model(input_ids=TOKENS, adapter_names=["default", "__base__"]).logits
    torch.testing.assert_close(mixed, torch.stack([expected[0], base[1]]), rtol=0, atol=1e-5)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)
    handle.remove()
    assert not any("attnscale" in name for name, _ in merged.named_modules())


def test_transformers_own_adapters_know_the_policy_too(tmp_path):
    model = llama().float()
    handle = attnscale.hf.apply(model, "ssmax", reference_length=8)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert all(p.requires_grad for p in handle.parameters())
    model.save_pretrained(tmp_path)
    assert any("attnscale" in name for name in load_file(tmp_path / "adapter_model.safetensors"))


def test_the_policy_alone_is_saved_and_loaded(tmp_path):
    model = llama().float()
    handle = attnscale.hf.apply(model, "ssmax", reference_length=8)
    with torch.no_grad():
        for number, parameter in enumerate(handle.parameters()):
            parameter.copy_(VALUES + number)
    expected = logits(model)
    handle.save(tmp_path / "policy")
    files = {file.name: file.stat().st_size for file in (tmp_path / "policy").iterdir()}
    assert set(files) == {"attnscale_config.json", "attnscale_policy.safetensors"}
    assert sum(files.values()) < 2000
    assert json.loads((tmp_path / "policy/attnscale_config.json").read_text()) == model.config.attnscale
    fresh = llama().float()
    loaded = attnscale.hf.load_policy(fresh, tmp_path / "policy")
    assert torch.equal(logits(fresh), expected)
    loaded.remove()
    with attnscale.hf.load_policy(adapt(fresh), tmp_path / "policy") as loaded:  # from within a wrapper
        assert torch.equal(answers(loaded.model), expected)
        loaded.save(tmp_path / "again")
    for name in files:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "policy" / name).read_bytes()


def test_a_policy_that_learns_nothing_leaves_no_tensors(tmp_path):
    model = llama().float()
    with attnscale.hf.apply(model, "ssmax", reference_length=8) as handle:
        handle.save(tmp_path)
    with attnscale.hf.apply(model, "log", reference_length=4, layers="1") as handle:
        expected = logits(model)
        handle.save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["attnscale_config.json"]
    with attnscale.hf.load_policy(model, tmp_path):
        assert torch.equal(logits(model), expected)


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    model = llama().float()
    handle = attnscale.hf.apply(model, "ssmax", reference_length=8)
    handle.save(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with torch.no_grad():
        handle.parameters()[0].fill_(2.0)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="full"):
        handle.save(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_whole_checkpoint_gives_its_policy_to_another_model(tmp_path):
    model = llama().float()
    handle = attnscale.hf.apply(model, "ssmax", reference_length=8)
    with torch.no_grad():
        handle.parameters()[1].copy_(VALUES)
    model.save_pretrained(tmp_path)
    expected = logits(model)
    other = llama().float()
    attnscale.hf.load_policy(other, tmp_path)
    assert torch.equal(logits(other), expected)


def test_a_policy_with_parameters_missing_is_refused_and_the_model_let_go(tmp_path):
    model = llama().float()
    attnscale.hf.apply(model, "ssmax", reference_length=8).save(tmp_path)
    (tmp_path / "attnscale_policy.safetensors").unlink()
    fresh = llama().float()
    before = logits(fresh)
    with pytest.raises(ArgumentError, match=r"path=.* lacks .*policy\.s"):
        attnscale.hf.load_policy(fresh, tmp_path)
    assert torch.equal(logits(fresh), before)
    assert not any("attnscale" in name for name, _ in fresh.named_modules())


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the Hub with one repository in it, and no network."""
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "cache" / "models--someone--a-model"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache", snapshot


def test_a_model_and_a_policy_are_loaded_by_the_id_of_a_repository(hub):
    cache, snapshot = hub
    model = llama().float()
    handle = attnscale.hf.apply(model, "ssmax", reference_length=8, layers="1")
    with torch.no_grad():
        handle.parameters()[0].copy_(VALUES)
    expected = logits(model)
    model.save_pretrained(snapshot)
    handle.save(snapshot / "policy")
    loaded = attnscale.hf.load("someone/a-model", cache_dir=cache)
    assert torch.equal(logits(loaded.model), expected)
    fresh = llama().float()
    attnscale.hf.load_policy(fresh, "someone/a-model", cache_dir=cache, subfolder="policy")
    assert torch.equal(logits(fresh), expected)


def test_a_repository_that_is_not_there_is_refused(hub):
    with pytest.raises(ArgumentError, match=r"path='someone/else' is not accepted"):
        attnscale.hf.load("someone/else", cache_dir=hub[0])
    with pytest.raises(ArgumentError, match=r"path='someone/else' is not accepted"):
        attnscale.hf.load_policy(llama(), "someone/else", cache_dir=hub[0])
