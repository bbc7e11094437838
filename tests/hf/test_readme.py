"""Snippets of attnscale/hf/README.md: inspect and apply, anchored plans, YaRN for every layout of rope parameters."""

# ruff: noqa: E402  (there is no transformers for Python 3.10)

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

import torch
from tiny_models import TOKENS, build, llama

import attnscale
from attnscale.hf.attention_layers import find_attention_layers
from attnscale.hf.existing import find_existing
from attnscale.hf.plan import read_plan

README = (Path(__file__).resolve().parents[2] / "attnscale" / "hf" / "README.md").read_text(encoding="utf-8")
BLOCKS = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "attnscale.hf." in block]


def block_with(words):
    (block,) = [block for block in BLOCKS if words in block]
    return block


def gemma3():
    config = transformers.Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=64,
        pad_token_id=0,
    )
    return build(transformers.Gemma3ForCausalLM, config)


def test_inspect_is_shown_with_the_arguments_of_apply():
    calls = [node for node in ast.walk(ast.parse(block_with("hf.inspect("))) if isinstance(node, ast.Call)]
    by_name = {
        node.func.attr: (ast.dump(ast.Tuple(node.args)), [ast.dump(keyword) for keyword in node.keywords])
        for node in calls
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("inspect", "apply")
    }
    assert by_name["inspect"] == by_name["apply"]


def test_every_law_of_the_plan_is_anchored_with_a_floor():
    names = {}
    exec(block_with("plan = {").partition("config =")[0], names)
    plan = read_plan(names["plan"])
    for layer in range(4):
        policy = plan.build(layer, num_heads=4, head_dim=8)
        n = torch.tensor([2, 64, 8192]).reshape(1, 1, -1)
        assert torch.equal(policy(n).broadcast_to(1, 4, 3), torch.ones(1, 4, 3))
        assert policy(n * 8).amax() > 1.0


@pytest.mark.parametrize(("kind", "stretched"), [(llama, [True, True]), (gemma3, [False, True])])
def test_the_yarn_block_stretches_full_layers_and_keeps_theta(tmp_path, kind, stretched):
    kind().float().save_pretrained(tmp_path)
    before = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    names = {"transformers": transformers, "attnscale": attnscale, "path": tmp_path}
    setting, _, applying = block_with("L, factor =").partition("attnscale.hf.apply")
    exec(setting, names)
    model = names["model"].eval()
    found = [[one.name for one in find_existing(model, layer)] for layer in find_attention_layers(model)]
    assert found == [["YaRN"] if stretch else [] for stretch in stretched]
    after = model.config.rope_parameters
    for old, new in [(before, after)] if "rope_theta" in before else [(before[key], after[key]) for key in before]:
        assert old["rope_theta"] == new["rope_theta"]
    exec(f"handle = attnscale.hf.apply{applying}", names)
    with torch.no_grad():
        assert model(TOKENS).logits.isfinite().all()
    assert not [one for layer in find_attention_layers(model) for one in find_existing(model, layer)]
    names["handle"].remove()


@pytest.mark.parametrize("flash", [False, True])
def test_documents_packed_by_the_collator_are_read_as_if_alone(flash):
    model, documents = llama().float(), TOKENS[0].tensor_split(2)
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=flash)
    batch = collate([{"input_ids": document.tolist()} for document in documents])
    with attnscale.hf.apply(model, "log", reference_length=4), torch.no_grad():
        alone = torch.cat([model(document[None]).logits for document in documents], 1)
        torch.testing.assert_close(model(**batch, use_cache=False).logits, alone)
        ignored = {name: value for name, value in batch.items() if name != "position_ids"}
        assert (model(**ignored, use_cache=False).logits - alone).abs().max() > 0.1
