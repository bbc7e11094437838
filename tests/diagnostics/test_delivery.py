"""Sinks on threads of their own: none delays a step, none loses what it can still write, no thread stays behind."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import tiny_gpt

from attnscale import Monitor
from attnscale.diagnostics import Event, JsonlSink, MemorySink, Progress, Record, RunInfo, read
from attnscale.diagnostics import delivery as module
from attnscale.diagnostics.delivery import MOST_WAITING, Delivery, Notices
from attnscale.diagnostics.records.file import End, Tail
from attnscale.errors import ArgumentTypeError, MonitorWarning

RUN = RunInfo("GPT", 1, 1, "log", 1, 4, "0", "0", "")


class Gate:
    """A sink that waits in `log` until it is opened, and notes what it gets and on which thread."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.calls: list[object] = []
        self.threads: set[threading.Thread] = set()

    def open(self, run: RunInfo) -> None:
        self.calls.append(run)

    def progress(self, progress: Progress, step: int) -> None:
        self.calls.append(progress)

    def log(self, records: Sequence[Record], step: int) -> None:
        self.entered.set()
        assert self.gate.wait(60)
        self.threads.add(threading.current_thread())
        self.calls.append(step)

    def event(self, events: Sequence[Event], step: int) -> None:
        self.calls.append([event.number for event in events])

    def close(self) -> None:
        self.calls.append("closed")


def event(number: int, status: str = "begun") -> Event:
    return Event(number, "logit_jump", status, "warning", 0, 0, (), "", "")


def send(delivery: Delivery, step: int, *events: Event) -> None:
    delivery.send([Record(step, "a", 0)], step, events, Progress(float(step)), lambda: RUN)


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("attnscale-")]


@contextlib.contextmanager
def no_thread_left() -> Iterator[None]:
    before = own_threads()
    yield
    assert own_threads() == before


def test_a_sink_that_blocks_delays_neither_the_training_nor_another_sink(tmp_path: Path) -> None:
    """If it did, this test would wait for ever: the gate opens after the steps."""
    gate, file, model = Gate(), JsonlSink(tmp_path / "attn.jsonl"), tiny_gpt.build()
    with no_thread_left(), Monitor(model, every=1, rows=4, sinks=[gate, file], alerts=None) as monitor:
        for step in range(3):
            model.loss(tiny_gpt.batch(step)).backward()
            monitor.step(step)
        monitor._delivery._lanes[1].wait()  # the file is complete while the other still waits
        assert file.path.read_bytes().count(b'"kind": "report"') == 3
        assert [call for call in gate.calls if isinstance(call, int)] == []
        gate.gate.set()
    assert [call for call in gate.calls if isinstance(call, int)] == [0, 1, 2]
    assert gate.calls[-1] == "closed"
    assert threading.current_thread() not in gate.threads
    assert len(gate.threads) == 1


def test_what_a_sink_receives_comes_in_order() -> None:
    gate = Gate()
    gate.gate.set()
    delivery = Delivery([gate], Notices())
    send(delivery, 5, event(1), event(2))
    send(delivery, 6)
    delivery.close()
    assert gate.calls == [RUN, Progress(5.0), 5, [1, 2], Progress(6.0), 6, "closed"]


def test_flush_waits_for_everything_that_was_sent() -> None:
    gate, kept = Gate(), MemorySink()
    delivery = Delivery([gate, kept], Notices())
    send(delivery, 0)
    assert [record.step for record in kept.records] == [0]  # immediate
    threading.Timer(0.01, gate.gate.set).start()
    delivery.flush()
    assert gate.calls[-1] == 0
    delivery.close()


def test_a_full_queue_drops_reports_counts_them_and_keeps_their_events(recwarn: pytest.WarningsRecorder) -> None:
    gate, notices = Gate(), Notices()
    delivery = Delivery([gate], notices)
    send(delivery, 0)
    assert gate.entered.wait(60)
    for step in range(1, MOST_WAITING + 1):
        send(delivery, step)
    for step in (100, 101):  # no place is left
        send(delivery, step, event(step))
    notices.issue()
    (warned,) = recwarn.list
    assert "sink Gate is too slow" in str(warned.message)
    gate.gate.set()
    delivery.flush()
    send(delivery, 200)
    delivery.close()
    notices.issue()
    assert len(recwarn.list) == 1
    assert [call for call in gate.calls if isinstance(call, int)] == [*range(MOST_WAITING + 1), 200]
    assert gate.calls[-5:] == [Progress(200.0, None, 2), 200, [100, 101], Progress(dropped=2), "closed"]


def test_the_file_says_how_many_reports_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 0)
    sink = JsonlSink(tmp_path / "attn.jsonl")
    sink.log([Record(0, "a", 0)], 0)
    delivery = Delivery([sink], Notices())
    for step in range(1, 4):
        send(delivery, step, event(step))
    delivery.close()
    *_, end = items = list(Tail(sink.path).new())
    assert isinstance(end, End)
    assert end.dropped == 3
    assert [item.number for item in items if isinstance(item, Event)] == [1, 2, 3]


def test_a_sink_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    gate, notices = Gate(), Notices()
    delivery = Delivery([gate], notices)
    send(delivery, 0)
    assert gate.entered.wait(60)
    delivery.close()
    with pytest.warns(MonitorWarning, match="sink Gate did not finish"):
        notices.issue()
    assert "closed" not in gate.calls  # its thread still uses it
    (thread,) = own_threads()
    gate.gate.set()
    thread.join(60)


def test_a_failure_on_the_thread_is_warned_of_at_the_next_step() -> None:
    class Failing(Gate):
        def log(self, records: Sequence[Record], step: int) -> None:
            raise OSError("no space left")

    model, failing = tiny_gpt.build(), Failing()
    with no_thread_left(), Monitor(model, every=1, rows=4, sinks=[failing], alerts=None) as monitor:
        model.loss(tiny_gpt.batch(0)).backward()
        monitor.step(0)
        with pytest.warns(MonitorWarning, match="sink Failing failed and is dropped.*no space left"):
            monitor.flush()
        model.loss(tiny_gpt.batch(1)).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            monitor.step(1)
    assert failing.calls[-1] == "closed"
    assert failing.calls.count("closed") == 1


def test_no_thread_starts_before_the_first_report() -> None:
    with no_thread_left():
        delivery = Delivery([Gate()], Notices())
        assert not own_threads()
        delivery.close()


def test_the_thread_of_a_monitor_that_is_never_closed_ends_with_it() -> None:
    gate = Gate()
    gate.gate.set()
    delivery = Delivery([gate], Notices())
    send(delivery, 0)
    (thread,) = own_threads()
    gone = weakref.ref(delivery)
    del delivery
    gc.collect()
    assert gone() is None
    thread.join(60)
    assert not thread.is_alive()
    assert gate.calls[-1] == 0


def run(program: str, *arguments: object) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *map(str, sys.path)])}
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    subprocess.run(command, env=environment, check=True, timeout=120)


def test_what_is_queued_is_written_when_the_interpreter_exits(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    program = """
        import sys, threading
        from test_delivery import Delivery, Notices, send
        from attnscale.diagnostics import JsonlSink

        class Slow(JsonlSink):
            def log(self, records, step):
                main.join(0.05)  # still busy while the main thread ends
                super().log(records, step)

        main = threading.main_thread()
        delivery = Delivery([Slow(sys.argv[1])], Notices())
        for step in range(3):
            send(delivery, step)
    """
    run(program, tmp_path / "attn.jsonl")
    assert read(tmp_path / "attn.jsonl")["step"].tolist() == [0, 1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_neither_hangs_nor_writes_what_its_parent_has_queued(tmp_path: Path) -> None:
    program = """
        import os, sys, threading
        from test_delivery import Delivery, Notices, send
        from attnscale.diagnostics import JsonlSink

        class Waiting(JsonlSink):
            def log(self, records, step):
                if os.getpid() == parent:
                    gate.wait()
                super().log(records, step)

        parent, gate = os.getpid(), threading.Event()
        delivery = Delivery([Waiting(sys.argv[1])], Notices())
        for step in range(2):
            send(delivery, step)
        child = os.fork()
        if child == 0:
            delivery.flush()
            send(delivery, 7)
            delivery.flush()
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        gate.set()
        delivery.close()
    """
    run(program, tmp_path / "attn.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "attn.jsonl").read_text().splitlines()]
    assert [line.get("step", line["kind"]) for line in lines] == ["run", 7, 0, 1, "end"]


def test_a_loss_that_is_no_number_is_refused() -> None:
    with Monitor(tiny_gpt.build(), every=1, alerts=None) as monitor, pytest.raises(ArgumentTypeError, match="loss='2'"):
        monitor.step(0, loss="2")  # type: ignore[arg-type]
