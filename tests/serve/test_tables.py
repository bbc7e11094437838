"""Tables of β for serving: the values of the policies, for every law, preset and plan, and for saved checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from catalogue import ARGUMENTS, FIXED, MIXED, build
from torch import nn

from attnscale import build_policy
from attnscale.errors import ArgumentError
from attnscale.policies.base import LengthPolicy
from attnscale.policies.record import write_record
from attnscale.serve.tables import LayerShape, beta_table, layer_policies

PATH = "model.layers.0.self_attn"
SHAPES = {PATH: LayerShape(num_heads=4, head_dim=16)}
LENGTH = 300


@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize("name", [*FIXED, *MIXED])
def test_a_table_holds_the_beta_of_the_policy_at_every_position(name: str, window: int | None) -> None:
    policy = build(name)
    table = beta_table(policy, LENGTH, window)
    assert table.dtype == torch.float32
    assert table.shape[0] == LENGTH
    for position in (0, 1, 47, 48, 49, LENGTH - 1):
        n = min(position + 1, window or LENGTH)
        expected = policy(torch.tensor([[[n]]]), positions=torch.tensor([[[position]]])).float()
        assert table[position].equal(expected.broadcast_to(1, table.shape[1], 1).reshape(-1))


def test_policies_of_length_have_one_column_and_policies_per_head_one_for_each_head() -> None:
    assert beta_table(build("log"), 8).shape == (8, 1)
    assert beta_table(build("ssmax"), 8).shape == (8, 4)
    assert beta_table(build("per_head"), 8).shape == (8, 4)


def saved(policy: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the record and the tensors of a checkpoint with this policy."""
    tensors = {f"{PATH}.attnscale.policy.{name}": value for name, value in policy.state_dict().items()}
    return write_record({PATH: policy}), tensors


@pytest.mark.parametrize(
    "policy",
    [
        build_policy("ssmax", num_heads=4, bias=True),
        build_policy("per_head", num_heads=4, heads={"0-1": {"name": "ssmax"}, "3": {"name": "yarn", "factor": 4}}),
        build_policy("log", reference_length=32, floor=True),
    ],
    ids=lambda policy: policy.name,
)
def test_a_record_with_learned_values_gives_the_table_of_the_saved_policy(policy: LengthPolicy) -> None:
    for parameter in policy.parameters():
        nn.init.normal_(parameter)
    record, tensors = saved(policy)
    others = {"model.layers.0.self_attn.q_proj.weight": torch.ones(1)}
    built = layer_policies(record, SHAPES, tensors | others)
    assert beta_table(built[PATH], LENGTH).equal(beta_table(policy, LENGTH))


def test_learned_values_are_rounded_to_the_dtype_of_the_model_as_in_transformers() -> None:
    policy = build_policy("ssmax", num_heads=4)
    nn.init.normal_(policy.s)
    built = layer_policies(*(saved(policy)[0], SHAPES, saved(policy)[1]), torch.bfloat16)
    assert beta_table(built[PATH], 64).equal(beta_table(policy.bfloat16(), 64))


def test_a_trained_estimate_per_head_has_a_table() -> None:
    policy = build_policy("gap_adaptive", scope="head", num_heads=4)
    policy.sums.copy_(torch.tensor([1.0, 0.3, 0.2, 0.1, 0.07]).expand(4, 5))
    record, tensors = saved(policy)
    assert beta_table(layer_policies(record, SHAPES, tensors)[PATH], LENGTH).equal(beta_table(policy.eval(), LENGTH))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gap_adaptive", "reads scores"), ("entropy_adaptive", "reads scores"), ("asentmax", "reads queries")],
)
def test_policies_that_read_more_than_lengths_are_refused(name: str, reason: str) -> None:
    record = {"modules": {PATH: {"name": name} | ARGUMENTS[name]}}
    with pytest.raises(ArgumentError, match=f"of {PATH} has no table.*{reason}"):
        layer_policies(record, SHAPES, {})


def test_tensors_that_do_not_fit_are_refused() -> None:
    record, tensors = saved(build_policy("ssmax", num_heads=4))
    name = f"{PATH}.attnscale.policy.s"
    with pytest.raises(ArgumentError, match=f"lacks {name}"):
        layer_policies(record, SHAPES, {})
    with pytest.raises(ArgumentError, match=r"of shape \[2\] is not accepted: expected \[4\]"):
        layer_policies(record, SHAPES, {name: torch.ones(2)})
    with pytest.raises(ArgumentError, match=f"unexpected tensor {PATH}.attnscale.policy.b"):
        layer_policies(record, SHAPES, tensors | {f"{PATH}.attnscale.policy.b": torch.ones(4)})


def test_a_module_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"'model.layers.7.self_attn', which this model does not have"):
        layer_policies({"modules": {"model.layers.7.self_attn": {"name": "log"}}}, SHAPES, {})


def test_an_infinite_beta_is_refused() -> None:
    policy = build_policy("ssmax", num_heads=4)
    nn.init.constant_(policy.s, torch.inf)
    with pytest.raises(ArgumentError, match="not finite"):
        beta_table(policy, 8)


def test_a_checkpoint_of_transformers_has_the_tables_of_its_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    from attnscale import hf

    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, intermediate_size=32, **shape))
    heads = {"default": {"name": "constant"}, "heads": {"0-1": {"name": "ssmax", "bias": True}}}
    plan = {"default": {"name": "log", "reference_length": 64, "floor": True}, "layers": {"1": heads}}
    with hf.apply(model, plan) as handle:
        for parameter in (p for policy in handle.policies.values() for p in policy.parameters()):
            nn.init.normal_(parameter)
        model.save_pretrained(tmp_path)
        expected = {path: beta_table(policy, LENGTH) for path, policy in handle.policies.items()}
    record = transformers.AutoConfig.from_pretrained(tmp_path).attnscale
    shapes = {path: LayerShape(4, 16) for path in expected}
    built = layer_policies(record, shapes, safetensors.load_file(tmp_path / "model.safetensors"))
    assert {path: beta_table(policy, LENGTH).tolist() for path, policy in built.items()} == {
        path: table.tolist() for path, table in expected.items()
    }
