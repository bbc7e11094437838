"""Policies are saved with a model: adapters, merged models, copies, Hub repositories.

Loading without the policy warns or raises, also if attnscale is not imported.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
import transformers
from hf_releases import is_before
from huggingface_hub import HfApi, constants
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny_models import TOKENS, llama, logits, train

import attnscale
import attnscale.hf
from attnscale import ArgumentError, AttnScaleWarning

peft = pytest.importorskip("peft")
hotswap_adapter = pytest.importorskip("peft.utils.hotswap").hotswap_adapter

LOG = {"name": "log", "reference_length": 4, "floor": True}
SSMAX = {"name": "ssmax", "reference_length": 8}
PLAN = {"default": "constant", "layers": {"1": LOG}, "heads": {"0-1": {"name": "sqrt_log", "reference_length": 4}}}
ADAPTIVE = {"name": "gap_adaptive", "scope": "head", "target_w_max": 0.6}
POLICIES = {"fixed": LOG, "plan": PLAN, "learned": SSMAX, "adaptive": ADAPTIVE}


@pytest.fixture
def base(stock_folder):
    return stock_folder


def stock(base):
    return transformers.AutoModelForCausalLM.from_pretrained(base)


def adapt(model, **options):
    """A model with an adapter that changes its answers."""
    torch.manual_seed(1)
    options = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False} | options
    return peft.get_peft_model(model, peft.LoraConfig(**options)).eval()


def applied(model, policy=LOG, **options):
    """A model with a policy that has learned something, if it learns, and its handle."""
    handle = attnscale.hf.apply(model, policy, probe=policy is not ADAPTIVE, **options)
    with torch.no_grad():
        for number, parameter in enumerate(handle.parameters()):
            parameter.copy_(torch.linspace(0.2, 0.9, 4) + number)
    if policy is ADAPTIVE:
        logits(model.train())
        model.eval()
    return model, handle


def adapted(base, policy=LOG, **options):
    """A model with a policy and an adapter."""
    return adapt(applied(stock(base), policy, **options)[0])


def load_base_and_adapter(base, folder):
    return peft.PeftModel.from_pretrained(stock(base), folder)


def load_into_the_model(base, folder):
    model = stock(base)
    model.load_adapter(str(folder))
    return model


def load_by_the_name_of_the_adapter(base, folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def add_to_others(base, folder):
    model = adapt(stock(base))
    model.load_adapter(folder, "second")
    return model


LOADERS = [load_base_and_adapter, load_into_the_model, load_by_the_name_of_the_adapter, add_to_others]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("order", ["before", "after"])
def test_an_adapter_comes_back_with_the_policy_of_its_model(base, policy, order, tmp_path):
    model = adapted(base, policy) if order == "before" else applied(adapt(stock(base)), policy)[0]
    expected = logits(model)
    model.save_pretrained(tmp_path)
    handle = attnscale.hf.load(tmp_path)
    assert torch.equal(logits(handle.model), expected)
    second = stock(base)
    attnscale.hf.load_policy(second, tmp_path)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(second, tmp_path)), expected)
    handle.remove()
    assert torch.equal(logits(handle.model), logits(adapt(stock(base))))


@pytest.mark.parametrize("load", LOADERS)
def test_an_adapter_loaded_without_its_policy_warns(base, load, tmp_path):
    model = adapted(base)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    with pytest.warns(AttnScaleWarning, match=r"'name': 'log'.*the model has no policy.*attnscale\.hf\.load"):
        loaded = load(base, tmp_path)
    if load is load_base_and_adapter:  # what the message advises
        attnscale.hf.load_policy(loaded, tmp_path)
        assert torch.equal(logits(loaded), expected)


def test_an_adapter_loaded_beside_another_policy_warns(base, tmp_path):
    adapted(base).save_pretrained(tmp_path)
    others = [LOG | {"reference_length": 8}, SSMAX]
    for model in [*(applied(stock(base), other)[0] for other in others), applied(stock(base), layers="1")[0]]:
        with pytest.warns(AttnScaleWarning, match="the model has {"):
            peft.PeftModel.from_pretrained(model, tmp_path)


def test_adapters_that_transformers_adds_itself_keep_the_policy(base, tmp_path, caplog):
    model, _ = applied(stock(base), SSMAX)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(attnscale.hf.load(tmp_path).model), expected)
    second = stock(base)
    attnscale.hf.load_policy(second, tmp_path)
    second.load_adapter(str(tmp_path))
    assert torch.equal(logits(second), expected)
    assert "attnscale" not in caplog.text  # transformers reports no unexpected tensors


def test_each_of_several_adapters_is_saved_with_the_policy(base, tmp_path):
    model = adapted(base, SSMAX)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path)
    for name, folder in {"default": tmp_path, "second": tmp_path / "second"}.items():
        model.set_adapter(name)
        assert torch.equal(logits(attnscale.hf.load(folder).model), logits(model))


def test_a_further_adapter_that_replaces_what_was_learned_warns(base, tmp_path):
    model = adapted(base, SSMAX)
    model.save_pretrained(tmp_path / "same")
    other, handle = applied(stock(base), SSMAX)
    with torch.no_grad():
        handle.parameters()[0].mul_(2)
    adapt(other).save_pretrained(tmp_path / "other")
    model.load_adapter(tmp_path / "same", "same")
    with pytest.warns(AttnScaleWarning, match="'other' has replaced"):
        model.load_adapter(tmp_path / "other", "other")


@pytest.mark.parametrize("policy", [LOG, SSMAX], ids=["fixed", "learned"])
def test_an_adapter_that_is_swapped_in_brings_what_its_policy_has_learned(base, policy, tmp_path):
    model = adapted(base, policy)
    model.save_pretrained(tmp_path)
    other = adapt(stock(base))
    with torch.no_grad():
        attnscale.hf.apply(other, policy)
        for name, parameter in other.named_parameters():
            if "lora_" in name:
                parameter.mul_(2)
    hotswap_adapter(other, tmp_path, "default")
    assert torch.equal(logits(other), logits(model))
    with pytest.warns(AttnScaleWarning, match="the model has no policy"):
        hotswap_adapter(adapt(stock(base)), tmp_path, "default")


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_merged_model_keeps_the_policy(base, policy, tmp_path):
    merged = adapted(base, policy).merge_and_unload()
    expected = logits(merged)
    merged.save_pretrained(tmp_path)
    assert torch.equal(logits(attnscale.hf.load(tmp_path).model), expected)
    if policy in (LOG, PLAN):
        assert torch.equal(logits(stock(tmp_path)), expected)


def test_a_model_that_is_merged_and_saved_before_its_first_forward_keeps_the_policy(base, tmp_path):
    model, _ = applied(stock(base))
    model.save_pretrained(tmp_path / "model")
    expected = logits(adapt(model).merge_and_unload())
    adapt(stock(tmp_path / "model")).save_pretrained(tmp_path / "adapter")
    merged = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(stock(tmp_path / "merged")), expected)


def test_a_model_without_the_values_that_its_policy_has_learned_is_not_saved(base, tmp_path):
    applied(stock(base), SSMAX)[0].save_pretrained(tmp_path / "model")
    model = stock(tmp_path / "model")  # plain from_pretrained leaves them out
    for save in (model.save_pretrained, adapt(model).save_pretrained):
        with pytest.raises(ArgumentError, match=r"attnscale\.hf\.load"):
            save(tmp_path / "again")


def test_a_scaling_that_the_policy_has_replaced_stays_replaced(base, tmp_path):
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    llama(rope_parameters=rope).float().save_pretrained(tmp_path / "base")
    replaced, composed = (adapted(tmp_path / "base", LOG, on_existing=way) for way in ("replace", "compose"))
    for model, folder in ((replaced, tmp_path / "replaced"), (composed, tmp_path / "composed")):
        model.save_pretrained(folder)
        assert torch.equal(logits(attnscale.hf.load(folder).model), logits(model))
    assert not torch.equal(logits(replaced), logits(composed))
    model, _ = applied(stock(tmp_path / "base"), LOG, on_existing="compose")
    with pytest.warns(AttnScaleWarning, match="on_existing='replace'.*on_existing='compose'"):
        peft.PeftModel.from_pretrained(model, tmp_path / "replaced")


def test_a_policy_is_saved_whatever_part_of_the_state_is_given_and_in_either_format(base, tmp_path):
    model = adapted(base, SSMAX)
    state = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    model.save_pretrained(tmp_path / "part", state_dict=state)
    model.save_pretrained(tmp_path / "bin", safe_serialization=False)
    for folder in (tmp_path / "part", tmp_path / "bin"):
        assert torch.equal(logits(attnscale.hf.load(folder).model), logits(model))


def test_an_adapter_that_lacks_what_the_policy_has_learned_warns(base, tmp_path):
    from safetensors.torch import save_file

    adapted(base, SSMAX).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "policy.s" not in name}, file)
    with pytest.warns(AttnScaleWarning, match=r"lacks .*policy\.s"):
        peft.PeftModel.from_pretrained(applied(stock(base), SSMAX)[0], tmp_path)


def test_an_adapter_that_is_saved_after_the_policy_was_removed_has_none(base, tmp_path):
    model, handle = applied(stock(base))
    model = adapt(model)
    model.save_pretrained(tmp_path)
    handle.remove()
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert "attnscale" not in (tmp_path / "adapter_config.json").read_text()
    assert not any("attnscale" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    assert torch.equal(logits(load_base_and_adapter(base, tmp_path)), expected)
    with pytest.raises(ArgumentError, match="an adapter with a policy"):
        attnscale.hf.load(tmp_path)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_and_other_models_of_a_process_save_their_own_policies(base, how, tmp_path):
    model, handle = applied(stock(base), SSMAX)
    model, other = adapt(model), adapted(base, LOG)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    expected = logits(model)
    with torch.no_grad():
        handle.parameters()[0].mul_(2)
    handle.remove()
    twin.save_pretrained(tmp_path / "twin")
    other.save_pretrained(tmp_path / "other")
    model.save_pretrained(tmp_path / "model")
    assert torch.equal(logits(attnscale.hf.load(tmp_path / "twin").model), expected)
    assert torch.equal(logits(attnscale.hf.load(tmp_path / "other").model), logits(other))
    assert torch.equal(logits(load_base_and_adapter(base, tmp_path / "model")), logits(model))


@pytest.fixture
def uploads(tmp_path, monkeypatch):
    """The folder that gets what would be uploaded to the Hub."""
    target = tmp_path / "uploads"

    def receive(self, repo_id, operations, **_):
        for operation in operations:
            file = target / repo_id / operation.path_in_repo
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(operation.path_or_fileobj, file)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    answer_for_the_hub(monkeypatch, "create_repo", lambda self, repo_id, **_: type("Url", (), {"repo_id": repo_id}))
    answer_for_the_hub(monkeypatch, "create_commit", receive)
    return target


def answer_for_the_hub(monkeypatch, name, method):
    """Replace a method of HfApi, and the function that transformers imports instead before 5.12."""
    monkeypatch.setattr(HfApi, name, method)
    for module in (transformers.utils.hub, transformers.modeling_utils):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, functools.partial(method, None))


def test_what_is_pushed_to_the_hub_has_the_policy(base, uploads):
    model = adapted(base, SSMAX)
    model.push_to_hub("someone/adapter")
    assert torch.equal(logits(attnscale.hf.load(uploads / "someone/adapter").model), logits(model))
    merged = model.merge_and_unload()
    merged.push_to_hub("someone/merged")
    assert torch.equal(logits(attnscale.hf.load(uploads / "someone/merged").model), logits(merged))


STOCK = """
    import json, sys, warnings
    import peft, torch, transformers

    base, adapter, learned, merged, run, adapter_run, expected = sys.argv[1:]
    outcomes = {}

    def attempt(name, action):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                action()
                outcomes[name] = [str(warning.message) for warning in seen]
            except Exception as error:
                outcomes[name] = f"{type(error).__name__}: {error}"

    def model():
        return transformers.AutoModelForCausalLM.from_pretrained(base)

    def resume(model, run):
        rows = [{"input_ids": torch.arange(1, 9), "labels": torch.arange(1, 9)}] * 2
        arguments = transformers.TrainingArguments(
            run, max_steps=3, report_to=[], use_cpu=True, disable_tqdm=True, per_device_train_batch_size=1
        )
        transformers.Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=True)

    attempt("adapter", lambda: peft.PeftModel.from_pretrained(model(), adapter))
    attempt("learned", lambda: peft.PeftModel.from_pretrained(model(), learned))
    attempt("by name", lambda: transformers.AutoModelForCausalLM.from_pretrained(adapter))
    attempt("merged", lambda: transformers.AutoModelForCausalLM.from_pretrained(merged))
    attempt("resume", lambda: resume(model(), run))
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    attempt("resume adapter", lambda: resume(peft.get_peft_model(model(), lora), adapter_run))
    assert "attnscale" not in sys.modules

    import attnscale.hf

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # PEFT 0.21
    tokens, *answers = torch.load(expected)
    with torch.no_grad():
        found = [attnscale.hf.load(path).model(input_ids=tokens).logits for path in (adapter, learned, merged)]
    outcomes["with attnscale"] = [torch.equal(*pair) for pair in zip(found, answers, strict=True)]
    print(json.dumps(outcomes))
"""


def test_another_process_is_warned_or_refused_without_attnscale_and_gets_the_same_with_it(base, tmp_path):
    model, learned = adapted(base), adapted(base, SSMAX)
    model.save_pretrained(tmp_path / "adapter")
    learned.save_pretrained(tmp_path / "learned")
    merged = copy.deepcopy(learned).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    torch.save([TOKENS, *(logits(one) for one in (model, learned, merged))], tmp_path / "expected")
    train(model, tmp_path / "adapter-run", 2)
    train(applied(stock(base))[0], tmp_path / "run", 2)
    folders = ("adapter", "learned", "merged", "run", "adapter-run", "expected")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STOCK), base, *(tmp_path / folder for folder in folders)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    for name in ("adapter", "learned", "by name"):
        assert any("'attnscale'" in message for message in outcomes[name]), (name, outcomes[name])
    refused = {"resume": "TypeError", "resume adapter": "TypeError"}
    if is_before("5.4"):
        assert outcomes["merged"] == []  # these releases ignore the implementation in config.json: β = 1
    else:
        refused["merged"] = "ValueError"
    for name, kind in refused.items():
        assert outcomes[name].startswith(kind), (name, outcomes[name])
        assert "attnscale" in outcomes[name]
    assert outcomes["with attnscale"] == [True, True, True]


@pytest.mark.parametrize("policy", [LOG, SSMAX], ids=["fixed", "learned"])
def test_saving_a_model_that_computes_without_its_policy_warns(base, policy, tmp_path):
    model, _ = applied(stock(base), policy)
    expected = logits(model)
    model.save_pretrained(tmp_path / "model")
    switched = copy.deepcopy(model)
    switched.set_attn_implementation("sdpa")
    never = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="sdpa")
    for one in (switched, never):
        assert torch.equal(logits(one), logits(stock(base)))
        for saved in (one, adapt(copy.deepcopy(one))):
            with pytest.warns(AttnScaleWarning, match="attn_implementation='sdpa'") as seen:
                saved.save_pretrained(tmp_path / "again")
            assert [warning.filename for warning in seen] == [__file__]
    # What the messages advise.
    switched.set_attn_implementation("attnscale")
    switched.save_pretrained(tmp_path / "with")
    assert torch.equal(logits(attnscale.hf.load(tmp_path / "with").model), expected)
    switched.set_attn_implementation("sdpa")
    attnscale.hf.attach(switched).remove()
    del never.config.attnscale
    for one in (switched, never):
        one.save_pretrained(tmp_path / "without")
        assert torch.equal(logits(stock(tmp_path / "without")), logits(stock(base)))


def test_saving_a_model_whose_policy_computes_under_sdpa_does_not_warn(base, tmp_path):
    model, handle = applied(stock(base), override=True)
    with handle:
        model.save_pretrained(tmp_path)
        adapt(model).save_pretrained(tmp_path / "adapter")
        model.set_attn_implementation("eager")
        with pytest.warns(AttnScaleWarning, match="attn_implementation='eager'"):
            model.save_pretrained(tmp_path)


class Full(OSError):
    """The disk is full."""


def fail(*_, **__):
    raise Full


def test_an_adapter_whose_saving_fails_is_not_loaded_at_another_temperature(base, tmp_path, monkeypatch):
    model, fresh, old = adapted(base), tmp_path / "fresh", tmp_path / "old"
    adapt(stock(base)).save_pretrained(old)
    with monkeypatch.context() as patch:
        patch.setattr(peft.LoraConfig, "save_pretrained", fail)  # called after the weights are written
        for folder in (fresh, old):
            with pytest.raises(Full):
                model.save_pretrained(folder)
    with pytest.raises(ValueError, match="adapter_config"):
        load_base_and_adapter(base, fresh)
    assert "attnscale" in json.loads((old / "adapter_config.json").read_text())  # PEFT without attnscale warns about it
    assert torch.equal(logits(attnscale.hf.load(old).model), logits(model))
    assert "attnscale" not in model.peft_config["default"].to_dict()


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_an_adapter_whose_saving_fails_before_the_weights_leaves_the_earlier_one(base, safe, tmp_path, monkeypatch):
    model, old = adapted(base), adapt(stock(base))
    for one in (model, old):
        one.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM"))
    old.save_pretrained(tmp_path, safe_serialization=safe)
    folders = [tmp_path, tmp_path / "second"]
    configs = [(folder / "adapter_config.json").read_bytes() for folder in folders]
    name = "safe_save_file" if safe else "torch.save"
    with monkeypatch.context() as patch:
        patch.setattr(f"peft.peft_model.{name}", fail)
        with pytest.raises(Full):
            model.save_pretrained(tmp_path, safe_serialization=safe)
    assert [(folder / "adapter_config.json").read_bytes() for folder in folders] == configs
    with monkeypatch.context() as patch:
        patch.setattr(peft.LoraConfig, "save_pretrained", fail)  # the first weights are written, the second are not
        with pytest.raises(Full):
            model.save_pretrained(tmp_path, safe_serialization=safe)
    named = ["attnscale" in json.loads((folder / "adapter_config.json").read_text()) for folder in folders]
    assert named == [True, False]


def test_an_adapter_of_transformers_whose_saving_fails_leaves_the_earlier_one(base, tmp_path, monkeypatch):
    from transformers import modeling_utils

    model, old = applied(stock(base))[0], stock(base)
    for one in (model, old):
        one.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    old.save_pretrained(tmp_path)
    monkeypatch.setattr(modeling_utils, "safe_save_file", fail)
    with pytest.raises(Full):
        model.save_pretrained(tmp_path)
    assert "attnscale" not in (tmp_path / "adapter_config.json").read_text()
    assert torch.equal(logits(load_into_the_model(base, tmp_path)), logits(old))


def test_a_model_whose_saving_fails_leaves_the_policies_of_the_weights_that_are_there(base, tmp_path, monkeypatch):
    from transformers import modeling_utils

    for policies in ([LOG, None], [None, LOG], [LOG, LOG | {"reference_length": 8}]):
        before, after = (stock(base) if policy is None else applied(stock(base), policy)[0] for policy in policies)
        before.save_pretrained(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(modeling_utils, "safe_save_file", fail)
            with pytest.raises(Full):
                after.save_pretrained(tmp_path)
        assert torch.equal(logits(stock(tmp_path)), logits(before))
    (tmp_path / "cut").mkdir()
    content = (tmp_path / "model.safetensors").read_bytes()

    def cut(tensors, file, metadata):
        with open(file, "wb") as out:
            out.write(content[:1000])
        raise Full

    with monkeypatch.context() as patch:
        patch.setattr(modeling_utils, "safe_save_file", cut)
        with pytest.raises(Full):
            after.save_pretrained(tmp_path)
    with pytest.raises(SafetensorError):
        stock(tmp_path)


def test_an_upload_that_fails_leaves_the_config_of_the_weights_that_were_written(base, tmp_path, uploads, monkeypatch):
    model, _ = applied(stock(base))
    stock(base).save_pretrained(tmp_path / "model")
    answer_for_the_hub(monkeypatch, "create_commit", fail)
    with pytest.raises(Full):
        model.save_pretrained(str(tmp_path / "model"), push_to_hub=True, repo_id="someone/model")
    assert torch.equal(logits(stock(tmp_path / "model")), logits(model))


def test_models_and_adapters_without_a_policy_are_saved_as_without_attnscale(base, tmp_path):
    model, tuned = stock(base), adapt(stock(base))
    for one, name in ((model, "model"), (tuned, "adapter")):
        one.save_pretrained(tmp_path / "ours" / name)
        type(one).save_pretrained.__wrapped__(one, tmp_path / "theirs" / name)
    files = [file.relative_to(tmp_path / "theirs") for file in (tmp_path / "theirs").rglob("*.*")]
    assert len(files) == 6
    for file in files:
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes(), file


def test_adapters_of_other_models_are_saved_and_loaded(tmp_path):
    torch.manual_seed(0)
    model, lora = torch.nn.Sequential(torch.nn.Linear(4, 4)), {"target_modules": ["0"], "init_lora_weights": False}
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**lora))
    adapted.save_pretrained(tmp_path)
    assert torch.equal(peft.PeftModel.from_pretrained(model, tmp_path)(torch.ones(4)), adapted(torch.ones(4)))


def test_load_says_what_is_missing_for_an_adapter(base, tmp_path):
    adapted(base).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_config.json"
    for name in (None, str(tmp_path / "gone")):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": name}))
        with pytest.raises(ArgumentError, match=r"base model .*load_policy"):
            attnscale.hf.load(tmp_path / "adapter", local_files_only=True)


def test_an_adapter_is_loaded_for_training_on_request(base, tmp_path):
    adapted(base, SSMAX).save_pretrained(tmp_path)
    for trainable in (False, True):
        handle = attnscale.hf.load(tmp_path, is_trainable=trainable)
        assert {p.requires_grad for p in handle.parameters()} == {trainable}


def test_importing_again_wraps_nothing_twice():
    from attnscale.hf.persistence import keep_policies

    save, callbacks = peft.PeftModel.save_pretrained, list(transformers.trainer.DEFAULT_CALLBACKS)
    keep_policies()
    assert peft.PeftModel.save_pretrained is save
    assert callbacks == transformers.trainer.DEFAULT_CALLBACKS
