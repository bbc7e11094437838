"""The terminal view: right numbers, and a file that grows, breaks off and begins anew."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from attnscale.cli import main
from attnscale.diagnostics import Alert, JsonlSink, Record, Summary
from attnscale.diagnostics.records.record import Tail
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


def alert(step: int, head: int = 0, layer: str = LAYERS[1]) -> Alert:
    return Alert("collapsed", step, layer, head, 0.995, 0.99, "half of the rows give 0.995 to one key")


def write(path: Path, reports: Sequence[list[Record]], alerts: Sequence[Alert] = ()) -> Path:
    sink = JsonlSink(path)
    for records in reports:
        sink.log(records, records[0].step)
    if alerts:
        sink.alert(alerts, alerts[0].step)
    sink.close()
    return path


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
    write(path, [report(0, 0.1), report(50, 0.3)], [alert(50), alert(50, head=1)])
    assert main(["watch", str(path), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step 50 · 2 reports · 2 layers × 2 heads" in lines[0]
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("layers.")}
    # w_max and entropy are means over heads, gain the least, max_logit the largest of the sampled rows.
    numbers = {name: [float(cell) for cell in cells[1:] if cell[0].isdigit()] for name, cells in rows.items()}
    assert numbers == {"layers.0": [0.45, 0.55, 0.25, 12.0], "layers.1": [2, 0.45, 0.55, 0.2, 12.0]}
    assert "2 alerts: 2 collapsed" in "".join(lines)
    assert "step 50  model.layers.1.attn  heads 0, 1  collapsed  half of the rows give 0.995 to one key" in lines


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
    assert f"path={str(path)!r} is not accepted: expected a file of records" in captured.err
    assert captured.out == ""


def test_a_file_that_turns_out_to_hold_no_records_says_so_until_it_does(path: Path) -> None:
    watch = Watch(path)
    for content, shown in ((b"", "no records yet"), (b'{"kind": "rec', "no records yet"), (b"loss", "not a file of")):
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
    expected = "not a folder" if kind == "directory" else "an existing file of records"
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
    assert watch.history.series(LAYERS[0], "w_max") == pytest.approx([0.375, 0.375, 0.6])
    assert watch.tail.offset == path.stat().st_size
    watch.update()
    assert watch.history.reports == 3


def test_a_line_that_is_not_complete_waits_for_its_rest(path: Path) -> None:
    write(path, [report(0)])
    whole = path.read_bytes()
    for cut in (1, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        tail = Tail(path)
        before = list(tail.new())
        assert before == report(0)[: whole[:cut].count(b"\n")]
        with path.open("ab") as file:
            file.write(whole[cut:])
        assert before + list(tail.new()) == report(0)
        assert tail.skipped == 0


def test_a_file_that_became_shorter_is_read_from_its_beginning(path: Path) -> None:
    write(path, [report(0), report(1), report(2)], [alert(2)])
    watch = Watch(path)
    watch.update()
    path.write_bytes(b"")
    write(path, [report(5)])
    watch.update()
    assert watch.history.steps == [5]
    assert watch.history.by_kind.total() == 0
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
    assert "no records yet" in printed(watch)
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
    monkeypatch.setattr("attnscale.diagnostics.records.record.LONGEST", 1000)
    path.write_bytes(b"x" * 5500)
    tail = Tail(path)
    assert list(tail.new()) == []
    assert sum(map(sys.getsizeof, vars(tail).values())) <= 1000
    assert tail.offset == 5000  # nor read again
    with path.open("ab") as file:
        file.write(b"x" * 10 + b"\n" + json.dumps({"kind": "record", **record(4).as_dict()}).encode() + b"\n")
    assert list(tail.new()) == [record(4)]
    assert tail.skipped == 1


def test_memory_is_bounded_and_what_is_kept_covers_the_whole_run() -> None:
    history = History(most_steps=64, most_alerts=10)
    for step in range(5000):
        history.add([record(step, w_max=step / 5000), alert(step, layer=LAYERS[0])])
        assert len(history.steps) <= 65
    assert history.reports == history.by_kind.total() == 5000
    assert len(history.alerts) == 10
    steps = history.steps
    assert (steps[0], steps[-1]) == (0, 4999)
    gaps = [after - before for before, after in itertools.pairwise(steps[:-1])]
    assert len(steps) > 32
    assert set(gaps) == {128}
    assert history.series(LAYERS[0], "w_max") == [step / 5000 for step in steps]


def test_a_resumed_run_replaces_what_it_does_again() -> None:
    history = History()
    for step in (0, 10, 20, 30):
        history.add([record(step, w_max=0.1)])
    for step in (20, 30):
        history.add([record(step, w_max=0.9)])
    assert history.steps == [0, 10, 20, 30]
    assert history.series(LAYERS[0], "w_max") == [0.1, 0.1, 0.9, 0.9]


def test_a_head_without_a_number_spoils_no_layer() -> None:
    history = History()
    history.add([record(0, w_max=0.5), Record(0, LAYERS[0], 1), record(0, head=2, w_max=math.nan, gain=0.25)])
    assert history.latest(LAYERS[0]) == {"w_max": 0.5, "relative_entropy": 0.5, "gain": 0.25, "max_logit": 10.0}


@pytest.mark.parametrize("width", [20, 24, 36, 60, 80, 120, 300])
def test_no_line_is_wider_than_the_terminal(width: int, path: Path) -> None:
    write(path, [report(step, 0.1 + step / 100) for step in range(20)], [alert(19, head) for head in range(20)])
    watch = Watch(path)
    watch.update()
    lines = printed(watch, width).splitlines()
    assert max(map(len, lines)) <= width
    # Nothing was folded: title, heading, two layers, an empty line, the sum of alerts and the one group they are in.
    assert len(lines) == 7
    assert lines[0].startswith("step 19")
    assert lines[2].startswith("laye")
    assert " 0.435" in lines[2]


def test_a_low_terminal_shows_the_layers_with_alerts_first(path: Path) -> None:
    layers = [f"blocks.{index}.attn" for index in range(48)]
    write(path, [[record(1, layer) for layer in layers]], [alert(1, layer=layers[29])])
    watch = Watch(path)
    watch.update()
    text = printed(watch, height=20)
    assert len(text.splitlines()) <= 20
    assert "blocks.29 " in text
    assert "more layers" in text
    assert all(f"blocks.{index} " in printed(watch) for index in range(48))


def test_alerts_are_red(path: Path) -> None:
    write(path, [report(1)], [alert(1)])
    watch = Watch(path)
    watch.update()
    red, normal = "\x1b[31m", printed(watch, force_terminal=True, color_system="standard")
    assert f"{red}layers.1" in normal
    assert f"{red}layers.0" not in normal
    assert "\x1b[1;31mcollapsed" in normal


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
