"""Moves a policy to the device and dtype of its module."""

from __future__ import annotations

import torch
from torch import nn

from attnscale.policies.base import Policy


def settle(policy: Policy, module: nn.Module, device: torch.device | None = None) -> None:
    """Move a policy to a device, by default that of the module, and to the dtype of the module's trainable parameters.

    Parameters trained together share a dtype, as `fully_shard` requires; β is computed in fp32 in any case. If the
    module's parameters are frozen, as under an adapter, the policy keeps its dtype.

    >>> from attnscale import build_policy
    >>> policy = build_policy("ssmax", num_heads=2)
    >>> settle(policy, nn.Linear(4, 4, dtype=torch.bfloat16))
    >>> policy.s.dtype, policy(8).dtype
    (torch.bfloat16, torch.float32)
    """
    if not isinstance(policy, nn.Module):
        return
    parameters = list(module.parameters())
    held = (parameter.device for parameter in parameters if parameter.device.type != "meta")
    policy.to(next(held, torch.device("cpu")) if device is None else device)
    trained = (parameter.dtype for parameter in parameters if parameter.requires_grad)
    dtype = next((dtype for dtype in trained if dtype.is_floating_point and dtype.itemsize > 1), None)
    if dtype is not None:
        policy.to(dtype)
