"""A monitor never harms a run: no number changes, nothing stays behind, and whatever fails, fails alone."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import tracemalloc

import numpy as np
import pytest
import tiny_gpt
import torch

from attnscale import ArgumentError, ArgumentTypeError, Monitor, ScaledDotProductAttention
from attnscale.diagnostics import JsonlSink, MemorySink, Thresholds
from attnscale.diagnostics.listener import LayerListener


def curve(model, steps=6, monitor=None, **settings):
    """Losses of a short training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model.loss(tiny_gpt.batch(step, **settings))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if monitor is not None:
            monitor.step(step)
    return losses


@pytest.mark.parametrize("policy", ["constant", "log", {"name": "ssmax", "num_heads": 2}])
def test_the_loss_curve_is_the_same_to_the_bit(policy):
    plain = curve(tiny_gpt.build(policy=policy))
    watched = tiny_gpt.build(policy=policy)
    with Monitor(watched, every=2, rows=5, sinks=[MemorySink()]) as monitor:
        assert curve(watched, monitor=monitor) == plain


def test_random_numbers_are_not_drawn_from_the_run():
    model = tiny_gpt.build()
    torch.manual_seed(0)
    with Monitor(model, every=1) as monitor:
        model.loss(tiny_gpt.batch()).backward()
        monitor.step(0)
    drawn = torch.rand(4)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(4), drawn)


def test_closing_leaves_the_model_as_it_was():
    model = tiny_gpt.build()
    before = {name: vars(module).copy() for name, module in model.named_modules()}
    monitor = Monitor(model, every=1)
    assert all(block.attention.tap is not None for block in model.blocks)
    monitor.close()
    monitor.close()
    assert {name: vars(module) for name, module in model.named_modules()} == before
    assert all(block.attention.tap is None for block in model.blocks)


def test_what_is_saved_and_copied_knows_nothing_of_the_monitor():
    model = tiny_gpt.build()
    keys = set(model.state_dict())
    with Monitor(model, every=1):
        assert set(model.state_dict()) == keys
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert all(block.attention.tap is None for block in other.blocks)
            other.loss(tiny_gpt.batch()).backward()


@pytest.mark.parametrize("backend", ["reference", "sdpa", "blockwise"])
def test_the_output_may_be_changed_in_place_where_it_may_be_without_a_monitor(backend):
    """A backend that keeps its output for backward has autograd forbid it."""
    attention = ScaledDotProductAttention("log")

    def gradient():
        q, k, v = torch.randn(3, 1, 2, 8, 8, generator=torch.Generator().manual_seed(0)).unbind()
        out = attention(q.requires_grad_(), k, v, is_causal=True, backend=backend)
        out.mul_(2.0)
        try:
            out.sum().backward()
        except RuntimeError:
            return None
        return q.grad

    plain = gradient()
    with Monitor(attention, every=1) as monitor:
        watched = gradient()
        records = monitor.step(0)
    assert (plain is None) == (backend != "reference")
    assert (watched is None) == (plain is None)
    if plain is not None:
        assert torch.equal(watched, plain)
        assert records[0].backward


class Failing:
    """A sink whose methods fail when told to."""

    def __init__(self, when):
        self.when, self.calls = when, []

    def log(self, records, step):
        self.calls.append(step)
        if "log" in self.when:
            raise OSError("no space left")

    def close(self):
        if "close" in self.when:
            raise ValueError("already closed")


def test_a_sink_that_fails_is_dropped_and_the_others_go_on():
    model, good, bad = tiny_gpt.build(), MemorySink(), Failing({"log"})
    with Monitor(model, every=1, sinks=[bad, good]) as monitor:
        model.loss(tiny_gpt.batch()).backward()
        monitor.step(0)
        with pytest.warns(RuntimeWarning, match="sink Failing.*OSError"):
            monitor.flush()
        model.loss(tiny_gpt.batch()).backward()
        monitor.step(1)
    assert bad.calls == [0]
    assert {record.step for record in good.records} == {0, 1}
    with pytest.warns(RuntimeWarning, match="already closed"):
        Monitor(model, sinks=[Failing({"close"})]).close()


def test_a_listener_that_fails_hears_no_more_and_the_run_goes_on(monkeypatch):
    def fail(self, heard, number):
        raise RuntimeError("out of memory")

    plain = curve(tiny_gpt.build(), steps=1)
    model = tiny_gpt.build()
    monkeypatch.setattr(LayerListener, "forward", fail)
    with Monitor(model, every=1) as monitor, pytest.warns(RuntimeWarning, match="listener.*out of memory"):
        assert curve(model, steps=1, monitor=monitor) == plain


def test_memory_does_not_grow_with_steps_or_micro_batches():
    model, sink = tiny_gpt.build(layers=1), MemorySink(steps=2)
    tokens = tiny_gpt.batch(size=1, length=8)
    with Monitor(model, every=2, rows=4, sinks=[sink], alerts=None) as monitor:

        def run(steps):
            for step in range(steps):
                model.loss(tokens).backward()
                model.loss(tokens).backward()
                monitor.step(step)

        run(20)
        gc.collect()
        tracemalloc.start()
        run(100)
        gc.collect()
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert grown < 400_000
        # Steps at which it does not listen cost next to nothing, however many there are.
        layer = monitor.layers["blocks.0.attention"]
        monitor._listen(False, 1)
        for step in range(1, 100_000, 2):
            monitor.step(step - 1 if step % 2 == 0 else step + 1)
            monitor._listen(False, step)
        assert layer.training.forward is None


def test_calls_without_a_backward_do_not_pile_up():
    model = tiny_gpt.build(layers=1)
    layer = None
    with Monitor(model, every=1, rows=4) as monitor, torch.no_grad():
        layer = monitor.layers["blocks.0.attention"]
        for _ in range(300):
            model(tiny_gpt.batch(size=1, length=8))
        assert layer.tally().forward.sample.shape[-1] <= 4 * 512
        assert len(layer._unanswered) <= 64
        monitor.step(0)
    assert not layer._unanswered


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every=0 is not accepted: expected an int >= 1"),
        ({"rows": 0}, "rows=0 is not accepted"),
        ({"alerts": "configs/monitor/none.yaml"}, "none.yaml"),
    ],
)
def test_bad_arguments_are_refused_and_nothing_is_attached(arguments, message):
    model = tiny_gpt.build()
    with pytest.raises(ArgumentError, match=message):
        Monitor(model, **arguments)
    assert all(block.attention.tap is None for block in model.blocks)


def test_what_is_no_sink_no_model_or_watched_already_is_refused():
    model = tiny_gpt.build()
    with pytest.raises(ArgumentTypeError, match="sinks="):
        Monitor(model, sinks=[object()])
    with pytest.raises(ArgumentTypeError, match="model="):
        Monitor("model")
    with pytest.raises(ArgumentError, match="model="):
        Monitor(torch.nn.Linear(2, 2))
    with Monitor(model):
        with pytest.raises(ArgumentError, match="model="):
            Monitor(model)
        with pytest.raises(ArgumentError, match="step=-1"):
            Monitor(tiny_gpt.build()).step(-1)


def test_numbers_of_numpy_are_taken_and_reported_as_plain_ones(tmp_path):
    model, path = tiny_gpt.build(), tmp_path / "run.jsonl"
    alerts = Thresholds(collapsed=np.float32(0.5), seen=np.int64(1))
    assert alerts == Thresholds(collapsed=0.5, seen=1)
    with Monitor(model, every=np.int64(2), rows=np.int32(4), sinks=[JsonlSink(path)], alerts=alerts) as monitor:
        for step in np.arange(4):
            model.loss(tiny_gpt.batch(int(step))).backward()
            monitor.step(step)
    steps = [record["step"] for record in map(json.loads, path.read_text().splitlines()) if "step" in record]
    assert set(steps) == {0, 2}


def test_thresholds_refuse_what_they_do_not_know(tmp_path):
    path = tmp_path / "limits.yaml"
    path.write_text("collapse: 0.9\n")
    with pytest.raises(ArgumentError, match="key 'collapse'"):
        Thresholds.read(path)
    with pytest.raises(ArgumentError, match="diffuse=-1"):
        Thresholds(diffuse=-1)
    with pytest.raises(ArgumentError, match="vanishing=nan"):
        Thresholds(vanishing=float("nan"))
    with pytest.raises(ArgumentTypeError, match="jump=True"):
        Thresholds(jump=True)
