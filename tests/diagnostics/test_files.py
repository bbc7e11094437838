"""Files of long runs: small, quick to open, readable when old, newer, damaged or hostile."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_gpt
import torch

from attnscale import Monitor
from attnscale.diagnostics import Event, JsonlSink, MemorySink, Progress, Record, RunInfo, Summary, read, read_jsonl
from attnscale.diagnostics.records.file import Region, Tail, scan
from attnscale.diagnostics.records.report import Report
from attnscale.errors import ArgumentError
from attnscale.report.data import Key, read_run

RUN = RunInfo("GPT", 2, 3, "log", 50, 64, "0.2.0", "2.13.0", "2026-01-31T12:00:00+00:00")
EVENT = Event(4, "logit_jump", "begun", "warning", 0, 0, (("layers.1", (2,)),), "logits jumped", "lower the rate")


def summary(value: float) -> Summary:
    return Summary(value, value / 2, value * 0.875, value * 2, value / 4, value * 4, 64)


def report(step: int = 0, layers: int = 2, heads: int = 3) -> list[Record]:
    """Records that differ in every number; the statistics of both passes are equal."""
    chance = random.Random(step)
    found = []
    for layer in range(layers):
        for head in range(heads):
            forward = {name: summary(chance.random()) for name in ("w_max", "max_logit", "entropy")}
            backward = {"w_max": forward["w_max"], "score_gradient": summary(chance.random() / 1e4)}
            found.append(Record(step, f"layers.{layer}", head, forward, backward, {"gain": chance.random()}))
    return found


def write(path: Path, *steps: int, run: RunInfo | None = None) -> Path:
    sink = JsonlSink(path)
    if run is not None:
        sink.open(run)
    for step in steps:
        sink.progress(Progress(10.0 - step, 1e-3), step)
        sink.log(report(step), step)
    sink.close()
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "attn.jsonl"


def old_file(path: Path, *steps: int) -> Path:
    """A file of the first version: a line per head, alerts between them."""
    alert = {"kind": "exploding", "step": 0, "layer": "layers.1", "head": 2, "value": "inf", "limit": 100.0}
    with path.open("w") as file:
        for step in steps:
            for record in report(step):
                file.write(json.dumps({"kind": "record", **record.as_dict()}) + "\n")
            line = {
                "kind": "alert",
                "alert": {**alert, "step": step, "message": "a logit has reached inf", "row": None},
            }
            file.write(json.dumps(line) + "\n")
    return path


def test_a_report_takes_less_than_325_bytes_per_head() -> None:
    """48 layers × 32 heads × 2000 reports at 325 bytes are 1 GB. The quantities of a real report, as noise."""
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(18, 6, 1536, generator=generator).exp()
    own[0] = own[0, :, :1]  # n and β are the same for all heads
    own[1] = own[1, :, :1]
    forward = tuple(f"quantity_{index}" for index in range(16))
    backward = (*forward[2:9], "score_gradient", "beta_gradient")
    summaries = torch.cat([own[:16], own[2:9], own[16:]])
    layers = tuple((f"model.layers.{index}.self_attn", tuple(range(32)), "training") for index in range(48))
    numbers = torch.randn(10, 1536, generator=generator).exp()
    rows = torch.full((35, 1536), 128, dtype=torch.int32)
    rows[-10:] = 1
    wide = Report(0, layers, forward, backward, tuple("abcdefghij"), summaries, rows, numbers)
    line = json.dumps({"kind": "report", **wide.as_dict()})
    assert len(line) / 1536 < 325
    again = Report.from_dict(json.loads(line))
    torch.testing.assert_close(again.summaries, summaries, rtol=2**-11, atol=0)
    assert again.numbers.equal(numbers)
    assert again.rows.equal(rows)


def test_heads_layers_and_quantities_need_not_be_alike(path: Path) -> None:
    records = [
        Record(7, "a", 3, {"w_max": summary(0.5)}, {"w_max": summary(0.25)}, {"gain": math.nan}),
        Record(7, "a", 9, {}, {}, {"other": 3e7 + 1}),
        Record(7, "b", 0, {"beta": summary(2048)}, {}, {}, "evaluation"),
        Record(7, "a", 1),
    ]
    sink = JsonlSink(path)
    sink.log(records, 7)
    sink.close()
    found = list(read_jsonl(path))
    assert [(record.layer, record.head, record.mode) for record in found] == [
        ("a", 3, "training"),
        ("a", 9, "training"),
        ("b", 0, "evaluation"),
        ("a", 1, "training"),
    ]
    assert found[0].forward == records[0].forward
    assert found[0].backward == records[0].backward
    assert math.isnan(found[0].scalars["gain"])
    assert found[1:] == [replace(records[1], scalars={"other": 3e7}), *records[2:]]  # the next fp32 number


def test_a_monitor_writes_a_header_loss_rate_and_an_end(path: Path) -> None:
    model = tiny_gpt.build()
    with Monitor(model, every=1, rows=4, sinks=[JsonlSink(path)], alerts=None) as monitor:
        for step in range(2):
            loss = model.loss(tiny_gpt.batch(step))
            loss.backward()
            monitor.step(step, loss=loss, lr=0.5)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", "report", "report", "end"]
    header = RunInfo.from_dict(lines[0])
    assert (header.model, header.layers, header.heads, header.every, header.rows) == ("TinyGpt", 2, 2, 1, 4)
    assert header.torch == torch.__version__
    assert "log" in header.policy.lower()
    assert lines[2]["loss"] == pytest.approx(loss.item())
    assert lines[2]["lr"] == 0.5


def test_a_data_frame_has_a_row_for_each_step_layer_and_head(path: Path) -> None:
    pytest.importorskip("pandas")
    write(path, 0, 50, run=RUN)
    sink = JsonlSink(path)
    sink.event([EVENT], 50)
    sink.close()
    frame = read(path)
    expected = [record for step in (0, 50) for record in report(step)]
    assert [*zip(frame["step"], frame["layer"], frame["head"], strict=True)] == [
        (record.step, record.layer, record.head) for record in expected
    ]
    for column, wanted in {
        "forward/w_max/mean": [record.forward["w_max"].mean for record in expected],
        "backward/w_max/p90": [record.backward["w_max"].p90 for record in expected],
        "backward/score_gradient/max": [record.backward["score_gradient"].max for record in expected],
        "gain": [record.scalars["gain"] for record in expected],
        "loss": [10.0] * 6 + [-40.0] * 6,
    }.items():
        assert frame[column].tolist() == pytest.approx(wanted, rel=2**-11)
    assert frame.attrs["runs"] == [RUN]
    assert frame.attrs["events"] == [EVENT]
    assert frame.attrs["skipped"] == 0
    assert set(read(path, names=["forward/w_max", "gain"]).columns) == {
        *("step", "layer", "head", "mode", "loss", "lr", "gain"),
        *(f"forward/w_max/{mark}" for mark in ("mean", "p10", "p50", "p90", "min", "max")),
    }


def test_a_data_frame_joins_reports_of_different_columns(path: Path) -> None:
    pytest.importorskip("pandas")
    sink = JsonlSink(path)
    sink.log([Record(0, "a", 0, scalars={"gain": 0.5})], 0)
    sink.log([Record(1, "a", 0, scalars={"gain": 0.25, "more": 1.0}), Record(1, "b", 0)], 1)
    sink.close()
    frame = read(path)
    assert frame["layer"].tolist() == ["a", "a", "b"]
    assert frame["gain"].tolist() == pytest.approx([0.5, 0.25, math.nan], nan_ok=True)
    assert frame["more"].tolist() == pytest.approx([math.nan, 1.0, math.nan], nan_ok=True)


def test_readers_decode_only_the_reports_they_need(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    write(path, *range(100))
    decoded: list[int] = []
    whole = Tail.read

    def counted(tail: Tail, region: Region, names: object = None) -> Report | None:
        decoded.append(region.step)
        return whole(tail, region, names)

    monkeypatch.setattr(Tail, "read", counted)
    assert sorted(set(read(path, most=3)["step"])) == [0, 50, 99]
    assert decoded == [0, 50, 99]
    monkeypatch.setattr("attnscale.report.data.MOST_VALUES", 10)
    monkeypatch.setattr("attnscale.report.data.FEWEST_REPORTS", 5)
    run = read_run(path)
    assert len(run.steps) == 5
    assert run.reports == 100
    assert len(decoded) < 10


def test_a_resumed_run_appends_and_its_reports_replace_those_it_repeats(path: Path) -> None:
    pytest.importorskip("pandas")
    write(path, 0, 1, 2, 3, run=RUN)
    write(path, 2, 5, run=replace(RUN, started="later"))
    assert sorted(set(read(path)["step"])) == [0, 1, 2, 5]
    assert [run.started for run in read(path).attrs["runs"]] == [RUN.started, "later"]
    assert read_run(path).steps == [0, 1, 2, 5]


def test_an_old_file_opens_and_its_alerts_are_events(path: Path) -> None:
    pytest.importorskip("pandas")
    old_file(path, 0, 10)
    found = list(read_jsonl(path))
    records = [item for item in found if isinstance(item, Record)]
    assert [(record.step, record.layer, record.head) for record in records] == [
        (record.step, record.layer, record.head) for step in (0, 10) for record in report(step)
    ]
    assert records[0].forward["w_max"].mean == pytest.approx(report(0)[0].forward["w_max"].mean)
    events = [item for item in found if isinstance(item, Event)]
    assert [(event.number, event.cause, event.status, event.step) for event in events] == [
        (3, "exploding", "begun", 0),
        (3, "exploding", "begun", 10),
    ]
    assert (events[0].value, events[0].usual, events[0].places) == (math.inf, 100.0, (("layers.1", (2,)),))
    write(path, 20, run=RUN)
    assert sorted(set(read(path)["step"])) == [0, 10, 20]
    run = read_run(path)
    assert run.steps == [0, 10, 20]
    assert run.planes[Key("scalar", "gain", "value")][1].tolist() == pytest.approx(
        [record.scalars["gain"] for record in report(10)]
    )


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut in the middle": lambda line: line[: len(line) // 2] + b"\n",
    "a bit of base64 lost": lambda line: line.replace(b'"eJ', b'"eK', 1),
    "a wrong number of heads": lambda line: line.replace(b'["layers.0", 3]', b'["layers.0", 4]'),
    "more heads than there can be": lambda line: line.replace(b'["layers.0", 3]', b'["layers.0", 99999999999]'),
    "a missing field": lambda line: line.replace(b'"scalars"', b'"scalers"'),
    "another type": lambda line: line.replace(b'["layers.0", 3]', b"[7, 3]"),
    "zeros": lambda line: b"\0" * len(line) + b"\n",
    "text": lambda line: b"no space left on device\n",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_line_is_skipped_and_counted(path: Path, damage: Callable[[bytes], bytes]) -> None:
    pytest.importorskip("pandas")
    write(path, 0, 1, 2)
    lines = path.read_bytes().splitlines(keepends=True)
    broken = damage(lines[1])
    assert broken != lines[1]
    path.write_bytes(b"".join([lines[0], broken, *lines[2:]]))
    frame = read(path)
    assert sorted(set(frame["step"])) == [0, 2]
    assert frame.attrs["skipped"] == 1
    run = read_run(path)
    assert run.steps == [0, 2]
    assert run.unreadable == 1
    assert {item.step for item in read_jsonl(path)} == {0, 2}


def test_fields_and_lines_of_a_newer_version_are_noted(path: Path) -> None:
    pytest.importorskip("pandas")
    write(path, 0, 1, run=replace(RUN, format=2))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["host"] = "node1"
    lines[1]["grad_norm"] = 0.5
    lines += [{"kind": "checkpoint"}, {"kind": "event", "event": {**EVENT.as_dict(), "colour": "red"}}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    frame = read(path)
    assert sorted(set(frame["step"])) == [0, 1]
    assert frame.attrs["events"] == [EVENT]
    assert frame.attrs["skipped"] == 0
    assert frame.attrs["unknown"] == ["event/colour", "line/checkpoint", "report/grad_norm", "run/host"]


def test_control_characters_of_a_file_are_escaped(path: Path) -> None:
    evil = "layers.0\x1b[2J\x07\x9b\u202e\n"
    sink = JsonlSink(path)
    sink.open(replace(RUN, model=evil))
    sink.log([Record(0, evil, 0, {evil: summary(1.0)}, scalars={evil: 1.0}, mode=evil)], 0)
    sink.event([replace(EVENT, message=evil, advice=evil, cause=evil, places=((evil, (0,)),))], 0)
    sink.close()
    with path.open("a") as file:
        file.write(json.dumps({"kind": "record", **Record(1, evil, 0, {evil: summary(1.0)}).as_dict()}) + "\n")
        alert = {"kind": evil, "step": 1, "layer": evil, "head": 0, "value": 1.0, "limit": 1.0, "message": evil}
        file.write(json.dumps({"kind": "alert", "alert": alert}) + "\n")
    found = [text for item in (*Tail(path).new(), *read_jsonl(path)) for text in texts(item)]
    assert sum("layers.0" in text for text in found) == 1 + 2 * (4 + 3) + 4 + 2  # run, two events twice, two records
    for text in found:
        assert text.isprintable() or not text


def texts(item: object) -> Iterator[str]:
    """All texts of a header, an event or a record."""
    if isinstance(item, str):
        yield item
    elif isinstance(item, Mapping):
        yield from texts([*item.items()])
    elif isinstance(item, (tuple, list)):
        for part in item:
            yield from texts(part)
    elif hasattr(item, "__dict__"):
        yield from texts(vars(item))


@pytest.mark.parametrize(
    "content",
    [b"", b'{"kind": "rep', b"step,loss\n0,1\n", bytes(range(256)) * 50, b"\x89PNG\r\n\x1a\n", b'{"kind": "other"}\n'],
    ids=["empty", "incomplete", "csv", "binary", "png", "json"],
)
def test_a_file_without_reports_is_refused_by_name(path: Path, content: bytes) -> None:
    pytest.importorskip("pandas")
    path.write_bytes(content)
    assert list(read_jsonl(path)) == []
    for reader in (read, read_run):
        with pytest.raises(ArgumentError, match=r"attn.jsonl' is not accepted: expected a file of reports"):
            reader(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    with pytest.raises(ArgumentError, match="an existing file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(ArgumentError, match="not a folder"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError):
        next(read_jsonl(tmp_path / "none.jsonl"))
    with pytest.raises(ArgumentError, match="most=0"):
        read(write(tmp_path / "attn.jsonl", 0), most=0)


def test_what_is_written_is_what_a_memory_sink_keeps(path: Path) -> None:
    """A real model: every number of every record, within the rounding of the file."""
    kept, model = MemorySink(), tiny_gpt.build()
    with Monitor(model, every=1, rows=4, sinks=[JsonlSink(path), kept], alerts=None) as monitor:
        for step in range(2):
            model.loss(tiny_gpt.batch(step)).backward()
            monitor.step(step)
    found = list(read_jsonl(path))
    assert [(record.step, record.layer, record.head) for record in found] == [
        (record.step, record.layer, record.head) for record in kept.records
    ]
    for record, expected in zip(found, kept.records, strict=True):
        assert [name for _, name, _ in record.summaries()] == [name for _, name, _ in expected.summaries()]
        for (*_, one), (*_, other) in zip(record.summaries(), expected.summaries(), strict=True):
            assert [*one] == pytest.approx([*other], rel=2**-11, nan_ok=True)
            assert one.rows == other.rows
        assert record.scalars == pytest.approx(expected.scalars, rel=2**-23, nan_ok=True)
    assert len(scan(path).regions) == 2
