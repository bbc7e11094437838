"""Several processes, one report: gloo groups under DDP and FSDP2; every rank gets the numbers of all."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import tiny_gpt
import torch

from attnscale import Monitor
from attnscale.diagnostics import Record, read_jsonl

TESTS = Path(__file__).resolve().parents[1]

WORKER = textwrap.dedent(
    """
    import json, sys
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel
    import tiny_gpt
    from attnscale import Monitor
    from attnscale.diagnostics import JsonlSink

    rank, world, port, wrapper, folder = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    torch.set_num_threads(1)
    store = distributed.TCPStore("127.0.0.1", int(port), world, is_master=rank == 0)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = tiny_gpt.build()
    if wrapper == "ddp":
        run = DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        run = fully_shard(model, mesh=mesh)
    sinks = [JsonlSink(f"{folder}/attn.jsonl")] if rank == 0 else []
    collectives = []
    gather = distributed.all_gather
    distributed.all_gather = lambda *a, **k: (collectives.append(1), gather(*a, **k))[1]
    with Monitor(model, every=2, rows=5, sinks=sinks, alerts=None) as monitor:
        reports = []
        for step in range(3):
            tokens = tiny_gpt.batch(seed=10 * step + rank)
            loss = torch.nn.functional.cross_entropy(run(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            collectives.clear()
            records = monitor.step(step)
            reports.append({"collectives": len(collectives), "records": [record.as_dict() for record in records]})
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(reports, file)
    distributed.destroy_process_group()
    """
)


def run(world: int, wrapper: str, folder: Path) -> list[list[dict]]:
    """The reports of each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(world), str(port), wrapper, str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=300)
        assert worker.returncode == 0, errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize(("world", "wrapper"), [(2, "ddp"), (4, "ddp"), (2, "fsdp2")])
def test_every_rank_gets_the_numbers_of_all_by_one_collective(world, wrapper, tmp_path):
    reports = run(world, wrapper, tmp_path)
    assert [[bool(report["records"]) for report in rank] for rank in reports] == [[True, False, True]] * world
    assert all(report["collectives"] == bool(report["records"]) for rank in reports for report in rank)
    assert all(rank == reports[0] for rank in reports)

    # One process that sees the batches of all, at the first step, when all have the same weights.
    model = tiny_gpt.build()
    with Monitor(model, every=1, rows=5, alerts=None) as monitor:
        for rank in range(world):
            model.loss(tiny_gpt.batch(seed=rank)).backward()
        alone = monitor.step(0)
    for content, expected in zip(reports[0][0]["records"], alone, strict=True):
        found = Record.from_dict(content)
        assert (found.layer, found.head) == (expected.layer, expected.head)
        for name, summary in expected.forward.items():
            assert tuple(found.forward[name]) == pytest.approx(tuple(summary), rel=1e-5, abs=1e-6), name
        assert found.backward["w_max"].rows == expected.backward["w_max"].rows


def test_the_first_rank_writes_what_all_have_seen(tmp_path):
    reports = run(2, "ddp", tmp_path)
    written = list(read_jsonl(tmp_path / "attn.jsonl"))
    assert written == [Record.from_dict(record) for report in reports[0] for record in report["records"]]
    assert torch.tensor([record.forward["visible"].rows for record in written]).eq(2 * 2 * 5).all()
