"""The monitor: finds every attention of a model, measures it at some steps, and reports."""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from attnscale._util import state
from attnscale._util.checks import read_int
from attnscale._util.files import write_whole
from attnscale._util.optional import need
from attnscale._util.processes import read_group
from attnscale.call.tap import Tap
from attnscale.diagnostics.alerts import Notices, Thresholds, find_alerts
from attnscale.diagnostics.autograd import run_reported
from attnscale.diagnostics.listener import LayerListener
from attnscale.diagnostics.records.collect import Processes, refuse_unsaid_heads
from attnscale.diagnostics.records.record import Alert, Record
from attnscale.diagnostics.sinks import AlertSink, Sink
from attnscale.errors import ArgumentError, MonitorWarning, reject, reject_type
from attnscale.module import MultiheadAttention, ScaledDotProductAttention

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)

DEFAULT = Thresholds()

Finder = Callable[[nn.Module], Iterator[tuple[str, nn.Module]]]
Opener = Callable[[nn.Module, contextlib.ExitStack], dict[str, nn.Module]]


class Monitor(contextlib.AbstractContextManager["Monitor"]):
    """Watches the attention of a model while it trains; attnscale/diagnostics/README.md is its guide.

    At every `every`-th step it samples `rows` rows of each attention call (None: all), forward and backward, and hands
    one record per layer and head to the sinks. Call `step` once after each optimizer step. It never breaks a run or
    changes a number of it: a sink that fails is dropped with a warning, and other failures are warned of once, at the
    end of a step.

    `alerts` are `Thresholds`, a YAML file of them, or None. An `Alert` is raised when a head crosses a limit, and not
    again until it has been back; it goes to `on_alert` and to the sinks that take alerts. `dump` is a folder for the
    query and key rows of a head that raised one.

    In a distributed run every process has a monitor and calls `step`. Layers are joined by name over `process_group`
    (None: all processes), whose first process hands the records to its sinks. Heads that are spread over processes by
    `attnscale.distributed.HeadParallel` are joined by their numbers in the whole layer. Where processes hold different
    layers under the same names (pipeline stages), or the same rows twice, pass the group of those whose rows differ, or
    its DeviceMesh.

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
        process_group: ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        self.every = read_int("every", every, "an int >= 1", least=1)
        if rows is not None:
            rows = read_int("rows", rows, "an int >= 1 or None for all rows", least=1)
        for sink in sinks:
            if not isinstance(sink, Sink):
                reject_type("sinks", sink, "objects with log(records, step) and close()")
        group = read_group("process_group", process_group)
        self.limits = Thresholds.read(alerts) if isinstance(alerts, (str, Path)) else alerts
        self.on_alert = on_alert
        self.dump = None if dump is None else Path(dump)
        with contextlib.ExitStack() as undo:
            found = find_attention(model, undo)
            if any(module.tap is not None for module in found.values()):
                reject("model", type(model).__name__, "a model that no other monitor is attached to")
            if group is None:
                refuse_unsaid_heads(model, found.values())
            self._undo = undo.pop_all()  # removes what made a stock model measurable
        self._sinks = list(sinks)
        self._raised: set[tuple[str, str, int]] = set()  # kind, layer and head of the alerts of the last report
        self._closed = False
        self._notices = Notices()
        self._head_parts = {path: getattr(module, "head_part", (0, 1))[0] for path, module in found.items()}
        self._processes = Processes(self._head_parts, group, self._notices)
        modules = dict(model.named_modules())  # of a swapped model, the attention whose child ours is
        self.layers = {
            path: LayerListener(path, rows, dump is not None, modules.get(path, module), self._notices)
            for path, module in found.items()
        }
        self._tapped = [(module, Tap(self.layers[path], run_reported)) for path, module in found.items()]
        for module, tap in self._tapped:
            tap.attach(module)
        self._listen(True, 0)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is closed, since taps and files have one owner."""
        return _closed_copy, (type(self), self.every)

    def step(self, step: int) -> list[Record]:
        """End a training step: report if it was measured, and decide whether the next one is.

        Every process of a distributed run calls it with the same number and gets the records of all.
        """
        step = read_int("step", step, "an int >= 0", least=0)
        records: list[Record] = []
        alerts: list[Alert] = []
        if self._closed:
            return records
        if self._listening:
            self._guard("a report", self._report, step, records, alerts)
            for layer in self.layers.values():
                layer.reset()
        self._listen((step + 1) % self.every == 0, step + 1)
        self._notices.issue()
        for alert in alerts if self.on_alert is not None else ():
            self.on_alert(alert)  # type: ignore[misc]  # may raise, to stop the run
        return records

    def close(self) -> None:
        """Leave the model as it was and close the sinks. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._listen(False, 0)
        for module, tap in self._tapped:
            tap.detach(module)
        self._tapped = []
        self._undo.close()
        for layer in self.layers.values():
            layer.reset()
        for sink in list(self._sinks):
            self._try(sink, sink.close)
        self._sinks = []
        self._notices.issue()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _listen(self, listening: bool, step: int) -> None:
        self._listening = listening
        rank = self._processes.rank if listening else 0
        for layer in self.layers.values():
            layer.listening, layer.seed, layer.rank = listening, step, rank

    def _report(self, step: int, records: list[Record], alerts: list[Alert]) -> None:
        """Add the records and alerts of a step to the lists, and pass them on."""
        records += self._processes.collect(self.layers.values(), step)
        crossed = [] if self.limits is None else find_alerts(records, self.limits)
        found = {(alert.kind, alert.layer, alert.head): alert for alert in crossed}
        alerts += [alert for place, alert in found.items() if place not in self._raised]
        self._raised = set(found)
        for alert in alerts if self.dump is not None else ():
            if alert.layer in self.layers:  # else another process has it
                captured, part = self.layers[alert.layer].captured, self._head_parts[alert.layer]
                self._guard("a dump", _dump_rows, self.dump, alert, captured, part)
        if self._processes.rank > 0 or not records:
            return
        for sink in list(self._sinks):
            self._try(sink, sink.log, records, step)
            if alerts and sink in self._sinks and isinstance(sink, AlertSink):
                self._try(sink, sink.alert, alerts, step)
        for alert in alerts:
            log.warning("step %d, %s, head %d: %s: %s", step, alert.layer, alert.head, alert.kind, alert.message)

    def _try(self, sink: Sink, act: Callable[..., object], *arguments: Any) -> None:
        """Use a sink; one that fails is dropped."""
        if not self._guard(f"sink {type(sink).__name__}", act, *arguments) and sink in self._sinks:
            self._sinks.remove(sink)
            with contextlib.suppress(Exception):  # the failure has been warned of
                sink.close()

    def _guard(self, what: str, act: Callable[..., object], *arguments: Any) -> bool:
        try:
            act(*arguments)
        except Exception as error:
            warnings.warn(f"attnscale: {what} failed and is dropped: {error!r}", MonitorWarning, stacklevel=4)
            return False
        return True


def _closed_copy(kind: type[Monitor], every: int) -> Monitor:
    monitor = kind.__new__(kind)
    monitor.every, monitor.limits, monitor.on_alert, monitor.dump = every, None, None, None
    monitor.layers, monitor._closed = {}, True
    return monitor


def _dump_rows(folder: Path, alert: Alert, captured: Mapping[str, Tensor], part: int) -> None:
    """Write the sampled query rows of the head and the key rows at their slots as safetensors, if there are any.

    `part` is the number of this process's part of the layer's heads. The metadata of the file holds the whole alert.
    """
    save = need("safetensors.torch", "dump", "hf").save
    if not captured:
        return
    query, key = captured["query"], captured["key"]
    head = alert.head - part * query.shape[1]
    if not 0 <= head < query.shape[1]:
        return  # another process has it
    group = query.shape[1] // key.shape[1]
    rows = {
        "rows": captured["rows"].cpu().contiguous(),
        "query": query[:, head].cpu().contiguous(),  # [B, R, D]
        "key": key[:, head // group].cpu().contiguous(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    name = f"step{alert.step}-{alert.layer}-head{alert.head}-{alert.kind}.safetensors"
    write_whole(folder / name, save(rows, {field: str(value) for field, value in alert.as_dict().items()}))


def add_finder(finder: Finder, opener: Opener | None = None) -> None:
    """Register a finder of another kind of module: it yields paths and modules that have a `tap` and use it.

    The opener makes stock attention measurable until a stack is closed, in a model of its kind where nothing was found.
    """
    state.FINDERS.setdefault(finder, opener)


def find_attention(model: nn.Module, undo: contextlib.ExitStack | None = None) -> dict[str, nn.Module]:
    """Every attention of a model that can be measured; a shared one appears once, under its first path.

    With `undo`, stock attention of transformers is made measurable, until that is closed.
    """
    if not isinstance(model, nn.Module):
        reject_type("model", model, "a torch.nn.Module")
    origins = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    for package in (state.MODEL_PACKAGES[origin] for origin in origins & state.MODEL_PACKAGES.keys()):
        importlib.import_module(package)  # adds its finder
    found: dict[str, nn.Module] = {}
    for finder in (_ours, *state.FINDERS):
        for path, module in finder(model):
            if all(module is not other for other in found.values()):
                found[path] = module
    if not found and undo is not None:
        for opener in filter(None, state.FINDERS.values()):
            found |= opener(model, undo)
    if not found:
        raise ArgumentError(
            f"model={type(model).__name__} is not accepted: expected at least one attention of attnscale's; "
            "attnscale.convert gives torch models theirs, attnscale.hf.apply those of transformers "
            "(with the policy 'constant' they compute what they did)"
        )
    return found


def _ours(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, (ScaledDotProductAttention, MultiheadAttention)):
            # A swapped model has ours as a child of its own attention, whose path is the one users know.
            yield path.removesuffix(".attnscale") or type(module).__name__, module
