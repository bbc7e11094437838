"""A model that was trained: SmolLM2-135M reading enwik8. Run by `make test-real`, which fetches both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import attnscale
from attnscale.lab.tasks import read_window

FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "smollm2"
LENGTH = 512
EPSILON = torch.finfo(torch.float32).eps


def load(implementation="sdpa", dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation=implementation, dtype=dtype).eval()


@pytest.fixture(scope="module")
def model():
    return load()


@pytest.fixture(scope="module")
def tokens():
    text = (FOLDER / "enwik8").read_bytes()[50_000_000:50_010_000].decode("utf-8", errors="ignore")
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    return torch.tensor([tokenizer(text, add_special_tokens=False).input_ids[:LENGTH]])


def row_statistics_of_weights(model, tokens):
    """Largest weight and entropy [layers, H, T] from the weights that eager attention returns."""
    with torch.inference_mode():
        weights = model(tokens, output_attentions=True, use_cache=False).attentions
    return {
        "w_max": torch.cat([each.amax(-1) for each in weights]).double(),
        "entropy": torch.cat([torch.special.entr(each.double()).sum(-1) for each in weights]),
    }


@pytest.fixture(scope="module")
def eager(tokens):
    return row_statistics_of_weights(load("eager"), tokens)


@pytest.fixture(scope="module")
def precise(tokens):
    return row_statistics_of_weights(load("eager", torch.float64), tokens)


def test_the_model_has_learned_to_read(model, tokens):
    """What was fetched and converted is a language model: a wrong layout of its weights costs more than 10 nats."""
    with torch.inference_mode():
        assert model(tokens, labels=tokens).loss < 3.5


def test_constant_generates_what_stock_generates(model, tokens):
    settings = {"max_new_tokens": 256, "min_new_tokens": 256, "do_sample": False}
    prompt = tokens[:, :64]
    stock = model.generate(prompt, **settings)
    assert stock.shape == (1, 64 + 256)
    with attnscale.hf.apply(model, "constant"):
        assert torch.equal(model.generate(prompt, **settings), stock)
    # So that this could fail: another temperature writes something else.
    with attnscale.hf.apply(model, "constant", beta=1.2):
        assert not torch.equal(model.generate(prompt, **settings)[:, :96], stock[:, :96])


def test_statistics_of_every_row_are_those_of_eager_weights(model, tokens, eager, precise):
    """Ours are off from fp64 by at most twice what eager attention in fp32 is, layer by layer, plus a rounding."""
    seen = []
    with attnscale.hf.apply(model, "constant") as handle:
        sites = [model.get_submodule(path).attnscale for path in handle.policies]
        hooks = [
            site.register_forward_pre_hook(lambda _, given, named: seen.append((given, named)), with_kwargs=True)
            for site in sites
        ]
        with torch.inference_mode():
            model(tokens, use_cache=False)
        for hook in hooks:
            hook.remove()
    found = [attnscale.attention_with_stats(*given, **named).stats for given, named in seen]
    for name in ("w_max", "entropy"):
        ours = torch.cat([getattr(stats, name) for stats in found]).double()
        assert ours.shape == (30, 9, LENGTH)
        error, budget = ((each - precise[name]).abs().amax((1, 2)) for each in (ours, eager[name]))
        size = precise[name].amax((1, 2)) * EPSILON
        assert (error <= 2 * budget + size).all(), (name, error / budget)


def test_what_observe_reports_of_a_head_is_what_eager_weights_give(model, tokens, eager, precise):
    with attnscale.hf.apply(model, "constant"), attnscale.observe(model) as record, torch.inference_mode():
        model(tokens, use_cache=False)
    assert len(record.records) == 30 * 9
    for name in ("w_max", "entropy"):
        for number, head in enumerate(record.records):
            layer = number // 9
            assert (head.head, head.forward[name].rows) == (number % 9, LENGTH)
            assert f"layers.{layer}." in head.layer
            rows = precise[name][layer, head.head]
            budget = 2 * (eager[name][layer] - precise[name][layer]).abs().max() + rows.max() * EPSILON
            # A mean, a minimum and a maximum move by no more than the rows do.
            for summary in ("mean", "min", "max"):
                ours = getattr(head.forward[name], summary)
                assert abs(ours - getattr(rows, summary)()) <= budget, (head.layer, head.head, name, summary)


def test_losses_are_those_of_the_model_itself(model, tokens):
    """Off by at most twice what fp32 costs the plain way from its logits, plus a rounding."""
    lengths = [128, LENGTH - 1]
    with attnscale.hf.apply(model, "constant"):
        bins = read_window(model, tokens[0], lengths, size=len, chunk=LENGTH)["bins"]
    with torch.inference_mode():
        logits = model(tokens[:, :-1], use_cache=False).logits[0]
    for found in bins:
        part = slice(found["start"], found["stop"])
        plain, exact = (
            cross_entropy(each[part], tokens[0, 1:][part], reduction="sum").item() for each in (logits, logits.double())
        )
        assert found["bytes"] == found["stop"] - found["start"]
        assert abs(found["nats"] - exact) <= 2 * abs(plain - exact) + EPSILON * exact


def test_a_floored_law_changes_nothing_inside_the_reference_length(model, tokens):
    with torch.inference_mode():
        stock = model(tokens, use_cache=False).logits
        with attnscale.hf.apply(model, "log", reference_length=256, floor=True):
            scaled = model(tokens, use_cache=False).logits
    assert torch.equal(scaled[:, :256], stock[:, :256])
    assert not torch.isclose(scaled[:, 300:], stock[:, 300:]).all()
