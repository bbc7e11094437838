"""A process that dies, or does not come, makes the others fail within the timeout of the process group."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_two_ranks
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from attnscale import ScaledDotProductAttention
from attnscale.distributed import context_parallel_attention, share_rows

METHODS = ("gather", "ulysses", "ring")


def until_the_other_dies(rank: int) -> dict[str, str]:
    """What the first process is told where the second skips a layer, and by each method once it has died."""
    mesh = init_device_mesh("cpu", (2,))
    q, places = torch.randn(1, 2, 8, 4), torch.arange(16)
    layer = ScaledDotProductAttention("gap_adaptive", scope="head", num_heads=2)
    calls: dict[str, Callable[[], Any]] = {
        method: lambda how=method: context_parallel_attention(q, q, q, mesh=mesh, positions=places, method=how)
        for method in METHODS
    }
    calls["estimate"] = lambda: layer(q, q, q, is_causal=True)
    for call in calls.values():
        call()
    share_rows(layer, distributed.new_group(timeout=datetime.timedelta(seconds=1)))
    said = {} if rank == 1 else {"skipped": told(calls["estimate"])}
    distributed.barrier()
    if rank == 1:
        os._exit(0)
    share_rows(layer, mesh)
    return said | {name: told(call) for name, call in calls.items()}


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.fixture(scope="module")
def survivor(tmp_path_factory):
    survivor, dead = on_two_ranks(until_the_other_dies, tmp_path_factory.mktemp("pair"))
    assert dead is None
    return survivor


@pytest.mark.parametrize("call", [*METHODS, "estimate"])
def test_the_others_fail_and_do_not_wait(call, survivor):
    assert any(word in survivor[call] for word in ("Connection", "peer", "imed out"))


@pytest.mark.parametrize("call", ["skipped", "estimate"])
def test_an_estimate_that_waits_in_vain_says_what_to_do(call, survivor):
    assert "ended or skipped the layer" in survivor[call]
    assert "attnscale.distributed.share_rows(model, None)" in survivor[call]
