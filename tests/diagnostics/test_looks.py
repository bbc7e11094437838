"""When rows are looked at: all layers together where autograd keeps their tensors, at once everywhere else."""

from __future__ import annotations

import math

import pytest
import tiny_gpt
import torch

from attnscale import Monitor, ScaledDotProductAttention
from attnscale.attention import _bind
from attnscale.diagnostics import deferred as looks
from attnscale.diagnostics.records.pending import Pending, settle
from attnscale.statistics.rows.quantities import AGAIN_COLUMNS
from attnscale.statistics.rows.row_sums import look

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


def test_all_happen_when_backward_has_come_to_the_last(model, monkeypatch):
    answered = []

    def noting(calls, gradients=None):
        answered.append(None if gradients is None else len(gradients))
        return look(calls, gradients)

    monkeypatch.setattr(looks, "look", noting)
    with Monitor(model, every=1, rows=8, alerts=None) as monitor:
        loss = model.loss(tiny_gpt.batch())
        assert len(monitor._looks._waiting) == LAYERS
        loss.backward()
        assert not monitor._looks._waiting
        assert monitor._looks._held == 0
    assert answered == [LAYERS]  # one pass for all of them, forward and backward


@pytest.mark.parametrize(("rows", "sizes"), [(1, [1, 1, 1]), (2 * 2 * 2 * 8, [2, 1]), (2**13, [3])])
def test_one_look_is_of_so_many_rows(model, rows, sizes, monkeypatch):
    expected, found = reported(model, tiny_gpt.batch()), []

    def noting(calls, gradients=None):
        found.append(len(calls))
        return look(calls, gradients)

    monkeypatch.setattr(looks, "look", noting)
    monkeypatch.setattr(looks, "TOGETHER", rows)
    assert_alike(reported(model, tiny_gpt.batch()), expected)
    assert found == sizes


@pytest.mark.parametrize("held", [0, 3_000, 20_000])
def test_it_makes_no_difference_how_many_may_wait(model, held, monkeypatch):
    batches = tiny_gpt.batch(0), tiny_gpt.batch(1, length=17)
    together = reported(model, *batches)
    most = []
    monkeypatch.setattr(looks, "MOST_HELD", held)
    add = looks.Looks.add

    def watched(self, one):
        add(self, one)
        most.append(self._held)

    monkeypatch.setattr(looks.Looks, "add", watched)
    assert_alike(reported(model, *batches), together)
    assert max(most) <= held
    assert len(most) == 2 * LAYERS


def test_a_forward_whose_backward_never_comes_is_reported(model):
    with Monitor(model, every=1, rows=8, alerts=None) as monitor:
        model(tiny_gpt.batch())
        records = monitor.step(0)
    assert len(records) == 2 * LAYERS
    assert all(record.forward["w_max"].rows == 16 and not record.backward for record in records)


def test_calls_with_and_without_a_backward_are_told_apart(model, monkeypatch):
    found = []

    def noting(calls, gradients=None):
        found.append((len(calls), gradients is not None))
        return look(calls, gradients)

    def some():
        with Monitor(model, every=1, rows=8, alerts=None) as monitor:
            model.loss(tiny_gpt.batch(1))
            model.loss(tiny_gpt.batch()).backward()
            return monitor.step(0)

    monkeypatch.setattr(looks, "look", noting)
    together = some()
    assert found == [(LAYERS, False), (LAYERS, True)]
    assert all(record.forward["w_max"].rows == 32 for record in together)
    assert all(record.backward["w_max"].rows == 16 for record in together)
    monkeypatch.setattr(looks, "MOST_HELD", 0)
    assert_alike(some(), together)


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


def test_what_has_been_changed_is_not_taken_for_what_was_attended_to():
    attention = ScaledDotProductAttention("log")
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    with Monitor(attention, every=1, rows=8, alerts=None) as monitor:
        key = k * 2.0
        attention(q, key, v, is_causal=True)
        with torch.no_grad():
            key.add_(1.0)  # without a backward, autograd does not mind
        assert all(not record.forward for record in monitor.step(0))
        attention(q, key, v, is_causal=True)
        assert all(record.forward for record in monitor.step(1))


def test_nothing_waits_without_autograd_or_in_a_graph(model):
    with Monitor(model, every=1, rows=8, alerts=None) as monitor:
        with torch.no_grad():
            model(tiny_gpt.batch())
        assert not monitor._looks._waiting
        torch.compile(model, backend="aot_eager")(tiny_gpt.batch())
        assert not monitor._looks._waiting
        assert monitor.step(0)[0].forward["w_max"].rows == 16  # those of the call with gradients enabled


def test_a_look_that_fails_takes_no_other_with_it(model, monkeypatch):
    whole = reported(model, tiny_gpt.batch())
    number = []

    def failing(calls, gradients=None):
        number.extend(call for call in calls if all(call is not other for other in number))
        if any(call is number[1] for call in calls):
            raise RuntimeError("no rows today")
        return look(calls, gradients)

    monkeypatch.setattr(looks, "look", failing)
    with pytest.warns(RuntimeWarning, match="no rows today"):
        records = reported(model, tiny_gpt.batch())
    lost = {record.layer for record in records if not record.forward}
    assert len(lost) == 1
    assert_alike(
        [record for record in records if record.layer not in lost],
        [record for record in whole if record.layer not in lost],
    )


def sums_of(heads: int, length: int, batch: int = 1, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v, up = (torch.randn(batch, heads, length, 8, generator=generator) for _ in range(4))
    _, call, _, _ = _bind(q, k, v, is_causal=True, policy="log")
    return [found[0] for found in look([call], [up])]


def test_calls_of_all_shapes_are_settled_as_each_alone():
    found = [sums_of(2, 20), sums_of(4, 20), sums_of(2, 20, seed=2), sums_of(2, 90), sums_of(4, 9, 3), sums_of(2, 7)]
    together, alone = ([Pending() for _ in range(3)] for _ in range(2))
    for index, (sums, gradients) in enumerate(found):
        for pendings in (together, alone):
            pendings[index % 3].add_forward(sums)
            pendings[index % 3].add_backward(sums[..., :AGAIN_COLUMNS], gradients)
        settle([alone[index % 3]])
    settle(together)
    for one, other in zip(together, alone, strict=True):
        for phase in ("forward", "backward"):
            for part, same in zip(getattr(one, phase), getattr(other, phase), strict=True):
                torch.testing.assert_close(part, same, equal_nan=True, rtol=1e-6, atol=0.0)


def test_what_is_large_does_not_wait(monkeypatch):
    monkeypatch.setattr(Pending, "SMALL", 1000)
    pending = Pending()
    pending.add_forward(sums_of(2, 20)[0])
    assert pending.forward is not None
    assert math.isfinite(float(pending.forward.total[0].sum()))


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
