"""The window schedule: its factor at each change, its state, and the hook for a training loop."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import attnscale
from attnscale import ArgumentError, build_policy, scaled_dot_product_attention
from attnscale.policies import set_window


def attn_scale(windows: list[int], start: float = 1.0) -> float:
    """The running scale of modded-nanogpt over a sequence of windows."""
    for old, new in itertools.pairwise(windows):
        start *= 0.2 * math.log(new / old) + 1
    return start


def test_each_change_multiplies_the_temperature() -> None:
    policy, windows = build_policy("window_schedule", window=384), [384]
    for window in (896, 1408, 1664, 1664, 2560):
        policy.set_window(window)
        windows.append(window)
        assert float(policy.beta) == attn_scale(windows)
        assert policy(8192) == torch.tensor(attn_scale(windows))
    # mpmath at 40 digits
    assert math.isclose(attn_scale([384, 896, 1408]), 1.2751752379570257, rel_tol=1e-15)


def test_the_temperature_is_that_of_every_row() -> None:
    policy = build_policy("window_schedule", window=4)
    policy.set_window(16)
    q = torch.randn(1, 2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    beta = torch.tensor(attn_scale([4, 16])).double()
    expected = scaled_dot_product_attention(q, q, q, is_causal=True, scale=float(beta) / math.sqrt(8))
    for backend in ("sdpa", "blockwise", "reference"):
        found = scaled_dot_product_attention(q, q, q, is_causal=True, policy=policy, backend=backend)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    assert policy(torch.ones(2, 1, 6, dtype=torch.int64)).shape == (2, 1, 6)


def test_a_resumed_run_continues_where_it_was() -> None:
    policy, resumed = (build_policy("window_schedule", window=384) for _ in range(2))
    policy.set_window(896)
    resumed.load_state_dict(policy.state_dict())
    resumed.set_window(896)  # as a training loop announces it again
    assert torch.equal(resumed(1), policy(1))
    resumed.set_window(1408)
    assert float(resumed.beta) == attn_scale([384, 896, 1408])
    resumed.reset_parameters()
    assert (int(resumed.current_window), float(resumed.beta)) == (384, 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casting_the_model_does_not_round_the_state(dtype: torch.dtype) -> None:
    policy = build_policy("window_schedule", window=384)
    policy.set_window(896)
    exact = policy(1)
    model = nn.Sequential(nn.Linear(2, 2), attnscale.ScaledDotProductAttention(policy)).to(dtype)
    assert policy.beta.dtype == torch.float64
    assert torch.equal(policy(1), exact)
    assert model[0].weight.dtype == dtype


def test_a_copy_has_its_own_state() -> None:
    policy = build_policy("window_schedule", window=384)
    twin = copy.deepcopy(policy)
    twin.set_window(896)
    assert (int(policy.current_window), int(twin.current_window)) == (384, 896)


def test_the_hook_reaches_every_policy_of_a_model_or_none() -> None:
    first = build_policy("window_schedule", window=384)
    second = build_policy("window_schedule", window=100_000)
    model = nn.ModuleList(attnscale.ScaledDotProductAttention(policy) for policy in (first, second))
    set_window(model, 768)
    assert [int(policy.current_window) for policy in (first, second)] == [768, 768]
    second.reset_parameters()
    with pytest.raises(ArgumentError, match=r"window=100 .* a window > 673\.8"):
        set_window(model, 100)
    assert [int(policy.current_window) for policy in (first, second)] == [768, 100_000]


@pytest.mark.parametrize("window", [0, -1, 2.5, True, "8"])
def test_a_window_that_is_none_is_refused(window: object) -> None:
    policy = build_policy("window_schedule", window=384)
    with pytest.raises(attnscale.AttnScaleError, match="window="):
        policy.set_window(window)
    assert float(policy.beta) == 1.0


def test_a_model_without_a_schedule_is_refused() -> None:
    with pytest.raises(ArgumentError, match="model=Linear is not accepted: it has no window_schedule policy"):
        set_window(nn.Linear(2, 2), 8)


def test_heads_may_differ_in_their_schedule() -> None:
    policy = build_policy("per_head", num_heads=3, heads={"1": {"name": "window_schedule", "window": 4}})
    set_window(policy, 8)
    assert policy(torch.tensor([5]))[:, 0].tolist() == [1.0, pytest.approx(attn_scale([4, 8])), 1.0]
