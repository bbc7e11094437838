"""The monitor: listens to every attention of a model at some steps, and reports."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from attnscale.diagnostics.alerts import Thresholds, find_alerts
from attnscale.diagnostics.records import Alert, Record
from attnscale.diagnostics.sinks.base import AlertSink, Sink
from attnscale.errors import reject, reject_type
from attnscale.tap import Tap

log = logging.getLogger(__name__)

DEFAULT = Thresholds()


class Monitor:
    """Watches the attention of a model while it trains, for almost nothing.

    At every `every`-th step it samples `rows` rows of each attention call (None: all), forward and backward, and hands
    one record per layer and head to the sinks. Call `step` once after each optimizer step. It never breaks a run: a
    sink that fails is dropped with a warning, and nothing it does changes a number of the training.

    `alerts` are `Thresholds`, a YAML file of them, or None. An `Alert` is raised when a head crosses a limit, and not
    again until it has been back; it goes to `on_alert` and to the sinks that take them. `dump` is a folder for the
    query and key rows of a head that raised one.

    >>> import torch
    >>> from attnscale import ScaledDotProductAttention
    >>> attention = ScaledDotProductAttention("log")
    >>> q = torch.randn(1, 2, 16, 8, requires_grad=True)
    >>> with Monitor(attention, every=1, alerts=None) as monitor:
    ...     attention(q, q, q, is_causal=True).sum().backward()
    ...     records = monitor.step(0)
    >>> [(record.head, record.forward["visible"].max) for record in records]
    [(0, 16.0), (1, 16.0)]
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        rows: int | None = 64,
        sinks: Sequence[Sink] = (),
        *,
        alerts: Thresholds | str | Path | None = DEFAULT,
        on_alert: Callable[[Alert], object] | None = None,
        dump: str | Path | None = None,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            reject("every", every, "an int >= 1")
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            reject("rows", rows, "an int >= 1 or None for all rows")
        for sink in sinks:
            if not isinstance(sink, Sink):
                reject_type("sinks", sink, "objects with log(records, step) and close()")
        self.every = every
        self.limits = Thresholds.read(alerts) if isinstance(alerts, (str, Path)) else alerts
        self.on_alert = on_alert
        self.dump = None if dump is None else Path(dump)
        # Imported here and in the reports: `import attnscale` brings this file along, and most runs have no monitor.
        from attnscale.diagnostics.discovery import open_attention
        from attnscale.diagnostics.layer import LayerListener
        from attnscale.diagnostics.looks import Looks

        self._sinks = list(sinks)
        self._lasting: set[tuple[str, str, int]] = set()
        with contextlib.ExitStack() as undo:
            found = open_attention(model, undo)
            self._undo = undo.pop_all()  # what a model had to be given to be listened to
        self._looks = Looks()
        self.layers = {path: LayerListener(path, rows, capture=dump is not None, looks=self._looks) for path in found}
        if any(module.tap is not None for module in found.values()):
            reject("model", type(model).__name__, "a model that no other monitor is attached to")
        self._tapped = [(module, Tap(self.layers[path])) for path, module in found.items()]
        for module, tap in self._tapped:
            module.tap = tap  # type: ignore[assignment]
        self._listen(True, 0)

    def step(self, step: int) -> list[Record]:
        """The end of a training step: report if it was one to listen to, and decide about the next.

        Every process of a distributed run calls it with the same number, and gets the numbers of all.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            reject("step", step, "an int >= 0")
        records: list[Record] = []
        alerts: list[Alert] = []
        if self._listening:
            self._guard("a report", self._report, step, records, alerts)
            for layer in self.layers.values():
                layer.reset()
        self._listen((step + 1) % self.every == 0, step + 1)
        for alert in alerts if self.on_alert is not None else ():
            self.on_alert(alert)  # type: ignore[misc]  # what it raises is the user's own, and may stop the run
        return records

    def close(self) -> None:
        """Leave the model as it was and close the sinks. Twice is once."""
        for module, _ in self._tapped:
            del module.tap
        self._tapped = []
        self._undo.close()
        self._listening = False
        for sink in list(self._sinks):
            self._try(sink, sink.close)
        self._sinks = []

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self, listening: bool, step: int) -> None:
        self._listening = listening
        for layer in self.layers.values():
            layer.listening, layer.seed = listening, step

    def _report(self, step: int, records: list[Record], alerts: list[Alert]) -> None:
        """Fill in the records and alerts of a step, and hand them on."""
        from attnscale.diagnostics.collect import collect
        from attnscale.diagnostics.dump import dump_rows
        from attnscale.diagnostics.gather import is_writer

        self._looks.happen()
        records += collect(self.layers.values(), step)
        alerts += self._new_alerts(records)
        for alert in alerts if self.dump is not None else ():
            self._guard("a dump", dump_rows, self.dump, alert, self.layers[alert.layer].captured)
        if is_writer() and records:
            self._to_sinks(records, alerts, step)
            for alert in alerts:
                log.warning("step %d, %s, head %d: %s: %s", step, alert.layer, alert.head, alert.kind, alert.message)

    def _new_alerts(self, records: list[Record]) -> list[Alert]:
        """What has begun since the last report; an alert comes again once its cause has gone and is back."""
        found = [] if self.limits is None else find_alerts(records, self.limits)
        lasting, self._lasting = self._lasting, {(alert.kind, alert.layer, alert.head) for alert in found}
        return [alert for alert in found if (alert.kind, alert.layer, alert.head) not in lasting]

    def _to_sinks(self, records: list[Record], alerts: list[Alert], step: int) -> None:
        for sink in list(self._sinks):
            self._try(sink, sink.log, records, step)
            if alerts and sink in self._sinks and isinstance(sink, AlertSink):
                self._try(sink, sink.alert, alerts, step)

    def _try(self, sink: Sink, act: Callable[..., object], *arguments: Any) -> None:
        """Let a sink act; one that fails is dropped."""
        if not self._guard(f"sink {type(sink).__name__}", act, *arguments) and sink in self._sinks:
            self._sinks.remove(sink)
            with contextlib.suppress(Exception):  # it has been warned of; what it holds open is given back
                sink.close()

    def _guard(self, what: str, act: Callable[..., object], *arguments: Any) -> bool:
        try:
            act(*arguments)
        except Exception as error:
            warnings.warn(f"attnscale: {what} failed and is dropped: {error!r}", RuntimeWarning, stacklevel=4)
            return False
        return True
