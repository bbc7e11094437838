"""Sinks: destinations of records. JSONL files, TensorBoard, W&B, Trackio, MLflow, the terminal, memory.

A sink is a class in a module of this folder whose name ends in "Sink". Sinks are discovered automatically and exported
from here and from `attnscale.diagnostics`. A monitor passes the records and alerts of a step; they contain no tensors.
A sink may import `records` and `views`, never the monitor. Third-party packages are imported in its constructor.
"""

from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attnscale.diagnostics.records.record import Alert, Record
from attnscale.diagnostics.records.record import read_jsonl as read_jsonl

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

    Only the first process of a run uses the sink. A sink that raises is dropped with a warning; the run continues.

    Example:
        >>> class PrintSink:
        ...     def log(self, records, step):
        ...         print(step, len(records))
        ...
        ...     def close(self): ...
        >>> isinstance(PrintSink(), Sink), isinstance(PrintSink(), AlertSink)
        (True, False)
    """

    def log(self, records: Sequence[Record], step: int) -> None:
        """Write the records of a step.

        Args:
            records: one record per layer and head.
            step: training step.
        """

    def close(self) -> None:
        """Flush and close the sink. Called once, by `Monitor.close` or after a failure."""


@runtime_checkable
class AlertSink(Sink, Protocol):
    """Protocol of a sink that also receives alerts.

    Example:
        >>> class PrintAlerts:
        ...     def log(self, records, step): ...
        ...     def alert(self, alerts, step):
        ...         print(step, [alert.kind for alert in alerts])
        ...
        ...     def close(self): ...
    """

    def alert(self, alerts: Sequence[Alert], step: int) -> None:
        """Write the alerts of a step. Called after `log`, and only if there are alerts.

        Args:
            alerts: the new alerts.
            step: training step.
        """


if not TYPE_CHECKING:
    _MODULES = tuple(import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__))
    _SINKS = {name: found for module in _MODULES for name, found in vars(module).items() if name.endswith("Sink")}
    __all__ = sorted(["AlertSink", "Sink", *_SINKS, "read_jsonl"])

    def __getattr__(name: str) -> Any:
        if name in _SINKS:
            return _SINKS[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
