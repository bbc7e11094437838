"""What leaves a monitor: reports to sinks, and warnings about failed measurements.

Each sink has a thread and a bounded queue, so that no sink delays a training step.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from attnscale._util.handles import Uncopied
from attnscale.diagnostics.records.record import Event, Progress, Record, RunInfo
from attnscale.diagnostics.sinks import EventSink, ProgressSink, RunSink, Sink
from attnscale.errors import MonitorWarning

MOST_WAITING = 8  # reports per sink; a report of 1,500 heads takes about 15 MB
PATIENCE = 60.0  # seconds without progress after which a sink is given up at the end


class Notices(Uncopied):
    """Collects warnings during forward and backward, one per kind, and issues them at the end of the step."""

    def __init__(self) -> None:
        self._known: set[object] = set()
        self._waiting: list[str] = []

    def add(self, kind: object, text: str) -> None:
        """Add a warning unless one of this kind has been added before."""
        if kind not in self._known:
            self._known.add(kind)
            self._waiting.append(text)

    def add_error(self, text: str, error: BaseException) -> None:
        """Add a warning about an exception. Its kind is the exception type and the line that raised it."""
        places = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        self.add((type(error), *places[-1:]), f"{text}: {error!r}")

    def issue(self) -> None:
        """Issue all pending warnings."""
        waiting, self._waiting = self._waiting, []
        for text in waiting:
            warnings.warn(f"attnscale: {text}", MonitorWarning, stacklevel=3)


class Message(NamedTuple):
    """What a sink receives of one step."""

    records: tuple[Record, ...]
    step: int
    events: tuple[Event, ...] = ()
    progress: Progress = Progress()


class Delivery(Uncopied):
    """The sinks of a monitor.

    Sinks with `immediate = True` are called directly, others on threads of their own. A failing sink is closed and
    dropped, and `notices` receives a warning. If the queue of a sink is full, the report is dropped and counted; its
    events are sent with the next report. Threads start with the first report; a forked process starts its own.
    """

    def __init__(self, sinks: Sequence[Sink], notices: Notices) -> None:
        self._lanes = [_Lane(sink) for sink in sinks]
        self._notices = notices
        self._opened = False
        # The thread of a monitor that is never closed ends when the monitor is garbage. `atexit` waits for it.
        weakref.finalize(self, _stop, self._lanes).atexit = False

    def send(
        self,
        records: Sequence[Record],
        step: int,
        events: Sequence[Event],
        progress: Progress,
        describe: Callable[[], RunInfo],
    ) -> None:
        """Send a report to all sinks without waiting. `describe` is called once, for the header."""
        message = Message(tuple(records), step, tuple(events), progress)
        self._check()
        if not self._opened:
            self._opened = True
            run = describe()
            for lane in list(self._lanes):
                if isinstance(lane.sink, RunSink):
                    self._try(lane, lane.sink.open, run)
        for lane in sorted(self._lanes, key=lambda lane: lane.immediate):  # starts the threads first
            self._try(
                lane, _deliver if lane.immediate else lane.put, *((lane.sink,) if lane.immediate else ()), message
            )
            if lane.dropped:
                text = f"sink {lane.name} is too slow: a report was dropped. Further dropped reports are only counted"
                self._notices.add((id(lane), "slow"), text)

    def flush(self) -> None:
        """Wait until all reports are written. A sink without progress for a minute is given up."""
        for lane in self._lanes:
            lane.wait()
        self._check()

    def close(self) -> None:
        """Write what is queued, end the threads and close the sinks. Idempotent."""
        for lane in self._lanes:
            lane.stop()
        for lane in self._lanes:
            lane.end()
        self._check()
        for lane in list(self._lanes):
            if lane.is_busy:
                text = f"sink {lane.name} did not finish; {len(lane.waiting) + 1} reports may be lost"
                self._notices.add((id(lane), "lost"), text)
            else:
                self._try(lane, lane.close)
        self._lanes.clear()

    def _check(self) -> None:
        for lane in list(self._lanes):
            if lane.error is not None:
                self._drop(lane, lane.error)

    def _try(self, lane: _Lane, act: Callable[..., object], *arguments: object) -> None:
        try:
            act(*arguments)
        except Exception as error:
            self._drop(lane, error)

    def _drop(self, lane: _Lane, error: BaseException) -> None:
        self._lanes.remove(lane)
        self._notices.add((id(lane), "failed"), f"sink {lane.name} failed and is dropped: {error!r}")
        lane.stop()
        lane.end()
        with contextlib.suppress(Exception):  # the warning has already been added
            lane.sink.close()


class _Lane:
    """One sink with its queue and thread. The thread refers to the lane only, never to the monitor."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.name = type(sink).__name__
        self.immediate = bool(getattr(sink, "immediate", False))
        self.error: BaseException | None = None
        self.dropped = 0
        self._late: tuple[Event, ...] = ()  # events of dropped reports
        self._last_step = 0
        self._thread: threading.Thread | None = None
        self._process = 0
        self._reset()

    def _reset(self) -> None:
        self.waiting: deque[Message] = deque()
        self._changed = threading.Condition()
        self._ending = False
        self._busy = False
        self._finished = 0  # messages

    @property
    def is_busy(self) -> bool:
        return self._owned and self._busy

    @property
    def _owned(self) -> bool:
        """Whether the thread runs in this process; after a fork it does not, and its lock may be held."""
        return self._process == os.getpid()

    def put(self, message: Message) -> None:
        """Queue a message, or drop it if the queue is full."""
        if not self._owned:
            self._reset()
            self._process = os.getpid()
            self._thread = threading.Thread(target=self._run, name=f"attnscale-{self.name}", daemon=True)
            self._thread.start()
            atexit.register(self.end)  # after the first `open`: runs before the exit handlers of a tracker
        with self._changed:
            self._last_step = message.step
            if len(self.waiting) >= MOST_WAITING:
                self.dropped += 1
                self._late += message.events
                return
            progress = message.progress._replace(dropped=self.dropped)
            self.waiting.append(message._replace(events=self._late + message.events, progress=progress))
            self._late = ()
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until the queue is empty, as long as there is progress."""
        if not self._owned:
            return
        with self._changed:
            while self._busy or self.waiting:
                finished = self._finished
                self._changed.wait_for(lambda: self._finished != finished, PATIENCE)  # noqa: B023
                if self._finished == finished:
                    return

    def stop(self) -> None:
        """Let the thread end once its queue is empty."""
        if self._owned:
            with self._changed:
                self._ending = True
                self._changed.notify_all()

    def end(self) -> None:
        """Write what is queued, as long as there is progress, and end the thread."""
        if self._owned and self._thread is not None and self._thread is not threading.current_thread():
            self.stop()
            self.wait()
            if not self._busy:
                self._thread.join(PATIENCE)
            atexit.unregister(self.end)

    def close(self) -> None:
        """Tell the sink about reports dropped after the last one it received, and close it."""
        if self.dropped and isinstance(self.sink, ProgressSink):
            self.sink.progress(Progress(dropped=self.dropped), self._last_step)
        if self._late and isinstance(self.sink, EventSink):
            self.sink.event(self._late, self._last_step)
        self.sink.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.waiting or self._ending)
                if not self.waiting:
                    return
                message: Message | None = self.waiting.popleft()
                self._busy = True
            try:
                _deliver(self.sink, message)  # type: ignore[arg-type]
            except BaseException as error:
                self.error = error
            message = None  # frees the records before the next report arrives
            with self._changed:
                if self.error is not None:
                    self.waiting.clear()
                    self._ending = True
                self._busy = False
                self._finished += 1
                self._changed.notify_all()


def _stop(lanes: list[_Lane]) -> None:
    for lane in lanes:
        lane.stop()


def _deliver(sink: Sink, message: Message) -> None:
    if isinstance(sink, ProgressSink):
        sink.progress(message.progress, message.step)
    sink.log(message.records, message.step)
    if message.events and isinstance(sink, EventSink):
        sink.event(message.events, message.step)
