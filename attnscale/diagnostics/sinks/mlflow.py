"""Records for MLflow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from attnscale._util.optional import need
from attnscale.diagnostics.records.record import Alert, Record, by_kind
from attnscale.diagnostics.views.flatten import compact, flatten
from attnscale.errors import reject_type

BATCH = 1000  # metrics per request, the limit of MLflow servers


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
        while batch := dict(islice(values, BATCH)):
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
