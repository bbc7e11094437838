"""Several processes, one report: gloo groups under DDP and FSDP2; every rank gets the numbers of all."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import tiny_gpt
import torch
from ranks import on_ranks
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from attnscale import Monitor
from attnscale.diagnostics import JsonlSink, Record, read_jsonl
from attnscale.errors import ArgumentError, BackendError

Report = dict[str, Any]


def trained_by_ddp(rank: int) -> list[Report]:
    """The reports of one process."""
    return reports_of(rank, DistributedDataParallel)


def trained_by_fsdp2(rank: int) -> list[Report]:
    """The reports of one process."""

    def shard(model: tiny_gpt.TinyGpt) -> nn.Module:
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return reports_of(rank, shard)


def reports_of(rank: int, wrap: Callable[[tiny_gpt.TinyGpt], nn.Module]) -> list[Report]:
    model = tiny_gpt.build()
    run = wrap(model)
    sinks = [JsonlSink(f"{os.environ['RANKS_FOLDER']}/attn.jsonl")] if rank == 0 else []
    collectives = []
    gather = distributed.all_gather_object
    distributed.all_gather_object = lambda *a, **k: (collectives.append(1), gather(*a, **k))[1]
    with Monitor(model, every=2, rows=5, sinks=sinks, alerts=None) as monitor:
        reports = []
        for step in range(3):
            tokens = tiny_gpt.batch(seed=10 * step + rank)
            loss = nn.functional.cross_entropy(run(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            collectives.clear()
            records = monitor.step(step)
            reports.append({"collectives": len(collectives), "records": [record.as_dict() for record in records]})
    return reports


@pytest.mark.parametrize(
    ("world", "trained"),
    [(2, trained_by_ddp), (4, trained_by_ddp), (2, trained_by_fsdp2)],
    ids=["2 ddp", "4 ddp", "2 fsdp2"],
)
def test_every_rank_gets_the_numbers_of_all_by_one_collective(world, trained, tmp_path):
    reports = on_ranks(trained, tmp_path, world)
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
    reports = on_ranks(trained_by_ddp, tmp_path, 2)
    written = list(read_jsonl(tmp_path / "attn.jsonl"))
    expected = [Record.from_dict(record) for report in reports[0] for record in report["records"]]
    for record, original in zip(written, expected, strict=True):
        assert (record.step, record.layer, record.head) == (original.step, original.layer, original.head)
        assert record.forward["w_max"] == pytest.approx(original.forward["w_max"], rel=2**-11)
    assert torch.tensor([record.forward["visible"].rows for record in written]).eq(2 * 2 * 5).all()


def stepped_on_one_rank(rank: int) -> str:
    """The error of the first process; the second never reports its last step."""
    model = tiny_gpt.build()
    with Monitor(model, every=1, alerts=None, timeout=0.5) as monitor:
        for step in range(3):
            model.loss(tiny_gpt.batch(rank)).backward()
            if rank == 0 or step < 2:
                try:
                    monitor.step(step)
                except BackendError as error:
                    return str(error)
    return ""


def test_a_step_that_only_one_rank_makes_is_an_error_within_seconds(tmp_path):
    first, second = on_ranks(stepped_on_one_rank, tmp_path, 2)
    assert "monitor.step(2)" in first
    assert "rank 1" in first
    assert second == ""


def skipped_by_one_rank(rank: int) -> list[Report]:
    """Records of a model of which the second process skips the second block at each other step."""
    model = tiny_gpt.build(layers=3)
    with Monitor(model, every=1, alerts=None) as monitor:
        reports = []
        for step in range(4):
            block = model.blocks[1]
            if rank == 1 and step % 2:
                block.forward = lambda x: x
            model.loss(tiny_gpt.batch(rank)).backward()
            vars(block).pop("forward", None)
            reports.append({record.layer: record.forward["visible"].rows for record in monitor.step(step)})
    return reports


def test_a_layer_that_one_rank_skips_is_absent_there_and_nothing_hangs(tmp_path):
    reports, others = on_ranks(skipped_by_one_rank, tmp_path, 2)
    assert reports == others
    for step, report in enumerate(reports):
        first, second, third = report.values()
        assert first == third
        assert second == (first / 2 if step % 2 else first)


class Stage(nn.Module):
    """Half of a `TinyGpt`, with the paths of the whole: the first one embeds, the last one has the head."""

    def __init__(self, model: tiny_gpt.TinyGpt, rank: int) -> None:
        super().__init__()
        self.embedding = model.embedding if rank == 0 else None
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in (2 * rank, 2 * rank + 1)})
        self.head = model.head if rank == 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trained_by_1f1b(rank: int) -> list[Report]:
    """The records of the second step of two pipeline stages with four microbatches, as one process sees them."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage_module = Stage(tiny_gpt.build(layers=4), rank)
    stage = PipelineStage(stage_module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=next_token_loss)
    tokens = tiny_gpt.batch(size=4)
    with Monitor(stage_module, every=1, rows=None, alerts=None) as monitor:
        for step in range(2):  # before the first one, torch runs each stage once more to learn the shapes
            if rank == 0:
                schedule.step(tokens[:, :-1])
            else:
                schedule.step(target=tokens[:, 1:])
            records = monitor.step(step)
        return [record.as_dict() for record in records]


def test_the_stages_of_a_pipeline_report_as_one_model(tmp_path):
    first, second = on_ranks(trained_by_1f1b, tmp_path, 2)
    assert first == second
    model, tokens = tiny_gpt.build(layers=4), tiny_gpt.batch(size=4)
    with Monitor(model, every=1, rows=None, alerts=None) as monitor:
        for sequence in tokens.split(1):
            next_token_loss(model(sequence[:, :-1]), sequence[:, 1:]).backward()  # the schedule divides at its end
        whole = monitor.step(1)
    assert [(record["layer"], record["head"]) for record in first] == [(r.layer, r.head) for r in whole]
    for content, expected in zip(first, whole, strict=True):
        found = Record.from_dict(content)
        for phase in ("forward", "backward"):
            for name, summary in getattr(expected, phase).items():
                assert tuple(getattr(found, phase)[name]) == pytest.approx(tuple(summary), rel=1e-4, abs=1e-6), name
        assert found.scalars == pytest.approx(expected.scalars, rel=1e-4, abs=1e-6, nan_ok=True)


class OwnAttention(nn.Module):
    """A user's block around torch's own function, with separate projections."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, 4)).transpose(1, 2) for project in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(mixed.transpose(1, 2).flatten(2))


def own_attention() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(OwnAttention(), OwnAttention()), torch.randn(2, 9, 16)


def trained_with_split_heads(rank: int) -> dict[str, Any]:
    """The error without `HeadParallel`, and the records with it."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from attnscale.distributed import HeadParallel

    model, x = own_attention()
    mesh = init_device_mesh("cpu", (2,))
    split = {f"*.{name}": ColwiseParallel() for name in "qkv"} | {"*.o": RowwiseParallel()}
    parallelize_module(model, mesh, split)
    with pytest.raises(ArgumentError) as unsaid:
        Monitor(model, every=1, alerts=None)
    parallelize_module(model, mesh, {"*": HeadParallel()})
    with Monitor(model, every=1, rows=None, alerts=None) as monitor:
        model(x).square().sum().backward()
        return {"unsaid": str(unsaid.value), "records": [record.as_dict() for record in monitor.step(0)]}


def test_heads_of_torchs_function_under_tensor_parallelism_keep_their_numbers(tmp_path):
    first, second = on_ranks(trained_with_split_heads, tmp_path, 2)
    assert "HeadParallel" in first["unsaid"]
    assert first["records"] == second["records"]
    model, x = own_attention()
    with Monitor(model, every=1, rows=None, alerts=None) as monitor:
        model(x).square().sum().backward()
        whole = monitor.step(0)
    assert [(r.layer, r.head) for r in whole] == [(layer, head) for layer in "01" for head in range(4)]
    for content, expected in zip(first["records"], whole, strict=True):
        found = Record.from_dict(content)
        assert (found.layer, found.head) == (expected.layer, expected.head)
        for phase in ("forward", "backward"):
            for name, summary in getattr(expected, phase).items():
                assert tuple(getattr(found, phase)[name]) == pytest.approx(tuple(summary), rel=1e-4, abs=1e-5), name
