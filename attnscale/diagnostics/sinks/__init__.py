"""Sinks: destinations of records. JSONL files, TensorBoard, W&B, Trackio, MLflow, the terminal, memory.

A sink is a class in a module of this folder whose name ends in "Sink". Sinks are discovered automatically and exported
from here and from `attnscale.diagnostics`. A monitor passes the records and events of a step; they contain no tensors.
A sink may import `records` and `views`, never the monitor. Third-party packages are imported in its constructor.
"""

from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attnscale.diagnostics.records.file import read as read
from attnscale.diagnostics.records.file import read_jsonl as read_jsonl
from attnscale.diagnostics.records.record import Event, Progress, Record, RunInfo

if TYPE_CHECKING:  # static types; imported dynamically below
    from attnscale.diagnostics.sinks.console import ConsoleSink as ConsoleSink
    from attnscale.diagnostics.sinks.jsonl import JsonlSink as JsonlSink
    from attnscale.diagnostics.sinks.memory import MemorySink as MemorySink
    from attnscale.diagnostics.sinks.tensorboard import TensorBoardSink as TensorBoardSink
    from attnscale.diagnostics.sinks.trackers import MlflowSink as MlflowSink
    from attnscale.diagnostics.sinks.trackers import TrackerSink as TrackerSink


@runtime_checkable
class Sink(Protocol):
    """Protocol of a destination of records.

    Only the first process of a run uses the sink. `log` runs on a thread of its own, one per sink, so that a slow sink
    does not delay the training. If it falls behind, reports are dropped and counted. A sink that must be called before
    `Monitor.step` returns has the attribute `immediate = True`. A sink that raises is dropped with a warning; the run
    continues.

    Example:
        >>> class PrintSink:
        ...     def log(self, records, step):
        ...         print(step, len(records))
        ...
        ...     def close(self): ...
        >>> isinstance(PrintSink(), Sink), isinstance(PrintSink(), EventSink)
        (True, False)
    """

    def log(self, records: Sequence[Record], step: int) -> None:
        """Write the records of a step.

        Args:
            records: one record per layer and head.
            step: training step.
        """

    def close(self) -> None:
        """Flush and close the sink. Called once, by `Monitor.close` or after a failure, on the thread of the caller."""


@runtime_checkable
class EventSink(Sink, Protocol):
    """Protocol of a sink that also receives events.

    Example:
        >>> class PrintEvents:
        ...     def log(self, records, step): ...
        ...     def event(self, events, step):
        ...         print(step, [event.message for event in events])
        ...
        ...     def close(self): ...
    """

    def event(self, events: Sequence[Event], step: int) -> None:
        """Write the events of a step. Called after `log`, on the same thread, and only if there are events.

        Args:
            events: the events that began, changed or ended.
            step: training step.
        """


@runtime_checkable
class RunSink(Sink, Protocol):
    """Protocol of a sink that also receives the description of the run.

    Example:
        >>> class PrintRun:
        ...     def open(self, run):
        ...         print(run.model, run.policy)
        ...
        ...     def log(self, records, step): ...
        ...     def close(self): ...
    """

    def open(self, run: RunInfo) -> None:
        """Receive the description of the run. Called once, before the first report, by the thread that trains.

        Args:
            run: model, policy, configuration and versions.
        """


@runtime_checkable
class ProgressSink(Sink, Protocol):
    """Protocol of a sink that also receives loss and learning rate.

    Example:
        >>> class PrintLoss:
        ...     def progress(self, progress, step):
        ...         print(step, progress.loss)
        ...
        ...     def log(self, records, step): ...
        ...     def close(self): ...
    """

    def progress(self, progress: Progress, step: int) -> None:
        """Receive loss, learning rate and number of dropped reports. Called before `log`, and once before `close`.

        Args:
            progress: the state of the training.
            step: training step.
        """


if not TYPE_CHECKING:
    _MODULES = tuple(import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__))
    _SINKS = {name: found for module in _MODULES for name, found in vars(module).items() if name.endswith("Sink")}
    __all__ = sorted(["EventSink", "ProgressSink", "RunSink", "Sink", *_SINKS, "read", "read_jsonl"])

    def __getattr__(name: str) -> Any:
        if name in _SINKS:
            return _SINKS[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
