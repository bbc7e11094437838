"""Every kind of call is measured, or skipped with a warning, and the next step is measured again."""

from __future__ import annotations

import math
import warnings

import pytest
import tiny_gpt
import torch
from torch import nn
from torch.autograd import forward_ad

from attnscale import Monitor, MultiheadAttention, ScaledDotProductAttention
from attnscale.diagnostics.listener import LayerListener
from attnscale.errors import MonitorWarning

SHAPE = (2, 2, 12, 8)


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def test_a_model_in_double_precision_is_measured_forward_and_backward():
    found = []
    for dtype in (torch.float64, torch.float32):
        model = tiny_gpt.build().to(dtype)
        with Monitor(model, every=1) as monitor:
            for step in range(2):
                model.loss(tiny_gpt.batch()).backward()
                records = monitor.step(step)
                assert len(records) == 4
            found.append(records)
    for double, single in zip(*found, strict=True):
        assert double.scalars == pytest.approx(single.scalars, rel=1e-3, abs=1e-6)
        assert double.scalars["mismatch"] == 0.0
        for phase in ("forward", "backward"):
            summaries = getattr(double, phase)
            assert summaries.keys() == getattr(single, phase).keys()
            for name in ("w_max", "entropy", "visible" if phase == "forward" else "score_gradient"):
                assert tuple(summaries[name]) == pytest.approx(tuple(getattr(single, phase)[name]), rel=1e-3, abs=1e-6)


def test_a_gradient_in_double_precision_is_that_of_autograd():
    attention, (q, k, v) = ScaledDotProductAttention("log"), tensors(*SHAPE, dtype=torch.float64)
    with Monitor(attention, every=1) as monitor:
        out = attention(q, k, v, is_causal=True)
        out.backward(torch.full_like(out, 0.5))
        records = monitor.step(0)
    for record in records:
        for name, x in (("query", q), ("key", k), ("value", v)):
            assert record.scalars[f"{name}_gradient"] == pytest.approx(x.grad[:, record.head].norm().item(), rel=1e-5)


EMPTY = {
    "no queries": ((2, 2, 0, 8), (2, 2, 12, 8)),
    "no keys": ((2, 2, 12, 8), (2, 2, 0, 8)),
    "no sequences": ((0, 2, 12, 8), (0, 2, 12, 8)),
    "nothing": ((0, 2, 0, 8), (0, 2, 0, 8)),
}


@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize("graph", [True, False])
def test_a_call_without_rows_counts_for_nothing_and_silences_nobody(kind, graph):
    queries, keys = EMPTY[kind]
    attention = ScaledDotProductAttention("log")

    def call(queries, keys):
        q, k, v = (torch.randn(shape, requires_grad=graph) for shape in (queries, keys, keys))
        out = attention(q, k, v)
        if graph:
            out.sum().backward()

    with Monitor(attention, every=1) as monitor:
        call(queries, keys)
        assert monitor.step(0) == []
        call(SHAPE, SHAPE)
        call(queries, keys)
        call(SHAPE, SHAPE)
        (first, _) = monitor.step(1)
        call(SHAPE, SHAPE)
        (second, _) = monitor.step(2)
    assert (first.forward["w_max"].rows, second.forward["w_max"].rows) == (48, 24)
    assert first.scalars.get("mismatch", 0.0) == 0.0
    assert math.isfinite(first.scalars["angle_ratio"])


def test_an_empty_micro_batch_leaves_a_multihead_module_heard():
    attention = MultiheadAttention(16, 2, batch_first=True, policy="log")
    with Monitor(attention, every=1) as monitor:
        for size in (2, 0, 2):
            x = torch.randn(size, 6, 16, requires_grad=True)
            attention(x, x, x, need_weights=False)[0].sum().backward()
        records = monitor.step(0)
    assert {record.forward["w_max"].rows for record in records} == {24}


def in_grad(attention, q, k, v):
    return torch.func.grad(lambda q: attention(q, k, v, is_causal=True, backend="reference").sum())(q)


def in_jvp(attention, q, k, v):
    return torch.func.jvp(lambda q: attention(q, k, v, is_causal=True, backend="reference"), (q,), (q,))[1]


def in_vmap(attention, q, k, v):
    run = torch.func.vmap(lambda q, k, v: attention(q, k, v, is_causal=True, backend="reference"))
    return run(q[None], k[None], v[None])


def in_dual_numbers(attention, q, k, v):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        return forward_ad.unpack_dual(attention(dual, k, v, is_causal=True, backend="reference")).tangent


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, when jvp is first used
@pytest.mark.parametrize("transformed", [in_grad, in_jvp, in_vmap, in_dual_numbers])
def test_a_transform_gives_the_same_while_a_monitor_listens_and_is_said_to_be_skipped(transformed):
    attention = ScaledDotProductAttention("log")
    inputs = [x.detach() for x in tensors(*SHAPE)]
    expected = transformed(attention, *inputs)
    with Monitor(attention, every=2, alerts=None) as monitor:
        assert torch.equal(transformed(attention, *inputs), expected)
        attention(*inputs, is_causal=True)
        with pytest.warns(MonitorWarning, match="inside torch.func transforms"):
            records = monitor.step(0)
        assert [record.scalars["skipped_calls"] for record in records] == [1.0, 1.0]
        assert {record.forward["w_max"].rows for record in records} == {24}
        assert torch.equal(transformed(attention, *inputs), expected)  # nobody listens
        assert monitor.step(1) == []
        assert torch.equal(transformed(attention, *inputs), expected)
        attention(*inputs, is_causal=True)
        records = monitor.step(2)  # warned of once
        assert {record.forward["w_max"].rows for record in records} == {24}


def test_the_gradient_of_a_gradient_passes_a_monitor():
    attention, (q, k, v) = ScaledDotProductAttention("log"), tensors(*SHAPE)

    def twice() -> torch.Tensor:
        out = attention(q, k, v, is_causal=True, backend="reference")
        (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), q)[0]

    expected = twice()
    with Monitor(attention, every=1, alerts=None) as monitor:
        assert torch.equal(twice(), expected)
        assert len(monitor.step(0)) == 2


def test_a_listener_that_failed_hears_the_next_step_and_each_kind_is_warned_of_once(monkeypatch):
    model = tiny_gpt.build()
    forward, failing = LayerListener.forward, [True]

    def fail(self, heard, number):
        if failing[0]:
            raise RuntimeError(f"out of memory at {torch.rand(())}")
        return forward(self, heard, number)

    monkeypatch.setattr(LayerListener, "forward", fail)
    with Monitor(model, every=1) as monitor:
        model.loss(tiny_gpt.batch()).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert all(not record.forward for record in monitor.step(0))
            model.loss(tiny_gpt.batch()).backward()
            monitor.step(1)
        assert [warning.category for warning in caught] == [MonitorWarning]  # for two layers and two steps
        assert "blocks.0.attention" in str(caught[0].message)
        failing[0] = False
        model.loss(tiny_gpt.batch()).backward()
        records = monitor.step(2)
    assert len(records) == 4
    assert all(record.forward and record.backward for record in records)


def test_warnings_that_are_errors_do_not_break_forward_or_backward(monkeypatch):
    def fail(self, heard, number):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(LayerListener, "forward", fail)
    model = tiny_gpt.build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor = Monitor(model, every=1)
        model.loss(tiny_gpt.batch()).backward()
        with pytest.raises(MonitorWarning, match="out of memory"):
            monitor.step(0)
        monitor.close()


def test_a_model_on_the_meta_device_is_left_alone():
    model = nn.Sequential(MultiheadAttention(16, 2, batch_first=True, policy="log", device="meta"))
    x = torch.empty(2, 6, 16, device="meta")
    with Monitor(model, every=1) as monitor:
        model[0](x, x, x, need_weights=False)
        assert monitor.step(0) == []
