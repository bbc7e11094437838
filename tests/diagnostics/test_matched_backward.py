"""Backward is compared with its own forward, and evaluation is not mixed into records of training."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import tiny_gpt
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from attnscale import Monitor, ScaledDotProductAttention, observe
from attnscale.diagnostics import JsonlSink, MemorySink, Record, read_jsonl

# A reentrant checkpoint says so where it is called without gradients.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")

RECOMPUTE = [None, "reentrant", "saved tensors"]


@pytest.fixture
def alerts():
    return []


def build(recompute=None):
    model = tiny_gpt.build()
    model.recompute = recompute
    return model


def rows_of(records, phase="forward"):
    return {getattr(record, phase)["w_max"].rows for record in records}


def assert_matched(records, alerts, forward=46, backward=46):
    assert alerts == []
    assert len(records) == 4
    assert {record.scalars["mismatch"] for record in records} == {0.0}
    assert rows_of(records) == {forward}
    assert rows_of(records, "backward") == {backward}
    assert {record.mode for record in records} == {"training"}


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("training", [True, False])
def test_a_reference_forward_before_backward_is_another_call(recompute, training, alerts):
    """As DPO makes it: the same modules without gradients, in training mode or not."""
    model = build(recompute)
    with Monitor(model, every=1, on_alert=alerts.append) as monitor:
        loss = model.loss(tiny_gpt.batch(0))
        model.train(training)
        with torch.no_grad():
            model.loss(tiny_gpt.batch(1))
            model.loss(tiny_gpt.batch(2))
        model.train()
        loss.backward()
        records = monitor.step(0)
    assert_matched(records, alerts)
    with Monitor(model, every=1) as monitor:
        model.loss(tiny_gpt.batch(0)).backward()
        alone = monitor.step(0)
    for record, other in zip(records, alone, strict=True):
        assert record.forward == other.forward
        assert record.scalars["angle_ratio"] == other.scalars["angle_ratio"]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_backward_may_come_in_any_order(recompute, order, alerts):
    model = build(recompute)
    with Monitor(model, every=1, on_alert=alerts.append) as monitor:
        losses = [model.loss(tiny_gpt.batch(seed)) for seed in range(3)]
        for index in order:
            losses[index].backward()
        records = monitor.step(0)
    assert_matched(records, alerts, 3 * 46, 3 * 46)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_losses_of_one_graph_and_another_forward_between(order, alerts):
    model = build()
    with Monitor(model, every=1, on_alert=alerts.append) as monitor:
        logits = model(tiny_gpt.batch(0)[:, :-1])
        other = model.loss(tiny_gpt.batch(1))
        losses = [logits.sum(), logits.square().sum()]
        losses[order[0]].backward(retain_graph=True)
        other.backward()
        losses[order[1]].backward()
        records = monitor.step(0)
    assert_matched(records, alerts, 2 * 46, 3 * 46)


@pytest.mark.parametrize("recompute", [None, "saved tensors"])
def test_compiled_calls_are_matched_too(recompute, alerts):
    """What a graph computes again in backward is not compared, as it does not know which call that was."""
    torch._dynamo.reset()
    model = tiny_gpt.build(layers=1)
    model.recompute = recompute
    compiled = torch.compile(model, backend="aot_eager")
    with Monitor(model, every=1, on_alert=alerts.append) as monitor:
        first, second = (compiled(tiny_gpt.batch(seed)[:, :-1]).square().sum() for seed in range(2))
        with torch.no_grad():
            compiled(tiny_gpt.batch(2)[:, :-1])
        first.backward()
        second.backward()
        records = monitor.step(0)
    assert alerts == []
    assert rows_of(records) == rows_of(records, "backward") == {2 * 46}
    assert all(record.scalars["mismatch"] < 1e-5 for record in records if recompute is None)


class Nested(nn.Module):
    """A block in a checkpoint in a checkpoint, called twice with different inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = ScaledDotProductAttention("log")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def twice(x: torch.Tensor) -> torch.Tensor:
            x = x + self.attention(x, x, x, is_causal=True)
            return x + self.attention(x * 3.0, x, x, is_causal=True)

        def inner(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(twice, checkpoint(twice, x, use_reentrant=True), use_reentrant=True)

        return checkpoint(inner, x, use_reentrant=True)


def test_nested_reentrant_checkpoints_find_the_call_they_repeat(alerts):
    model = Nested()
    x, y = (torch.randn(1, 2, 20, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_() for seed in (0, 1))
    with Monitor(model, every=1, on_alert=alerts.append) as monitor:
        one, other = model(x), model(y)
        with torch.no_grad():
            model(x + y)
        one.sum().backward()
        other.sum().backward()
        records = monitor.step(0)
    assert "mismatch" not in {alert.kind for alert in alerts}
    assert rows_of(records) == rows_of(records, "backward") == {2 * 4 * 20}
    assert {record.scalars["mismatch"] for record in records} == {0.0}


def test_a_recomputation_that_differs_is_still_told():
    model = build("reentrant")
    attention = model.blocks[1].attention
    with Monitor(model, every=1, alerts=None) as monitor:
        loss = model.loss(tiny_gpt.batch())
        with torch.no_grad():
            model.loss(tiny_gpt.batch(1))
        attention.policy = type(attention.policy)(gamma=2.0)
        loss.backward()
        records = monitor.step(0)
    by_layer = {record.layer: record.scalars["mismatch"] for record in records}
    assert by_layer["blocks.0.attention"] == 0.0
    assert by_layer["blocks.1.attention"] > 0.01


@pytest.mark.parametrize("evaluation", ["eval", "no_grad", "eval and no_grad", "inference_mode"])
@pytest.mark.parametrize("recompute", [None, "reentrant"])
def test_validation_between_steps_is_not_in_the_records_of_training(evaluation, recompute, alerts):
    """With two micro-batches a step, and a validation before and after each of them."""
    model, plain = build(recompute), build(recompute)
    quiet = {"no_grad": torch.no_grad, "eval and no_grad": torch.no_grad, "inference_mode": torch.inference_mode}

    def validate():
        model.train("eval" not in evaluation)
        with quiet.get(evaluation, nullcontext)():
            for seed in range(3):
                model.loss(tiny_gpt.batch(100 + seed, length=17))
        model.train()

    with Monitor(model, every=1, on_alert=alerts.append) as monitor, Monitor(plain, every=1) as expected:
        for step in range(2):
            for seed in range(2):
                validate()
                model.loss(tiny_gpt.batch(seed)).backward()
                plain.loss(tiny_gpt.batch(seed)).backward()
            validate()
            records, others = monitor.step(step), expected.step(step)
            assert_matched(records, alerts, 2 * 46, 2 * 46)
            for record, other in zip(records, others, strict=True):
                assert record.forward == other.forward
                assert record.backward == other.backward
                assert record.scalars == pytest.approx(other.scalars)


def test_a_step_of_evaluation_only_is_told_as_such(tmp_path):
    model, sink = build().eval(), MemorySink()
    with Monitor(model, every=1, sinks=[sink, JsonlSink(tmp_path / "attn.jsonl")]) as monitor:
        with torch.no_grad():
            model.loss(tiny_gpt.batch())
            model.loss(tiny_gpt.batch(1))
        records = monitor.step(0)
        model.train().loss(tiny_gpt.batch()).backward()
        trained = monitor.step(1)
    assert {record.mode for record in records} == {"evaluation"}
    assert rows_of(records) == {2 * 46}
    assert {record.mode for record in trained} == {"training"}
    assert sink.records == [*records, *trained]
    modes = [(record.step, record.layer, record.head, record.mode) for record in sink.records]
    written = read_jsonl(tmp_path / "attn.jsonl")
    assert [(record.step, record.layer, record.head, record.mode) for record in written] == modes


def test_records_of_older_files_are_of_training():
    content = Record(0, "attn", 0).as_dict()
    del content["mode"]
    assert Record.from_dict(content).mode == "training"


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_training_in_evaluation_mode_is_training(recompute, alerts):
    """As with frozen dropout: what backward comes to has been trained on."""
    model = build(recompute).eval()
    with Monitor(model, every=1, on_alert=alerts.append) as monitor:
        for seed in range(2):
            model.loss(tiny_gpt.batch(seed)).backward()
        records = monitor.step(0)
    assert alerts == []
    assert {record.mode for record in records} == {"training"}
    assert rows_of(records) == rows_of(records, "backward") == {2 * 46}


def test_frozen_layers_of_a_training_step_are_of_training():
    model = build()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.blocks[1].attention.scale = nn.Parameter(torch.ones(()))
    with Monitor(model, every=1) as monitor:
        model.loss(tiny_gpt.batch())
        records = monitor.step(0)
    assert {record.mode for record in records} == {"training"}


def test_hundreds_of_forwards_between_forward_and_backward_do_not_come_between(alerts):
    """As a generation makes them; backward still finds its own."""
    attention = ScaledDotProductAttention("log")
    x = torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with Monitor(attention, every=1, on_alert=alerts.append) as monitor:
        out = attention(x, x, x, is_causal=True)
        attention.eval()
        with torch.no_grad():
            for _ in range(200):
                attention(x * 2.0, x, x, is_causal=True)
        attention.train()
        out.sum().backward()
        records = monitor.step(0)
    assert alerts == []
    assert rows_of(records) == rows_of(records, "backward") == {12}
    assert {record.scalars["mismatch"] for record in records} == {0.0}


def test_observe_tells_of_training_or_else_of_evaluation():
    model = build()
    with observe(model) as seen, torch.no_grad():
        model.eval()(tiny_gpt.batch())
    assert {record.mode for record in seen.records} == {"evaluation"}
    with observe(model) as seen:
        with torch.no_grad():
            model(tiny_gpt.batch())
        model.train().loss(tiny_gpt.batch()).backward()
    assert {record.mode for record in seen.records} == {"training"}
    assert rows_of(seen.records) == {46}
