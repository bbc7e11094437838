"""`per_head` and running estimates per head use the n of each head."""

from __future__ import annotations

import pytest
import torch
from oracle import tensors
from torch.nn import functional as F

from attnscale import ArgumentError, build_policy, scaled_dot_product_attention

HEADS = {"3, 0": "log", "2": {"name": "ssmax", "reference_length": 8}}
Q, K, V = tensors((2, 5, 6, 8), (2, 5, 6, 8))


def policy():
    return build_policy("per_head", num_heads=5, default={"name": "constant", "beta": 2.0}, heads=HEADS)


def expected(n: torch.Tensor) -> torch.Tensor:
    """β [B, H, Tq] of n [B, H, Tq], head by head."""
    ssmax = build_policy("ssmax", num_heads=1, reference_length=8)
    parts = {0: build_policy("log"), 3: build_policy("log"), 2: ssmax}
    constant = build_policy("constant", beta=2.0)
    return torch.cat([parts.get(head, constant)(n[:, head : head + 1]) for head in range(5)], 1).detach()


def test_a_policy_is_given_the_n_of_its_own_heads():
    n = torch.arange(1, 61).reshape(2, 5, 6)
    assert torch.equal(policy()(n).detach(), expected(n))
    positions = torch.arange(100, 106)[None, None].expand(2, 5, 6)
    assert torch.equal(policy()(n, positions=positions)[:, 2], policy()(positions + 1)[:, 2])


@pytest.mark.parametrize("given", ["mask", "n"])
def test_attention_with_a_mask_or_n_per_head_uses_it(given):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(2, 5, 6, 6, generator=generator) < 0.6
    mask[..., 0] = True
    n = mask.sum(-1) if given == "mask" else torch.arange(1, 61).reshape(2, 5, 6)
    rules = {"attn_mask": mask} if given == "mask" else {"attn_mask": mask, "visible": n}
    out = scaled_dot_product_attention(Q, K, V, policy=policy(), **rules)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(Q * expected(n)[..., None].double(), K, V, mask))


def test_an_n_for_another_number_of_heads_is_refused():
    with pytest.raises(ArgumentError, match=r"n or positions=\[2, 3, 6\].*\[..., 5, Tq\]"):
        policy()(torch.ones(2, 3, 6, dtype=torch.int64))


def test_a_running_estimate_takes_the_n_of_each_head_too():
    estimate = build_policy("gap_adaptive", scope="head", num_heads=2)
    mask = torch.ones(1, 2, 6, 6, dtype=torch.bool)
    mask[:, 1, :, 3:] = False  # head 1 sees three keys where head 0 sees six
    q, k, v = tensors((1, 2, 6, 8), (1, 2, 6, 8))
    trained = scaled_dot_product_attention(q, k, v, mask, policy=estimate)
    frozen = scaled_dot_product_attention(q, k, v, mask, policy=estimate.eval())
    torch.testing.assert_close(trained, frozen)
