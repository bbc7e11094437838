"""When a monitor raises an alert, what it says, and what becomes of it."""

from __future__ import annotations

import logging
import math

import pytest
import tiny_gpt
import torch

from attnscale import Monitor, ScaledDotProductAttention
from attnscale.diagnostics import MemorySink, Record, Summary, Thresholds
from attnscale.diagnostics.alerts import find_alerts


def summary(value: float, largest: float | None = None) -> Summary:
    return Summary(value, value, value, value, value, value if largest is None else largest, 10)


def record(scalars: dict | None = None, step: int = 700, **forward: float) -> Record:
    healthy = {"w_max": 0.4, "relative_entropy": 0.5, "max_logit": 5.0, "prominence": 1.5, "visible": 100.0}
    quantities = {name: summary(value) for name, value in (healthy | forward).items()}
    return Record(step, "blocks.0.attention", 1, quantities, {}, {"gain": 0.5, "mismatch": 0.0, **(scalars or {})})


CROSSED = {
    "diffuse": record(relative_entropy=0.995),
    "collapsed": record(w_max=0.999, relative_entropy=0.001),
    "noise": record(w_max=0.7, prominence=0.8),
    "exploding": record(max_logit=150.0),
    "vanishing": record({"gain": 1e-6}),
    "mismatch": record({"mismatch": 0.1}),
    "broken": record({"broken_row": 3.0}),
}


def test_a_healthy_head_raises_nothing():
    assert find_alerts([record()], Thresholds()) == []


@pytest.mark.parametrize("kind", CROSSED)
def test_each_limit_raises_its_own_alert_and_can_be_switched_off(kind):
    (alert,) = find_alerts([CROSSED[kind]], Thresholds())
    assert (alert.kind, alert.step, alert.layer, alert.head) == (kind, 700, "blocks.0.attention", 1)
    assert alert.message
    assert alert.row == (3 if kind == "broken" else None)
    off = Thresholds(**{kind: False if kind == "broken" else None})
    assert find_alerts([CROSSED[kind]], off) == []


@pytest.mark.parametrize("kind", CROSSED)
def test_a_fresh_model_may_be_diffuse_noisy_and_without_gradient(kind):
    limits = Thresholds(after_step=701)
    early = kind in ("diffuse", "noise", "vanishing")
    assert [alert.kind for alert in find_alerts([CROSSED[kind]], limits)] == ([] if early else [kind])
    assert [alert.kind for alert in find_alerts([CROSSED[kind]], Thresholds(after_step=700))] == [kind]


def test_the_default_is_silent_about_a_model_that_has_just_been_made():
    model, heard = tiny_gpt.build(policy="constant"), []
    with Monitor(model, every=1, on_alert=heard.append) as monitor:
        model.loss(tiny_gpt.batch()).backward()
        records = monitor.step(0)
    assert heard == []
    later = [Record(100, x.layer, x.head, x.forward, x.backward, x.scalars) for x in records]
    assert {alert.kind for alert in find_alerts(later, Thresholds())} == {"diffuse"}  # which it is


def test_few_keys_are_not_diffuse():
    assert find_alerts([record(relative_entropy=0.995, visible=8.0)], Thresholds()) == []


@pytest.mark.parametrize(("matching", "alarm"), [(1, False), (8, False), (32, True)])
def test_noise_cannot_be_told_from_one_of_many_equal_keys(matching, alarm):
    """Of 256 keys, 1/(1 + 2·ln 256) are 21: more equals than that raise the deviation as far as they stand out."""
    attention, heard = ScaledDotProductAttention(), []
    generator = torch.Generator().manual_seed(0)
    q, k = torch.zeros(1, 1, 256, 8), 0.02 * torch.randn(1, 1, 256, 8, generator=generator)
    q[..., 0], k[..., :matching, 0] = 40 * math.sqrt(8), 1.0
    k[..., 0, 0] = 1.1  # of the equals, one takes the weight
    limits = Thresholds(after_step=0, collapsed=None, exploding=None)
    with Monitor(attention, every=1, alerts=limits, on_alert=heard.append) as monitor:
        attention(q, k, k)
        (seen,) = monitor.step(0)
    assert seen.forward["w_max"].p50 > 0.5
    assert [alert.kind for alert in heard] == (["noise"] if alarm else [])


def test_a_single_key_is_no_collapse():
    assert find_alerts([record(w_max=1.0, visible=1.0)], Thresholds()) == []


def test_the_limits_of_the_configurations_are_read():
    assert Thresholds.read("configs/monitor/default.yaml") == Thresholds()
    assert Thresholds.read("configs/monitor/strict.yaml").collapsed == 0.9


def run(monitor, attention, sharpness, steps):
    """Reports of a few steps with queries so sharp."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 32, 8, generator=generator)
    for step in steps:
        attention(q * sharpness, q, q, is_causal=True)
        monitor.step(step)


def test_an_alert_is_raised_when_it_begins_and_again_when_it_is_back(caplog):
    attention, sink, heard = ScaledDotProductAttention(), MemorySink(), []
    limits = Thresholds(diffuse=None, noise=None, exploding=None)
    with (
        caplog.at_level(logging.WARNING),
        Monitor(attention, every=1, sinks=[sink], alerts=limits, on_alert=heard.append) as monitor,
    ):
        run(monitor, attention, 1e3, range(3))
        run(monitor, attention, 1e-3, range(3, 5))
        run(monitor, attention, 1e3, range(5, 7))
    assert [(alert.kind, alert.step, alert.head) for alert in heard] == [
        ("collapsed", 0, 0),
        ("collapsed", 0, 1),
        ("collapsed", 5, 0),
        ("collapsed", 5, 1),
    ]
    assert list(sink.alerts) == heard
    assert "head 1: collapsed" in caplog.text


def test_what_a_callback_raises_is_the_users_own():
    attention = ScaledDotProductAttention()

    def stop(alert):
        raise KeyboardInterrupt(alert.kind)

    with Monitor(attention, every=1, on_alert=stop) as monitor, pytest.raises(KeyboardInterrupt):
        run(monitor, attention, 1e3, range(1))


def test_nan_is_reported_with_its_head_and_row():
    attention, heard = ScaledDotProductAttention(), []
    q = torch.randn(1, 2, 16, 8)
    k = q.clone()
    q[0, 1, 5] = math.nan
    with Monitor(attention, every=1, rows=4, on_alert=heard.append) as monitor:
        attention(q, k, k, is_causal=True)
        monitor.step(0)
    (broken,) = [alert for alert in heard if alert.kind == "broken"]
    assert (broken.head, broken.row, broken.step) == (1, 5, 0)


def test_the_rows_behind_an_alert_are_written(tmp_path):
    safetensors = pytest.importorskip("safetensors", reason="safetensors comes with transformers, which is optional")
    model = tiny_gpt.build()
    heard = []
    limits = Thresholds(diffuse=0.0, after_step=0)
    with Monitor(model, every=1, rows=5, alerts=limits, on_alert=heard.append, dump=tmp_path) as monitor:
        model.loss(tiny_gpt.batch()).backward()
        monitor.step(0)
    assert len(list(tmp_path.glob("*.safetensors"))) == len(heard) > 0
    alert = heard[0]
    path = tmp_path / f"step0-{alert.layer}-head{alert.head}-{alert.kind}.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["message"] == alert.message
        assert file.get_tensor("query").shape == file.get_tensor("key").shape == (2, 5, 8)
        assert file.get_tensor("rows").shape == (5,)
    assert not list(tmp_path.glob("*.partial"))
