"""Records for the trackers of experiments: Weights & Biases, Trackio and MLflow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from attnscale._util.optional import need
from attnscale.diagnostics.records.record import Alert, Record, by_kind
from attnscale.diagnostics.views.flatten import PREFIX, compact, flatten
from attnscale.errors import ArgumentError, reject, reject_type

MODULES = ("wandb", "trackio")
STEP = f"{PREFIX}/step"
SHOWN_HEADS = 20  # in one alert
MLFLOW_BATCH = 1000  # metrics per request, the limit of MLflow servers


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


class MlflowSink:
    """Logs metrics to an MLflow run: the given one, else the one active at the first report, else a new one.

    A new run ends with the sink. `heads` adds the mean of each head, `full` every number there is. Alerts become tags
    `attn.alert.<kind>`, which hold the latest of each kind.
    """

    def __init__(self, run_id: str | None = None, *, heads: bool = True, full: bool = False) -> None:
        if run_id is not None and not isinstance(run_id, str):
            reject_type("run_id", run_id, "the id of a run, or None")
        self._mlflow = need("mlflow", "MlflowSink", "mlflow")
        self.heads = heads
        self.full = full
        self.run_id = run_id
        self._ours = False
        self._closed = False

    def log(self, records: Sequence[Record], step: int) -> None:
        values = iter((flatten(records) if self.full else compact(records, heads=self.heads)).items())
        run_id = self._started()
        while batch := dict(islice(values, MLFLOW_BATCH)):
            self._mlflow.log_metrics(batch, step=step, run_id=run_id)

    def alert(self, alerts: Sequence[Alert], step: int) -> None:
        client = self._mlflow.MlflowClient()
        run_id = self._started()
        for kind, (*_, latest) in by_kind(alerts).items():
            text = f"step {step}, {latest.layer}, head {latest.head}: {latest.message}"
            client.set_tag(run_id, f"attn.alert.{kind}", text)

    def close(self) -> None:
        """End the run if it was started here."""
        if self._ours and not self._closed:
            self._mlflow.MlflowClient().set_terminated(self.run_id)
            active = self._mlflow.active_run()
            if active is not None and active.info.run_id == self.run_id:
                self._mlflow.end_run()
        self._closed = True

    def _started(self) -> str:
        if self._closed:
            raise ValueError("the sink is closed")
        if self.run_id is None:
            active = self._mlflow.active_run()
            self._ours = active is None
            run = self._mlflow.start_run() if active is None else active
            self.run_id = str(run.info.run_id)
        return self.run_id


def _row_of(run: Any) -> int | None:
    """The open row; None where there is none, as in a run shared by several processes."""
    try:
        return int(run.step)
    except Exception:
        return None
