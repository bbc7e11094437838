"""Removing a policy from a monitored model leaves no tap, in any order of closing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attnscale import Monitor, MultiheadAttention, convert


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, dropout=0.0), 2)


def run(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1)))


def attributes(model: nn.Module) -> dict[str, set[str]]:
    return {name: set(vars(module)) for name, module in model.named_modules()}


@pytest.mark.parametrize("order", ["conversion first", "monitor first"])
@pytest.mark.parametrize("heard", [False, True])
def test_a_converted_model_is_plain_again(order, heard):
    model = encoder()
    before, expected = attributes(model), run(model)
    conversion = convert(model, "log")
    monitor = Monitor(model, every=1)
    if heard:
        run(model).sum().backward()
    if order == "monitor first":
        monitor.close()
        conversion.remove()
    else:
        conversion.remove()
        assert attributes(model) == before
        assert torch.equal(run(model), expected)
        assert {record.layer for record in monitor.step(0)} == (
            {"layers.0.self_attn", "layers.1.self_attn"} if heard else set()
        )
        run(model).sum().backward()
        assert monitor.step(1) == []
        monitor.close()
    assert attributes(model) == before
    assert all(type(layer.self_attn) is nn.MultiheadAttention for layer in model.layers)
    assert torch.equal(run(model), expected)


def test_a_backward_after_the_removal_does_not_fail():
    model = encoder()
    conversion = convert(model, "log")
    with Monitor(model, every=1) as monitor:
        loss = run(model).sum()
        conversion.remove()
        loss.backward()
        records = monitor.step(0)
    assert all(record.backward for record in records)


def test_an_old_monitor_leaves_the_tap_of_a_new_one():
    model = encoder()
    conversion = convert(model, "log")
    old = Monitor(model, every=1)
    conversion.remove()
    again = convert(model, "log")
    new = Monitor(model, every=1)
    old.close()
    run(model).sum().backward()
    assert len(new.step(0)) == 4
    again.remove()
    new.close()
    assert not any("tap" in vars(module) for module in model.modules())


def test_a_module_of_ours_keeps_its_class_and_loses_its_tap():
    attention = MultiheadAttention(16, 2, policy="log")
    before = set(vars(attention))
    Monitor(attention).close()
    assert set(vars(attention)) == before


@pytest.mark.parametrize("order", ["handle first", "monitor first"])
def test_a_transformers_model_is_plain_again(order):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import attnscale.hf

    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.arange(10)[None]
    before, expected = attributes(model), model(tokens).logits
    handle = attnscale.hf.apply(model, "log", reference_length=64)
    monitor = Monitor(model, every=1)
    model(tokens).logits.sum().backward()
    if order == "monitor first":
        assert len(monitor.step(0)) == 4
        monitor.close()
        handle.remove()
    else:
        handle.remove()
        model(tokens)
        assert len(monitor.step(0)) == 4  # recorded before the removal
        model(tokens)
        assert {record.forward["beta"].max for record in monitor.step(1)} == {1.0}  # calls of torch's function
        monitor.close()
    assert attributes(model) == before
    assert torch.equal(model(tokens).logits, expected)
