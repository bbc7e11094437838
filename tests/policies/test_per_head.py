"""Different policies for different heads."""

from __future__ import annotations

import pytest
import torch

from attnscale import ArgumentError, attention_weights, build_policy, scaled_dot_product_attention
from attnscale.policies.build import build_policy_for

HEADS = {"3, 0": "log", "2": {"name": "ssmax", "reference_length": 8}}


def test_each_head_has_the_temperature_of_its_own_policy():
    policy = build_policy("per_head", num_heads=5, default={"name": "constant", "beta": 2.0}, heads=HEADS)
    n = torch.tensor([[[3, 64]], [[5, 7]]])  # [B, 1, Tq]
    log, ssmax = build_policy("log"), build_policy("ssmax", num_heads=1, reference_length=8)
    beta = policy(n)
    assert beta.shape == (2, 5, 2)
    for head in (0, 3):
        assert torch.equal(beta[:, head], log(n)[:, 0])
    assert torch.equal(beta[:, 2], ssmax(n)[:, 0])
    assert (beta[:, [1, 4]] == 2.0).all()


def test_an_int_gives_one_column():
    assert build_policy("per_head", num_heads=3, heads={"1": "log"})(64).shape == (3, 1)


def test_what_learns_learns_for_its_heads_only():
    policy = build_policy("per_head", num_heads=4, heads={"1-2": {"name": "ssmax", "reference_length": 8}})
    assert [tuple(parameter.shape) for parameter in policy.parameters()] == [(2,)]
    q = torch.randn(1, 4, 6, 8)
    scaled_dot_product_attention(q, q, q, is_causal=True, policy=policy).sum().backward()
    (gradient,) = (parameter.grad for parameter in policy.parameters())
    assert (gradient != 0).all()


def test_attention_uses_it_head_by_head():
    q = torch.randn(1, 4, 6, 8)
    mixed = attention_weights(q, q, is_causal=True, policy=build_policy("per_head", num_heads=4, heads={"1": "log"}))
    log, constant = (attention_weights(q, q, is_causal=True, policy=name) for name in ("log", "constant"))
    torch.testing.assert_close(mixed[:, 1], log[:, 1])
    torch.testing.assert_close(mixed[:, [0, 2, 3]], constant[:, [0, 2, 3]])


def test_the_number_of_heads_comes_from_the_module():
    assert build_policy_for({"name": "per_head", "heads": {"0": "log"}}, num_heads=6, head_dim=8).num_heads == 6


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ({"4": "log"}, "heads 0-3"),
        ({"0-1": "log", "1": "log"}, "do not overlap"),
        ({"2-1": "log"}, "range"),
        ({"0": "gap_adaptive"}, "queries or scores"),
        ({"0": {"name": "asentmax"}}, "queries or scores"),
        ({"0": "no_such"}, "no_such"),
    ],
)
def test_heads_that_make_no_sense_are_refused(heads, words):
    with pytest.raises(ArgumentError, match=words):
        build_policy("per_head", num_heads=4, heads=heads)
