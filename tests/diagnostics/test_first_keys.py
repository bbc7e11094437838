"""Records tell a head with an attention sink from one that looks elsewhere: `winner` and `first_share`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from attnscale import Monitor, ScaledDotProductAttention
from attnscale.diagnostics import JsonlSink
from attnscale.diagnostics.views.display import QUANTITIES
from attnscale.statistics.rows.quantities import FIRST_KEYS

LENGTH = 24


def heads(sharpness: float = 20.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three heads over one-hot keys: one attends to the first key, one to its own, one to all alike."""
    key = torch.eye(LENGTH)
    first = key[:1].expand(LENGTH, -1)
    query = torch.stack([sharpness * first, sharpness * key, torch.zeros(LENGTH, LENGTH)])[None]
    return query, key.expand(1, 3, -1, -1), torch.randn(1, 3, LENGTH, 4, generator=torch.Generator().manual_seed(0))


def records(tmp_path: Path, padding: int = 0):
    query, key, value = (torch.nn.functional.pad(x, (0, 0, padding, 0), value=7.0) for x in heads())
    module = ScaledDotProductAttention("constant")
    path = tmp_path / f"{padding}.jsonl"
    with Monitor(module, every=1, rows=None, alerts=None, sinks=[JsonlSink(path)]) as monitor:
        rules = {"key_padding": torch.arange(LENGTH + padding) < padding} if padding else {}
        module(query, key, value, is_causal=True, scale=1.0, **rules)
        found = monitor.step(0)
    return found, [json.loads(line) for line in path.read_text().splitlines()]


def test_a_sink_head_is_told_from_the_others(tmp_path):
    found, _ = records(tmp_path)
    sink, own, uniform = (record.forward for record in found)
    assert sink["winner"].max == 0.0
    assert sink["first_share"].mean == pytest.approx(1.0, abs=1e-5)
    assert own["winner"].max == LENGTH - 1
    assert own["winner"].mean == pytest.approx((LENGTH - 1) / 2)
    assert own["first_share"].min == pytest.approx(0.0, abs=1e-5)
    expected = sum(min(1.0, FIRST_KEYS / n) for n in range(1, LENGTH + 1)) / LENGTH
    assert uniform["first_share"].mean == pytest.approx(expected, abs=1e-5)


def test_padding_on_the_left_changes_nothing(tmp_path):
    plain, padded = records(tmp_path)[0], records(tmp_path, padding=5)[0]
    for one, other in zip(plain, padded, strict=True):
        for name in ("winner", "first_share"):
            assert one.forward[name].mean == pytest.approx(other.forward[name].mean, abs=1e-5)
            assert one.forward[name].max == pytest.approx(other.forward[name].max, abs=1e-5)


def test_both_are_on_disk_and_in_the_table_of_quantities(tmp_path):
    _, lines = records(tmp_path)
    held = [line for line in lines if line.get("kind") == "record"]
    assert len(held) == 3
    for name in ("winner", "first_share"):
        assert all(name in line["forward"] for line in held)
        assert QUANTITIES[name].phase == "forward"
