"""A process that dies makes the others fail, within the timeout of the process group."""

from __future__ import annotations

import os

import torch
from ranks import on_two_ranks
from torch.distributed.device_mesh import init_device_mesh

from attnscale.distributed import context_parallel_attention


def attend_until_the_other_dies(rank: int) -> list[str]:
    """What the first process is told, by each method, once the second has died in the midst of a run."""
    mesh = init_device_mesh("cpu", (2,))
    q, places, said = torch.randn(1, 2, 8, 4), torch.arange(16), []
    for method in ("gather", "ulysses", "ring"):
        context_parallel_attention(q, q, q, mesh=mesh, positions=places, method=method)
    if rank == 1:
        os._exit(0)
    for method in ("gather", "ulysses", "ring"):
        try:
            context_parallel_attention(q, q, q, mesh=mesh, positions=places, method=method)
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_the_others_fail_and_do_not_wait(tmp_path):
    survivor, dead = on_two_ranks(attend_until_the_other_dies, tmp_path)
    assert dead is None
    assert len(survivor) == 3
    assert all("Connection" in error or "peer" in error or "imed out" in error for error in survivor)
