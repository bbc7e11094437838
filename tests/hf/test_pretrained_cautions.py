"""`apply` warns about pretrained models with a large β, or with β < 1 in all sliding-window layers."""

# ruff: noqa: E402  (there is no transformers for Python 3.10)

from __future__ import annotations

import warnings

import pytest

transformers = pytest.importorskip("transformers")

import torch
from tiny_models import llama, logits, ministral, mistral

import attnscale
from attnscale import AttnScaleWarning
from attnscale.hf import apply, inspect
from attnscale.hf.attention_layers import find_attention_layers
from attnscale.hf.selection import find_cautions

WINDOW = 5  # of `mistral` and of half the layers of `ministral`
LENGTH = 64  # that the tiny models say they were trained for
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
HALF_SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.fixture
def pretrained(tmp_path):
    """A model as `from_pretrained` gives it."""

    def load(build, **settings):
        model = build(**settings)
        model.save_pretrained(tmp_path / "model")
        return type(model).from_pretrained(tmp_path / "model").eval()

    return load


def warned(model, policy, **arguments):
    """What `apply` warns of, which `inspect` has to foretell."""
    foretold = inspect(model, policy, **arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apply(model, policy, **arguments).remove()
    texts = [str(one.message) for one in caught if issubclass(one.category, AttnScaleWarning)]
    assert len(texts) == len(caught)
    assert all(one.filename == __file__ for one in caught)  # the line of the caller
    assert list(foretold.cautions) == texts
    assert str(foretold).endswith("\n".join(texts))
    return texts


def assert_multiplied(texts, beta):
    (text,) = texts
    assert f"by up to {beta:.3g} (at n = {LENGTH})" in text
    assert f"reference_length={LENGTH}, floor=True" in text


def test_an_absolute_law_in_a_pretrained_model(pretrained):
    model = pretrained(llama)
    assert_multiplied(warned(model, "log"), 4.159)
    assert_multiplied(warned(model, "sqrt_log"), 2.039)
    assert_multiplied(warned(model, "log_squared"), 17.3)
    assert_multiplied(warned(model, {"default": "constant", "heads": {"0": "log"}}), 4.159)
    heads = {"0": "log", "1": "log_squared", "2": {"name": "log", "reference_length": LENGTH}}
    assert_multiplied(warned(model, {"default": "constant", "heads": heads}), 17.3)
    (text,) = warned(model, "log", layers=1)
    assert "in 1 layer(s)" in text


def test_the_advised_length_is_that_before_stretching(pretrained):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH, "rope_theta": 10000.0}
    model = pretrained(llama, max_position_embeddings=4 * LENGTH, rope_parameters=rope)
    assert_multiplied(warned(model, "log", on_existing="replace"), 4.159)


@pytest.mark.parametrize(
    ("policy", "parameters"),
    [
        ("constant", {}),
        ("constant", {"beta": 4.0}),  # not a law: an explicit choice
        ("log", {"gamma": 0.25}),  # scaled to about 1 manually
        ("log", {"reference_length": LENGTH}),
        ("sqrt_log", {"reference_length": 32, "floor": True}),
        ("log", {"reference_length": 8}),  # sharp, but anchored where the caller wants it
        ("qwen", {"reference_length": LENGTH}),
        ("yarn", {"factor": 1.0}),
        ("ssmax", {"reference_length": LENGTH}),
        ("gap_adaptive", {}),
        ("asentmax", {}),
    ],
)
def test_what_a_pretrained_model_bears_is_not_warned_of(pretrained, policy, parameters):
    assert warned(pretrained(llama), policy, **parameters) == []


def test_an_anchored_law_without_floor_in_sliding_layers(pretrained):
    model = pretrained(ministral, **HALF_SLIDING)
    (text,) = warned(model, "log", reference_length=LENGTH)
    beta = attnscale.build_policy("log", reference_length=LENGTH)(WINDOW)
    assert f"in 1 sliding-window layer(s) β is at most {beta:.3g}" in text
    assert f"n <= {WINDOW}" in text
    assert warned(model, "log", reference_length=LENGTH // 2, floor=True) == []
    assert warned(model, "log", reference_length=LENGTH, layers="full") == []
    # These go by the position, which no window bounds.
    assert warned(model, "ssmax", reference_length=LENGTH) == []
    assert warned(model, "grok2", threshold=8) == []


def test_a_window_that_reaches_the_anchor(pretrained):
    model = pretrained(mistral)
    assert warned(model, "log", reference_length=WINDOW) == []
    assert len(warned(model, "log", reference_length=WINDOW + 1)) == 1


def test_a_law_that_learns_is_not_warned_of(pretrained):
    model = pretrained(mistral)
    layers = find_attention_layers(model)
    policy = attnscale.build_policy("log", reference_length=LENGTH)
    assert len(find_cautions(model, layers, {layer.path: policy for layer in layers})) == 1
    policy.register_parameter("learned", torch.nn.Parameter(torch.ones(())))
    assert find_cautions(model, layers, {layer.path: policy for layer in layers}) == []


def test_both_at_once(pretrained):
    model = pretrained(mistral)
    plan = {"layers": {"0": {"name": "log", "gamma": 2.0}, "1": {"name": "log", "reference_length": LENGTH}}}
    multiplied, softened = warned(model, plan)
    assert "(at n = 5)" in multiplied
    assert "sliding-window" in softened


def test_a_law_that_acts_only_where_the_rotary_embedding_fails(pretrained):
    (text,) = warned(pretrained(llama), "log", reference_length=LENGTH, floor=True)
    assert "in 2 layer(s) the policy acts only beyond the trained length 64" in text
    assert "attnscale.hf.recommend" in text
    (text,) = warned(pretrained(ministral, **HALF_SLIDING), "log", reference_length=LENGTH, floor=True)
    assert "in 1 layer(s)" in text  # the sliding window never exceeds the trained length
    assert warned(pretrained(llama, rope_parameters=LINEAR), "log", reference_length=LENGTH, floor=True) == []


@pytest.mark.parametrize(
    ("policy", "parameters", "beta"),
    [("yarn", {"factor": 4.0}, 1.296), ("deepseek", {}, 1.874), ("gpt_oss", {}, 1.813)],
)
def test_the_factor_of_a_stretched_embedding_on_one_that_is_not_stretched(pretrained, policy, parameters, beta):
    (text,) = warned(pretrained(llama), policy, **parameters)
    assert f"in 2 layer(s) β = {beta:.4g} at every length" in text
    (text,) = warned(pretrained(llama), {"default": "constant", "heads": {"0": {"name": policy, **parameters}}})
    assert "in 2 layer(s)" in text
    assert warned(pretrained(llama, rope_parameters=LINEAR), policy, **parameters) == []
    assert warned(llama(), policy, **parameters) == []


def test_scalable_softmax_that_starts_at_another_length_than_the_trained_one(pretrained):
    (text,) = warned(pretrained(llama), "ssmax")
    assert "β = 1 at n = 2048" in text
    assert "β = 0.545 at the trained length 64. Pass reference_length=64" in text
    assert warned(pretrained(llama), "ssmax", init=0.3) == []
    assert warned(pretrained(llama, max_position_embeddings=2048), "ssmax") == []
    learned = attnscale.build_policy("ssmax", num_heads=4)
    torch.nn.init.constant_(learned.s, 0.2)
    assert warned(pretrained(llama), learned) == []


def test_a_model_made_in_memory_whose_weights_are_trained(pretrained):
    model = llama()
    trained = pretrained(llama)
    torch.nn.init.uniform_(trained.model.norm.weight)
    model.load_state_dict(trained.state_dict())
    (text,) = warned(model, "log")
    assert "by up to 4.16 (at n = 64), but its weights are already trained" in text
    assert warned(model, "log", reference_length=32) == []


def test_models_that_are_to_be_trained_are_not_warned_of(tmp_path):
    assert warned(llama(), "log") == []
    assert warned(mistral(), "log", reference_length=LENGTH) == []
    llama().save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.name_or_path
    assert warned(transformers.AutoModelForCausalLM.from_config(config), "log") == []


def test_the_warning_outlives_a_change_of_dtype_and_a_wrapper(pretrained):
    model = torch.nn.Sequential(pretrained(llama).to(torch.float64))
    with pytest.warns(AttnScaleWarning, match="reference_length="):
        apply(model, "log", probe=False).remove()


def test_a_model_that_was_saved_with_its_law_loads_without_a_warning(tmp_path):
    model = llama()
    with apply(model, "log"):
        expected = logits(model)
        model.save_pretrained(tmp_path)
    loaded = attnscale.hf.load(tmp_path).model.eval()
    assert torch.allclose(logits(loaded), expected, rtol=1e-3)


def test_a_warning_that_is_an_error_leaves_nothing_behind(pretrained):
    model = pretrained(llama)
    before, config = logits(model), model.config.to_dict()
    with pytest.raises(AttnScaleWarning):  # as the tests are set up
        apply(model, "log")
    assert torch.equal(logits(model), before)
    assert model.config.to_dict() == config
    assert issubclass(AttnScaleWarning, UserWarning)
