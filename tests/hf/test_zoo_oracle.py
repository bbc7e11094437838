"""Every model type of the zoo against eager attention: β(n) times the score, after softcap and position bias."""

from __future__ import annotations

import pytest
import torch
from hf_zoo import TOKENS, ZOO, answer, apply_log, left_padding, reading
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

import attnscale

# transformers scripts functions of GPT-BigCode when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

BETA = attnscale.build_policy("log", reference_length=4)
IMAGE, PATCHES = 60, 9
READS_TEXT = [name for name, species in ZOO.items() if species.family != "tower"]


class WrittenOut:
    """The attention of a whole model in fp64, with all scores at once; the modules named have a temperature."""

    def __init__(self, model, paths):
        self.scaled = {id(model.get_submodule(path)) for path in paths}
        self.lengths = set()

    def __call__(
        self,
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=None,
        softcap=None,
        s_aux=None,
        position_bias=None,
        **_,
    ):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)  # [B, H, Tq, Tk]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if position_bias is not None:
            scores = scores + position_bias
        hidden = torch.zeros_like(scores, dtype=torch.bool)
        if attention_mask is not None:
            hidden = (attention_mask < -1e30).expand_as(scores)
            scores = scores + attention_mask.masked_fill(attention_mask < -1e30, 0)  # Doge learns a part of its mask
        if id(module) in self.scaled:
            visible = (~hidden).sum(-1)  # [B, H, Tq]
            self.lengths |= set(visible.unique().tolist())
            scores = BETA(visible.clamp(min=1)).double()[..., None] * scores
        scores = scores.masked_fill(hidden, -1e30)
        if s_aux is not None:
            sinks = s_aux.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., : key.shape[2]]
        return (weights @ value).transpose(1, 2).contiguous(), None


def both(model, monkeypatch, **inputs):
    """What attnscale answers, what attention written out does, and the lengths that the latter saw."""
    with apply_log(model) as handle:
        found, paths = answer(model, **inputs), list(handle.policies)
    oracle = WrittenOut(model, paths)
    monkeypatch.setitem(AttentionInterface._global_mapping, "written_out", oracle)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "written_out", eager_mask)
    model.set_attn_implementation("written_out")
    return found, answer(model, **inputs), oracle.lengths


@pytest.mark.parametrize("name", ZOO)
def test_logits_are_those_of_attention_written_out(name, monkeypatch):
    model = ZOO[name].build()
    found, expected, lengths = both(model, monkeypatch, **reading(model))
    assert max(lengths) >= 5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", READS_TEXT)
def test_padded_logits_are_those_of_attention_written_out(name, monkeypatch):
    model = ZOO[name].build()
    padding = left_padding()
    found, expected, lengths = both(model, monkeypatch, **reading(model), **padding)
    rows = torch.ones(found.shape[:2], dtype=torch.bool)
    if not model.config.is_encoder_decoder:
        rows = padding["attention_mask"].bool()
    assert (
        0 in lengths or 7 in lengths
    )  # padding occurred: its rows see no key in a decoder, and it is hidden elsewhere
    torch.testing.assert_close(found[rows], expected[rows], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["gemma3", "llava", "mistral3"])
def test_what_follows_an_image_sees_all_of_it(name, monkeypatch):
    model = ZOO[name].build()
    tokens = torch.cat([TOKENS[:1, :3], torch.full((1, PATCHES), IMAGE), TOKENS[:1, 3:6]], dim=1)
    pixels = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    inputs = {"input_ids": tokens, "pixel_values": pixels}
    if name == "gemma3":
        inputs["token_type_ids"] = (tokens == IMAGE).long()  # by which patches see each other
    if name == "mistral3":
        inputs["image_sizes"] = torch.tensor([[12, 12]])
    found, expected, lengths = both(model, monkeypatch, **inputs)
    assert max(lengths) == tokens.shape[1]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
