"""A custom `LengthPolicy` is registered under a name and then works like any other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attnscale
from attnscale import ArgumentError, ArgumentTypeError, LengthPolicy, build_policy, register_policy
from attnscale._util import state
from attnscale.policies import build_policy_for


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(state, "REGISTERED_POLICIES", {})
    return


@dataclass(eq=False, repr=False, kw_only=True)
class CubeRootLog(LengthPolicy):
    name = "cube_root_log"
    gamma: float = 1.0
    anchors: list[int] = field(default_factory=list)

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        return self.gamma * torch.log(n.clamp(min=2).double()) ** (1 / 3)


@dataclass(eq=False, repr=False, kw_only=True)
class Slopes(LengthPolicy):
    name = "slopes"
    num_heads: int

    def validate(self) -> None:
        self.slope = nn.Parameter(torch.ones(self.num_heads))

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        return self.slope[:, None] * n.double().sqrt()


def test_a_call_gives_the_class_a_name_in_every_spelling(tmp_path: Path):
    assert register_policy(CubeRootLog) is CubeRootLog
    policy = build_policy("cube_root_log", gamma=2.0)
    assert type(policy) is CubeRootLog
    assert policy.to_dict() == {"name": "cube_root_log", "gamma": 2.0, "anchors": []}
    assert build_policy(policy.to_dict()).to_dict() == policy.to_dict()
    policy.save(tmp_path / "own.yaml")
    again = build_policy(tmp_path / "own.yaml", anchors=[3])
    assert type(again) is CubeRootLog
    assert torch.equal(again(torch.arange(1, 9)), policy(torch.arange(1, 9)))
    q = torch.randn(1, 2, 9, 8)
    by_name = attnscale.scaled_dot_product_attention(q, q, q, is_causal=True, policy="cube_root_log")
    finished = attnscale.scaled_dot_product_attention(q, q, q, is_causal=True, policy=CubeRootLog())
    assert torch.equal(by_name, finished)


def test_a_decorator_does_the_same():
    @register_policy
    @dataclass(eq=False, repr=False, kw_only=True)
    class Decorated(LengthPolicy):
        name = "decorated"

        def formula(self, n: Tensor, position: Tensor) -> Tensor:
            return n.double()

    assert type(build_policy("decorated")) is Decorated


def test_what_learns_gets_the_heads_of_its_module_and_may_be_mixed_by_head():
    register_policy(Slopes)
    assert build_policy_for("slopes", num_heads=3, head_dim=8).slope.shape == (3,)
    assert attnscale.MultiheadAttention(8, 2, policy="slopes").policy.slope.shape == (2,)
    mixed = build_policy("per_head", num_heads=3, heads={"1-2": "slopes"})
    assert mixed(torch.tensor([[9]])).tolist() == [[1.0], [3.0], [3.0]]


def test_registering_again_changes_nothing():
    register_policy(register_policy(CubeRootLog))
    assert type(build_policy("cube_root_log")) is CubeRootLog


def test_the_message_about_an_unknown_name_knows_it():
    register_policy(CubeRootLog)
    with pytest.raises(ArgumentError, match=r"cube_root_log\. Did you mean 'cube_root_log'\?"):
        build_policy("cube_root_lag")


@pytest.mark.parametrize("taken", ["log", "cube_root_log"])
def test_a_name_that_another_class_has_is_refused(taken):
    register_policy(CubeRootLog)

    class Other(LengthPolicy):
        name = taken

    with pytest.raises(ArgumentError, match=f"name='{taken}' is not accepted: expected a name for Other"):
        register_policy(Other)
    assert type(build_policy(taken)) is not Other


def test_a_subclass_has_to_have_a_name_of_its_own():
    class Renamed(type(build_policy("log"))):
        pass

    with pytest.raises(ArgumentError, match="name='log'"):
        register_policy(Renamed)


@pytest.mark.parametrize("name", [None, "", 3, "own.yaml"])
def test_a_class_without_a_usable_name_is_refused(name):
    class Nameless(LengthPolicy):
        pass

    if name is not None:
        Nameless.name = name
    with pytest.raises(ArgumentError, match="class attribute `name` of Nameless"):
        register_policy(Nameless)


@pytest.mark.parametrize("what", ["log", None, nn.Identity, CubeRootLog(), lambda n: n])
def test_what_is_no_class_of_policies_is_refused(what):
    with pytest.raises(ArgumentTypeError, match=r"a subclass of attnscale\.LengthPolicy"):
        register_policy(what)
