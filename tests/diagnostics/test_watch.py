"""The terminal view: right numbers, and a file that grows, breaks off and begins anew."""

from __future__ import annotations

import io
import itertools
import math
import os
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from attnscale.cli import main
from attnscale.diagnostics import Event, JsonlSink, Progress, Record, RunInfo, Summary
from attnscale.diagnostics.records.file import Region, Tail
from attnscale.diagnostics.records.report import Report
from attnscale.diagnostics.views.watch import History, Watch, show, sparkline

LAYERS = ("model.layers.0.attn", "model.layers.1.attn")


def summary(value: float) -> Summary:
    return Summary(value, value, value, value, value, 2 * value, 64)


def record(step: int, layer: str = LAYERS[0], head: int = 0, w_max: float = 0.25, gain: float = 1.0) -> Record:
    forward = {"w_max": summary(w_max), "relative_entropy": summary(1 - w_max), "max_logit": summary(10 * w_max)}
    return Record(step, layer, head, forward, {}, {"gain": gain})


def report(step: int, w_max: float = 0.25) -> list[Record]:
    """Two layers of two heads; head 1 has twice the weight of head 0, layer 1 half the gain of layer 0."""
    return [
        record(step, layer, head, w_max * (1 + head), 1 / (1 + index + 3 * head))
        for index, layer in enumerate(LAYERS)
        for head in range(2)
    ]


def event(
    step: int, number: int = 0, status: str = "begun", layer: str = LAYERS[1], heads: tuple[int, ...] = (0,)
) -> Event:
    message = f"half of the rows of {layer} give 0.995 to one key since step {step}"
    return Event(number, "collapse", status, "warning", step, step, ((layer, heads),), message, "lower the rate")


def write(path: Path, reports: Sequence[list[Record]], events: Sequence[Event] = ()) -> Path:
    """Append reports and events, as a run that has not ended."""
    sink = JsonlSink(path)
    for records in reports:
        sink.log(records, records[0].step)
    sink.event(events, 0)
    sink._file.close()
    return path


def history(most_steps: int = 256) -> History:
    """A history whose regions are steps of one head with a `w_max` of step / 5000."""
    return History(
        lambda region, _: Report.of([record(region.step, w_max=region.step / 5000)], region.step), most_steps
    )


def region(step: int) -> Region:
    return Region(step, -1, -2)


def printed(watch: Watch, width: int = 120, height: int | None = None, **options: object) -> str:
    console = Console(file=io.StringIO(), width=width, **options)  # type: ignore[arg-type]
    console.print(watch.view(width, height))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "attn.jsonl"


def test_once_prints_the_latest_numbers_of_every_layer_and_the_alerts(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    write(path, [report(0, 0.1), report(50, 0.3)], [event(50, heads=(0, 1))])
    assert main(["watch", str(path), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step 50 · 2 reports · 2 layers × 2 heads" in lines[0]
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("layers.")}
    # max_logit is the largest of the sampled rows, followed by its head; entropy and w_max are means, gain the least.
    numbers = {name: [float(cell) for cell in cells[1:] if cell[0].isdigit()] for name, cells in rows.items()}
    assert numbers == {"layers.0": [12.0, 1, 0.55, 0.25, 0.45], "layers.1": [12.0, 1, 0.55, 0.2, 0.45]}
    assert lines[2] == "max logit 12 at layers.0 h1 · H / ln n 0.550 · min gain 0.200 at layers.1 h1"
    assert lines[3] == "1 open event:"
    assert lines[4].startswith("! collapse  since step 50  layers.1 heads 0, 1  half of the rows")


def test_what_is_no_terminal_gets_the_state_once_without_asking(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(path, [report(7)])
    assert main(["watch", str(path)]) == 0
    assert "step 7" in capsys.readouterr().out


FOREIGN = {"csv": b"step,loss\n0,2\n", "a word": b"loss", "json": b'{\n "a": 1\n}\n', "pickle": b"\x80\x02]q\x00."}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("more", [[], ["--once"]])
def test_a_file_without_any_record_is_refused(
    content: bytes, more: list[str], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_bytes(content)
    assert main(["watch", str(path), *more]) == 2
    captured = capsys.readouterr()
    assert f"path={str(path)!r} is not accepted: expected a file of reports" in captured.err
    assert captured.out == ""


def test_a_file_that_turns_out_to_hold_no_records_says_so_until_it_does(path: Path) -> None:
    watch = Watch(path)
    for content, shown in ((b"", "no reports yet"), (b'{"kind": "rep', "no reports yet"), (b"loss", "not a file of")):
        path.write_bytes(content)
        watch.update()
        assert shown in printed(watch)
    path.unlink()
    write(path, [report(0)])
    watch.update()
    assert "step 0" in printed(watch)


@pytest.mark.parametrize("kind", ["missing", "directory"])
def test_a_path_that_is_no_file_exits_with_two(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    path = tmp_path if kind == "directory" else tmp_path / "none.jsonl"
    assert main(["watch", str(path), "--once"]) == 2
    expected = "not a folder" if kind == "directory" else "an existing file of reports"
    assert f"ArgumentError: path={str(path)!r} is not accepted: expected" in (error := capsys.readouterr().err)
    assert expected in error


def test_a_growing_file_is_followed_without_reading_it_again(path: Path) -> None:
    write(path, [report(0), report(1)])
    watch = Watch(path)
    watch.update()
    assert watch.history.steps == [0, 1]
    with path.open("r+b") as file:  # whoever reads this again will notice
        file.write(b"x" * 100)
    write(path, [report(2, 0.4)])
    watch.update()
    assert watch.history.steps == [0, 1, 2]
    assert watch.tail.skipped == 0
    assert watch.history.series(LAYERS[0], "w_max") == pytest.approx([0.375, 0.375, 0.6], rel=1e-3)
    assert watch.tail.offset == path.stat().st_size
    watch.update()
    assert watch.history.reports == 3


def test_a_line_that_is_not_complete_waits_for_its_rest(path: Path) -> None:
    write(path, [report(0)])
    whole = path.read_bytes()
    for cut in (1, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        tail = Tail(path)
        assert list(tail.new()) == []
        with path.open("ab") as file:
            file.write(whole[cut:])
        assert list(tail.new()) == [Region(0, 0, len(whole))]
        assert tail.skipped == 0


def test_a_file_that_became_shorter_is_read_from_its_beginning(path: Path) -> None:
    write(path, [report(0), report(1), report(2)], [event(2)])
    watch = Watch(path)
    watch.update()
    path.write_bytes(b"")
    write(path, [report(5)])
    watch.update()
    assert watch.history.steps == [5]
    assert watch.history.events == []
    path.write_bytes(b"")
    watch.update()
    assert watch.history.steps == []


def test_a_file_that_was_replaced_is_read_from_its_beginning_even_if_longer(path: Path, tmp_path: Path) -> None:
    write(path, [report(0)])
    watch = Watch(path)
    watch.update()
    os.replace(write(tmp_path / "other.jsonl", [report(step) for step in (8, 9)]), path)
    watch.update()
    assert watch.history.steps == [8, 9]


def test_a_file_that_does_not_exist_yet_is_waited_for(path: Path) -> None:
    watch = Watch(path)
    watch.update()
    assert "does not exist yet" in printed(watch)
    path.touch()
    watch.update()
    assert "no reports yet" in printed(watch)
    write(path, [report(3)])
    watch.update()
    assert "step 3" in printed(watch)


@pytest.mark.parametrize(
    "line", [b"nonsense", b"\xff\xfe", b"{}", b"[1]", b'{"kind": "record", "step": 1}', b"[" * 10000], ids=range(6)
)
def test_a_line_that_is_no_record_is_counted_and_left_out(line: bytes, path: Path) -> None:
    write(path, [report(0)])
    with path.open("ab") as file:
        file.write(line + b"\n")
    write(path, [report(1)])
    watch = Watch(path)
    watch.update()
    assert watch.history.steps == [0, 1]
    assert watch.tail.skipped == 1
    assert "1 unreadable lines" in printed(watch)


def test_a_line_without_end_is_not_kept_in_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnscale.diagnostics.records.file.LONGEST", 1000)
    path.write_bytes(b"x" * 5500)
    tail = Tail(path)
    assert list(tail.new()) == []
    assert sum(map(sys.getsizeof, vars(tail).values())) <= 1000
    assert tail.offset == 5000  # nor read again
    with path.open("ab") as file:
        file.write(b"x" * 10 + b"\n" + b'{"kind": "report", "step": 4, "layers": []}\n')
    assert [item.step for item in tail.new()] == [4]
    assert tail.skipped == 1


def test_memory_is_bounded_and_what_is_kept_covers_the_whole_run() -> None:
    found = history(most_steps=64)
    for step in range(5000):
        found.add([region(step), event(step, number=step, layer=LAYERS[0])])
        assert len(found.steps) <= 65
    assert found.reports == 5000
    assert len(found.events) == 256
    steps = found.steps
    assert (steps[0], steps[-1]) == (0, 4999)
    gaps = [after - before for before, after in itertools.pairwise(steps[:-1])]
    assert len(steps) > 32
    assert set(gaps) == {128}
    assert found.series(LAYERS[0], "w_max") == pytest.approx([step / 5000 for step in steps])


def test_reports_that_are_not_kept_are_never_decoded() -> None:
    decoded: list[int] = []

    def read(region: Region, names: Collection[str]) -> Report:
        decoded.append(region.step)
        return Report.of([record(region.step)], region.step)

    found = History(read, most_steps=8)
    found.add(region(step) for step in range(1000))
    assert len(decoded) < 50
    assert decoded[-1] == 999
    assert found.reports == 1000


def test_a_resumed_run_replaces_what_it_does_again() -> None:
    found = history()
    for step in (0, 1000, 2000, 3000, 1500, 2000):
        found.add([region(step)])
    assert found.steps == [0, 1000, 1500, 2000]
    assert found.series(LAYERS[0], "w_max") == pytest.approx([0, 0.2, 0.3, 0.4])


def test_a_report_that_cannot_be_read_is_left_out() -> None:
    found = History(lambda region, _: None if region.step == 1 else Report.of([record(region.step)], region.step))
    for step in range(3):
        found.add([region(step)])
    assert found.steps == [0, 2]


def test_an_event_is_shown_until_it_is_over_or_the_run_resumes() -> None:
    found = history()
    found.add([region(0), event(0, 1), event(0, 2)])
    found.add([region(1), event(1, 1, "over"), event(1, 2, "lasting", heads=(0, 3))])
    assert [(one.number, one.places[0][1]) for one in found.events] == [(2, (0, 3))]
    assert found.over == 1
    assert found.alerting == {LAYERS[1]}
    found.add([RunInfo("GPT", 2, 2, "log", 1, 4, "0", "0", "")])
    assert found.events == []


def test_alerts_of_an_old_file_are_one_event_for_each_kind() -> None:
    found = history()
    found.add([region(0), event(5, heads=(2,)), event(7, heads=(1,)), event(8, layer=LAYERS[0])])
    (one,) = found.events
    assert one.start == 5
    assert one.places == ((LAYERS[1], (1, 2)), (LAYERS[0], (0,)))


def test_a_head_without_a_number_spoils_no_layer() -> None:
    records = [record(0, w_max=0.5), Record(0, LAYERS[0], 1), record(0, head=2, w_max=math.nan, gain=0.25)]
    found = History(lambda region, _: Report.of(records, 0))
    found.add([region(0)])
    assert found.latest(LAYERS[0]) == {"w_max": 0.5, "relative_entropy": 0.5, "gain": 0.25, "max_logit": 10.0}


def test_a_run_is_alive_until_a_report_is_long_overdue(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    sink = JsonlSink(path)

    def state(seconds: float) -> str:
        os.utime(path, (written, written))
        clock[0] = written + seconds
        watch = Watch(path)
        watch.update()
        return printed(watch).splitlines()[1]

    written = clock[0]
    sink.log(report(0), 0)
    assert state(5) == "last report 5 s ago"
    written = clock[0] = 1060.0
    sink.progress(Progress(loss=2.25, dropped=3), 50)
    sink.log(report(50), 50)
    assert state(120) == "running: last report 2 min ago; usually one every 60 s · 3 reports dropped"
    assert state(600) == "silent for 10 min; usually one every 60 s · 3 reports dropped"
    watch = Watch(path)
    watch.update()
    assert printed(watch).startswith("step 50 · loss 2.250 · 2 reports")
    sink.close()
    assert state(7200) == "closed 2 h ago · 3 reports dropped"


def test_a_newer_version_is_named(path: Path) -> None:
    write(path, [report(0)])
    path.write_text(path.read_text().replace('"step": 0,', '"step": 0, "grad_norm": 0.5,'))
    watch = Watch(path)
    watch.update()
    assert "written by a newer attnscale" in printed(watch)


def test_nothing_of_a_file_can_control_the_terminal(path: Path) -> None:
    evil = "layers.0\x1b[2J\x07\r\x9b"
    hostile = path.with_name("a\x1b[31mb.jsonl")
    write(hostile, [[record(0, evil)]], [event(0, layer=evil)])
    watch = Watch(hostile)
    watch.update()
    text = printed(watch)
    assert "layers.0\\x1b[2J" in text
    assert not [letter for letter in text if letter != "\n" and not letter.isprintable()]


@pytest.mark.parametrize("width", [20, 24, 36, 60, 80, 120, 300])
def test_no_line_is_wider_than_the_terminal(width: int, path: Path) -> None:
    write(path, [report(step, 0.1 + step / 100) for step in range(20)], [event(19, heads=tuple(range(20)))])
    watch = Watch(path)
    watch.update()
    lines = printed(watch, width).splitlines()
    assert max(map(len, lines)) <= width
    # Nothing was folded: title, state, summary, two lines of events, an empty line, the heading, two layers.
    assert len(lines) == 9
    assert lines[0].startswith("step 19")
    assert lines[4].startswith("! collapse  since")
    assert lines[7].startswith("laye")
    assert " 11.6" in lines[7]


def test_eighty_columns_keep_logit_worst_head_and_events(path: Path) -> None:
    layers = [f"model.decoder.layers.{index}.self_attn" for index in range(3)]
    records = [record(step, layer, head, 0.1 * (1 + head)) for step in (0, 1) for layer in layers for head in range(4)]
    write(path, [records[:12], records[12:]], [event(1, layer=layers[2], heads=(3,))])
    watch = Watch(path)
    watch.update()
    text = printed(watch, 80)
    assert "max logit 8.000 at layers.0 h3 · H / ln n 0.750 · min gain 1.000 at layers.0 h0" in text
    assert "! collapse  since step 1  layers.2 head 3" in text
    heading = next(line for line in text.splitlines() if line.startswith("layer "))
    assert heading.split()[:4] == ["layer", "max", "logit", "head"]
    row = next(line for line in text.splitlines() if line.startswith("layers.2 !"))
    assert row.split()[3:5] == ["8.000", "3"]


def test_a_low_terminal_shows_the_layers_with_events_first(path: Path) -> None:
    layers = [f"blocks.{index}.attn" for index in range(48)]
    write(path, [[record(1, layer) for layer in layers]], [event(1, layer=layers[29])])
    watch = Watch(path)
    watch.update()
    text = printed(watch, height=20)
    assert len(text.splitlines()) <= 20
    assert "blocks.29 " in text
    assert "more layers" in text
    assert all(f"blocks.{index} " in printed(watch) for index in range(48))


def test_layers_with_events_are_red(path: Path) -> None:
    write(path, [report(1)], [event(1)])
    watch = Watch(path)
    watch.update()
    red, normal = "\x1b[31m", printed(watch, force_terminal=True, color_system="standard")
    assert f"{red}layers.1 !" in normal
    assert f"{red}layers.0" not in normal
    assert f"{red}! collapse  since step 1" in normal


def test_a_sparkline_shows_where_values_lie() -> None:
    assert sparkline(range(8), [x / 7 for x in range(8)], 8, 0.0, 1.0, False) == "▁▂▃▄▅▆▇█"
    assert sparkline(range(3), [1e-4, 1e-2, 1.0], 3, 1e-4, 1.0, True) == "▁▅█"
    assert sparkline([0, 1, 2], [0.0, math.nan, math.inf], 3, 0.0, 1.0, False) == "▁ ×"
    assert sparkline([0, 90, 100], [0.0, 1.0, 1.0], 10, 0.0, 1.0, False) == "▁▁▁▁▁▁▁▁██"
    assert sparkline([5], [1.0], 4, 0.0, 1.0, False) == "█   "
    assert sparkline(range(100), [0.0] * 100, 7, 0.0, 1.0, False, ".#") == "......."


def test_the_live_view_follows_until_interrupted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, [report(111)])
    waits = iter([lambda: write(path, [report(222)]), lambda: None])

    def sleep(_: float) -> None:
        act = next(waits, None)
        if act is None:
            raise KeyboardInterrupt
        act()

    monkeypatch.setattr(time, "sleep", sleep)
    console = Console(file=io.StringIO(), width=100, height=30, force_terminal=True, color_system=None)
    try:
        show(path, console)
    except KeyboardInterrupt:
        pytest.fail("Ctrl-C came through")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.index("step 111") < text.index("step 222")
    assert "step 222" in text[text.rindex("\x1b[?1049l") :]  # the last state stays when the screen is given back
