"""The monitor: finds the attention modules of a model, measures them at selected steps, and reports."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

import attnscale
from attnscale._util import state
from attnscale._util.checks import check_flag, read_int, read_number
from attnscale._util.files import write_whole
from attnscale._util.optional import need
from attnscale._util.processes import read_group
from attnscale.call.tap import Tap, leave_all_modules
from attnscale.diagnostics.autograd import run_reported
from attnscale.diagnostics.delivery import Delivery, Notices
from attnscale.diagnostics.events import EventLog, Thresholds
from attnscale.diagnostics.listener import LayerListener
from attnscale.diagnostics.records.record import Event, Progress, Record, RunInfo, layers_of
from attnscale.diagnostics.records.tally import Processes
from attnscale.diagnostics.sinks import Sink
from attnscale.diagnostics.torch_calls import TorchCalls, calling_modules, is_unconverted
from attnscale.diagnostics.tracking import LogitTracker, MaxLogits
from attnscale.errors import ArgumentError, BackendError, MonitorWarning, reject, reject_type
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
        model: a model that calls `torch.nn.functional.scaled_dot_product_attention` in its forward pass, a transformers
            model with the "sdpa" attention implementation, or a model with attnscale attention (`attnscale.convert`,
            `attnscale.hf.apply`). Calls of torch's function are named by the path of the module that makes them; the
            second call in one forward pass of a module is `path#2`.
        every: number of steps between two measurements.
        rows: number of sampled rows per attention call. None measures all rows.
        sinks: destinations of the records: objects with `log(records, step)` and `close()`.
        alerts: `Thresholds`, the path of a YAML file with thresholds, or None for no events.
        on_alert: called with each `Event` that begins, changes or ends, at the end of `step`. It may raise to stop the
            run. `attnscale.diagnostics.actions` has functions that stop the run, save a checkpoint or lower the
            learning rate.
        dump: folder for the sampled query and key rows of the heads of each new event (safetensors).
        process_group: processes whose rows are merged, as a ProcessGroup or DeviceMesh. None means all processes. Pass
            a group if processes hold different layers under the same names (pipeline stages) or the same rows.
        timeout: seconds that a report waits for the other processes before `step` raises a `BackendError`.
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
        on_alert: Callable[[Event], object] | None = None,
        dump: str | Path | None = None,
        process_group: ProcessGroup | DeviceMesh | None = None,
        timeout: float = 60.0,
        track: bool = True,
    ) -> None:
        self.every = read_int("every", every, "an int >= 1", least=1)
        if rows is not None:
            rows = read_int("rows", rows, "an int >= 1 or None for all rows", least=1)
        for sink in sinks:
            if not isinstance(sink, Sink):
                reject_type("sinks", sink, "objects with log(records, step) and close()")
        timeout = read_number("timeout", timeout, "a number of seconds > 0")
        if not timeout > 0:
            reject("timeout", timeout, "a number of seconds > 0")
        check_flag("track", track)
        group = read_group("process_group", process_group)
        self.limits = Thresholds.read(alerts) if isinstance(alerts, (str, Path)) else alerts
        if on_alert is not None and not callable(on_alert):
            reject_type("on_alert", on_alert, "a function of an Event, or None")
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
                refuse_unsaid_heads(model, [*found.values(), *calling_modules(model).values()])
            self._layer_order = [path or type(model).__name__ for path, _ in model.named_modules()]
            self._notices = Notices()
            modules = dict(model.named_modules())  # in a swapped model, the parent of our module

            self._trackers: dict[str, LogitTracker] = {}

            def listen(name: str, module: nn.Module) -> LayerListener:
                layer = LayerListener(name, rows, dump is not None, modules.get(name, module), self._notices)
                if track:
                    self._trackers[name] = LogitTracker()
                    layer.trackers.append(self._trackers[name])
                return layer

            self.layers = {path: listen(path, module) for path, module in found.items()}
            self._torch_calls = TorchCalls(model, listen, self.layers)
            undo.callback(self._torch_calls.remove)
            self._undo = undo.pop_all()  # restores a stock model
        self._log = None if self.limits is None else EventLog(self.limits)
        self._closed = False
        self._steps = 1  # since the last report
        self._delivery = Delivery(sinks, self._notices)
        self._rows = rows
        self._policies = [getattr(module, "policy", None) for module in found.values()]
        self._model, self._attention = model, found
        callers = {name: modules.get(name.partition("#")[0]) for name in self._torch_calls.listeners}
        # This process's share of the heads of a layer: its index, and the number of shares.
        self.head_parts: dict[str, tuple[int, int]] = {
            path: getattr(module, "head_part", (0, 1)) for path, module in (callers | found).items()
        }
        parts = {path: part for path, (part, _) in self.head_parts.items()}
        self._processes = Processes(parts, group, self._notices, timeout)
        self._tapped = [(module, Tap(self.layers[path], run_reported)) for path, module in found.items()]
        for module, tap in self._tapped:
            tap.attach(module)
        self._listen(True, 0)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is a closed monitor, because taps and files have a single owner."""
        return _closed_copy, (type(self), self.every)

    def step(self, step: int, *, loss: float | Tensor | None = None, lr: float | None = None) -> list[Record]:
        """End a training step: report it if it was measured, and enable or disable measurement of the next step.

        Args:
            step: number of the step, >= 0. In a distributed run all processes pass the same number.
            loss: training loss of the step, stored with the report. A tensor is read only if the step was measured.
            lr: learning rate of the step, stored with the report.

        Returns:
            One record per layer and head, merged over all processes. Empty if the step was not measured.

        Raises:
            ArgumentError: `step` is negative.
            ArgumentTypeError: `loss` or `lr` is not a number.
            BackendError: another process of the group did not call `step` in time.
            Exception: any exception that `on_alert` raises.
        """
        step = read_int("step", step, "an int >= 0", least=0)
        records: list[Record] = []
        events: list[Event] = []
        if self._closed:
            return records
        if self._listening:
            if isinstance(loss, Tensor):
                loss = loss.detach()
            progress = Progress(
                None if loss is None else read_number("loss", loss), None if lr is None else read_number("lr", lr)
            )
            self._guard("a report", self._report, step, records, events, progress)
            for layer in self._listeners():
                layer.reset()
        leave_all_modules()  # an interrupted forward pass
        self._steps = 1 if self._listening else self._steps + 1
        for layer in self._listeners():
            layer.failed, layer.steps = False, self._steps - 1
        for tracker in self._trackers.values():
            tracker.reset()
        self._listen((step + 1) % self.every == 0, step + 1)
        self._notices.issue()
        for event in events if self.on_alert is not None else ():
            self.on_alert(event)  # type: ignore[misc]  # may raise, to stop the run
        return records

    @property
    def events(self) -> list[Event]:
        """The events that are not over."""
        return [] if self._log is None else self._log.open

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

    def flush(self) -> None:
        """Wait until the sinks have written all reports."""
        if not self._closed:
            self._delivery.flush()
            self._notices.issue()

    def close(self) -> None:
        """Detach from the model, write what is queued, and close the sinks. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._listen(False, 0)
        for module, tap in self._tapped:
            tap.detach(module)
        self._tapped = []
        self._undo.close()
        for layer in self._listeners():
            layer.reset()
        self._delivery.close()
        self._notices.issue()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _listen(self, listening: bool, step: int) -> None:
        self._listening = listening
        rank = self._processes.rank if listening else 0
        clock = itertools.count()
        for layer in self._listeners():
            layer.listening, layer.seed, layer.rank, layer.clock = listening, step, rank, clock

    def _listeners(self) -> Iterator[LayerListener]:
        """Iterate over all listeners, including those of modules that have made no attention call so far."""
        return iter((self._torch_calls.listeners | self.layers).values())

    def _add_called_layers(self) -> None:
        """Add the modules that have called torch's attention function to `layers`, in the order of the model."""
        called = {name: layer for name, layer in self._torch_calls.listeners.items() if layer.tally().heads}
        if called.keys() - self.layers:
            every = (self.layers | called).items()
            self.layers = dict(sorted(every, key=lambda item: self._layer_order.index(item[0].partition("#")[0])))

    def _report(self, step: int, records: list[Record], events: list[Event], progress: Progress) -> None:
        """Append the records and events of a step to the lists, and send them to the sinks."""
        self._add_called_layers()
        records += self._processes.collect(self.layers.values(), step, self._steps)
        if self._torch_calls.listeners:
            self._torch_calls.note_unseen(records, self._notices)
        if self._log is not None:
            faulty = any("broken_row" in record.scalars for record in records)
            finite = faulty and has_finite_weights(self._model)
            events += self._log.update(step, records, progress.lr, weights_finite=finite)
        for event in events if self.dump is not None else ():
            for layer, heads in event.places if event.status == "begun" else ():
                if layer in self.layers:  # otherwise the layer belongs to another process
                    captured, (part, _) = self.layers[layer].captured, self.head_parts[layer]
                    self._guard("a dump", _dump_rows, self.dump, event, layer, heads, captured, part)
        if self._processes.rank > 0 or not records:
            return
        self._delivery.send(records, step, events, progress, lambda: self._describe(records))
        for event in events:
            log.warning("step %d: %s %s: %s. %s", step, event.cause, event.status, event.message, event.advice)

    def _describe(self, records: list[Record]) -> RunInfo:
        policies = dict.fromkeys("none" if policy is None else repr(policy) for policy in self._policies)
        return RunInfo(
            model=type(self._model).__name__,
            layers=len(layers_of(records)),
            heads=1 + max(record.head for record in records),
            policy="; ".join(policies),
            every=self.every,
            rows=self._rows,
            attnscale=attnscale.__version__,
            torch=torch.__version__,
            started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            limits={} if self.limits is None else vars(self.limits),
        )

    def _guard(self, what: str, act: Callable[..., object], *arguments: Any) -> bool:
        try:
            act(*arguments)
        except BackendError:  # a process is missing: the run is at fault, and would hang
            raise
        except Exception as error:
            warnings.warn(f"attnscale: {what} failed and is dropped: {error!r}", MonitorWarning, stacklevel=4)
            return False
        return True


def has_finite_weights(model: nn.Module) -> bool:
    """Whether no parameter of a model, or this process's shard of it, contains NaN or infinity."""
    local = (getattr(parameter, "_local_tensor", parameter).detach() for parameter in model.parameters())
    return all(bool(weight.isfinite().all()) for weight in local if weight.is_floating_point())


def _closed_copy(kind: type[Monitor], every: int) -> Monitor:
    monitor = kind.__new__(kind)
    monitor.every, monitor.limits, monitor.on_alert, monitor.dump = every, None, None, None
    monitor.layers, monitor._trackers, monitor._closed = {}, {}, True
    return monitor


def _dump_rows(
    folder: Path, event: Event, layer: str, heads: Iterable[int], captured: Mapping[str, Tensor], part: int
) -> None:
    """Write the sampled query rows of some heads, and the key rows at the same slots, as safetensors.

    `part` is the index of this process's share of the layer's heads. The file metadata contains the event.
    """
    save = need("safetensors.torch", "dump", "hf").save
    if not captured:
        return
    query, key = captured["query"], captured["key"]
    group = query.shape[1] // key.shape[1]
    for head in heads:
        local = head - part * query.shape[1]
        if not 0 <= local < query.shape[1]:
            continue  # the head belongs to another process
        rows = {
            "rows": captured["rows"].cpu().contiguous(),
            "query": query[:, local].cpu().contiguous(),  # [B, R, D]
            "key": key[:, local // group].cpu().contiguous(),
        }
        folder.mkdir(parents=True, exist_ok=True)
        name = f"step{event.step}-{layer}-head{head}-{event.cause}.safetensors"
        write_whole(folder / name, save(rows, {field: str(value) for field, value in event.as_dict().items()}))


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
        undo: if given, stock transformers attention is made measurable until this ExitStack is closed, and a model is
            accepted without attention modules if its forward pass may call torch's attention function.

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
    if found:
        return found
    unconverted = [path or type(model).__name__ for path, module in model.named_modules() if is_unconverted(module)]
    if unconverted:
        raise ArgumentError(
            f"model={type(model).__name__} is not accepted: torch.nn.MultiheadAttention ({unconverted[0]!r}) cannot be "
            'measured. Call attnscale.convert(model, "constant") first, which does not change its output'
        )
    if undo is None or not calling_modules(model):
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
