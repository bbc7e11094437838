"""Temperatures from the query and from a training schedule in transformers models."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from catalogue import BY_QUERY
from tiny_models import TOKENS, llama, logits, mistral

import attnscale
import attnscale.hf
from attnscale.hf.sites import site_of

by_query = pytest.mark.parametrize("name", BY_QUERY)
SCHEDULE = {"name": "window_schedule", "window": 4}


def trained(model, policy, **options):
    """Apply a policy and move its parameters away from their initial values."""
    handle = attnscale.hf.apply(model, policy, **options)
    for number, parameter in enumerate(handle.parameters()):
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(number))
    return handle


def decoded(model):
    """Logits of tokens that are fed one by one."""
    cache, steps = None, []
    with torch.no_grad():
        for token in TOKENS.split(1, dim=1):
            step = model(token, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            steps.append(step.logits)
    return torch.cat(steps, 1)


@by_query
@pytest.mark.parametrize("kind", [llama, mistral], ids=["full", "window"])
def test_prefill_decoding_and_padded_batches_agree(name, kind):
    model = kind()
    stock = logits(model)
    trained(model, name)
    whole = logits(model)
    assert (whole - stock).abs().max() > 1e-2
    torch.testing.assert_close(decoded(model), whole, rtol=1e-11, atol=1e-11)
    pad = torch.zeros(2, 3, dtype=TOKENS.dtype)
    mask = torch.cat([pad, torch.ones_like(TOKENS)], 1)
    # The positions that `generate` passes: others rotate the query differently.
    options = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    with torch.no_grad():
        padded = model(torch.cat([pad, TOKENS], 1), **options).logits[:, 3:]
    torch.testing.assert_close(padded, whole, rtol=1e-11, atol=1e-11)


@by_query
def test_the_row_is_scaled_by_its_own_query(name):
    model = llama()
    trained(model, name)
    module = model.model.layers[0].self_attn
    policy, seen = site_of(module).policy, []

    def record(site, inputs, options):
        seen.append(inputs[0])

    hook = module.attnscale.register_forward_pre_hook(record, with_kwargs=True)
    whole = logits(model)
    hook.remove()
    beta = policy(torch.arange(1, TOKENS.shape[1] + 1), query=seen[0])
    site_of(module).policy = attnscale.build_policy("constant")
    scale = module.attnscale.register_forward_pre_hook(lambda _, inputs: (inputs[0] * beta[..., None], *inputs[1:]))
    torch.testing.assert_close(logits(model), whole, rtol=1e-11, atol=1e-11)
    scale.remove()


@by_query
def test_a_saved_model_has_its_temperatures(name, tmp_path):
    model = llama().float()
    handle = trained(model, name)
    expected = logits(model)
    model.save_pretrained(tmp_path / "model")
    handle.save(tmp_path / "policy")
    loaded = attnscale.hf.load(tmp_path / "model").model
    assert torch.equal(logits(loaded), expected)
    other = llama().float()
    attnscale.hf.load_policy(other, tmp_path / "policy")
    assert torch.equal(logits(other), expected)
    twin = copy.deepcopy(model)
    handle.remove()
    assert torch.equal(logits(twin), expected)


def test_a_plan_mixes_queries_and_lengths_by_layer():
    model = llama()
    attnscale.hf.apply(model, {"default": "log", "layers": {"1": "selective"}})
    first, second = (site_of(layer.self_attn).policy for layer in model.model.layers)
    assert (first.name, second.name) == ("log", "selective")
    assert (second.num_heads, second.head_dim) == (4, 8)
    with pytest.raises(attnscale.ArgumentError, match="queries or scores"):
        attnscale.hf.apply(llama(), {"heads": {"0-1": "moondream"}})


def test_a_compiled_model_is_the_eager_one():
    torch._dynamo.reset()
    model = llama()
    trained(model, "qassmax")
    expected = logits(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found = compiled(TOKENS, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    torch._dynamo.reset()


@by_query
def test_checkpointed_training_has_the_same_gradients(name):
    found = []
    for checkpointed in (False, True):
        model = llama()
        handle = trained(model, name)
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        found.append([parameter.grad for parameter in handle.parameters()])
    assert all((gradient != 0).any() for gradient in found[0])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_window_schedule_survives_saving_and_goes_on(tmp_path):
    model = llama().float()
    attnscale.hf.apply(model, SCHEDULE)
    stock = logits(model)
    attnscale.policies.set_window(model, 8)
    expected = logits(model)
    assert not torch.equal(expected, stock)
    model.save_pretrained(tmp_path)
    loaded = attnscale.hf.load(tmp_path).model
    assert torch.equal(logits(loaded), expected)
    for one in (model, loaded):
        attnscale.policies.set_window(one, 32)
    assert torch.equal(logits(loaded), logits(model))
    with pytest.raises(attnscale.AttnScaleError, match=r"attnscale\.hf\.load"):
        logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))


def test_a_schedule_changes_a_compiled_model_without_a_new_graph():
    torch._dynamo.reset()
    model = llama()
    attnscale.hf.apply(model, SCHEDULE)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        before = compiled(TOKENS, use_cache=False).logits
        attnscale.policies.set_window(model, 32)
        after = compiled(TOKENS, use_cache=False).logits
    assert len(graphs) == 1
    torch.testing.assert_close(after, logits(model), rtol=1e-11, atol=1e-11)
    assert (after - before).abs().max() > 1e-3
    torch._dynamo.reset()
