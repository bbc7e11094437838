"""A process group ends with `destroy_process_group`: nothing of ours keeps it, or its threads, alive."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from ranks import RANKS, group_threads, join, on_two_ranks
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from attnscale import Monitor, ScaledDotProductAttention
from attnscale.distributed import ContextParallel, share_rows

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted on Linux")

METHODS = ("gather", "ulysses", "ring")


def spread_sequence(method: str) -> None:
    mesh, attention = init_device_mesh("cpu", (RANKS,)), ScaledDotProductAttention("log")
    ContextParallel(method=method)._apply(attention, mesh)
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    with Monitor(attention, every=1, process_group=mesh) as monitor:
        attention(q, q, q, is_causal=True, positions=torch.arange(8 * RANKS)).sum().backward()
        assert monitor.step(0)


def shared_estimate() -> None:
    attention = ScaledDotProductAttention("gap_adaptive", scope="head", num_heads=2)
    share_rows(attention, init_device_mesh("cpu", (RANKS,)))
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    attention(q, q, q, is_causal=True).sum().backward()


def split_transformer() -> None:
    from attnscale.hf.sites import _shards

    mesh, places = init_device_mesh("cpu", (RANKS,)), torch.arange(8 * RANKS)[None]
    first, second = (_shards(places, mesh, 8, masked=False) for _ in range(2))
    assert first.slots is second.slots
    assert first.group is second.group


USES: dict[str, Callable[[], None]] = {
    **{method: lambda method=method: spread_sequence(method) for method in METHODS},
    "estimate": shared_estimate,
    **({"transformers": split_transformer} if find_spec("transformers") else {}),
}


def threads_left(rank: int) -> dict[str, list[str]]:
    """The threads of gloo that are left when a group has been used in each way, and destroyed."""
    distributed.barrier()  # both have joined
    distributed.destroy_process_group()
    gc.freeze()  # what is collected below is what the uses have made
    left = {}
    for name, use in USES.items():
        folder = Path(os.environ["RANKS_FOLDER"], name)
        folder.mkdir(exist_ok=True)
        join(folder, rank, RANKS)
        assert group_threads()
        use()
        gc.collect()
        distributed.destroy_process_group()
        left[name] = group_threads()
    return left


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    return on_two_ranks(threads_left, tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("use", USES)
def test_a_destroyed_group_has_no_threads_left(use, left):
    assert [one[use] for one in left] == [[], []]
