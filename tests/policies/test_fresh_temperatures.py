"""Β always belongs to the policy and the n of the current call, never to a stale cache entry."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from catalogue import ARGUMENTS, build
from oracle import tensors
from torch import Tensor, nn
from torch.nn import functional as F

from attnscale import ArgumentError, AttnScaleError, LengthPolicy, build_policy, scaled_dot_product_attention
from attnscale.policies import FormulaPolicy

Q, K, V = tensors((2, 4, 9, 16), (2, 4, 9, 16))
N = torch.arange(1, 10)


def check(policy: LengthPolicy) -> None:
    """Rows with increasing n and one row that sees all keys, against the formula and torch's attention."""
    out = scaled_dot_product_attention(Q, K, V, is_causal=True, policy=policy)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(Q * beta(policy, N), K, V, is_causal=True))
    out = scaled_dot_product_attention(Q[:, :, :1], K, V, policy=policy)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(Q[:, :, :1] * beta(policy, N[-1:]), K, V))


def beta(policy: LengthPolicy, n: Tensor) -> Tensor:
    return policy(n).detach()[..., None].double()


def policy_class(factor: float) -> type[FormulaPolicy]:
    """Classes with equal name, fields and qualified name that differ only in their formula, below a thousand keys."""

    @dataclass(eq=False, repr=False, kw_only=True)
    class Own(FormulaPolicy):
        name = "own"
        gamma: float = 1.0

        def formula(self, n: Tensor, position: Tensor) -> Tensor:
            return torch.where(n < 1000, factor, 1.0) * self.gamma * n.double()

    return Own


def test_classes_of_equal_name_and_fields_are_told_apart():
    for factor in (0.1, 0.7):
        check(policy_class(factor)())


def test_a_subclass_that_keeps_the_name_is_told_apart():
    @dataclass(eq=False, repr=False, kw_only=True)
    class Doubled(type(build_policy("log"))):
        def law(self, n: Tensor) -> Tensor:
            return torch.where(n < 1000, 2.0, 1.0) * super().law(n)

    for policy in (build_policy("log"), Doubled(), build_policy("log")):
        check(policy)


def test_values_that_compare_equal_but_are_not_the_same_are_told_apart():
    @dataclass(eq=False, repr=False, kw_only=True)
    class Signed(FormulaPolicy):
        name = "signed"
        zero: float = 0.0

        def formula(self, n: Tensor, position: Tensor) -> Tensor:
            return torch.where(n < 1000, 2.0 + math.copysign(1.0, self.zero), 1.0)

    for zero in (0.0, -0.0):
        check(Signed(zero=zero))


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_the_fields_of_a_finished_policy_are_fixed(name):
    policy = build(name)
    before = policy.to_dict()
    for field in dataclasses.fields(policy):
        if field.init:
            with pytest.raises(ArgumentError, match=rf"{field.name}=.* build a new policy"):
                setattr(policy, field.name, 3)
            with pytest.raises(AttributeError, match="build a new policy"):
                delattr(policy, field.name)
    assert policy.to_dict() == before


def test_a_reference_length_set_afterwards_is_refused():
    policy = build_policy("log", reference_length=32)
    with pytest.raises(AttnScaleError, match="reference_length=64"):
        policy.reference_length = 64
    assert policy(32).item() == 1.0


def test_a_new_policy_is_made_of_an_old_one():
    policy = build_policy("log", reference_length=32)
    other = dataclasses.replace(policy, reference_length=64)
    assert (policy(64).item() > 1, other(64).item()) == (True, 1.0)
    check(other)


def test_a_plain_attribute_that_changes_is_noticed():
    class Attribute(FormulaPolicy):
        name = "attribute"
        factor = 1.0
        table: tuple[float, ...] | list[float] | None = None

        def formula(self, n: Tensor, position: Tensor) -> Tensor:
            return n.double() * (self.factor if self.table is None else self.table[0]) * (1 if self.training else 2)

    policy = Attribute()
    check(policy)
    policy.factor = 0.25
    check(policy)
    policy.eval()
    check(policy)
    policy.table = [3.0]  # which can change without an assignment
    check(policy)
    policy.table[0] = 0.125
    check(policy)
    del policy.table
    check(policy)


@pytest.mark.parametrize("policy", [build_policy("log"), build_policy("ssmax", num_heads=4)], ids=lambda x: x.name)
def test_an_n_changed_through_numpy_is_noticed(policy):
    counts = np.full((2, 1, 9), 4)
    mask, visible = torch.ones(9, 9, dtype=torch.bool), torch.from_numpy(counts)
    for rules in ({"visible": visible, "attn_mask": mask}, {"visible": visible}):
        for n in (4, 400):
            counts[:] = n
            out = scaled_dot_product_attention(Q, K, V, policy=policy, **rules)
            torch.testing.assert_close(out, F.scaled_dot_product_attention(Q * beta(policy, visible), K, V))


@pytest.mark.parametrize("name", ["log", "ssmax", "asentmax", "gap_adaptive", "per_head"])
def test_what_any_module_can_do_a_policy_can(name):
    policy = build(name)
    for other in (copy.deepcopy(policy), copy.copy(policy), pickle.loads(pickle.dumps(policy)), policy.double()):
        assert other.to_dict() == policy.to_dict()
        with pytest.raises(ArgumentError):
            setattr(other, next(field.name for field in dataclasses.fields(other) if field.init), 3)
    policy.train(False)
    assert not policy.training
    policy.load_state_dict(copy.deepcopy(policy.state_dict()))
    policy.register_buffer("more", torch.zeros(2), persistent=False)
    policy.more = torch.ones(2)
    policy.child = nn.Identity()
    policy.register_forward_hook(lambda *_: None).remove()
    for key, parameter in list(policy.named_parameters(recurse=False)):
        setattr(policy, key, nn.Parameter(parameter.detach() + 1))  # as FSDP does
        assert torch.equal(policy.state_dict()[key], parameter + 1)
