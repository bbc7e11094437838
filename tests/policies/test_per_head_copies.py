"""`per_head` orders its parts without an index that each call would copy to the device."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnscale import build_policy


class Operators(TorchDispatchMode):
    """Records the executed operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_no_index_is_made_on_the_host():
    policy = build_policy("per_head", num_heads=6, heads={"1, 4": "log", "0": "sqrt_log"})
    n = torch.arange(1, 9)[None, None]
    with Operators() as operators:
        policy(n)
    # A list as an index becomes a tensor on the host (lift_fresh), is copied to the device, and indexes there.
    assert [name for name in operators.names if name.startswith(("aten::index", "aten::lift_fresh"))] == []


def test_nothing_has_to_be_moved_or_loaded():
    policy = build_policy("per_head", num_heads=6, heads={"1, 4": "log", "0": "sqrt_log"})
    assert policy.state_dict() == {}
    assert list(policy.buffers()) == []
    with torch.device("meta"):
        built = build_policy("per_head", num_heads=6, heads={"1, 4": "log", "0": "sqrt_log"})
    n = torch.arange(1, 9)[None, None]
    assert torch.equal(built.to_empty(device="cpu")(n), policy(n))
