"""Gives a policy the device and dtype of the module that it is put into."""

from __future__ import annotations

import torch
from torch import nn

from attnscale.policies.base import Policy


def settle(policy: Policy, module: nn.Module, device: torch.device | None = None) -> None:
    """Move a policy to a device, by default a module's, and to the dtype of the module's parameters that train.

    Parameters that train together have one dtype, as `fully_shard` requires; β is computed in fp32 from any. Beside
    frozen parameters, as under an adapter, a policy keeps its own.

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
