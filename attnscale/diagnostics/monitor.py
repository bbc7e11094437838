"""The monitor: finds the attention modules of a model, measures them at selected steps, and reports."""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, distributed, nn

from attnscale._util import state
from attnscale._util.checks import check_flag, read_int
from attnscale._util.files import write_whole
from attnscale._util.optional import need
from attnscale._util.processes import read_group
from attnscale.call.tap import Tap
from attnscale.diagnostics.alerts import Notices, Thresholds, find_alerts
from attnscale.diagnostics.autograd import run_reported
from attnscale.diagnostics.listener import LayerListener
from attnscale.diagnostics.max_logits import LogitTracker, MaxLogits
from attnscale.diagnostics.records.record import Alert, Record
from attnscale.diagnostics.records.tally import Processes
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
    """Monitors the attention of a model during training. attnscale/diagnostics/README.md is the guide.

    Call `step` once after each optimizer step. At every `every`-th step the monitor samples rows of each attention
    call, forward and backward, and sends one record per layer and head to the sinks. It does not affect training
    numerics and never stops a run: a failing sink is dropped with a warning, and other failures issue one
    `MonitorWarning` at the end of the step.

    In a distributed run, every process has a monitor and calls `step`. Records are merged across processes by layer
    name, and the first process of the group writes to its sinks. Under `attnscale.distributed.HeadParallel`, heads are
    numbered as in the full layer.

    Args:
        model: a model with attnscale attention (`attnscale.convert`, `attnscale.hf.apply`), or a transformers model
            that uses the "sdpa" attention implementation.
        every: number of steps between two measurements.
        rows: number of sampled rows per attention call. None measures all rows.
        sinks: destinations of the records: objects with `log(records, step)` and `close()`.
        alerts: `Thresholds`, the path of a YAML file with thresholds, or None for no alerts. An alert is raised when a
            head crosses a limit, and again only after the head has returned within the limit.
        on_alert: called with each `Alert` at the end of `step`. It may raise to stop the run.
        dump: folder for the sampled query and key rows of each head that raises an alert (safetensors).
        process_group: processes whose rows are merged, as a ProcessGroup or DeviceMesh. None means all processes. Pass
            a group if processes hold different layers under the same names (pipeline stages) or the same rows.
        track: track the largest logits of every step; see `max_logits`.

    Raises:
        ArgumentError: an argument is out of range, the model has no attention that can be measured, another monitor is
            attached to it, or tensor parallelism shards its heads without `HeadParallel` or a `process_group`.
        ArgumentTypeError: `model`, a sink or `process_group` has the wrong type.

    Example:
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
        track: bool = True,
    ) -> None:
        self.every = read_int("every", every, "an int >= 1", least=1)
        if rows is not None:
            rows = read_int("rows", rows, "an int >= 1 or None for all rows", least=1)
        for sink in sinks:
            if not isinstance(sink, Sink):
                reject_type("sinks", sink, "objects with log(records, step) and close()")
        check_flag("track", track)
        group = read_group("process_group", process_group)
        self.limits = Thresholds.read(alerts) if isinstance(alerts, (str, Path)) else alerts
        self.on_alert = on_alert
        self.dump = None if dump is None else Path(dump)
        with contextlib.ExitStack() as undo:
            found = find_attention(model, undo)
            if any(module.tap is not None for module in found.values()):
                reject(
                    "model",
                    type(model).__name__,
                    "a model without a monitor or QKClip; close the other monitor first, or pass it to QKClip",
                )
            if group is None:
                refuse_unsaid_heads(model, found.values())
            self._undo = undo.pop_all()  # restores a stock model
        self._sinks = list(sinks)
        self._raised: set[tuple[str, str, int]] = set()  # kind, layer and head of the alerts of the last report
        self._closed = False
        self._notices = Notices()
        self._model, self._attention = model, found
        self._head_parts = {path: getattr(module, "head_part", (0, 1))[0] for path, module in found.items()}
        self._processes = Processes(self._head_parts, group, self._notices)
        modules = dict(model.named_modules())  # in a swapped model, the parent of our module
        self.layers = {
            path: LayerListener(path, rows, dump is not None, modules.get(path, module), self._notices)
            for path, module in found.items()
        }
        self._trackers = {path: LogitTracker() for path in self.layers} if track else {}
        for path, tracker in self._trackers.items():
            self.layers[path].trackers.append(tracker)
        self._tapped = [(module, Tap(self.layers[path], run_reported)) for path, module in found.items()]
        for module, tap in self._tapped:
            tap.attach(module)
        self._listen(True, 0)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is a closed monitor, because taps and files have a single owner."""
        return _closed_copy, (type(self), self.every)

    def step(self, step: int) -> list[Record]:
        """End a training step: report it if it was measured, and enable or disable measurement of the next step.

        Args:
            step: number of the step, >= 0. In a distributed run all processes pass the same number.

        Returns:
            One record per layer and head, merged over all processes. Empty if the step was not measured.

        Raises:
            ArgumentError: `step` is negative.
            Exception: any exception that `on_alert` raises.
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
        for layer in self.layers.values():
            layer.failed = False
        for tracker in self._trackers.values():
            tracker.reset()
        self._listen((step + 1) % self.every == 0, step + 1)
        self._notices.issue()
        for alert in alerts if self.on_alert is not None else ():
            self.on_alert(alert)  # type: ignore[misc]  # may raise, to stop the run
        return records

    def max_logits(self) -> dict[str, MaxLogits]:
        """Return the largest logits since the last `step`, per head, over all rows of this process.

        Logits are after temperature, over visible keys; padding rows and rows with NaN do not count. Validation passes
        count only if the layer had no training call. Call this before `step`, which resets the maxima.

        At a measured step the maxima are exact. At other steps they are by-products of the backend, at no extra pass:
        exact with "triton" and "blockwise"; bounds at most ln n apart with "sdpa" on the CPU, from the lse of torch's
        fused kernel. No bounds are known where torch does not run this kernel (on other devices, with dropout, with
        values and keys of different size, with a mask that requires gradients), for calls that return the weights, and
        for sequences split over processes. Whether the output is finite is always known. Nested tensors, and calls
        inside torch.func transforms, are not tracked.

        Returns:
            `MaxLogits` with tensors [H] by layer; heads of this process only. Layers without calls are missing. Empty
            with `track=False`. Reading the tensors synchronises with their device; tracking does not.

        Example:
            >>> import torch
            >>> from attnscale import ScaledDotProductAttention
            >>> attention, q = ScaledDotProductAttention("log"), torch.eye(4)[None, None] * 10
            >>> with Monitor(attention, alerts=None) as monitor:
            ...     _ = attention(q, q, q)
            ...     monitor.max_logits()["ScaledDotProductAttention"].exact
            tensor([...])
        """
        found = {path: tracker.read() for path, tracker in self._trackers.items()}
        return {path: largest for path, largest in found.items() if largest is not None}

    def close(self) -> None:
        """Detach from the model and close the sinks. Idempotent."""
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
        """Append the records and alerts of a step to the lists, and send them to the sinks."""
        records += self._processes.collect(self.layers.values(), step)
        crossed = [] if self.limits is None else find_alerts(records, self.limits)
        found = {(alert.kind, alert.layer, alert.head): alert for alert in crossed}
        alerts += [alert for place, alert in found.items() if place not in self._raised]
        self._raised = set(found)
        for alert in alerts if self.dump is not None else ():
            if alert.layer in self.layers:  # otherwise the layer belongs to another process
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
        """Call a method of a sink. A failing sink is dropped."""
        if not self._guard(f"sink {type(sink).__name__}", act, *arguments) and sink in self._sinks:
            self._sinks.remove(sink)
            with contextlib.suppress(Exception):  # the warning has already been issued
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
    monitor.layers, monitor._trackers, monitor._closed = {}, {}, True
    return monitor


def _dump_rows(folder: Path, alert: Alert, captured: Mapping[str, Tensor], part: int) -> None:
    """Write the sampled query rows of the head, and the key rows at the same slots, as safetensors.

    `part` is the index of this process's share of the layer's heads. The file metadata contains the alert.
    """
    save = need("safetensors.torch", "dump", "hf").save
    if not captured:
        return
    query, key = captured["query"], captured["key"]
    head = alert.head - part * query.shape[1]
    if not 0 <= head < query.shape[1]:
        return  # the head belongs to another process
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
    """Register a finder for another kind of attention module.

    Args:
        finder: `finder(model)` yields the path and the module of each attention module that has a `tap` and reports its
            calls to it.
        opener: `opener(model, stack)` makes stock attention measurable until the ExitStack is closed, and returns the
            modules by path. Called only if no finder finds a module.

    Example:
        >>> def find_mine(model):
        ...     return ((path, module) for path, module in model.named_modules() if hasattr(module, "my_attention"))
        >>> add_finder(find_mine)
        >>> _ = state.FINDERS.pop(find_mine)
    """
    state.FINDERS.setdefault(finder, opener)


def find_attention(model: nn.Module, undo: contextlib.ExitStack | None = None) -> dict[str, nn.Module]:
    """Return all attention modules of a model that can be measured.

    Args:
        model: the model to search.
        undo: if given, stock transformers attention is made measurable until this ExitStack is closed.

    Returns:
        Modules by path. A shared module appears once, under its first path.

    Raises:
        ArgumentError: the model has no attention module that can be measured.
        ArgumentTypeError: `model` is not a torch.nn.Module.

    Example:
        >>> import attnscale
        >>> list(find_attention(nn.Sequential(nn.Linear(4, 4), attnscale.MultiheadAttention(4, 2))))
        ['1']
    """
    if not isinstance(model, nn.Module):
        reject_type("model", model, "a torch.nn.Module")
    origins = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    for package in (state.MODEL_PACKAGES[origin] for origin in origins & state.MODEL_PACKAGES.keys()):
        importlib.import_module(package)  # registers its finder
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
            f"model={type(model).__name__} is not accepted: expected a model with at least one attnscale attention "
            "module. Convert torch models with attnscale.convert and transformers models with attnscale.hf.apply; "
            "the policy 'constant' does not change their output"
        )
    return found


def _ours(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, (ScaledDotProductAttention, MultiheadAttention)):
            # In a swapped model our module is a child of the model's own attention. Users know the path of the parent.
            yield path.removesuffix(".attnscale") or type(module).__name__, module


def refuse_unsaid_heads(model: nn.Module, attention: Iterable[nn.Module]) -> None:
    """Reject a tensor-parallel model if neither `HeadParallel` nor a process group describes its heads."""
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    said = any(getattr(module, "head_part", (0, 1))[1] > 1 for module in attention)
    if several and not said and _is_tensor_parallel(model):
        raise ArgumentError(
            "process_group=None is not accepted for a model sharded by tensor parallelism: heads of other processes "
            "would be counted as additional rows. Add attnscale.distributed.HeadParallel() for the attention to "
            "the plan of parallelize_module, or pass the process_group of the processes that hold different rows"
        )


def _is_tensor_parallel(model: nn.Module) -> bool:
    """`fully_shard` shards a parameter along one mesh dimension. Further shards come from tensor parallelism."""
    sharded = 0
    for parameter in model.parameters():
        placements = getattr(parameter, "placements", ())
        sharded = max(sharded, sum(type(placement).__name__.endswith("Shard") for placement in placements))
    by_data = any(kind.__name__ == "FSDPModule" for module in model.modules() for kind in type(module).__mro__)
    return sharded > by_data
