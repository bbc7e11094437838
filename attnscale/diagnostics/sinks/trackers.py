"""Records for Weights & Biases and Trackio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnscale._util.optional import need
from attnscale.diagnostics.records.record import Alert, Record, by_kind
from attnscale.diagnostics.views.flatten import PREFIX, compact, flatten
from attnscale.errors import ArgumentError, reject, reject_type

MODULES = ("wandb", "trackio")
STEP = f"{PREFIX}/step"
SHOWN_HEADS = 20  # in one alert


class TrackerSink:
    """Logs to a run of W&B or Trackio: a given one, or that of the named module.

    `TrackerSink("wandb", project="p")` starts a run with these arguments at the first report and ends it with the sink;
    `TrackerSink("wandb")` uses the run that is active then. In W&B, `attn/step` is the axis of all `attn/…`, and the
    numbers are added to the open row, so that W&B's own step count is unaffected.

    `heads` adds the mean of each head, `full` every number there is, which is a lot for a tracker.
    """

    def __init__(self, run: Any, *, heads: bool = True, full: bool = False, **start: Any) -> None:
        if isinstance(run, str):
            if run not in MODULES:
                reject("run", run, f"a run, or one of {', '.join(MODULES)}")
            self._module = need(run, "TrackerSink", run)
            self._run = None
        else:
            if not callable(getattr(run, "log", None)) or isinstance(run, type):
                reject_type("run", run, f"a run with log(...), or one of {', '.join(MODULES)}")
            if start:
                raise ArgumentError(f"{', '.join(start)} is not accepted: expected none with a run that exists")
            self._module = None
            self._run = run
        self.heads = heads
        self.full = full
        self._start = start
        self._defined = False
        self._open_row: int | None = None  # the W&B row with the last report

    def log(self, records: Sequence[Record], step: int) -> None:
        values = flatten(records) if self.full else compact(records, heads=self.heads)
        run = self._started()
        if not callable(getattr(run, "define_metric", None)):
            run.log(values, step=step)
            return
        if not self._defined:
            run.define_metric(STEP)
            run.define_metric(f"{PREFIX}/*", step_metric=STEP)
            self._defined = True
        row = _row_of(run)
        if row is None:
            run.log({STEP: step, **values})
            return
        if row == self._open_row:
            run.log({}, commit=True)  # or this report would replace the last one in the same row
        run.log({STEP: step, **values}, commit=False)
        self._open_row = _row_of(run)

    def alert(self, alerts: Sequence[Alert], step: int) -> None:
        run = self._started()
        if not callable(getattr(run, "alert", None)):
            return
        level = {"level": "WARN"} if callable(getattr(run, "define_metric", None)) else {}
        for kind, group in by_kind(alerts).items():
            lines = [f"step {step}, {alert.layer}, head {alert.head}: {alert.message}" for alert in group[:SHOWN_HEADS]]
            if len(group) > SHOWN_HEADS:
                lines.append(f"and {len(group) - SHOWN_HEADS} more")
            run.alert(title=f"attention: {kind}", text="\n".join(lines), **level)

    def close(self) -> None:
        """End the run if it was started here."""
        if self._start and self._run is not None:
            self._run.finish()
        self._run = None

    def _started(self) -> Any:
        """The run. Looked up or started at the first report, since only one of several processes logs."""
        if self._run is None:
            if self._module is None:
                raise ValueError("the sink is closed")
            if self._start:
                self._run = self._module.init(**self._start)
            else:
                active = getattr(self._module, "run", None)  # in trackio a module of that name
                self._run = active if callable(getattr(active, "log", None)) else self._module
        return self._run


def _row_of(run: Any) -> int | None:
    """The open row; None where there is none, as in a run shared by several processes."""
    try:
        return int(run.step)
    except Exception:
        return None
