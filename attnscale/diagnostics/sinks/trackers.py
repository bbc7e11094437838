"""Sinks for experiment trackers: Weights & Biases, Trackio and MLflow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from attnscale._util.optional import need
from attnscale.diagnostics.records.record import Event, Record, RunInfo
from attnscale.diagnostics.views.flatten import PREFIX, compact, flatten
from attnscale.errors import ArgumentError, reject, reject_type

MODULES = ("wandb", "trackio")
STEP = f"{PREFIX}/step"
MLFLOW_BATCH = 1000  # metrics per request, the limit of MLflow servers


class TrackerSink:
    """Logs to a W&B or Trackio run.

    `TrackerSink("wandb", project="p")` starts a run with these arguments at the first report and ends it on `close`.
    `TrackerSink("wandb")` uses the run that is active at the first report. In W&B, `attn/step` is the x-axis of all
    `attn/…` metrics, and values are added to the open row, so W&B's own step count does not change.

    Args:
        run: "wandb", "trackio", or a run object with a `log` method.
        heads: whether to log the mean of each head.
        full: log every number instead of the main quantities. This is a large number of metrics.
        start: arguments of `init` for a new run. Not allowed together with a run object.

    Raises:
        ArgumentError: unknown module name, or `start` arguments together with a run object.
        ArgumentTypeError: `run` has no `log` method.
        MissingDependencyError: the named package is not installed.

    Example:
        >>> from attnscale.diagnostics import Record
        >>> class Run:
        ...     def log(self, values, step):
        ...         print(values, step)
        >>> sink = TrackerSink(Run(), heads=False)
        >>> sink.log([Record(0, "layers.0", 0, scalars={"score_gain": 0.5})], step=0)
        {'attn/layers.0/score_gain': 0.5} 0
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
                raise ArgumentError(
                    f"{', '.join(start)} is not accepted together with an existing run; expected only run=..."
                )
            self._module = None
            self._run = run
        self.heads = heads
        self.full = full
        self._start = start
        self._defined = False
        self._open_row: int | None = None  # W&B row of the last report

    def open(self, run: RunInfo) -> None:
        """Start the run, or look up the active one, on the thread that trains."""
        self._started()

    def log(self, records: Sequence[Record], step: int) -> None:
        """Log the records of a step to the run."""
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
            run.log({}, commit=True)  # otherwise this report would overwrite the last one in the same row
        run.log({STEP: step, **values}, commit=False)
        self._open_row = _row_of(run)

    def event(self, events: Sequence[Event], step: int) -> None:
        """Send one alert per event, if the run supports alerts."""
        run = self._started()
        if not callable(getattr(run, "alert", None)):
            return
        leveled = callable(getattr(run, "define_metric", None))
        for event in events:
            level = {"level": "ERROR" if event.severity == "critical" else "WARN"} if leveled else {}
            text = "\n".join(filter(None, (f"step {step}: {event.message}", event.advice)))
            run.alert(title=f"attention: {event.cause} {event.status}", text=text, **level)

    def close(self) -> None:
        """End the run if this sink started it."""
        if self._start and self._run is not None:
            self._run.finish()
        self._run = None

    def _started(self) -> Any:
        """Return the run. It is started or looked up at the first report, because only one process logs."""
        if self._run is None:
            if self._module is None:
                raise ValueError("the sink is closed")
            if self._start:
                self._run = self._module.init(**self._start)
            else:
                active = getattr(self._module, "run", None)  # in trackio, `run` is a module
                self._run = active if callable(getattr(active, "log", None)) else self._module
        return self._run


class MlflowSink:
    """Logs metrics to an MLflow run. Events become tags `attn.event.<cause>` with the latest event of each cause.

    Args:
        run_id: id of an existing run. None uses the run that is active at the first report, or starts a new run, which
            ends on `close`.
        heads: whether to log the mean of each head.
        full: log every number instead of the main quantities.

    Raises:
        ArgumentTypeError: `run_id` is not a string.
        MissingDependencyError: mlflow is not installed.

    Example:
        `attnscale.Monitor(model, sinks=[MlflowSink()])`
    """

    def __init__(self, run_id: str | None = None, *, heads: bool = True, full: bool = False) -> None:
        if run_id is not None and not isinstance(run_id, str):
            reject_type("run_id", run_id, "the id of a run as a str, or None")
        self._mlflow = need("mlflow", "MlflowSink", "mlflow")
        self.heads = heads
        self.full = full
        self.run_id = run_id
        self._ours = False
        self._closed = False

    def open(self, run: RunInfo) -> None:
        """Start the run, or look up the active one, on the thread that trains: MLflow keeps one per thread."""
        self._started()

    def log(self, records: Sequence[Record], step: int) -> None:
        """Log the records of a step as metrics. Raises ValueError if the sink is closed."""
        values = iter((flatten(records) if self.full else compact(records, heads=self.heads)).items())
        run_id = self._started()
        while batch := dict(islice(values, MLFLOW_BATCH)):
            self._mlflow.log_metrics(batch, step=step, run_id=run_id)

    def event(self, events: Sequence[Event], step: int) -> None:
        """Store the latest event of each cause as a tag. Raises ValueError if the sink is closed."""
        client = self._mlflow.MlflowClient()
        run_id = self._started()
        for event in events:
            text = f"step {step}, {event.status}: {event.message}"
            client.set_tag(run_id, f"attn.event.{event.cause}", text)

    def close(self) -> None:
        """End the run if this sink started it."""
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
    """Return the open row; None if there is none, as in a run shared by several processes."""
    try:
        return int(run.step)
    except Exception:
        return None
