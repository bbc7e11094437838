"""Records tell for every head which of the keys it sees weighs most, and the weight of the first four, by name."""

from __future__ import annotations

import io
import json
import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnscale import Monitor, ScaledDotProductAttention, accumulation_scale, observe
from attnscale.cli import main
from attnscale.diagnostics import ConsoleSink, JsonlSink, Record, read_jsonl
from attnscale.diagnostics.views.display import QUANTITIES
from attnscale.diagnostics.views.flatten import flatten
from attnscale.report import build_page, read_run

NAMES = ("winner", "first_share")
FIRST = 4
BATCH, HEADS, LENGTH, DIM = 2, 3, 17, 8
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
SEEN = torch.rand(BATCH, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.5
SEEN |= torch.eye(LENGTH, dtype=torch.bool)  # a row whose own key is hidden could be padding
DOCUMENTS = torch.arange(LENGTH) // 6
SINKS = torch.tensor([1.0, -1.0, 3.0])
LEFT = torch.arange(LENGTH) < torch.tensor([[9], [0]])
CALLS: dict[str, tuple[dict[str, Any], Tensor]] = {
    "full": ({}, torch.ones(LENGTH, LENGTH, dtype=torch.bool)),
    "causal": ({"is_causal": True}, CAUSAL),
    "window": ({"is_causal": True, "window": 6}, CAUSAL & ~CAUSAL.tril(-6)),
    "documents": ({"is_causal": True, "document_ids": DOCUMENTS}, CAUSAL & (DOCUMENTS[:, None] == DOCUMENTS)),
    "left padding": ({"is_causal": True, "key_padding": LEFT}, CAUSAL & ~LEFT[:, None, None]),
    "mask per head": ({"attn_mask": SEEN}, SEEN),
    "bias": ({"attn_mask": torch.zeros(SEEN.shape).masked_fill(~SEEN, -math.inf)}, SEEN),
    "sinks": ({"is_causal": True, "sinks": SINKS}, CAUSAL),
}


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [2 * torch.randn(BATCH, HEADS, LENGTH, DIM, generator=generator) for _ in range(3)]


def by_head(q: Tensor, k: Tensor, seen: Tensor, sinks: Tensor | None = None) -> dict[str, list[list[float]]]:
    """What rows that see something have, head by head, written out in fp64; β = ln n, or ln 2 for fewer than two."""
    found: dict[str, list[list[float]]] = {name: [[] for _ in range(q.shape[1])] for name in NAMES}
    seen = seen.expand(*q.shape[:3], k.shape[2])
    for b, h, i in product(*map(range, q.shape[:3])):
        keys = seen[b, h, i].nonzero()[:, 0]
        if not len(keys):
            continue
        logits = math.log(max(2, len(keys))) * (k[b, h, keys].double() @ q[b, h, i].double()) / math.sqrt(q.shape[-1])
        outcomes = logits if sinks is None else torch.cat([logits, sinks[h : h + 1].double()])
        found["winner"][h].append(float(logits.argmax()))
        found["first_share"][h].append(float(outcomes.softmax(0)[: min(FIRST, len(keys))].sum()))
    return found


def assert_records(records: list[Record], truth: dict[str, list[list[float]]]) -> None:
    assert [record.head for record in records] == list(range(HEADS))
    for record in records:
        for name in NAMES:
            values = torch.tensor(truth[name][record.head], dtype=torch.float64)
            summary = record.forward[name]
            assert summary.rows == len(values)
            expected = {"mean": values.mean(), "min": values.min(), "max": values.max()}
            expected |= {f"p{share}": values.quantile(share / 100) for share in (10, 50, 90)}
            for mark, value in expected.items():
                assert getattr(summary, mark) == pytest.approx(value.item(), rel=1e-4, abs=1e-4), (name, mark)
            assert name not in record.backward


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backward", [True, False], ids=["training", "forward"])
def test_every_head_has_both_whatever_hides_keys(name, backward):
    rules, seen = CALLS[name]
    q, k, v = (x.requires_grad_(backward) for x in inputs())
    attention = ScaledDotProductAttention("log")
    with Monitor(attention, every=1, rows=None, alerts=None) as monitor:
        out = attention(q, k, v, **rules)
        if backward:
            out.sum().backward()
        records = monitor.step(0)
    assert_records(records, by_head(q.detach(), k.detach(), seen, rules.get("sinks")))


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("by", ["key_padding", "mask"])
def test_padding_moves_neither(side, by):
    """A place is counted among the keys that a row sees: padding before them does not move it."""
    q, k, v = inputs()
    before, after = {"left": (6, 0), "right": (0, 6), "both": (3, 5)}[side]
    long = [torch.nn.functional.pad(x, (0, 0, before, after), value=7.0) for x in (q, k, v)]
    padding = torch.ones(before + LENGTH + after, dtype=torch.bool)
    padding[before : before + LENGTH] = False
    rules: dict[str, Any] = {"is_causal": True, "key_padding": padding.expand(BATCH, -1)}
    if by == "mask":
        rules = {"attn_mask": torch.ones(len(padding), len(padding), dtype=torch.bool).tril() & ~padding}
    attention = ScaledDotProductAttention("log")
    found = []
    for call, keywords in (((q, k, v), {"is_causal": True}), (long, rules)):
        with observe(attention) as seen:
            attention(*call, **keywords)
        found.append(seen.records)
        assert_records(seen.records, by_head(q, k, CAUSAL))
    for one, other in zip(*found, strict=True):
        for name in NAMES:
            assert one.forward[name].rows == other.forward[name].rows
            for mark in ("mean", "p10", "p50", "p90", "min", "max"):
                pair = getattr(one.forward[name], mark), getattr(other.forward[name], mark)
                assert math.isclose(*pair, rel_tol=1e-5, abs_tol=1e-6), (name, mark)


def test_an_attention_sink_shows():
    """All rows but the first give their weight to the first key, which is what `first_share` near 1 says."""
    q, k = torch.ones(1, HEADS, LENGTH, DIM), torch.zeros(1, HEADS, LENGTH, DIM)
    k[:, :, 0] = 8.0
    attention = ScaledDotProductAttention("log")
    with observe(attention) as seen:
        attention(q, k, k, is_causal=True)
    for record in seen.records:
        assert record.forward["winner"].max == 0.0
        assert record.forward["first_share"].min > 0.99


def test_rows_that_see_nothing_are_in_neither_and_a_call_without_keys_breaks_nothing():
    q, k, v = inputs()
    hidden = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    hidden[3:, :5] = True
    attention = ScaledDotProductAttention("log")
    with Monitor(attention, every=1, rows=None, alerts=None) as monitor:
        attention(q, k, v, attn_mask=hidden)
        attention(q, k[:, :, :0], v[:, :, :0])
        attention(q, k[:, :, :0], v[:, :, :0], attn_mask=hidden[:, :0])
        records = monitor.step(0)
    assert all("skipped_calls" not in record.scalars for record in records)
    for record in records:
        assert {record.forward[name].rows for name in NAMES} == {record.forward["w_max"].rows}
        assert record.forward["winner"].max <= 4.0
        assert record.forward["first_share"].max <= 1.0


@pytest.fixture
def run(tmp_path) -> tuple[Path, list[list[Record]], str]:
    """A run of two reports: its file, its records, and what the console showed."""
    torch.manual_seed(0)
    attention, console = ScaledDotProductAttention("log"), io.StringIO()
    path, records = tmp_path / "attn.jsonl", []
    with Monitor(attention, every=1, sinks=[JsonlSink(path), ConsoleSink(console)], alerts=None) as monitor:
        for step in range(2):
            q, k, v = (torch.randn(BATCH, HEADS, LENGTH, DIM).requires_grad_() for _ in range(3))
            attention(q, k, v, is_causal=True).sum().backward()
            records.append(monitor.step(step))
    return path, records, console.getvalue()


def test_the_file_of_a_run_has_both_by_name(run):
    path, reports, _ = run
    for found, record in zip(read_jsonl(path), [record for report in reports for record in report], strict=True):
        for name in NAMES:
            assert found.forward[name] == pytest.approx(record.forward[name], rel=2**-11)
    planes = {(key.phase, key.name, key.statistic) for key in read_run(path).planes}
    assert {("forward", name, mark) for name in NAMES for mark in ("mean", "p10", "p50", "p90")} <= planes


def test_names_of_trackers_have_both(run):
    _, (records, _), _ = run
    numbers = flatten(records)
    layer = records[0].layer
    for name in NAMES:
        for head in range(HEADS):
            assert numbers[f"attn/{layer}/h{head}/forward/{name}/mean"] == records[head].forward[name].mean


def test_the_page_of_a_run_lists_both_with_what_they_mean(run):
    path, _, _ = run
    page = build_page(read_run(path))
    content = json.loads(re.search(r"<script[^>]*application/json[^>]*>(.*?)</script>", page, re.S)[1])
    shown = {quantity["name"]: quantity for quantity in content["quantities"] if quantity["phase"] == "forward"}
    for name in NAMES:
        assert shown[name]["label"] == QUANTITIES[name].label
        assert shown[name]["explanation"] == QUANTITIES[name].explanation
    assert shown["first_share"]["share"]
    assert not shown["winner"]["share"]


def test_the_terminal_shows_the_run_all_the_same(run, capsys):
    path, _, printed = run
    assert "w_max" in printed
    assert main(["watch", str(path), "--once"]) == 0
    assert "step 1" in capsys.readouterr().out


@pytest.mark.parametrize("rules", CALLS)
def test_criticality_without_the_first_keys_is_that_of_the_other_keys(rules):
    """A bracket of Λ over the visible keys but the first four, for the first rows of a call."""
    options, seen = CALLS[rules]
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, DIM, generator=generator) for _ in range(3))
    attention = ScaledDotProductAttention()
    with Monitor(attention, every=1, rows=None, alerts=None) as monitor:
        attention(q, k, v, **options)
        records = monitor.step(0)
    scores = q @ k.mT / math.sqrt(DIM)
    if isinstance(mask := options.get("attn_mask"), Tensor) and mask.dtype != torch.bool:
        scores = scores + mask
    padded = LEFT if rules == "left padding" else torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    for record in records:
        values = []
        for batch, row in product(range(BATCH), range(min(16, LENGTH))):
            rest = seen.expand(BATCH, HEADS, LENGTH, LENGTH)[batch, record.head, row].nonzero()[FIRST:, 0]
            if len(rest) > 1 and not padded[batch, row]:
                values.append(1 / accumulation_scale(scores[batch, record.head, row, rest][None]).item())
        found = record.forward["criticality_rest"]
        assert found.rows == len(values)
        assert found.mean == pytest.approx(sum(values) / len(values), rel=0.13)
