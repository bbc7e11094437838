"""Where records go: every sink holds what it was given, and none of them can hurt a run."""

from __future__ import annotations

import gc
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import tracemalloc
import types
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_gpt

from attnscale import Monitor
from attnscale.diagnostics import (
    ConsoleSink,
    Event,
    JsonlSink,
    MemorySink,
    MlflowSink,
    Record,
    Summary,
    TensorBoardSink,
    TrackerSink,
    read_jsonl,
)
from attnscale.diagnostics.sinks.tensorboard import cell_size, draw
from attnscale.diagnostics.views.display import MAIN, colour, grid_of
from attnscale.diagnostics.views.flatten import MAIN_NAMES, compact, flatten
from attnscale.errors import ArgumentError, ArgumentTypeError, MissingDependencyError


def spread(mean: float) -> Summary:
    return Summary(mean, mean / 2, mean * 0.9, mean * 2, mean / 4, mean * 4, 64)


def report(step: int = 0, layers: int = 2, heads: int = 3) -> list[Record]:
    """Records whose numbers are all different."""
    return [
        Record(
            step,
            f"layers.{layer}",
            head,
            {"w_max": spread((1 + head + 10 * layer + step) / 100), "max_logit": spread(1.0 + head + layer)},
            {"w_max": spread(0.5), "score_gradient": spread(1e-3 * (1 + head))},
            {"score_gain": 0.1 * (1 + head), "token_angle": 0.5 + 0.1 * layer},
        )
        for layer in range(layers)
        for head in range(heads)
    ]


def event(step: int = 0, head: int = 0, cause: str = "collapsed", status: str = "begun") -> Event:
    message = f"layers.1, head {head}: half of the rows give 0.999 to one key since step {step}"
    places = (("layers.1", (head,)),)
    return Event(0, cause, status, "warning", step, step, places, message, "lower the rate", "w_max", 0.999, 0.99)


def close_to(records: list[Record]) -> list[Record]:
    """The records as a file holds them: summaries have 11 significant bits, scalars are fp32."""

    def near(x: float) -> float:
        return pytest.approx(x, rel=2**-11, nan_ok=True)

    def nearby(summaries: Mapping[str, Summary]) -> dict[str, tuple[float, ...]]:
        return {name: (*map(near, summary[:-1]), summary.rows) for name, summary in summaries.items()}

    return [
        replace(
            record,
            forward=nearby(record.forward),
            backward=nearby(record.backward),
            scalars={name: pytest.approx(x, rel=2**-24) for name, x in record.scalars.items()},
        )
        for record in records
    ]


def train(sinks: list[object], steps: int = 4) -> list[list[Record]]:
    """A short training that reports at every step; a weight of one layer is NaN, which is an event."""
    model = tiny_gpt.build()
    model.blocks[1].inner.weight.data[0] = math.nan
    found = []
    with Monitor(model, every=1, rows=4, sinks=sinks) as monitor:
        for step in range(steps):
            model.loss(tiny_gpt.batch(step)).backward()
            found.append(monitor.step(step))
    return found


# Flat names


def test_flat_names_say_layer_head_phase_quantity_and_mark():
    flat = flatten(report())
    assert flat["attn/layers.1/h2/forward/w_max/mean"] == 0.13
    assert flat["attn/layers.1/h2/forward/w_max/p90"] == 0.26
    assert flat["attn/layers.0/h1/backward/score_gradient/max"] == pytest.approx(8e-3)
    assert flat["attn/layers.0/h1/score_gain"] == 0.2
    assert len(flat) == 6 * (4 * 6 + 2)


def test_without_heads_a_layer_has_its_mean_and_its_extremes():
    flat = flatten(report(), heads=False)
    assert flat["attn/layers.1/forward/w_max/mean"] == pytest.approx(0.12)
    assert flat["attn/layers.1/forward/w_max/min"] == pytest.approx(0.11 / 4)
    assert flat["attn/layers.1/forward/w_max/max"] == pytest.approx(0.13 * 4)
    assert flat["attn/layers.1/score_gain"] == pytest.approx(0.2)


def test_a_layer_with_a_broken_head_is_broken():
    records = [Record(0, "a", 0, {"w_max": spread(math.nan)}), Record(0, "a", 1, {"w_max": spread(0.5)})]
    assert all(math.isnan(x) for x in flatten(records, heads=False).values())


def test_a_compact_report_holds_the_main_quantities_only():
    flat = compact(report())
    assert "attn/layers.0/forward/w_max/p10" in flat
    assert "attn/layers.0/h1/forward/w_max/mean" in flat
    assert "attn/layers.0/h1/forward/w_max/p10" not in flat
    assert not [name for name in flat if "backward/w_max" in name]
    assert "forward/w_max" in MAIN_NAMES
    assert set(compact(report(), heads=False)) == {name for name in flat if "/h" not in name}


def test_an_unknown_mark_is_refused():
    with pytest.raises(ArgumentError, match="marks='median'"):
        flatten(report(), marks=("median",))


# JSONL


def test_lines_give_back_what_was_logged(tmp_path: Path):
    sink = JsonlSink(tmp_path / "new" / "attn.jsonl")
    sink.log(report(3), 3)
    sink.event([event(3)], 3)
    sink.log(report(4), 4)
    sink.close()
    assert list(read_jsonl(sink.path)) == [*close_to(report(3)), event(3), *close_to(report(4))]


def test_numbers_that_are_not_finite_survive_and_the_file_stays_strict_json(tmp_path: Path):
    summary = Summary(math.nan, -math.inf, 0.0, 1e-30, -1.0, math.inf, 10**6 + 1)
    sink = JsonlSink(tmp_path / "attn.jsonl")
    sink.log([Record(0, "nan", 0, {"w_max": summary}, {"entropy": summary}, {"gain": math.inf})], 0)
    sink.event([replace(event(), message="nan", value=math.nan, usual=math.inf)], 0)
    sink.close()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for line in sink.path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    record, found = read_jsonl(sink.path)
    assert record.layer == "nan"
    expected = [pytest.approx(x, rel=2**-11, nan_ok=True) for x in summary]
    assert [*record.forward["w_max"]] == expected
    assert [*record.backward["entropy"]] == expected
    assert record.forward["w_max"].rows == 10**6 + 1
    assert record.scalars["gain"] == math.inf
    assert math.isnan(found.value)
    assert (found.usual, found.message) == (math.inf, "nan")


WRITER = """
import sys
sys.path.insert(0, {tests!r})
from test_sinks import report
from attnscale.diagnostics import JsonlSink

sink, step = JsonlSink({path!r}), 0
while True:
    sink.log(report(step, layers=8, heads=8), step)
    sys.stdout.write(f"{{step}}\\n")
    sys.stdout.flush()
    step += 1
"""


def test_a_killed_process_leaves_a_readable_file_that_a_resumed_one_goes_on_with(tmp_path: Path):
    path = tmp_path / "attn.jsonl"
    program = WRITER.format(tests=str(Path(__file__).parent), path=str(path))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        announced = [int(child.stdout.readline()) for _ in range(20)][-1]
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL

    found = [record for record in read_jsonl(path) if isinstance(record, Record)]
    assert announced == 19
    expected = [record for step in range(20) for record in report(step, layers=8, heads=8)]
    assert found[: 64 * 20] == close_to(expected)
    kept = len(found)
    sink = JsonlSink(path)
    sink.log(report(1000), 1000)
    sink.close()
    assert list(read_jsonl(path))[kept:] == close_to(report(1000))


@pytest.mark.parametrize("cut", [1, 2, 100, 5000])
def test_a_truncated_last_line_is_skipped_by_readers_and_cut_by_the_next_writer(tmp_path: Path, cut: int):
    path = tmp_path / "attn.jsonl"
    path.write_bytes(b"")
    sink = JsonlSink(path)
    sink.log(report(0), 0)
    many = Record(1, "long", 0, {f"quantity_{i}": spread(0.5 + i) for i in range(1000)})  # longer than one block
    sink.log([many], 1)
    sink.close()
    *lines, _ = path.read_bytes().splitlines(keepends=True)  # without that of `close`
    path.write_bytes(b"".join(lines)[:-cut])
    assert list(read_jsonl(path)) == close_to(report(0))
    sink = JsonlSink(path)
    sink.log(report(2), 2)
    sink.close()
    assert list(read_jsonl(path)) == close_to([*report(0), *report(2)])


def test_a_file_that_holds_nothing_but_the_start_of_a_line_becomes_empty(tmp_path: Path):
    path = tmp_path / "attn.jsonl"
    path.write_bytes(b"{" * 10_000)
    JsonlSink(path).close()
    assert path.read_bytes() == b""


# What fails, fails alone


class Failing:
    """Raises at the call it is told to."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.calls: list[str] = []

    def act(self, name: str) -> None:
        self.calls.append(name)
        if name == self.where:
            raise OSError("no space left")

    def log(self, records: object, step: int) -> None:
        self.act("log")

    def event(self, events: object, step: int) -> None:
        self.act("event")

    def close(self) -> None:
        self.act("close")


@pytest.mark.parametrize(
    ("where", "calls"),
    [("log", ["log", "close"]), ("event", ["log", "event", "close"])],
)
def test_a_sink_that_raises_is_warned_of_once_closed_and_called_no_more(where: str, calls: list[str]):
    failing, memory = Failing(where), MemorySink()
    with pytest.warns(RuntimeWarning, match="sink Failing.*no space left") as warned:
        train([failing, memory])
    assert len(warned) == 1
    assert failing.calls == calls
    assert {record.step for record in memory.records} == {0, 1, 2, 3}
    assert memory.events


def test_a_sink_that_cannot_be_closed_does_not_keep_the_others_open(tmp_path: Path):
    after = [JsonlSink(tmp_path / "a.jsonl"), JsonlSink(tmp_path / "b.jsonl")]
    with pytest.warns(RuntimeWarning, match="sink Failing") as warned:
        train([Failing("close"), *after], steps=1)
    assert len(warned) == 1
    for sink in after:
        with pytest.raises(ValueError, match="closed"):
            sink.log(report(), 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_drops_the_sink_and_training_goes_on():
    memory = MemorySink()
    with pytest.warns(RuntimeWarning, match="sink JsonlSink failed.*No space left") as warned:
        train([JsonlSink("/dev/full"), memory])
    assert len(warned) == 1
    assert {record.step for record in memory.records} == {0, 1, 2, 3}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_drops_tensorboard_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    memory, sink = MemorySink(), TensorBoardSink(tmp_path)
    monkeypatch.setattr("attnscale.diagnostics.sinks.tensorboard._file_name", lambda: "/dev/full")
    with pytest.warns(RuntimeWarning, match="sink TensorBoardSink failed.*No space left") as warned:
        train([sink, memory])
    assert len(warned) == 1
    assert {record.step for record in memory.records} == {0, 1, 2, 3}


def closed(sink):
    sink.close()
    return sink


def test_a_closed_file_drops_the_sink_and_training_goes_on(tmp_path: Path):
    sinks = [
        closed(JsonlSink(tmp_path / "attn.jsonl")),
        closed(TensorBoardSink(tmp_path)),
        closed(ConsoleSink(io.StringIO())),
    ]
    with pytest.warns(RuntimeWarning) as warned:
        reports = train(sinks)
    assert {str(w.message).split()[2] for w in warned} == {"JsonlSink", "TensorBoardSink", "ConsoleSink"}
    assert len(warned) == 3
    assert [len(records) for records in reports] == [4, 4, 4, 4]


# Long runs


def grown(log, first: int, calls: int) -> tuple[int, int]:
    """Bytes gained by the last of so many calls, after those that fill what is bounded, and files opened by all."""
    log(0)
    files = len(os.listdir("/proc/self/fd"))
    for step in range(1, first):
        log(step)
    gc.collect()
    tracemalloc.start()
    for step in range(first, first + calls // 2):  # what is bounded is replaced by what is traced
        log(step)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for step in range(first + calls // 2, first + calls):
        log(step)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return after - before, len(os.listdir("/proc/self/fd")) - files


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_ten_thousand_reports_do_not_grow_memory_or_open_files(tmp_path: Path):
    memory, lines = MemorySink(steps=100), JsonlSink(tmp_path / "attn.jsonl")
    small = Record(0, "layers.0", 0, {}, {}, {"gain": 0.5})

    def log(step: int) -> None:
        # The tuple is new each time, so that keeping it shows.
        memory.log([small], step)
        memory.event([event()], step)
        lines.log([small], step)

    size, files = grown(log, 9_000, 1_000)
    assert size < 10_000  # 20 bytes for each of the last 500
    assert files == 0
    assert len(memory.records) == len(memory.events) == 100
    lines.close()
    assert lines.path.read_bytes().count(b"\n") == 10_001


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_many_reports_to_tensorboard_and_console_do_not_grow_memory_or_open_files(tmp_path: Path):
    records = report(layers=1, heads=1)
    with Path(os.devnull).open("w") as nowhere:
        board, console = TensorBoardSink(tmp_path, images=None), ConsoleSink(nowhere)

        def log(step: int) -> None:
            board.log(records, step)
            console.log(records, 0)  # rich remembers the last few thousand texts it has measured

        size, files = grown(log, 50, 100)
        board.close()
    assert size < 10_000
    assert files == 0


# TensorBoard, read by its own reader


def read_board(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "histograms": 0, "tensors": 0})
    return reader.Reload()


def test_tensorboard_reads_the_numbers_of_the_records(tmp_path: Path):
    sink = TensorBoardSink(tmp_path)
    for step in (0, 50):
        sink.log(report(step), step)
    reader = read_board(tmp_path)  # before close: nothing is kept back in a queue

    def curve(tag: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in reader.Scalars(tag)]

    for layer in range(2):
        for head in range(3):
            tag = f"attn.w_max.heads/layers.{layer}/h{head}"
            expected = [(step, pytest.approx((1 + head + 10 * layer + step) / 100)) for step in (0, 50)]
            assert curve(tag) == expected
    assert curve("attn.w_max/layers.1/mean") == [(0, pytest.approx(0.12)), (50, pytest.approx(0.62))]
    assert curve("attn.w_max/layers.1/p90") == [(0, pytest.approx(0.24)), (50, pytest.approx(1.24))]
    assert curve("attn.score_gain/layers.0/mean") == [(0, pytest.approx(0.2)), (50, pytest.approx(0.2))]
    assert curve("attn.score_gain.heads/layers.0/h2")[0][1] == pytest.approx(0.3)
    histogram = reader.Histograms("attn.w_max/heads")[-1]
    values = [record.forward["w_max"].mean for record in report(50)]
    assert histogram.step == 50
    assert histogram.histogram_value.num == sum(histogram.histogram_value.bucket) == len(values)
    assert histogram.histogram_value.sum == pytest.approx(sum(values))
    sink.close()


def test_tensorboard_shows_a_heat_map_with_a_cell_for_each_head(tmp_path: Path):
    from PIL import Image

    sink = TensorBoardSink(tmp_path, images=2)
    for step in range(3):
        sink.log(report(step, layers=4, heads=5), step)
    sink.close()
    reader = read_board(tmp_path)
    expected = draw(grid_of(report(2, layers=4, heads=5), MAIN[0]))
    events = reader.Images("attn.w_max/map")
    assert [event.step for event in events] == [0, 2]
    picture = Image.open(io.BytesIO(events[-1].encoded_image_string))
    assert (events[-1].height, events[-1].width) == (picture.height, picture.width) == expected.shape[:2]
    assert picture.convert("RGB").tobytes() == expected.tobytes()
    assert set(reader.Tags()["images"]) == {
        f"attn.{name}/map" for name in ("w_max", "max_logit", "token_angle", "score_gain")
    }


def test_tensorboard_shows_events_as_text(tmp_path: Path):
    sink = TensorBoardSink(tmp_path)
    sink.event([event(7, head=3), event(7, cause="diffuse")], 7)
    reader = read_board(tmp_path)  # before close: so little would stay in a buffer
    sink.close()
    (found,) = reader.Tensors("attn.events/collapsed/text_summary")
    text = found.tensor_proto.string_val[0].decode()
    assert found.step == 7
    assert text == f"**begun**: {event(7, head=3).message}\n\nlower the rate"


def test_tensorboard_takes_numbers_that_are_not_finite_and_heads_that_are_all_alike(tmp_path: Path):
    rows = [math.nan, math.inf, 0.5, 0.5, 0.5 + 1e-16, math.nextafter(0.5, 1)]
    records = [Record(0, "a", head, {"w_max": spread(x), "max_logit": spread(-x)}) for head, x in enumerate(rows)]
    records.append(Record(0, "b", 0, {"criticality": spread(math.nan)}, {}, {"gain": 0.0}))
    sink = TensorBoardSink(tmp_path)
    sink.log(records, 0)
    sink.log([Record(1, "a", head, {"w_max": spread(0.0)}) for head in range(2)], 1)
    sink.close()
    reader = read_board(tmp_path)
    assert math.isnan(reader.Scalars("attn.w_max.heads/a/h0")[0].value)
    assert reader.Scalars("attn.w_max.heads/a/h1")[0].value == math.inf
    histograms = [event.histogram_value for event in reader.Histograms("attn.w_max/heads")]
    assert [found.num for found in histograms] == [4, 2]
    for found in histograms:
        assert found.bucket_limit == sorted(set(found.bucket_limit))  # no bin without a width
    assert "attn.criticality/heads" not in reader.Tags()["histograms"]


def test_tensorboard_makes_no_file_before_the_first_report_and_a_new_one_for_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    second = types.SimpleNamespace(time=lambda: 1.8e9)  # both runs start within one
    monkeypatch.setattr("attnscale.diagnostics.sinks.tensorboard.time", second)
    TensorBoardSink(tmp_path / "tb").close()  # as in the processes that never log
    assert not (tmp_path / "tb").exists()
    for step in (0, 1):
        sink = TensorBoardSink(tmp_path / "tb", heads=False)
        sink.log(report(step), step)
        sink.close()
    assert len(list((tmp_path / "tb").iterdir())) == 2
    reader = read_board(tmp_path / "tb")
    assert [event.step for event in reader.Scalars("attn.w_max/layers.0/mean")] == [0, 1]
    assert not [tag for tag in reader.Tags()["scalars"] if ".heads/" in tag]


# Heat maps


def test_a_heat_map_colours_each_cell_by_its_value():
    grid = grid_of(report(0, layers=2, heads=3), MAIN[0])
    picture = draw(grid)
    size = cell_size(2, 3)
    last = picture.shape[0] - 8 - 16  # below the cells: a line of numbers and the margin
    for row in range(2):
        y = last - (2 - row) * size + size // 2
        found = [tuple(pixel) for pixel in picture[y].tolist()]
        columns = [found.index(colour((1 + head + 10 * row) / 100)) for head in range(3)]
        assert [x - columns[0] for x in columns] == [0, size, 2 * size]


def test_scales_are_fixed_for_shares_and_logarithmic_where_powers_of_ten_count():
    shares = grid_of(report(), MAIN[0])
    assert shares.scale() == (0.0, 1.0)
    assert shares.shares()[1][2] == pytest.approx(0.13)
    gains = [Record(0, "a", head, {}, {}, {"score_gain": x}) for head, x in enumerate((0.0, 1e-4, 1e-2, 1.0, math.nan))]
    grid = grid_of(gains, MAIN[-1])
    assert grid.scale() == (1e-4, 1.0)
    assert grid.shares()[0][:4] == [0.0, 0.0, pytest.approx(0.5), 1.0]
    assert math.isnan(grid.shares()[0][4])
    assert grid_of([], MAIN[0]) is None


@pytest.mark.parametrize("shape", [(1, 1), (2, 64), (120, 96)])
def test_a_heat_map_of_any_size_can_be_drawn(shape: tuple[int, int]):
    picture = draw(grid_of(report(0, *shape), MAIN[0]))
    assert picture.dtype == "uint8"
    assert picture.shape[0] >= shape[0] * cell_size(*shape)
    assert max(picture.shape) < 1300


def test_layers_with_fewer_heads_are_filled_up():
    grid = grid_of([*report(0, layers=1, heads=1), *report(0, layers=2, heads=3)[3:]], MAIN[0])
    assert grid.layers == ["layers.0", "layers.1"]
    assert [[math.isnan(x) for x in row] for row in grid.values] == [[False, True, True], [False] * 3]


# Trackers: recorders with the interface, and the bookkeeping, of the real ones


class WandbRun:
    """Rows as W&B makes them: open until committed or until a later step; an earlier step is lost."""

    def __init__(self) -> None:
        self.step = 0
        self.open: dict[str, float] = {}
        self.rows: list[dict[str, float]] = []
        self.metrics: dict[str, str | None] = {}
        self.alerts: list[dict[str, str]] = []
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics[name] = step_metric

    def log(self, data: dict[str, float], step: int | None = None, commit: bool | None = None) -> None:
        if step is not None and step < self.step:
            raise AssertionError("W&B drops a step that lies behind")
        if step is not None and step > self.step:
            self.commit()
            self.step = step
        self.open |= data
        if commit or (commit is None and step is None):
            self.commit()
            self.step += 1

    def commit(self) -> None:
        if self.open:
            self.rows.append(self.open)
        self.open = {}

    def alert(self, title: str, text: str, level: str) -> None:
        self.alerts.append({"title": title, "text": text, "level": level})

    def finish(self) -> None:
        self.commit()
        self.finished = True


class TrackioRun:
    """Takes any step, has no rows to commit and no metrics to define."""

    def __init__(self) -> None:
        self.logged: list[tuple[int | None, dict[str, float]]] = []
        self.alerts: list[str] = []
        self.finished = False

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step, metrics))

    def alert(self, title: str, text: str | None = None) -> None:
        self.alerts.append(title)

    def finish(self) -> None:
        self.finished = True


def module(name: str, run: object, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of that name whose init starts the run."""
    found = types.ModuleType(name)
    found.arguments = []

    def init(**arguments: object) -> object:
        found.arguments.append(arguments)
        return run

    found.init = init
    monkeypatch.setitem(sys.modules, name, found)
    return found


def test_wandb_alone_gets_a_row_for_each_report_on_an_axis_of_our_own():
    run = WandbRun()
    sink = TrackerSink(run)
    for step in (0, 50, 100):
        sink.log(report(step), step)
    sink.close()
    assert not run.finished  # it is the user's
    run.finish()
    assert run.rows == [{"attn/step": step, **compact(report(step))} for step in (0, 50, 100)]
    assert run.metrics == {"attn/step": None, "attn/*": "attn/step"}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_wandb_loses_no_row_of_the_users_or_ours(explicit: bool, before: bool, every: int):
    run = WandbRun()
    sink = TrackerSink(run, heads=False)
    for step in range(12):
        if before and step % every == 0:
            sink.log(report(step), step)
        run.log({"loss": float(step)}, step=step if explicit else None)
        if not before and step % every == 0:
            sink.log(report(step), step)
    run.finish()
    assert [row["loss"] for row in run.rows if "loss" in row] == list(range(12))
    assert [row["attn/step"] for row in run.rows if "attn/step" in row] == list(range(0, 12, every))


def test_wandb_that_tells_no_row_gets_rows_of_our_own():
    class Shared(WandbRun):
        @property
        def step(self) -> int:
            raise RuntimeError("not in a shared run")

        @step.setter
        def step(self, value: int) -> None: ...

        def log(self, data: dict[str, float], step: int | None = None, commit: bool | None = None) -> None:
            assert step is None
            assert commit is not False
            self.rows.append(data)

    run = Shared()
    sink = TrackerSink(run)
    for step in (0, 1):
        sink.log(report(step), step)
    assert [row["attn/step"] for row in run.rows] == [0, 1]


def test_trackio_gets_the_step():
    run = TrackioRun()
    sink = TrackerSink(run, full=True)
    sink.log(report(50), 50)
    sink.close()
    assert run.logged == [(50, flatten(report(50)))]
    assert not run.finished


def test_a_run_that_is_started_here_is_ended_here(monkeypatch: pytest.MonkeyPatch):
    run = TrackioRun()
    trackio = module("trackio", run, monkeypatch)
    sink = TrackerSink("trackio", project="p", name="n")
    assert trackio.arguments == []  # other processes of the run never start one
    for step in (0, 1):
        sink.log(report(step), step)
    sink.close()
    assert trackio.arguments == [{"project": "p", "name": "n"}]
    assert [step for step, _ in run.logged] == [0, 1]
    assert run.finished


def test_a_module_without_arguments_means_the_run_that_is_active(monkeypatch: pytest.MonkeyPatch):
    run = WandbRun()
    wandb = module("wandb", run, monkeypatch)
    sink = TrackerSink("wandb")
    wandb.run = run
    sink.log(report(), 0)
    sink.close()
    assert wandb.arguments == []
    assert run.open["attn/step"] == 0
    assert not run.finished

    inner = TrackioRun()
    trackio = module("trackio", inner, monkeypatch)
    trackio.run = types.ModuleType("trackio.run")  # a module there, no run
    trackio.log = inner.log
    TrackerSink("trackio").log(report(), 3)
    assert [step for step, _ in inner.logged] == [3]


def test_trackers_get_one_alert_for_each_event():
    wandb, trackio = WandbRun(), TrackioRun()
    events = [event(), replace(event(cause="diffuse", status="lasting"), severity="critical")]
    for run in (wandb, trackio):
        TrackerSink(run).event(events, 0)
    titles = ["attention: collapsed begun", "attention: diffuse lasting"]
    assert [alert["title"] for alert in wandb.alerts] == trackio.alerts == titles
    assert [alert["level"] for alert in wandb.alerts] == ["WARN", "ERROR"]
    assert wandb.alerts[0]["text"].splitlines() == [f"step 0: {event().message}", "lower the rate"]
    silent = types.SimpleNamespace(log=lambda *_, **__: None)
    TrackerSink(silent).event(events, 0)  # has no alerts


class Mlflow(types.ModuleType):
    """The part of MLflow that is used, with its limit of metrics per request."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.active: object = None
        self.metrics: list[tuple[str, int, dict[str, float]]] = []
        self.tags: dict[str, str] = {}
        self.ended: list[str] = []

    def active_run(self) -> object:
        return self.active

    def start_run(self) -> object:
        self.active = types.SimpleNamespace(info=types.SimpleNamespace(run_id="new"))
        return self.active

    def end_run(self) -> None:
        self.active = None

    def log_metrics(self, metrics: dict[str, float], step: int, run_id: str) -> None:
        assert 0 < len(metrics) <= 1000
        self.metrics.append((run_id, step, metrics))

    def MlflowClient(self) -> Mlflow:
        return self

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.tags[key] = value

    def set_terminated(self, run_id: str) -> None:
        self.ended.append(run_id)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Mlflow:
    found = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", found)
    return found


def test_mlflow_gets_metrics_with_their_step_in_requests_it_takes(mlflow: Mlflow):
    sink = MlflowSink("mine", full=True)
    sink.log(report(50, layers=4, heads=30), 50)
    sink.close()
    assert {(run, step) for run, step, _ in mlflow.metrics} == {("mine", 50)}
    assert len(mlflow.metrics) > 1
    together = {name: value for _, _, metrics in mlflow.metrics for name, value in metrics.items()}
    assert together == flatten(report(50, layers=4, heads=30))
    assert mlflow.ended == []


def test_mlflow_run_is_ended_only_where_it_was_started(mlflow: Mlflow):
    sink = MlflowSink()
    assert mlflow.active is None
    sink.log(report(), 0)
    sink.event([event(4), event(4, cause="diffuse")], 4)
    assert mlflow.metrics == [("new", 0, compact(report()))]
    assert mlflow.tags["attn.event.diffuse"].startswith("step 4, begun: layers.1, head 0: half")
    sink.close()
    sink.close()
    assert mlflow.ended == ["new"]
    assert mlflow.active is None
    with pytest.raises(ValueError, match="closed"):
        sink.log(report(), 1)

    mlflow.active = active = types.SimpleNamespace(info=types.SimpleNamespace(run_id="theirs"))
    sink = MlflowSink()
    sink.log(report(), 0)
    sink.close()
    assert mlflow.metrics[-1][0] == "theirs"
    assert mlflow.active is active


# Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def test_a_file_gets_a_plain_table_for_each_report():
    file = io.StringIO()
    sink = ConsoleSink(file)
    sink.log(report(0), 0)
    sink.event([event(0), event(0, head=2, cause="a\x1b[2J\nb")], 0)
    sink.log(report(50), 50)
    sink.close()
    text = file.getvalue()
    assert "\x1b" not in text
    assert text.count("attention, step") == 2
    row = next(line for line in text.splitlines() if "layers.1" in line)
    assert row.split()[:2] == ["layers.1", "0.12"]
    assert "0.11–0.13" in row
    assert "! step 0: collapsed begun: layers.1, head 0: half of the rows" in text
    assert "! step 0: a\\x1b[2J\\nb begun: layers.1, head 2" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_terminal_gets_one_table_that_changes_and_events_in_red(terminal: Terminal):
    sink = ConsoleSink(terminal)
    sink.log(report(0), 0)
    first = terminal.getvalue()
    assert "attention, step 0" in first
    assert "\x1b[1;31m" not in first
    sink.log(report(50), 50)
    sink.event([event(50)], 50)
    changed = terminal.getvalue()[len(first) :]
    assert "\x1b[1A" in changed  # goes back up to draw over the last one
    assert "\x1b[1;31mlayers.1" in changed
    assert "\x1b[1;31mlayers.0" not in changed
    assert "\x1b[31m! step 50: collapsed begun" in changed
    sink.close()
    assert terminal.getvalue().rstrip("\n").endswith("\x1b[?25h")  # the cursor is back


def test_the_cursor_comes_back_also_without_close(terminal: Terminal):
    sink = ConsoleSink(terminal)
    sink.log(report(0), 0)
    assert not terminal.getvalue().rstrip("\n").endswith("\x1b[?25h")
    before = sys.stdout
    del sink
    assert terminal.getvalue().rstrip("\n").endswith("\x1b[?25h")
    assert sys.stdout is not before


def test_the_console_shows_what_is_broken(terminal: Terminal):
    sink = ConsoleSink(terminal)
    sink.log([Record(0, "a[b]", 0, {"w_max": spread(math.nan)}), Record(0, "c", 0, {}, {}, {"gain": 0.5})], 0)
    sink.close()
    assert re.search(r"\x1b\[1;31m *nan", terminal.getvalue())
    assert "a[b]" in terminal.getvalue()


# Bad arguments


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: JsonlSink(3), ArgumentTypeError, "path=3"),
        (lambda path: JsonlSink(path), ArgumentError, "a file, not a folder"),
        (lambda path: MemorySink(0), ArgumentError, "steps=0"),
        (lambda path: MemorySink(True), ArgumentTypeError, "steps=True"),
        (lambda path: TensorBoardSink(None), ArgumentTypeError, "folder=None"),
        (lambda path: TensorBoardSink(path / "file"), ArgumentError, "a folder, not a file"),
        (lambda path: TensorBoardSink(path, images=0), ArgumentError, "images=0"),
        (lambda path: TrackerSink("neptune"), ArgumentError, "run='neptune'.*wandb, trackio"),
        (lambda path: TrackerSink(3), ArgumentTypeError, "run=3"),
        (lambda path: TrackerSink(WandbRun), ArgumentTypeError, "a run with log"),
        (lambda path: TrackerSink(WandbRun(), project="p"), ArgumentError, "project"),
        (lambda path: MlflowSink(3), ArgumentTypeError, "run_id=3"),
        (lambda path: ConsoleSink("file.txt"), ArgumentTypeError, "file='file.txt'"),
    ],
)
def test_bad_arguments_are_refused(make, error, message: str, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(error, match=message):
        make(tmp_path)


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (lambda path: TensorBoardSink(path), "tensorboard"),
        (lambda path: TrackerSink("wandb"), "wandb"),
        (lambda path: TrackerSink("trackio"), "trackio"),
        (lambda path: MlflowSink(), "mlflow"),
        (lambda path: ConsoleSink(), "rich"),
    ],
)
def test_what_is_not_installed_is_named_with_the_command_that_installs_it(
    make, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=rf"needs {package}: pip install {package}"):
        make(tmp_path)
