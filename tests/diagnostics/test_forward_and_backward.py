"""Calls are measured when they are made, and again when backward comes to them."""

from __future__ import annotations

import math

import pytest
import tiny_gpt
import torch

from attnscale import Monitor, ScaledDotProductAttention
from attnscale.attention import bind
from attnscale.backends.dispatch import prepare
from attnscale.diagnostics import listener
from attnscale.diagnostics.records.tally import KEPT, Spread, Tally, row_keys
from attnscale.statistics.rows.quantities import forward_quantities, measure_quantities

LAYERS = 3


@pytest.fixture
def model():
    return tiny_gpt.build(layers=LAYERS)


def reported(model, *batches):
    with Monitor(model, every=1, rows=8, alerts=None) as monitor:
        for tokens in batches:
            model.loss(tokens).backward()
        return monitor.step(0)


def assert_alike(records, others):
    assert [(record.layer, record.head) for record in records] == [(record.layer, record.head) for record in others]
    for record, other in zip(records, others, strict=True):
        assert record.forward == other.forward
        assert record.scalars == pytest.approx(other.scalars, rel=1e-5)
        for name, summary in record.backward.items():
            assert tuple(summary) == pytest.approx(tuple(other.backward[name]), rel=1e-4, abs=1e-6)


def test_forward_is_measured_before_backward_comes(model):
    with Monitor(model, every=1, rows=8, alerts=None) as monitor:
        loss = model.loss(tiny_gpt.batch())
        assert all(layer.training.forward is not None for layer in monitor.layers.values())
        assert all(layer.training.backward is None for layer in monitor.layers.values())
        loss.backward()
        assert all(layer.training.backward is not None for layer in monitor.layers.values())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_it_makes_no_difference_when_backward_comes(model, order):
    batches = tiny_gpt.batch(0), tiny_gpt.batch(1, length=17)
    at_once = reported(model, *batches)
    with Monitor(model, every=1, rows=8, alerts=None) as monitor:
        losses = [model.loss(tokens) for tokens in batches]
        for index in order:
            losses[index].backward()
        assert_alike(monitor.step(0), at_once)


def test_a_forward_whose_backward_never_comes_is_reported(model):
    with Monitor(model, every=1, rows=8, alerts=None) as monitor:
        model(tiny_gpt.batch())
        records = monitor.step(0)
    assert len(records) == 2 * LAYERS
    assert all(record.forward["w_max"].rows == 16 and not record.backward for record in records)


def test_calls_with_and_without_a_backward_are_told_apart(model):
    with Monitor(model, every=1, rows=8, alerts=None) as monitor:
        model.loss(tiny_gpt.batch(1))
        model.loss(tiny_gpt.batch()).backward()
        records = monitor.step(0)
    assert all(record.forward["w_max"].rows == 32 for record in records)
    assert all(record.backward["w_max"].rows == 16 for record in records)
    for record, other in zip(records, reported(model, tiny_gpt.batch()), strict=True):
        for name, summary in record.backward.items():
            assert tuple(summary) == pytest.approx(tuple(other.backward[name]), rel=1e-4, abs=1e-6)


def test_each_backward_of_a_graph_is_noted_with_its_own_gradient():
    attention = ScaledDotProductAttention("log")
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    with Monitor(attention, every=1, rows=8, alerts=None) as monitor:
        out = attention(q, k, v, is_causal=True)
        out.backward(torch.full_like(out, 3.0), retain_graph=True)
        out.backward(torch.full_like(out, 4.0))
        records = monitor.step(0)
    assert [record.scalars["output_gradient"] for record in records] == pytest.approx([5 * math.sqrt(16 * 8)] * 2)


@pytest.mark.parametrize(("keys", "known"), [(16, True), (15, False), (40, True)])
def test_angles_are_told_of_rows_that_have_a_slot_of_their_own(keys, known):
    attention = ScaledDotProductAttention("log")
    q, k = torch.randn(1, 2, 16, 8), torch.randn(1, 2, keys, 8)
    with Monitor(attention, every=1, rows=None, alerts=None) as monitor:
        attention(q, k, k)
        assert all(("angle_ratio" in record.scalars) == known for record in monitor.step(0))


def test_what_is_changed_after_a_call_does_not_change_what_was_measured():
    attention = ScaledDotProductAttention("log")
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))

    def forward_of(change):
        with Monitor(attention, every=1, rows=8, alerts=None) as monitor:
            key = k * 2.0
            attention(q, key, v, is_causal=True)
            with torch.no_grad():
                key.add_(change)  # without a backward, autograd does not mind
            return [record.forward for record in monitor.step(0)]

    assert forward_of(1.0) == forward_of(0.0)
    assert all(forward_of(1.0))


def test_calls_without_autograd_and_in_a_graph_are_measured_at_once(model):
    with Monitor(model, every=1, rows=8, alerts=None) as monitor:
        with torch.no_grad():
            model(tiny_gpt.batch())
        torch.compile(model, backend="aot_eager")(tiny_gpt.batch())
        assert monitor.step(0)[0].forward["w_max"].rows == 16  # those of the call with gradients enabled


def test_a_measurement_that_fails_takes_no_other_with_it(model, monkeypatch):
    whole = reported(model, tiny_gpt.batch())
    calls = []

    def failing(call):
        calls.append(call)
        if len(calls) == 2:
            raise RuntimeError("no rows today")
        return measure_quantities(call)

    monkeypatch.setattr(listener, "measure_quantities", failing)
    with pytest.warns(RuntimeWarning, match="no rows today"):
        records = reported(model, tiny_gpt.batch())
    lost = {record.layer for record in whole} - {record.layer for record in records if record.forward}
    assert len(lost) == 1
    assert_alike(
        [record for record in records if record.layer not in lost],
        [record for record in whole if record.layer not in lost],
    )


def quantities_of(length: int, batch: int = 1, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, 2, length, 8, generator=generator) for _ in range(3))
    _, call, backend, policy = bind(q, k, v, is_causal=True, policy="log")
    call = prepare(call, policy, backend).call
    return forward_quantities(measure_quantities(call), call.row_beta())


def test_calls_of_all_shapes_are_counted_as_their_rows_together():
    found = [quantities_of(20), quantities_of(20, seed=2), quantities_of(90), quantities_of(9, 3), quantities_of(7)]
    tally = Tally()
    keys = [row_keys(salt, rows.shape[1] * rows.shape[3], rows.device) for salt, rows in enumerate(found)]
    for rows, keys_of_rows in zip(found, keys, strict=True):
        tally.add_forward(rows, keys_of_rows)
        tally.add_backward(rows, keys_of_rows)
    rows = torch.cat([one.transpose(1, 2).flatten(2) for one in found], dim=-1)
    whole = Spread.of(rows, torch.cat(keys))
    for spread in (tally.forward, tally.backward):
        for part, same in zip(spread, whole, strict=True):
            torch.testing.assert_close(part, same, equal_nan=True, rtol=1e-6, atol=0.0)


def test_what_is_held_does_not_grow_with_the_calls():
    tally, rows = Tally(), quantities_of(90)
    for salt in range(2 * KEPT // 90):
        tally.add_forward(rows, row_keys(salt, 90, rows.device))
    assert tally.width == KEPT
    assert tally.numbers == rows.shape[0] * 2 * KEPT
    assert math.isfinite(float(tally.forward.total[0].sum()))


def test_a_row_that_is_broken_in_one_call_is_named_whatever_the_others_are():
    attention = ScaledDotProductAttention("log")
    clean = torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(0))
    broken = clean.clone()
    broken[:, :, 5] = math.nan
    with Monitor(attention, every=1, rows=8, alerts=None) as monitor, torch.no_grad():
        for query in (clean, broken, clean):
            attention(query, clean, clean, is_causal=True)
        records = monitor.step(0)
    assert [record.scalars["broken_row"] for record in records] == [5.0, 5.0]
