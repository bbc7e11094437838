"""Position-based policies: in a sliding window n saturates while the position grows."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny_models import TOKENS, llama, logits, mistral

import attnscale

LLAMA4 = {"name": "llama4", "floor_length": 3, "coefficient": 2.0}


def step_by_step(model):
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        steps = [model(TOKENS[:, i : i + 1], past_key_values=cache).logits for i in range(TOKENS.shape[1])]
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("build", [llama, mistral])
@pytest.mark.parametrize("policy", [LLAMA4, {"name": "ssmax", "reference_length": 4}])
def test_decoding_gives_what_a_prefill_gives(build, policy):
    model = build()
    with attnscale.hf.apply(model, policy):
        torch.testing.assert_close(step_by_step(model), logits(model), rtol=0, atol=1e-9)


def test_a_left_padded_row_gives_what_it_gives_alone():
    model = mistral()
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.int64), TOKENS], dim=1)
    mask = (padded != 0).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with attnscale.hf.apply(model, LLAMA4):
        batch = logits(model, padded, attention_mask=mask, position_ids=positions)
        torch.testing.assert_close(batch[:, 3:], logits(model), rtol=0, atol=1e-9)


def test_in_a_window_the_temperature_still_grows_with_the_position():
    """The last row of a window of five stands at position ten: its β is not that of position four."""
    model, scaled = mistral(num_hidden_layers=1), mistral(num_hidden_layers=1)
    beta = attnscale.build_policy(LLAMA4)(11).item()
    assert beta != attnscale.build_policy(LLAMA4)(5).item()
    with torch.no_grad():
        scaled.model.layers[0].self_attn.q_proj.weight.mul_(beta)
    with attnscale.hf.apply(model, LLAMA4):
        torch.testing.assert_close(logits(model)[:, -1], logits(scaled)[:, -1], rtol=0, atol=1e-6)
