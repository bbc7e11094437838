"""Reports of several processes are joined by the names of layers; nothing hangs, and nothing is mixed up."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_two_ranks
from torch import distributed, nn

from attnscale import ArgumentTypeError, Monitor, ScaledDotProductAttention
from attnscale.diagnostics import MemorySink, Record
from attnscale.diagnostics.records import tally as collecting


class Layers(nn.Module):
    """Attention layers by name, called one by one with tensors that differ from process to process."""

    def __init__(self, rank: int, *names: str) -> None:
        super().__init__()
        self.rank = rank
        self.layers = nn.ModuleDict({name: ScaledDotProductAttention("log") for name in names})

    def forward(self, *names: str, batch: int = 1, heads: int = 2, length: int = 16, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(self.rank)
        x = torch.randn(batch, heads, length, 8, generator=generator).mul(scale).requires_grad_()
        for name in names:
            self.layers[name](x, x, x, is_causal=True).sum().backward()


def every_scenario(rank: int) -> dict[str, Any]:
    """What one of two processes reports in each scenario."""
    collectives: list[str] = []

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **settings: Any) -> Any:
            collectives.append(act.__name__)
            return act(*arguments, **settings)

        return count

    for name in ("all_gather_into_tensor", "all_gather_object", "all_reduce", "broadcast", "all_gather"):
        setattr(distributed, name, counted(getattr(distributed, name)))

    found: dict[str, Any] = {}

    def report(scenario, monitor, step):
        collectives.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            records = monitor.step(step)
        found.setdefault(scenario, []).append(
            {
                "records": [record.as_dict() for record in records],
                "collectives": list(collectives),
                "warnings": [f"{warning.category.__name__}: {warning.message}" for warning in caught],
            }
        )

    # A layer that a process skips, one that nobody has called yet, and one that is called late.
    model = Layers(rank, "a", "b", "c")
    with Monitor(model, every=1, alerts=None) as monitor:
        for step, called in enumerate([("ab", "a"), ("a", "ab"), ("a", "a"), ("ab", "abc"), ("", "")]):
            model(*called[rank])
            report("skipped", monitor, step)

    # Stages of a pipeline, whose layers have names of their own.
    model, sink = Layers(rank, *("ab" if rank == 0 else "cd")), MemorySink()
    with Monitor(model, every=1, alerts=None, sinks=[sink]) as monitor:
        for step in range(2):
            model(*model.layers, length=16 if rank == 0 else 32)
            report("pipeline", monitor, step)
    found["written"] = len(sink.records)

    # The same names with different numbers of heads.
    model = Layers(rank, "a", "b")
    with Monitor(model, every=1, alerts=None) as monitor:
        for step in range(2):
            model("a", heads=2 + 2 * rank)
            model("b")
            report("heads", monitor, step)

    # Each in a group of its own.
    groups = [distributed.new_group([0]), distributed.new_group([1])]
    model, sink = Layers(rank, "a"), MemorySink()
    with Monitor(model, every=1, alerts=None, process_group=groups[rank], sinks=[sink]) as monitor:
        model("a", batch=1 + rank)
        report("alone", monitor, 0)
    found["written alone"] = len(sink.records)
    together = distributed.new_group([1, 0])
    with Monitor(model, every=1, alerts=None, process_group=together) as monitor:
        model("a", batch=1 + rank)
        report("together", monitor, 0)
    try:
        Monitor(model, process_group=groups[1 - rank])
    except Exception as error:
        found["refused"] = f"{type(error).__name__}: {error}"

    # Processes that are not at the same step.
    with Monitor(model, every=1, alerts=None) as monitor:
        model("a")
        report("steps", monitor, 5 + rank)

    # A report that fails in one process.
    pack = collecting.pack
    with Monitor(model, every=1, alerts=None) as monitor:
        model("a")
        if rank == 1:
            collecting.pack = lambda *tallies: 1 / 0
        report("failure", monitor, 0)
        collecting.pack = pack
        model("a")
        report("failure", monitor, 1)

    # One that trains while the other evaluates.
    with Monitor(model, every=1, alerts=None) as monitor:
        if rank == 0:
            with torch.no_grad():
                x = torch.randn(3, 2, 16, 8)
                model.eval().layers["a"](x, x, x, is_causal=True)
        else:
            model.train()("a")
        report("modes", monitor, 0)

    # Processes with different numbers of rows, more than are sent.
    model.train()
    with Monitor(model, every=1, rows=None, alerts=None) as monitor:
        model("a", batch=4 if rank == 0 else 120, length=16 if rank == 0 else 64)
        report("rows", monitor, 0)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes has reported in every scenario."""
    return on_two_ranks(every_scenario, tmp_path_factory.mktemp("processes"))


def rows_of(report: dict) -> dict[str, int]:
    """Rows of each layer, over heads."""
    found: dict[str, int] = {}
    for record in map(Record.from_dict, report["records"]):
        name = record.layer.removeprefix("layers.")
        found[name] = found.get(name, 0) + record.forward["visible"].rows
    return found


def test_a_layer_is_told_of_the_processes_that_called_it(ranks):
    reports = [rank["skipped"] for rank in ranks]
    assert [rows_of(report) for report in reports[0]] == [
        {"a": 64, "b": 32},
        {"a": 64, "b": 32},
        {"a": 64},
        {"a": 64, "b": 64, "c": 32},
        {},
    ]
    for one, other in zip(*reports, strict=True):
        assert one["records"] == other["records"]
        assert one["warnings"] == other["warnings"] == []


def test_what_only_one_process_called_is_what_it_saw(ranks):
    """Its own numbers, not an average with nothing."""
    record = next(Record.from_dict(r) for r in ranks[0]["skipped"][0]["records"] if r["layer"] == "layers.b")
    torch.manual_seed(0)
    attention, x = (
        ScaledDotProductAttention("log"),
        torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(0)),
    )
    x.requires_grad_()
    with Monitor(attention, every=1, alerts=None) as monitor:
        attention(x, x, x, is_causal=True).sum().backward()
        alone = monitor.step(0)[0]
    assert record.forward["w_max"] == pytest.approx(alone.forward["w_max"])
    assert record.scalars == pytest.approx(alone.scalars)


def test_a_report_is_one_collective_also_where_layers_are_new(ranks):
    for rank in ranks:
        assert [report["collectives"] for report in rank["skipped"]] == [["all_gather_object"]] * 5


def test_stages_of_a_pipeline_keep_their_names(ranks):
    for rank in ranks:
        for report in rank["pipeline"]:
            assert rows_of(report) == {"a": 32, "b": 32, "c": 64, "d": 64}
            longest = {r["layer"]: Record.from_dict(r).forward["visible"].max for r in report["records"]}
            assert longest == {"layers.a": 16, "layers.b": 16, "layers.c": 32, "layers.d": 32}
    assert [rank["written"] for rank in ranks] == [16, 0]


def test_layers_that_cannot_be_joined_are_told_as_each_process_has_them(ranks):
    for number, rank in enumerate(ranks):
        first, second = rank["heads"]
        assert rows_of(first) == rows_of(second) == {"a": (2 + 2 * number) * 16, "b": 64}
        (warning,) = first["warnings"]
        assert warning.startswith("MonitorWarning: attnscale: ")
        assert "layers.a" in warning
        assert "2, 4" in warning
        assert "process_group" in warning
        assert second["warnings"] == []


def test_a_group_is_joined_and_nobody_else(ranks):
    for number, rank in enumerate(ranks):
        assert rows_of(rank["alone"][0]) == {"a": (1 + number) * 32}
        assert rank["alone"][0]["collectives"] == []
        assert rank["written alone"] == 2
        assert rows_of(rank["together"][0]) == {"a": 3 * 32}
        assert rank["refused"].startswith("ArgumentTypeError: process_group=")


def test_processes_at_different_steps_are_told_so(ranks):
    for number, rank in enumerate(ranks):
        (report,) = rank["steps"]
        assert rows_of(report) == {"a": 32}
        assert {record["step"] for record in report["records"]} == {5 + number}
        assert "5, 6" in report["warnings"][0]


def test_a_process_that_fails_does_not_keep_the_others_waiting(ranks):
    for number, rank in enumerate(ranks):
        first, second = rank["failure"]
        assert rows_of(first) == {"a": 32}
        assert len(first["warnings"]) == number
        assert rows_of(second) == {"a": 64}


def test_training_of_one_process_is_not_mixed_with_evaluation_of_another(ranks):
    for rank in ranks:
        (report,) = rank["modes"]
        assert {record["mode"] for record in report["records"]} == {"training"}
        assert rows_of(report) == {"a": 32}


def test_percentiles_count_processes_by_their_rows(ranks):
    lengths = torch.cat([torch.arange(1, 17).repeat(4), torch.arange(1, 65).repeat(120)]).double()
    for rank in ranks:
        for record in map(Record.from_dict, rank["rows"][0]["records"]):
            visible = record.forward["visible"]
            assert visible.rows == lengths.numel()
            assert visible.mean == pytest.approx(lengths.mean().item(), rel=1e-5)
            for mark, level in zip(visible[1:4], (0.1, 0.5, 0.9), strict=True):
                assert abs((lengths <= mark).double().mean().item() - level) < 5 * 0.5 / 256**0.5


@pytest.mark.parametrize("group", ["world", 0, object()])
def test_what_is_no_process_group_is_refused(group):
    with pytest.raises(ArgumentTypeError, match="process_group="):
        Monitor(ScaledDotProductAttention("log"), process_group=group)
