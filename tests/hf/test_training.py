"""Training with a policy: gradients, checkpointing, adapters, learned scales and the Trainer."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny_models import TOKENS, llama, logits

import attnscale

POLICY = {"name": "log", "reference_length": 4}


def gradients(model):
    model.zero_grad()
    model(TOKENS, labels=TOKENS).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradient_checkpointing_changes_no_gradient():
    model = llama().train()
    with attnscale.hf.apply(model, POLICY):
        plain = gradients(model)
        for reentrant in (False, True):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            again = gradients(model)
            model.gradient_checkpointing_disable()
            assert plain.keys() == again.keys()
            assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_learned_scales_train_alone():
    model = llama().train()
    handle = attnscale.hf.apply(model, "ssmax", reference_length=8)
    model.requires_grad_(False)
    scales = handle.parameters()
    assert [tuple(s.shape) for s in scales] == [(4,), (4,)]
    for scale in scales:
        scale.requires_grad_(True)
    optimizer = torch.optim.SGD(scales, lr=0.01)
    before, losses = [s.detach().clone() for s in scales], []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert all((a != b).all() for a, b in zip(before, scales, strict=True))
    assert all(p.grad is None for name, p in model.named_parameters() if "attnscale" not in name)


def test_what_was_learned_is_saved_in_the_checkpoint_and_comes_back(tmp_path):
    from safetensors import safe_open

    model = llama().float()
    handle = attnscale.hf.apply(model, "ssmax", reference_length=8, layers="1")
    with torch.no_grad():
        handle.parameters()[0].copy_(torch.tensor([0.3, 0.5, 0.7, 0.9]))
    expected = logits(model)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    held = set()
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            held |= set(tensors.keys())
    assert "model.layers.1.self_attn.attnscale.policy.s" in held

    loaded = attnscale.hf.load(tmp_path)
    assert list(loaded.policies) == ["model.layers.1.self_attn"]
    assert torch.equal(logits(loaded.model), expected)

    # Plain from_pretrained does not load the scales; the first forward pass raises.
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    handle.remove()
    assert torch.equal(logits(stock), logits(model))
    blind = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="attnscale")
    with pytest.raises(attnscale.ArgumentError, match=r"attnscale\.hf\.load"):
        logits(blind)


def test_a_checkpoint_without_the_scales_is_refused_and_the_model_let_go(tmp_path):
    model = llama()
    with attnscale.hf.apply(model, "ssmax", reference_length=8):
        model.save_pretrained(tmp_path)
        kept = {name: value for name, value in model.state_dict().items() if "attnscale" not in name}
        model.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(attnscale.ArgumentError, match=r"path=.* lacks .*policy\.s"):
        attnscale.hf.load(tmp_path)


@pytest.mark.parametrize("what", ["nothing there", "no policy"])
def test_a_folder_without_a_policy_is_refused(tmp_path, what):
    if what == "no policy":
        llama().save_pretrained(tmp_path)
    with pytest.raises(attnscale.ArgumentError, match=r"path=.* is not accepted"):
        attnscale.hf.load(tmp_path)


def test_the_name_alone_takes_the_policy_from_the_config(tmp_path):
    model = llama().float()
    with attnscale.hf.apply(model, POLICY):
        expected = logits(model)
        model.save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    named = load(tmp_path, attn_implementation="attnscale")
    assert torch.equal(logits(named), expected)
    with attnscale.observe(load(tmp_path, attn_implementation="attnscale")) as record:
        pass
    assert not record.records  # attention is found before the first forward pass, and nothing is recorded yet


def test_the_name_without_a_policy_says_what_to_write():
    model = llama(attn_implementation="attnscale")
    with pytest.raises(attnscale.ArgumentError, match=r"config\.attnscale=None is not accepted.*'name': 'log'"):
        logits(model)


def test_adapters_train_beside_a_policy():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = llama()
    expected = None
    with attnscale.hf.apply(model, POLICY):
        expected = logits(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    handle = attnscale.hf.apply(adapted, POLICY)
    assert next(iter(handle.policies)) == "base_model.model.model.layers.0.self_attn"
    torch.testing.assert_close(logits(adapted), expected, rtol=0, atol=1e-12)  # an adapter starts at zero
    adapted.train()
    assert all("lora" in name for name in gradients(adapted))
    merged = adapted.eval().merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-12)
    handle.remove()
    with attnscale.hf.apply(merged, POLICY):
        torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-12)


class HalfLinear(torch.nn.Module):
    """A linear layer as quantisers put in place: weights in another format, widened when used."""

    def __init__(self, linear):
        super().__init__()
        self.register_buffer("codes", (linear.weight * 64).round().to(torch.int16))

    def forward(self, x):
        return x @ (self.codes.to(x.dtype) / 64).mT


def test_quantised_linear_layers_are_not_touched():
    model = llama()
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, HalfLinear(getattr(layer.self_attn, name)))
    before, codes = logits(model), model.model.layers[0].self_attn.q_proj.codes
    with attnscale.hf.apply(model, "constant"):
        assert torch.equal(logits(model), before)
        assert model.model.layers[0].self_attn.q_proj.codes is codes
    with attnscale.hf.apply(model, POLICY):
        assert not torch.equal(logits(model), before)


def test_a_model_spread_by_a_device_map_with_offload(tmp_path):
    """Layers whose weights stay on the disk until they are used: a policy that learns sits where they compute."""
    model = llama().float()
    with attnscale.hf.apply(model, "ssmax", reference_length=8):
        expected = logits(model)
    model.save_pretrained(tmp_path / "model")
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    spread = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    with attnscale.hf.apply(spread, "ssmax", reference_length=8) as handle:
        assert torch.equal(logits(spread), expected)
        assert {parameter.device.type for parameter in handle.parameters()} == {"cpu"}


def test_compiled_without_breaks_it_gives_the_same():
    model = llama()
    with attnscale.hf.apply(model, POLICY):
        expected = logits(model)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(TOKENS, use_cache=False).logits, expected, rtol=0, atol=1e-12)
            mask = torch.ones_like(TOKENS)
            mask[1, :4] = 0
            padded = compiled(TOKENS, attention_mask=mask, use_cache=False).logits
            plain = model(TOKENS, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(padded[mask.bool()], plain[mask.bool()], rtol=0, atol=1e-12)


def test_the_trainer_runs_with_a_policy_and_logs_what_the_monitor_sees(tmp_path):
    model = llama().float().train()
    attnscale.hf.apply(model, "ssmax", reference_length=8)
    data = [{"input_ids": row, "labels": row} for row in TOKENS.repeat(4, 1)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=2,
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    monitor = attnscale.Monitor(model, every=2, rows=5, alerts=None)
    attnscale.hf.AttnScaleCallback(monitor).attach(trainer)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(0 < entry["attn/entropy_share"] <= 1 for entry in logged)
    loaded = attnscale.hf.load(tmp_path / "checkpoint-4")
    assert torch.equal(logits(loaded.model), logits(model.eval()))


def test_statistics_of_every_layer_are_those_of_the_eager_weights():
    model, eager = llama(), llama(attn_implementation="eager")
    with torch.no_grad():
        weights = eager(TOKENS, output_attentions=True).attentions
    with attnscale.hf.apply(model, "constant"), attnscale.observe(model, rows=None) as record:
        logits(model)
    assert len(record.records) == 2 * 4  # layers × heads
    for layer, weight in enumerate(weights):
        for head in range(4):
            (found,) = (
                one for one in record.records if one.layer == f"model.layers.{layer}.self_attn" and one.head == head
            )
            torch.testing.assert_close(
                torch.tensor(found.forward["w_max"].mean, dtype=torch.float64),
                weight[:, head].amax(-1).mean(),
                rtol=0,
                atol=1e-6,
            )


def test_a_policy_that_reads_the_scores():
    """Gap-adaptive β needs the scores: the blockwise backend, the same in prefill and in decoding."""
    model = llama()
    with attnscale.hf.apply(model, "gap_adaptive", target_w_max=0.6):
        whole = logits(model)
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            steps = [model(TOKENS[:, i : i + 1], past_key_values=cache).logits for i in range(TOKENS.shape[1])]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-6)
