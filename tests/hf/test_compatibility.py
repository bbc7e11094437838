"""What older supported releases of transformers do differently, on every release."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny_models import llama, logits
from torch import nn

import attnscale
from attnscale.hf import existing
from attnscale.hf.compatibility import keep_implementation, loading_info, why_fixed

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8}


@pytest.mark.parametrize("saved", ["attnscale", {"text_config": "attnscale"}, {"a": {"": "sdpa", "b": "attnscale"}}])
def test_the_implementation_of_a_checkpoint_with_a_policy_is_kept(saved):
    values = {"attn_implementation": saved}
    assert keep_implementation(values, {"revision": "main"}) == {"attn_implementation": saved, "revision": "main"}


@pytest.mark.parametrize("given", ["sdpa", None])
def test_an_implementation_of_the_caller_comes_first(given):
    values = {"attn_implementation": "attnscale"}
    assert keep_implementation(values, {"attn_implementation": given}) == {"attn_implementation": given}


@pytest.mark.parametrize("values", [{}, {"attn_implementation": "sdpa"}, {"attn_implementation": {"a": "eager"}}])
def test_other_checkpoints_are_read_as_without_attnscale(values):
    assert keep_implementation(values, {}) == {}


def test_the_loading_info_is_found_alone_and_in_a_tuple():
    info = object()
    assert loading_info(info) is info
    assert loading_info((info, None)) is info


class Ours(nn.Module):
    """Attention whose scaling depends on the slots of the cache."""

    def forward(self, hidden_states, cache_position=None):
        return hidden_states


def test_a_scaling_by_cache_position_is_fixed_and_one_by_position_is_not():
    assert f"requires transformers 5.4 or newer, and {transformers.__version__} is installed" in why_fixed(Ours())
    assert why_fixed(llama()) is None  # has an argument position_ids


def test_a_scaling_that_cannot_be_disabled_is_refused_and_the_model_untouched(monkeypatch):
    model = llama(rope_parameters=dict(YARN))
    before, names = logits(model), [name for name, _ in model.named_modules()]
    found = existing.Existing("Ours", "logits × 2", lambda: pytest.fail("disabled"), fixed="it cannot be disabled")
    monkeypatch.setattr("attnscale.hf.selection.find_existing", lambda *_: [found])
    monkeypatch.setattr("attnscale.hf.inspection.find_existing", lambda *_: [found])
    options = {"reference_length": 8, "on_existing": "replace"}
    (detail,) = {layer.detail for layer in attnscale.hf.inspect(model, "log", **options).layers}
    assert detail == "already scaled; it cannot be disabled"
    with pytest.raises(attnscale.ArgumentError, match=r"Ours: logits × 2.*it cannot be disabled"):
        attnscale.hf.apply(model, "log", **options)
    assert [name for name, _ in model.named_modules()] == names
    assert torch.equal(logits(model), before)
    assert not hasattr(model.config, "attnscale")
