"""A policy adopts the device and dtype of its module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import attnscale
from attnscale.policies.settle import settle


def ssmax() -> attnscale.policies.Policy:
    return attnscale.build_policy("ssmax", num_heads=2, reference_length=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_it_has_the_dtype_of_what_trains_beside_it_and_beta_in_fp32_or_more(dtype):
    policy = ssmax()
    settle(policy, nn.Linear(2, 2, dtype=dtype))
    assert policy.s.dtype == dtype
    assert policy(64).dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(policy(64), torch.ones(2, 1), rtol=torch.finfo(dtype).eps, atol=1e-7, check_dtype=False)


def test_beside_frozen_parameters_it_stays_fp32():
    policy, frozen = ssmax(), nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False)
    settle(policy, frozen)
    assert policy.s.dtype == torch.float32


def test_running_estimates_keep_fp64():
    policy = attnscale.build_policy("gap_adaptive", scope="head", num_heads=2)
    settle(policy, nn.Linear(2, 2, dtype=torch.bfloat16))
    assert policy.sums.dtype == torch.float64


def test_modules_of_torch_give_theirs():
    attention = attnscale.MultiheadAttention(8, 2, dtype=torch.bfloat16, policy="ssmax")
    assert {parameter.dtype for parameter in attention.parameters()} == {torch.bfloat16}
