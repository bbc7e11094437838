"""`attnscale.hf.apply`: its changes, its errors, and complete removal."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from tiny_models import TOKENS, bloom, deepseek_sparse, llama, logits, ministral, t5

import attnscale
from attnscale import ArgumentError, ArgumentTypeError
from attnscale.policies.record import NAME


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_remove_restores_the_model_to_the_bit():
    model = llama()
    before, state, config = logits(model), state_of(model), copy.deepcopy(model.config.to_dict())
    modules = [name for name, _ in model.named_modules()]
    handle = attnscale.hf.apply(model, "log", reference_length=4)
    assert not torch.equal(logits(model), before)
    handle.remove()
    handle.remove()
    assert torch.equal(logits(model), before)
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    assert [name for name, _ in model.named_modules()] == modules
    assert state_of(model).keys() == state.keys()


@pytest.mark.parametrize(
    ("policy", "parts"),
    [
        ({"name": "log", "reference_length": 4}, ("Llama", "Log(", "reference_length=4", "2 layers")),
        ({"default": "constant", "layers": {"1": "log"}}, ("Constant(", "others", "2 layers")),
        ({"default": "constant", "heads": {"0-1": "log"}}, ("PerHead(...)", "2 layers")),
        ("gap_adaptive", ("GapAdaptive(...)",)),
    ],
    ids=str,
)
def test_a_handle_prints_as_one_line(policy, parts):
    model = llama()
    with attnscale.hf.apply(model, policy) as handle:
        shown = str(handle)
        assert all(part in shown for part in parts)
    for line in (shown, str(handle)):
        assert "\n" not in line
        assert len(line) < 160
    assert str(handle) != shown


def test_a_context_manager_removes_at_the_end():
    model = llama()
    before = logits(model)
    with attnscale.hf.apply(model, "log", reference_length=4) as handle:
        assert list(handle.policies) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
        assert not torch.equal(logits(model), before)
    assert torch.equal(logits(model), before)


def test_beta_multiplies_the_logits():
    """A constant β is what one gets by scaling the query projection."""
    model, scaled = llama(), llama()
    with torch.no_grad():
        for layer in scaled.model.layers:
            layer.self_attn.q_proj.weight.mul_(1.5)
    with attnscale.hf.apply(model, "constant", beta=1.5):
        torch.testing.assert_close(logits(model), logits(scaled), rtol=0, atol=1e-12)


def test_a_running_estimate_is_applied_before_it_has_seen_a_row():
    model = llama()
    attnscale.hf.apply(model, "gap_adaptive", scope="head", num_heads=model.config.num_attention_heads)
    estimates = [buffer for name, buffer in model.named_buffers() if name.endswith("sums")]
    assert estimates
    assert all((sums == 0).all() for sums in estimates)
    with pytest.raises(ArgumentError, match="has seen no rows"):
        model.eval()(TOKENS)
    model.train()(TOKENS)
    assert all((sums != 0).any() for sums in estimates)


def test_only_the_layers_asked_for():
    model, half = llama(), llama()
    with torch.no_grad():
        half.model.layers[1].self_attn.q_proj.weight.mul_(1.5)
    for layers in ("1", [1]):
        with attnscale.hf.apply(model, "constant", beta=1.5, layers=layers) as handle:
            assert list(handle.policies) == ["model.layers.1.self_attn"]
            torch.testing.assert_close(logits(model), logits(half), rtol=0, atol=1e-12)
    plan = {"default": "constant", "layers": {"1": {"name": "constant", "beta": 1.5}}}
    with attnscale.hf.apply(model, plan):
        torch.testing.assert_close(logits(model), logits(half), rtol=0, atol=1e-12)


def test_only_the_heads_asked_for():
    model, two = llama(), llama()
    with torch.no_grad():
        two.model.layers[0].self_attn.q_proj.weight[16:].mul_(1.5)  # heads 2 and 3 of 4, 8 dimensions each
    plan = {"layers": {"0": {"default": "constant", "heads": {"2-3": {"name": "constant", "beta": 1.5}}}}}
    with attnscale.hf.apply(model, plan):
        torch.testing.assert_close(logits(model), logits(two), rtol=0, atol=1e-12)


def test_a_yaml_file_is_a_plan(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("default: constant\nlayers:\n  1: {name: log, reference_length: 4}\n")
    model, same = llama(), llama()
    with attnscale.hf.apply(model, file), attnscale.hf.apply(same, "log", reference_length=4, layers="1"):
        assert torch.equal(logits(model), logits(same))


def test_full_and_nope_layers():
    model = ministral(layer_types=["sliding_attention", "full_attention"])
    with attnscale.hf.apply(model, "log", layers="full") as handle:
        assert list(handle.policies) == ["model.layers.1.self_attn"]
    smollm3 = transformers.SmolLM3ForCausalLM(
        transformers.SmolLM3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
        )
    ).eval()
    with attnscale.hf.apply(smollm3, "log", layers="nope") as handle:
        assert list(handle.policies) == ["model.layers.3.self_attn"]


def test_cross_attention_is_left_alone_unless_asked_for():
    model = t5()
    with attnscale.hf.apply(model, "log") as handle:
        assert not any("EncDec" in path for path in handle.policies)
    with attnscale.hf.apply(model, "log", cross=True) as handle:
        assert any("EncDec" in path for path in handle.policies)


@pytest.mark.parametrize(
    ("build", "words"),
    [(bloom, "AttentionInterface"), (deepseek_sparse, "indexer")],
)
def test_models_that_cannot_be_swapped_are_refused_and_untouched(build, words):
    model = build()
    names, before = [name for name, _ in model.named_modules()], model.config.to_dict()
    with pytest.raises(ArgumentError, match=words):
        attnscale.hf.apply(model, "log")
    assert [name for name, _ in model.named_modules()] == names
    assert model.config.to_dict() == before


def test_a_module_that_is_not_reached_rolls_everything_back(monkeypatch):
    model = llama()
    before = logits(model)
    monkeypatch.setattr(model.model.layers[1], "forward", lambda hidden_states, **_: hidden_states)
    with pytest.raises(ArgumentError, match=r"did not reach model\.layers\.1\.self_attn"):
        attnscale.hf.apply(model, "log")
    monkeypatch.undo()
    assert torch.equal(logits(model), before)
    assert not any(name.endswith(NAME) for name, _ in model.named_modules())
    assert model.config._attn_implementation == "sdpa"


def test_a_probe_that_fails_says_what_to_pass():
    model = llama()
    with pytest.raises(ArgumentError, match=r"probe=\{\.\.\.\}"):
        attnscale.hf.apply(model, "log", probe={"no_such_input": 1})
    assert not any(name.endswith(NAME) for name, _ in model.named_modules())


def test_the_probe_leaves_modes_and_random_numbers_alone():
    model = llama().train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    handle = attnscale.hf.apply(model, "log")
    assert torch.equal(torch.rand(3), expected)
    handle.remove()
    assert [module.training for module in model.modules()] == modes


def test_applying_twice_is_refused():
    model = llama()
    with attnscale.hf.apply(model, "log"), pytest.raises(ArgumentError, match="has a policy"):
        attnscale.hf.apply(model, "log")


def test_models_that_share_a_config_do_not_share_a_policy():
    config = llama().config
    torch.manual_seed(0)
    model, other = (transformers.LlamaForCausalLM(config).double().eval() for _ in range(2))
    before = logits(other)
    handle = attnscale.hf.apply(model, "log", reference_length=4)
    assert torch.equal(logits(other), before)
    with pytest.raises(ArgumentError, match="shares its config"):
        attnscale.hf.apply(other, "sqrt_log")
    with attnscale.hf.apply(other, "log", reference_length=4):
        handle.remove()
        assert config._attn_implementation == "attnscale"  # the other one needs it
    assert config._attn_implementation == "sdpa"
    assert not hasattr(config, "attnscale")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"policy": "no_such"}, "no_such"),
        ({"policy": "log", "layers": "7"}, "layers"),
        ({"policy": "log", "layers": "one"}, "range"),
        ({"policy": "log", "towers": "vision"}, "towers"),
        ({"policy": "log", "on_existing": "ignore"}, "on_existing"),
        ({"policy": {"layers": {"0-9": "log"}}}, "layers 0-1"),
        ({"policy": {"layers": {"0-1": "log", "1": "log"}}}, "overlap"),
        ({"policy": {"heads": {"9": "log"}}}, "heads"),
        ({"policy": {"surprise": 1}}, "surprise"),
        ({"policy": "log", "no_such_parameter": 1}, "no_such_parameter"),
    ],
)
def test_bad_arguments_are_named_and_change_nothing(arguments, words):
    model = llama()
    before = logits(model)
    with pytest.raises(ArgumentError, match=words):
        attnscale.hf.apply(model, **arguments)
    assert torch.equal(logits(model), before)


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(ArgumentTypeError, match="transformers model"):
        attnscale.hf.apply(torch.nn.Linear(2, 2), "log")


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_n_is_counted_once_a_forward(inference):
    counts = []  # n as each layer gets it; kept alive, so that equal ids are the same tensor
    model = llama(num_hidden_layers=4)
    mask = torch.ones_like(TOKENS)
    mask[0, :3] = 0
    with attnscale.hf.apply(model, "log", reference_length=4) as handle:
        for path in handle.policies:
            site = model.get_submodule(f"{path}.{NAME}")
            site.register_forward_pre_hook(lambda _, args, kwargs: counts.append(kwargs["visible"]), with_kwargs=True)
        with inference():
            for forwards in (1, 2):
                model(TOKENS, attention_mask=mask)
                assert len(counts) == 4 * forwards
                assert len(set(map(id, counts))) == forwards


def test_a_mask_changed_in_place_is_counted_again():
    model = llama()
    mask = torch.ones(2, 1, TOKENS.shape[1], TOKENS.shape[1], dtype=torch.bool).tril()
    with attnscale.hf.apply(model, "log", reference_length=4), torch.inference_mode():
        mask = mask.clone()
        model(TOKENS, attention_mask=mask)
        mask[:, :, :, :4] = False
        mask[:, :, :4] = True
        after = model(TOKENS, attention_mask=mask).logits
        fresh = model(TOKENS, attention_mask=mask.clone()).logits
    assert torch.equal(after, fresh)


@pytest.mark.parametrize("training", [False, True])
def test_a_policy_is_in_the_mode_of_its_model(training):
    """A running estimate goes on learning in training mode only."""
    model = llama().train(training)
    handle = attnscale.hf.apply(model, "ssmax", reference_length=8)
    assert {policy.training for policy in handle.policies.values()} == {training}
