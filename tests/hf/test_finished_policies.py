"""`hf.apply` with policy instances, including learned values and user-defined classes."""

# ruff: noqa: E402  (transformers is not there for Python 3.10)

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from tiny_models import llama, logits

import attnscale
import attnscale.hf
from attnscale import ArgumentError
from attnscale._util import state

LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


@dataclass(eq=False, repr=False, kw_only=True)
class CubeRootLog(attnscale.LengthPolicy):
    """The README's example of one's own policy."""

    name = "cube_root_log"
    gamma: float = 1.0

    def formula(self, n, position):
        return self.gamma * torch.log(n.clamp(min=2).double()) ** (1 / 3)


@dataclass(eq=False, repr=False, kw_only=True)
class Learned(attnscale.LengthPolicy):
    """One's own with a parameter."""

    name = "my_learned"
    num_heads: int

    def validate(self):
        self.gain = nn.Parameter(torch.ones(self.num_heads))

    def formula(self, n, position):
        return self.gain[:, None].double() * torch.log(n.clamp(min=2).double())

    def longest_beta(self):
        return 20.0


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """An empty one for each test."""
    monkeypatch.setattr(state, "REGISTERED_POLICIES", {})


@pytest.fixture
def registered(registry):
    """Both classes have a name."""
    for kind in (CubeRootLog, Learned):
        attnscale.register_policy(kind)


def ssmax(values, **fields):
    policy = attnscale.build_policy("ssmax", num_heads=len(values), **fields)
    with torch.no_grad():
        policy.s.copy_(torch.tensor(values))
    return policy


def test_a_learned_policy_is_applied_with_what_it_has_learned():
    model, policy = llama(), ssmax([9.0, 8.0, 7.0, 6.0])
    with attnscale.hf.apply(model, policy) as handle:
        for path in LAYERS:
            assert handle.policies[path].s.tolist() == [9.0, 8.0, 7.0, 6.0]
            assert handle.policies[path] is not policy
        found = logits(model)
    same = llama()
    with attnscale.hf.apply(same, "ssmax") as handle, torch.no_grad():
        for parameter in handle.parameters():
            parameter.copy_(policy.s)
        assert torch.equal(logits(same), found)


def test_each_module_has_a_copy_of_its_own():
    model, policy = llama(), ssmax([9.0] * 4)
    handle = attnscale.hf.apply(model, policy)
    first, second = (handle.policies[path] for path in LAYERS)
    with torch.no_grad():
        first.s.fill_(1.0)
    assert second.s.tolist() == policy.s.tolist() == [9.0] * 4


def test_a_plan_keeps_what_its_policies_have_learned():
    model = llama()
    plan = {
        "default": ssmax([9.0] * 4),
        "layers": {"1": {"default": ssmax([2.0, 3.0]), "heads": {"2-3": ssmax([5.0, 4.0])}}},
    }
    with attnscale.hf.apply(model, plan) as handle:
        assert handle.policies[LAYERS[0]].s.tolist() == [9.0] * 4
        parts = handle.policies[LAYERS[1]].state_dict()
        assert sorted(value.tolist() for value in parts.values()) == [[2.0, 3.0], [5.0, 4.0]]
        expected = torch.tensor([2.0, 3.0, 5.0, 4.0]).double() * math.log(8)
        torch.testing.assert_close(handle.policies[LAYERS[1]](torch.tensor([[8]]))[:, 0], expected)


@pytest.mark.parametrize("by_head", [False, True])
def test_it_is_saved_and_comes_back(tmp_path, by_head):
    model = llama().float()
    plan = {"default": ssmax([9.0, 8.0]), "heads": {"1,3": ssmax([7.0, 6.0])}}
    handle = attnscale.hf.apply(model, plan if by_head else ssmax([9.0, 8.0, 7.0, 6.0], bias=True))
    expected = logits(model)
    model.save_pretrained(tmp_path)
    loaded = attnscale.hf.load(tmp_path)
    states = ([value.tolist() for value in one.policies[LAYERS[0]].state_dict().values()] for one in (handle, loaded))
    assert next(states) == next(states)
    assert torch.equal(logits(loaded.model), expected)


def test_ones_own_policy_is_applied():
    model = llama()
    stock = logits(model)
    policy = CubeRootLog(gamma=1.5)
    with attnscale.hf.apply(model, policy) as handle:
        assert type(handle.policies[LAYERS[0]]) is CubeRootLog
        assert handle.policies[LAYERS[0]] is not policy
        found = logits(model)
        assert torch.equal(logits(copy.deepcopy(model)), found)
    assert not torch.equal(found, stock)
    assert torch.equal(logits(model), stock)
    with attnscale.hf.apply(model, {"layers": {"0-1": CubeRootLog(gamma=1.5)}}):
        assert torch.equal(logits(model), found)


def test_hidden_fields_of_ones_own_policy_are_kept():
    """Two that look alike are not taken for one."""
    model = llama()
    one, two = CubeRootLog(), CubeRootLog()
    two.formula = lambda n, position: torch.full_like(n, 3, dtype=torch.float64)
    with attnscale.hf.apply(model, {"layers": {"0": one, "1": two}}) as handle:
        assert handle.policies[LAYERS[1]](8).item() == 3.0
        assert handle.policies[LAYERS[0]](8).item() == pytest.approx(torch.log(torch.tensor(8.0)).item() ** (1 / 3))


def test_inspect_shows_a_finished_policy():
    text = str(attnscale.hf.inspect(llama(), CubeRootLog(gamma=2.0), lengths=[8]))
    assert "cube_root_log(gamma=2.0" in text
    assert "selected: β = 2.553" in text


def test_an_unregistered_policy_is_saved_and_loading_it_says_what_to_do(tmp_path):
    model = llama().float()
    attnscale.hf.apply(model, CubeRootLog(gamma=1.5))
    expected = logits(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match=r"'CubeRootLog'.*attnscale\.register_policy"):
        attnscale.hf.load(tmp_path)
    by_name = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="attnscale")
    with pytest.raises(ArgumentError, match=r"'CubeRootLog'.*attnscale\.register_policy"):
        logits(by_name)
    attnscale.register_policy(CubeRootLog)
    assert torch.equal(logits(attnscale.hf.load(tmp_path).model), expected)
    assert torch.equal(logits(by_name), expected)


def test_a_class_with_the_name_of_another_one_is_not_taken_for_it(tmp_path):
    @dataclass(eq=False, repr=False, kw_only=True)
    class Mine(CubeRootLog):
        name = "sqrt_log"

    model = llama().float()
    attnscale.hf.apply(model, Mine())
    model.save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match=r"Mine'.*attnscale\.register_policy"):
        attnscale.hf.load(tmp_path)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("policy", ["object", "name"])
def test_a_registered_policy_has_a_name_and_a_checkpoint(policy, tmp_path):
    model = llama().float()
    given = Learned(num_heads=4) if policy == "object" else "my_learned"
    handle = attnscale.hf.apply(model, given, layers="1")
    with torch.no_grad():
        handle.parameters()[0].copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert model.config.attnscale["modules"] == {LAYERS[1]: {"name": "my_learned", "num_heads": 4}}
    assert torch.equal(logits(attnscale.hf.load(tmp_path).model), expected)


@pytest.mark.parametrize(
    "policy",
    [
        lambda: ssmax([1.0] * 3),
        lambda: {"name": "ssmax", "num_heads": 3},
        lambda: Learned(num_heads=3),
        lambda: {"layers": {"1": ssmax([1.0] * 3)}},
    ],
    ids=["finished", "mapping", "own", "plan"],
)
def test_another_number_of_heads_is_refused_by_both_numbers(policy):
    model = llama()
    before = logits(model)
    with pytest.raises(ArgumentError, match=r"num_heads=3, but .*self_attn has num_heads=4"):
        attnscale.hf.apply(model, policy())
    assert torch.equal(logits(model), before)


def test_another_number_of_heads_in_a_range_is_refused_by_both_numbers():
    with pytest.raises(ArgumentError, match=r"heads '0-1'.*num_heads=3, but the range has 2"):
        attnscale.hf.apply(llama(), {"heads": {"0-1": ssmax([1.0] * 3)}})
    with pytest.raises(ArgumentError, match=r"'default'.*num_heads=4, but the range has 2"):
        attnscale.hf.apply(llama(), {"default": ssmax([1.0] * 4), "heads": {"0-1": "constant"}})


def test_another_head_dimension_is_refused_by_both_numbers():
    with pytest.raises(ArgumentError, match=r"head_dim=6, but .*self_attn has head_dim=8"):
        attnscale.hf.apply(llama(), attnscale.build_policy("asentmax", num_heads=4, head_dim=6))


def test_keywords_beside_a_finished_policy_are_refused():
    with pytest.raises(ArgumentError, match="not accepted together with a built policy"):
        attnscale.hf.apply(llama(), CubeRootLog(), gamma=2.0)
