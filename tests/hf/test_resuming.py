"""Policies in Trainer checkpoints and in resumed training."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from tiny_models import logits, train

import attnscale
import attnscale.hf
from attnscale import AttnScaleWarning

LOG = {"name": "log", "reference_length": 4, "floor": True}
SSMAX = {"name": "ssmax", "reference_length": 8}
ADAPTIVE = {"name": "gap_adaptive", "scope": "head", "target_w_max": 0.6}


def build(folder, policy, kind):
    """A model for training, with a policy unless that is None, and with an adapter or without."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    if policy is not None:
        attnscale.hf.apply(model, policy, probe=policy is not ADAPTIVE)
    if kind == "adapter":
        peft = pytest.importorskip("peft")
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    return model


def state(trainer):
    """Every tensor that training has changed: weights, buffers and the moments of the optimizer."""
    moments = [value for entry in trainer.optimizer.state_dict()["state"].values() for value in entry.values()]
    return [*trainer.model.state_dict().values(), *moments]


@pytest.mark.parametrize("kind", ["model", "adapter"])
@pytest.mark.parametrize("policy", [LOG, SSMAX, ADAPTIVE], ids=lambda policy: policy["name"])
def test_resumed_training_is_that_which_was_not_interrupted(stock_folder, policy, kind, tmp_path):
    whole = train(build(stock_folder, policy, kind), tmp_path / "whole", 4)
    train(build(stock_folder, policy, kind), tmp_path / "part", 2)
    resumed = train(build(stock_folder, policy, kind), tmp_path / "part", 4, resume=tmp_path / "part" / "checkpoint-2")
    assert len(state(whole)) == len(state(resumed))
    assert all(torch.equal(a, b) for a, b in zip(state(whole), state(resumed), strict=True))
    own = {name: value for name, value in whole.model.state_dict().items() if "attnscale" in name}
    started = build(stock_folder, policy, kind).state_dict()
    assert not any(torch.equal(value, started[name]) for name, value in own.items())
    for folder in ("checkpoint-4", "model"):
        resumed.save_model(str(tmp_path / "part" / "model"))
        loaded = attnscale.hf.load(tmp_path / "part" / folder)
        assert torch.equal(logits(loaded.model), logits(whole.model.eval()))


@pytest.mark.parametrize("kind", ["model", "adapter"])
@pytest.mark.parametrize("resumed", [None, LOG | {"reference_length": 8}], ids=["none", "another"])
def test_resuming_without_the_policy_of_the_checkpoint_warns(stock_folder, kind, resumed, tmp_path):
    train(build(stock_folder, LOG, kind), tmp_path, 2)
    model = build(stock_folder, resumed, kind)
    with pytest.warns(AttnScaleWarning, match="'name': 'log'.* but the model has") as seen:
        train(model, tmp_path, 3, resume=tmp_path / "checkpoint-2")
    assert len(seen) == 1


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_resuming_a_checkpoint_without_a_policy_in_a_model_with_one_warns(stock_folder, kind, tmp_path):
    train(build(stock_folder, None, kind), tmp_path, 2)
    model = build(stock_folder, LOG, kind)
    with pytest.warns(AttnScaleWarning, match="a checkpoint with no policy, but the model has .*'name': 'log'") as seen:
        train(model, tmp_path, 3, resume=tmp_path / "checkpoint-2")
    assert len(seen) == 1
    train(model, tmp_path / "fresh", 1)  # warns of nothing


@pytest.mark.parametrize("policies", [(SSMAX, None), (None, SSMAX), (LOG, SSMAX)], ids=["lost", "new", "another"])
def test_resuming_with_other_parameters_warns_before_the_optimizer_raises(stock_folder, policies, tmp_path):
    before, after = policies
    train(build(stock_folder, before, "model"), tmp_path, 2)
    with (
        pytest.warns(AttnScaleWarning, match="a checkpoint with .* but the model has"),
        pytest.raises(ValueError, match="parameter group"),
    ):
        train(build(stock_folder, after, "model"), tmp_path, 3, resume=tmp_path / "checkpoint-2")


def test_a_training_that_reads_the_state_of_another_run_does_not_warn(stock_folder, tmp_path):
    train(build(stock_folder, None, "model"), tmp_path, 2)

    class Reader(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            transformers.TrainerState.load_from_json(tmp_path / "checkpoint-2/trainer_state.json")

    train(build(stock_folder, LOG, "model"), tmp_path / "fresh", 2, callbacks=[Reader()])
    train(
        build(stock_folder, LOG, "model"),
        tmp_path / "fresh",
        3,
        resume=tmp_path / "fresh/checkpoint-2",
        callbacks=[Reader()],
    )


def test_the_state_of_a_trainer_names_the_policies_of_its_model_only(stock_folder, tmp_path):
    trainer = train(build(stock_folder, LOG, "model"), tmp_path / "with", 2)
    written = json.loads((tmp_path / "with/checkpoint-2/trainer_state.json").read_text())
    assert written["attnscale"] == trainer.model.config.attnscale
    train(build(stock_folder, None, "model"), tmp_path / "without", 2)
    assert "attnscale" not in json.loads((tmp_path / "without/checkpoint-2/trainer_state.json").read_text())


def test_training_that_goes_on_without_the_policy_says_so_in_its_next_checkpoint(stock_folder, tmp_path):
    train(build(stock_folder, LOG, "model"), tmp_path, 2)
    with pytest.warns(AttnScaleWarning, match="has no policy"):
        train(build(stock_folder, None, "model"), tmp_path, 4, resume=tmp_path / "checkpoint-2")
    assert "attnscale" not in json.loads((tmp_path / "checkpoint-4/trainer_state.json").read_text())
    assert "attnscale" not in (tmp_path / "checkpoint-4/config.json").read_text()
