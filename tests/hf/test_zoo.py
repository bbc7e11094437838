"""Every model type of the zoo: β = 1 equals stock, β(n) takes effect, removal is complete, saving keeps the policy."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_releases import is_before, skip_before
from hf_zoo import EAGER, ZOO, answer, apply_log, left_padding, reading

import attnscale

STOCK_IS_SDPA = sorted(ZOO.keys() - EAGER)

# Stock computes the share of its sinks in fp32.
STOCK_ROUNDS = {"granite_swa"}

SOFTCAPPED = {"gemma2", "t5gemma", "vaultgemma"}

# transformers scripts functions of GPT-BigCode when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def test_the_zoo_has_forty_types_and_more():
    assert len(ZOO) >= 44
    assert {species.family for species in ZOO.values()} == {
        "decoder",
        "encoder",
        "encoder-decoder",
        "multimodal",
        "tower",
    }


@pytest.mark.parametrize("name", STOCK_IS_SDPA)
def test_constant_is_stock_to_the_bit(name):
    model, options = ZOO[name].build(), ZOO[name].options
    assert model.config._attn_implementation == "sdpa"
    padding = left_padding() if model.main_input_name == "input_ids" else {}
    both = (reading(model), reading(model) | padding)
    stock = [answer(model, **inputs) for inputs in both]
    with attnscale.hf.apply(model, "constant", **options):
        for inputs, expected in zip(both, stock, strict=True):
            assert torch.equal(answer(model, **inputs), expected)


@pytest.mark.parametrize("name", sorted(EAGER))
@pytest.mark.usefixtures("softmax_in_fp64")
def test_constant_is_stock_where_stock_is_eager(name):
    model, options = ZOO[name].build(), ZOO[name].options
    if name in SOFTCAPPED and is_before("5.21"):
        model.set_attn_implementation("eager")  # these releases select "sdpa", which ignores the softcap
    assert model.config._attn_implementation == "eager"
    inputs = reading(model)
    stock = answer(model, **inputs)
    with attnscale.hf.apply(model, "constant", **options):
        tolerance = 1e-5 if name in STOCK_ROUNDS else 1e-10
        torch.testing.assert_close(answer(model, **inputs), stock, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ZOO)
def test_apply_acts_and_remove_leaves_no_trace(name):
    model = ZOO[name].build()
    inputs = reading(model)
    before, config = answer(model, **inputs), copy.deepcopy(model.config.to_dict())
    names, implementation = [path for path, _ in model.named_modules()], model.config._attn_implementation
    state = copy.deepcopy(model.state_dict())
    handle = apply_log(model)
    assert (answer(model, **inputs) - before).abs().max() > 1e-3
    handle.remove()
    assert torch.equal(answer(model, **inputs), before)
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == implementation
    assert [path for path, _ in model.named_modules()] == names
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[path]) for path, value in model.state_dict().items())


@pytest.mark.parametrize("name", ZOO)
def test_a_saved_model_comes_back_with_what_its_policy_learned(name, tmp_path):
    if name == "apertus":
        skip_before("5.1", "from_pretrained loads Apertus models")
    model = ZOO[name].build()
    inputs = reading(model)
    fresh = answer(model, **inputs)
    with attnscale.hf.apply(model, "ssmax", **ZOO[name].options) as handle:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in handle.parameters():
                parameter.add_(torch.rand(parameter.shape, generator=generator))
        expected = answer(model, **inputs)
        model.save_pretrained(tmp_path)
    assert (expected - fresh).abs().max() > 1e-3
    loaded = attnscale.hf.load(tmp_path, experts_implementation="eager")
    # Not bit-identical: matrix products depend on the memory alignment of the loaded weights.
    torch.testing.assert_close(answer(loaded.model, **inputs), expected, rtol=0, atol=1e-12)
